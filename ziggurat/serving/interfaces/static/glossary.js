// The glossary box: how terms are to be translated.

import { $, button, make, preferences, remember } from "./common.js";

/** Return the terms as they stand in the box, those too that are not complete. */
const terms = () => Array.from($("terms").children, ({ fields: { term, wanted, mode } }) => (
  { source: term.value.trim(), target: wanted.value.trim(), mode: mode.value }));

/** Return the complete terms. */
export const glossary = () => terms().filter((term) => term.source && term.target);

function keep() {
  remember({ keep: $("keep").checked, glossary: $("keep").checked ? glossary() : undefined });
}

function add(given = {}, changed) {
  const field = (name, value) => {
    const input = make("input", { value: String(value ?? ""), placeholder: name, autocomplete: "off" });
    input.setAttribute("aria-label", name);
    return input;
  };
  const mode = make("select", {}, new Option("if it fits", "soft"), new Option("always", "hard"));
  mode.setAttribute("aria-label", "When it is used");
  mode.value = given.mode === "hard" ? "hard" : "soft";
  const fields = { term: field("Term", given.source), wanted: field("Translation", given.target), mode };
  const use = make("span", { className: "soft use" });
  const remove = () => (row.remove(), $("add").focus(), changed());
  const row = make("li", { fields, use }, fields.term, "→", fields.wanted, mode, button("×", remove, "Remove this term"), use);
  $("terms").append(row);
  return fields;
}

/** Say of each term how often the last translation used it. */
export function showUse(used = []) {
  for (const { fields, use } of $("terms").children) {
    const found = used.find((each) => each.source === fields.term.value.trim());
    if (!found) use.textContent = "";
    else if (!found.found) use.textContent = "not in the text";
    else if (!found.applied) use.textContent = found.dropped ? "not used: the sentence would suffer" : "not used";
    else use.textContent = found.applied < found.found ? `used ${found.applied} of ${found.found} times` : "used";
  }
}

/** Let terms lead the other way. */
export function swapTerms() {
  for (const { fields: { term, wanted } } of $("terms").children) [term.value, wanted.value] = [wanted.value, term.value];
  keep();
}

/** Show the terms that are remembered; `changed` is called when they change. */
export function startGlossary(changed) {
  const save = () => (keep(), changed());
  $("keep").checked = preferences.keep === true;
  const kept = Array.isArray(preferences.glossary) ? preferences.glossary : [];
  for (const term of kept.length ? kept : [{}]) add({ ...term }, save);
  $("keep").onchange = keep;
  $("add").onclick = () => add({}, save).term.focus();
  $("terms").addEventListener("input", save);
}
