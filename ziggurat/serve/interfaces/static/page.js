// The page of `ziggurat serve`, over the paths under v1/ (docs/serve.md): languages, typing, buttons and keys.

import { $, Problem, announce, ask, calm, complain, make, named, preferences, remember, settings, store, stored } from "./common.js";
import { startDocuments } from "./documents.js";
import { offerModes, startGlossary, swapTerms } from "./glossary.js";
import { callOff, instead, request, show, startOutput, translation } from "./output.js";

const PAUSE = 400; // milliseconds without typing after which text is sent
const RIGHT_TO_LEFT = /^(ar|arc|azb|bqi|ckb|dv|fa|glk|he|iw|ji|ks|lrc|mzn|nqo|pnb|prs|ps|sd|syr|ug|ur|yi)(-|$)|-(Arab|Hebr|Nkoo|Syrc|Thaa)\b/i;

const [source, target, from, to] = [$("source"), $("target"), $("from"), $("to")];

// Languages

let detected = null; // the language that was detected, if `from` is "auto"
let guessed = false; // whether its confidence was 0

const spoken = () => (from.value === "auto" ? detected : from.value); // null: unknown yet

function targetsOf(code) {
  const all = settings.languages.filter((language) => code === "auto" || language.code === code);
  return [...new Set(all.flatMap((language) => language.targets))].filter((each) => each !== code);
}

const options = (codes) => codes.map((code) => new Option(named(code), code)).sort((a, b) => a.text.localeCompare(b.text));

/** Offer the languages that the source can be translated into; keep `wanted` if it is one of them. */
function offerTargets(wanted = to.value) {
  const codes = targetsOf(from.value);
  to.replaceChildren(...options(codes));
  if (codes.includes(wanted)) to.value = wanted;
  mark();
}

/** Set the language and the direction of each side, and whether the sides can be swapped. */
function mark() {
  for (const [element, code] of [[source, spoken()], [$("mirror"), spoken()], [target, to.value]]) {
    element.lang = code ?? "";
    element.dir = !code ? "auto" : RIGHT_TO_LEFT.test(code) ? "rtl" : "ltr";
  }
  const first = from.options[0];
  if (first?.value === "auto") first.text = detected ? `${named(detected)} (${guessed ? "guessed" : "detected"})` : "Detect language";
  const pairs = settings.pairs.filter((pair) => pair.target === to.value && ["auto", pair.source].includes(from.value));
  offerModes(pairs.every((pair) => pair.soft_terms));
  $("swap").disabled = !spoken() || !targetsOf(to.value).includes(spoken());
}

function chosen() {
  remember({ from: from.value, to: to.value });
  mark();
  translate();
}

function swap() {
  if ($("swap").disabled) return;
  const [before, text] = [spoken(), translation()];
  from.value = to.value;
  detected = null;
  offerTargets(before);
  swapTerms();
  if (text) source.value = text;
  typed();
  chosen();
}

// Typing

let timer;

/** Count the characters typed, and translate the text after a pause. */
function typed() {
  const [count, most] = [Array.from(source.value).length, settings.limits.characters];
  $("mirror").textContent = `${source.value}\u200b`; // so that an empty last line has room
  $("counter").textContent = `${count.toLocaleString("en")} / ${(most ?? 0).toLocaleString("en")}`;
  $("counter").classList.toggle("over", count > most);
  source.setAttribute("aria-invalid", count > most);
  $("clear").hidden = $("link").hidden = !count;
  target.classList.add("stale");
  callOff();
  clearTimeout(timer);
  timer = setTimeout(translate, source.value.trim() ? PAUSE : 0);
}

/** Translate the text; cancel any running request. */
function translate() {
  clearTimeout(timer);
  callOff();
  calm();
  if (!to.value) return; // no settings yet
  const text = source.value;
  const over = Array.from(text).length - settings.limits.characters;
  if (!text.trim()) {
    detected = null;
    mark();
    $("note").hidden = true;
    show("", { text: "" });
  } else if (over > 0) {
    complain(new Problem(`The text is ${over.toLocaleString("en")} character${over === 1 ? "" : "s"} too long.`));
  } else if (settings.key_required && !$("key").value) {
    complain(new Problem("This server requires an API key: enter it above."));
  } else {
    instead(async (signal) => {
      const found = await request({ text, source: from.value }, signal);
      if (from.value === "auto") [detected, guessed] = [found.source, found.detected?.confidence === 0];
      mark();
      show(text, found);
      $("note").hidden = found.source !== to.value;
      $("note").textContent = `The text is already in ${named(to.value)}.`;
      announce(`Translated into ${named(to.value)}.`);
    }, translate);
  }
}

// Buttons and keys

async function copy(text, pressed) {
  const before = pressed.textContent;
  if (before === "Copied") return;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Not allowed: without TLS, except on this machine, browsers only support the old way.
    const field = document.body.appendChild(make("textarea", { value: text }));
    field.select();
    document.execCommand("copy");
    field.remove();
    pressed.focus();
  }
  pressed.textContent = "Copied";
  announce("Copied.");
  setTimeout(() => (pressed.textContent = before), 1500);
}

/** Return an address with the text, in the part that browsers never send to a server. */
function address() {
  const fields = new URLSearchParams({ source: from.value, target: to.value, text: source.value });
  return `${location.origin}${location.pathname}#${fields}`;
}

function keys(event) {
  const both = event.altKey && event.shiftKey && !event.ctrlKey && !event.metaKey;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) translate();
  else if (both && event.code === "KeyS") swap();
  else if (both && event.code === "KeyC" && !$("copy").disabled) copy(translation(), $("copy"));
  else return;
  event.preventDefault();
}

function listen() {
  source.addEventListener("input", typed);
  document.addEventListener("keydown", keys);
  from.onchange = () => ((detected = null), offerTargets(), chosen());
  to.onchange = chosen;
  $("swap").onclick = swap;
  $("clear").onclick = () => ((source.value = ""), typed(), source.focus());
  $("copy").onclick = () => copy(translation(), $("copy"));
  $("link").onclick = () => copy(address(), $("link"));
  $("unsure").onchange = () => (remember({ unsure: $("unsure").checked }), translate());
  $("open-help").onclick = () => $("help").showModal();
  $("close-help").onclick = () => $("help").close();
  $("key-box").onsubmit = (event) => {
    event.preventDefault();
    store("sessionStorage", "ziggurat-key", $("key").value);
    translate();
  };
  window.addEventListener("online", () => $("problem").hidden || $("again").click());
}

async function start() {
  try {
    Object.assign(settings, await (await ask("v1/settings")).json());
  } catch (error) {
    complain(error, start);
    return;
  }
  $("version").textContent = `Ziggurat ${settings.version}`;
  $("key-box").hidden = !settings.key_required;
  from.replaceChildren(...options(settings.languages.map(({ code }) => code).filter((code) => targetsOf(code).length)));
  if (settings.detection) from.prepend(new Option("Detect language", "auto"));
  const linked = new URLSearchParams(location.hash.slice(1));
  if (linked.has("text")) history.replaceState(null, "", location.pathname); // so that the text does not stay in the address
  from.value = linked.get("source") ?? preferences.from ?? "";
  if (from.selectedIndex < 0) from.selectedIndex = 0;
  offerTargets(linked.get("target") ?? preferences.to ?? navigator.language.split("-")[0]);
  startDocuments();
  if (linked.has("text")) source.value = linked.get("text");
  typed();
  translate();
}

$("key").value = stored("sessionStorage", "ziggurat-key") ?? "";
$("unsure").checked = preferences.unsure === true;
startGlossary(typed);
startOutput();
listen();
start();
