// The translation on the page: its words, their counterparts, and their alternatives.
//
// The server's offsets count code points; those here count UTF-16 units, like JavaScript's strings.

import { $, Problem, announce, ask, button, calm, complain, make, settings } from "./common.js";
import { glossary, showUse } from "./glossary.js";

const UNSURE = Math.log(0.3); // log probability of a token

const [source, target] = [$("source"), $("target")];

let given = ""; // the text that was translated
let sentences = []; // {gap, text, source, links, tokens}: `gap` precedes it; ranges are [begin, end], for targets in `text`
let tail = ""; // text after the last sentence
let words = []; // words of the translation: {element, sentence, begin, end}
let sourceWords = []; // {element, begin, end}

export const translation = () => sentences.map(({ gap, text }) => gap + text).join("") + tail;

// Requests

let running = null; // AbortController of the current request

export function callOff() {
  running?.abort();
  $("working").hidden = true;
  target.setAttribute("aria-busy", false);
}

/** Replace the current work by `work` and show progress; `again` is offered if it fails. */
export async function instead(work, again) {
  callOff();
  calm();
  const mine = (running = new AbortController());
  $("working").hidden = false;
  target.setAttribute("aria-busy", true);
  try {
    await work(mine.signal);
  } catch (error) {
    if (!mine.signal.aborted) complain(error, again);
  } finally {
    if (running === mine) callOff();
  }
}

const unaligned = new Set(); // language pairs whose models give no alignment

/** Return the server's translation of a text, or of a part of it. */
export async function request(fields, signal) {
  const asked = { source: source.lang, target: target.lang, scores: $("unsure").checked, ...fields };
  if (glossary().length) asked.glossary = glossary();
  const post = async (more) => {
    const answer = await ask("v1/translate", { method: "POST", json: { ...asked, ...more }, signal });
    return (await answer.json()).translations[0];
  };
  const pair = `${asked.source} ${asked.target}`;
  try {
    if (!unaligned.has(pair)) return await post({ alignments: true });
  } catch (error) {
    if (error.status !== 400) throw error;
  }
  // An exported model refuses alignments; requesting alternatives makes the server return sentences anyway.
  const found = await post({ alternatives: asked.alternatives ?? Math.min(1, settings.limits.alternatives) });
  unaligned.add(pair);
  return found;
}

/** Return a function that converts offsets in code points of `text` to UTF-16 units, minus `first`. */
function units(text) {
  const at = [0];
  for (const point of text) at.push(at.at(-1) + point.length);
  return (ends, first = 0) => ends.map((offset) => at[offset] - first);
}

/** Return the sentences of the translation of `text`, which starts at `begin` of the source, and the text after them. */
function read(text, found, begin = 0) {
  const [inSource, inTarget] = [units(text), units(found.text)];
  let end = 0;
  const all = (found.sentences ?? []).map((each) => {
    const before = end;
    const [first, last] = inTarget(each.target);
    end = last;
    const sentence = { gap: found.text.slice(before, first), text: found.text.slice(first, last), source: inSource(each.source, -begin) };
    sentence.links = (each.links ?? []).map(([a, b, c, d]) => ({ sentence, source: inSource([a, b], -begin), target: inTarget([c, d], first) }));
    sentence.tokens = (each.tokens ?? []).map(({ target: ends, score }) => ({ target: inTarget(ends, first), score }));
    return sentence;
  });
  return [all, found.text.slice(end)];
}

export function show(text, found) {
  given = text;
  [sentences, tail] = read(text, found);
  target.classList.remove("stale");
  $("choices").hidePopover();
  showUse(found.glossary);
  draw();
}

// Words

/** Return the words of a text and the parts between them: {segment, index, isWordLike}. */
function split(text, language) {
  let segmenter;
  try {
    segmenter = new Intl.Segmenter(language || undefined, { granularity: "word" });
  } catch {
    segmenter = new Intl.Segmenter(undefined, { granularity: "word" }); // a code that browsers do not know
  }
  return Array.from(segmenter.segment(text));
}

/** Return a text in pieces for display, with words as elements, which are added to `noted` with `more`. */
function pieces(text, language, noted, more = {}) {
  return split(text, language).map(({ segment, index, isWordLike }) => {
    if (!isWordLike) return segment;
    const element = make("span", { className: "word", textContent: segment });
    noted.push({ element, begin: index, end: index + segment.length, ...more });
    return element;
  });
}

const overlap = (word, [begin, end]) => word.begin < end && begin < word.end;

/** Show the words of the translation, and those of the source in the mirror. */
function draw() {
  const more = settings.limits.alternatives > 0;
  [words, sourceWords] = [[], []];
  const parts = sentences.map((sentence, index) => {
    const line = make("span", {}, ...pieces(sentence.text, target.lang, words, { sentence }));
    if (!more) return [sentence.gap, line];
    const other = button("▾", () => offerSentences(other, sentence), `Other translations of sentence ${index + 1}`);
    other.className = "other";
    other.setAttribute("aria-haspopup", "menu");
    return [sentence.gap, line, other];
  });
  for (const word of words) {
    const unsure = word.sentence.tokens.some((token) => token.score < UNSURE && overlap(word, token.target));
    word.element.classList.toggle("unsure", unsure);
  }
  target.replaceChildren(...parts.flat(), tail);
  target.classList.toggle("choosable", more);
  if (words.length) reach(words[0]);
  $("copy").disabled = !translation().trim();
  $("hint").hidden = !more || !words.length;
  const mirrored = pieces(given, source.lang, sourceWords);
  if (source.value === given) $("mirror").replaceChildren(...mirrored, "\u200b");
}

/** Make Tab reach this word. Only this one is a button; screen readers read the others as text. */
function reach(word) {
  const marks = { tabindex: "0", role: "button", "aria-haspopup": "menu", "aria-description": "Arrow keys lead to other words" };
  const before = target.querySelector(".word[role]");
  for (const name of Object.keys(marks)) before?.removeAttribute(name);
  if (!target.classList.contains("choosable")) return;
  for (const [name, value] of Object.entries(marks)) word.element.setAttribute(name, value);
}

const touches = (word, link) => (word.sentence ? word.sentence === link.sentence && overlap(word, link.target) : overlap(word, link.source));

/** Highlight the counterpart of a word on either side; nothing if the element is not a word. */
function light(element) {
  const all = [...sourceWords, ...words];
  const word = all.find((each) => each.element === element);
  const links = word ? sentences.flatMap((each) => each.links).filter((link) => touches(word, link)) : [];
  for (const each of all) each.element.classList.toggle("on", links.some((link) => touches(each, link)));
}

// Other words and sentences

let choosing = null; // AbortController of the request for the menu's choices

/** Open a menu at an element; `find` returns choices as [action, content of the menu item...]. */
async function offer(element, title, nothing, find) {
  choosing?.abort();
  const mine = (choosing = new AbortController());
  $("choices-name").textContent = title;
  $("choices-said").textContent = "Looking …";
  $("menu").replaceChildren();
  $("choices").showPopover();
  place(element);
  let [items, said] = [[], nothing];
  try {
    items = await find(mine.signal);
  } catch (error) {
    if (!(error instanceof Problem)) {
      if (mine.signal.aborted) return;
      throw error;
    }
    said = error.message;
  }
  if (mine.signal.aborted) return;
  $("choices-said").textContent = items.length ? "" : said;
  $("menu").replaceChildren(...items.map(([pick, ...content]) => {
    const item = button("", () => ($("choices").hidePopover(), pick()));
    Object.assign(item, { tabIndex: -1, role: "menuitem", lang: target.lang, dir: target.dir });
    item.append(...content);
    return item;
  }));
  place(element);
  $("menu").firstChild?.focus();
}

/** Put the menu below an element, or above it if there is no room. */
function place(element) {
  const [box, at] = [$("choices").getBoundingClientRect(), element.getBoundingClientRect()];
  const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - box.width - 8));
  const narrow = matchMedia("(max-width: 45rem)").matches; // then the menu is as wide as the translation, which it must not cover
  const edge = narrow ? target.closest(".pane").getBoundingClientRect().bottom : at.bottom;
  const below = narrow || edge + 4 + box.height < window.innerHeight || at.top < box.height + 4;
  $("choices").style.left = `${left + window.scrollX}px`;
  $("choices").style.top = `${(below ? edge + 4 : at.top - 4 - box.height) + window.scrollY}px`;
}

/** Return the translations of a sentence, best first. */
async function several(sentence, fields, signal) {
  const asked = { text: given.slice(...sentence.source), alternatives: settings.limits.alternatives, ...fields };
  const found = await request(asked, signal);
  return [found.text, ...(found.alternatives ?? [])].map((text) => text.trim());
}

/** Return the fields for a translation that starts with a prefix, which on this page always ends with a whole word. */
const begun = (prefix) => (prefix ? { prefix, complete: true } : {});

function offerSentences(element, sentence) {
  offer(element, "Other translations", "There are no other translations.", async (signal) => {
    const others = new Set(await several(sentence, {}, signal));
    others.delete(sentence.text);
    return Array.from(others, (text) => [() => take(sentence, text, text), text]);
  });
}

function offerWords({ element, sentence, begin }) {
  const prefix = sentence.text.slice(0, begin).trimEnd();
  const present = element.textContent;
  offer(element, `Instead of “${present}”`, "No other word was found.", async (signal) => {
    const next = new Map(); // the next word -> the rest of the best translation that continues with it
    for (const text of await several(sentence, { next_words: true, ...begun(prefix) }, signal)) {
      if (!text.startsWith(prefix)) continue;
      const parts = split(text, target.lang);
      const first = parts.findIndex((part) => part.index === prefix.length); // -1 if the word before continues
      const word = first < 0 ? null : parts.slice(first).find((part) => part.isWordLike);
      if (!word || word.segment === present) continue;
      const [rest, end] = [text.slice(prefix.length), word.index + word.segment.length - prefix.length];
      if (!next.has(rest.slice(0, end))) next.set(rest.slice(0, end), rest.slice(end));
    }
    return Array.from(next, ([word, rest]) => [
      () => take(sentence, prefix + word + rest, prefix + word),
      make("b", { textContent: word.trim() }), make("span", { className: "rest", textContent: rest }),
    ]);
  });
}

/** Replace a sentence by `text`, and then by the model's continuation of `prefix`. */
function take(sentence, text, prefix) {
  const index = sentences.indexOf(sentence);
  const put = (found) => {
    sentences[index] = { ...found, gap: sentence.gap, source: sentence.source };
    for (const link of found.links) link.sentence = sentences[index];
    draw();
    const next = words.find((word) => word.sentence === sentences[index] && word.begin >= prefix.length);
    if (next) reach(next);
    (next?.element ?? target.querySelectorAll(".other")[index]).focus();
  };
  put({ text, links: [], tokens: [] });
  const asked = given.slice(...sentence.source);
  instead(async (signal) => {
    try {
      const found = await request({ text: asked, ...begun(prefix) }, signal);
      const [all] = read(asked, found, sentence.source[0]);
      // A whole sentence that was chosen stays unchanged; only its links are used.
      if (all.length === 1 && (text !== prefix || all[0].text === text)) put(all[0]);
    } catch (error) {
      if (error.status !== 400) throw error; // no prefixes through a third language: the choice stays
    }
    announce("Changed.");
  }, () => take(sentences[index], text, prefix));
}

// Keys and pointers

/** Move from word to word with the arrow keys, in their direction; Enter and the space bar act as a click. */
function keysOfWords(event) {
  const index = words.findIndex((word) => word.element === event.target);
  if (index < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
  const ahead = target.dir === "rtl" ? -1 : 1;
  const next = { ArrowRight: index + ahead, ArrowLeft: index - ahead, Home: 0, End: words.length - 1 }[event.key];
  if (words[next]) {
    reach(words[next]);
    words[next].element.focus();
  } else if (event.key === "Enter" || event.key === " ") offerWords(words[index]);
  else return;
  event.preventDefault();
}

function keysOfMenu(event) {
  const items = Array.from($("menu").children);
  const index = items.indexOf(document.activeElement);
  const next = { ArrowDown: index + 1, ArrowUp: index - 1, Home: 0, End: items.length - 1 }[event.key];
  if (event.key === "Tab") $("choices").hidePopover();
  if (next === undefined || !items.length) return;
  items[(next + items.length) % items.length].focus();
  event.preventDefault();
}

export function startOutput() {
  source.addEventListener("pointermove", ({ clientX, clientY }) => // the mirror lies below
    light(document.elementsFromPoint(clientX, clientY).find((element) => element.parentElement === $("mirror"))));
  target.addEventListener("pointerover", (event) => light(event.target));
  target.addEventListener("focusin", (event) => light(event.target));
  for (const kind of ["pointerleave", "focusout"]) target.addEventListener(kind, () => light(null));
  source.addEventListener("pointerleave", () => light(null));
  target.addEventListener("keydown", keysOfWords);
  target.addEventListener("click", (event) => {
    const word = words.find((each) => each.element === event.target);
    if (!word || !target.classList.contains("choosable") || !getSelection().isCollapsed) return;
    reach(word);
    word.element.focus(); // the menu returns the focus here
    offerWords(word);
  });
  $("choices").addEventListener("keydown", keysOfMenu);
  $("choices").addEventListener("toggle", (event) => event.newState === "closed" && choosing?.abort());
}
