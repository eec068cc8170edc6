// The glossary box: required translations of terms.

import { $, button, make, preferences, remember } from "./common.js";

let weighed = true; // whether the models for these languages can leave out a term that does not fit

/** Return the complete terms; `wishes`: with the modes the user chose, even if these models always use terms. */
export function glossary({ wishes = false } = {}) {
  const terms = Array.from($("terms").children, ({ fields: { term, wanted, mode }, wish }) => (
    { source: term.value.trim(), target: wanted.value.trim(), mode: wishes ? wish : mode.value }));
  return terms.filter((term) => term.source && term.target);
}

function keep() {
  remember({ keep: $("keep").checked, glossary: $("keep").checked ? glossary({ wishes: true }) : undefined });
}

/** Offer the modes that the models for the chosen languages support: "if it fits" and "always", or only "always". */
export function offerModes(fits) {
  weighed = fits;
  for (const { fields: { mode }, wish } of $("terms").children) {
    mode.options[0].disabled = !weighed;
    mode.value = weighed ? wish : "hard";
  }
  $("always").hidden = weighed;
}

function add(given = {}, changed) {
  const field = (name, value) => {
    const input = make("input", { value: String(value ?? ""), placeholder: name, autocomplete: "off" });
    input.setAttribute("aria-label", name);
    return input;
  };
  const mode = make("select", {}, new Option("if it fits", "soft"), new Option("always", "hard"));
  mode.setAttribute("aria-label", "When it is used");
  const wish = given.mode === "hard" ? "hard" : "soft";
  mode.onchange = () => (row.wish = mode.value);
  const fields = { term: field("Term", given.source), wanted: field("Translation", given.target), mode };
  const use = make("span", { className: "soft use" });
  const remove = () => (row.remove(), $("add").focus(), changed());
  const row = make("li", { fields, use, wish }, fields.term, "→", fields.wanted, mode, button("×", remove, "Remove this term"), use);
  $("terms").append(row);
  offerModes(weighed);
  return fields;
}

/** Show next to each term how often the last translation used it. */
export function showUse(used = []) {
  for (const { fields, use } of $("terms").children) {
    const found = used.find((each) => each.source === fields.term.value.trim());
    if (!found) use.textContent = "";
    else if (!found.found) use.textContent = "not in the text";
    else if (!found.applied) use.textContent = found.dropped ? "not used: the sentence would suffer" : "not used";
    else use.textContent = found.applied < found.found ? `used ${found.applied} of ${found.found} times` : "used";
  }
}

/** Swap the two sides of all terms. */
export function swapTerms() {
  for (const { fields: { term, wanted } } of $("terms").children) [term.value, wanted.value] = [wanted.value, term.value];
  keep();
}

/** Show the stored terms; `changed` is called when they change. */
export function startGlossary(changed) {
  const save = () => (keep(), changed());
  $("keep").checked = preferences.keep === true;
  const kept = Array.isArray(preferences.glossary) ? preferences.glossary : [];
  for (const term of kept.length ? kept : [{}]) add({ ...term }, save);
  $("keep").onchange = keep;
  $("add").onclick = () => add({}, save).term.focus();
  $("terms").addEventListener("input", save);
}
