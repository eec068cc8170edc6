// The page of `ziggurat serve`, over the paths under v1/ (docs/serve.md).
//
// Text of users and of the server becomes part of the page as text only (textContent), never as markup. Offsets of the
// server count code points, those of JavaScript's strings UTF-16 units: `Array.from(text)` leads from one to the other.

const PAUSE = 400; // milliseconds without typing after which text is sent
const POLL = 700; // milliseconds between two looks at a document
const UNSURE = Math.log(0.3); // log probability of a token
const RIGHT_TO_LEFT = /^(ar|arc|azb|bqi|ckb|dv|fa|glk|he|iw|ji|ks|ku-Arab|lrc|mzn|nqo|pnb|prs|ps|sd|syr|ug|ur|yi)(-|$)|-(Arab|Hebr|Nkoo|Syrc|Thaa)\b/i;

const $ = (id) => document.getElementById(id);
const [source, target, from, to] = [$("source"), $("target"), $("from"), $("to")];

/** Return a new element with these properties and what it contains. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Show a text, or nothing and no place for it. */
function tell(element, text) {
  element.textContent = text;
  element.hidden = !text;
}

let announcing;
/** Let screen readers say a text, the same one as before too. */
function announce(text) {
  clearTimeout(announcing);
  $("announcement").textContent = "";
  announcing = setTimeout(() => ($("announcement").textContent = text), 50);
}

// What is remembered

/** Return a storage's value, or null where the browser forbids storing. */
function stored(storage, name) {
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

function store(storage, name, value) {
  try {
    window[storage].setItem(name, value);
  } catch {
    // Forbidden by the browser, or full: the page works without.
  }
}

let preferences = {};
try {
  preferences = { ...JSON.parse(stored("localStorage", "ziggurat") ?? "{}") };
} catch {
  // Not ours: it is replaced.
}

function remember(changes) {
  preferences = { ...preferences, ...changes };
  store("localStorage", "ziggurat", JSON.stringify(preferences));
}

// The server

/** What went wrong, in words; `wait`: seconds after which it is worth another try, if it is. */
class Problem extends Error {
  constructor(message, status, wait) {
    super(message);
    [this.status, this.wait] = [status, wait];
  }
}

/** Return the answer of the server to a request. Raises Problem, or AbortError where it was called off. */
async function ask(path, options = {}) {
  const headers = options.json ? { "Content-Type": "application/json" } : {};
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const body = options.json ? JSON.stringify(options.json) : options.body;
  let answer;
  try {
    answer = await fetch(path, { method: options.method, headers, body, signal: options.signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(navigator.onLine ? "The server does not answer." : "You are offline.", 0, 5);
  }
  if (answer.ok) return answer;
  const said = await answer.json().then((found) => found.error?.message ?? "", () => "");
  const wait = Number.parseInt(answer.headers.get("Retry-After"), 10) || 10;
  const status = answer.status;
  if (status === 429) throw new Problem(`Too much at once (${said}).`, status, wait);
  if (status === 502 || status === 503) throw new Problem(`The server cannot translate now (${said}).`, status, wait);
  if (status === 504) throw new Problem("The translation took too long. A shorter text may help.", status);
  throw new Problem(said ? `The server says: ${said}` : `The server answered with the error ${status}.`, status);
}

let counting;
/** Show a problem, with a button and, where waiting helps, a countdown to `again`. */
function complain(problem, again) {
  if (!(problem instanceof Problem)) throw problem;
  calm();
  $("problem").hidden = false;
  let left = problem.wait;
  const count = () => ($("countdown").textContent = left ? `${left} s` : "");
  $("complaint").textContent = problem.message + (left ? " Trying again by itself …" : "");
  $("again").onclick = () => (calm(), again());
  count();
  if (!left) return;
  counting = setInterval(() => {
    left -= 1;
    count();
    if (left <= 0) $("again").click();
  }, 1000);
}

function calm() {
  clearInterval(counting);
  $("problem").hidden = true;
  $("complaint").textContent = "";
}

// Languages

let settings = { languages: [], limits: {}, files: [] };
let detected = null; // the language that was found, where it is to be detected

const named = (code) => settings.languages.find((language) => language.code === code)?.name ?? code;
const spoken = () => (from.value === "auto" ? detected : from.value); // null: not known yet

function targetsOf(code) {
  const all = settings.languages.filter((language) => code === "auto" || language.code === code);
  return [...new Set(all.flatMap((language) => language.targets))].filter((each) => each !== code);
}

/** Offer the languages into which the source can be translated; keep the one that is chosen, if it can be. */
function offerTargets(wanted = to.value) {
  const codes = targetsOf(from.value);
  to.replaceChildren(...codes.map((code) => new Option(named(code), code)).sort((a, b) => a.text.localeCompare(b.text)));
  if (codes.includes(wanted)) to.value = wanted;
  mark();
}

/** Tell the browser the language and the direction of each side, and whether the sides can be swapped. */
function mark() {
  const direction = (code) => (!code ? "auto" : RIGHT_TO_LEFT.test(code) ? "rtl" : "ltr");
  for (const [element, code] of [[source, spoken()], [$("mirror"), spoken()], [target, to.value]]) {
    element.lang = code ?? "";
    element.dir = direction(code);
  }
  if (from.options[0]?.value === "auto") from.options[0].text = detected ? `${named(detected)} (detected)` : "Detect language";
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
  for (const row of $("terms").children) [row.term.value, row.wanted.value] = [row.wanted.value, row.term.value];
  keepTerms();
  if (text) source.value = text;
  typed();
  chosen();
}

// Translation

let sentences = []; // {gap, text, source: [begin, end], links, tokens}: `gap` stands before; offsets are within `text`
let tail = ""; // what follows the last sentence
let given = []; // the code points that were translated
let running = null; // AbortController of the request under way
let timer;

const translation = () => sentences.map((each) => each.gap + each.text).join("") + tail;
const glossary = () => terms().filter((term) => term.source && term.target);

function typed() {
  const [count, most] = [Array.from(source.value).length, settings.limits.characters];
  $("mirror").textContent = `${source.value}\u200b`; // so that a last empty line has room
  $("counter").textContent = `${count.toLocaleString("en")} / ${(most ?? 0).toLocaleString("en")}`;
  $("counter").classList.toggle("over", count > most);
  source.setAttribute("aria-invalid", count > most);
  $("clear").hidden = $("link").hidden = !count;
  target.classList.add("stale");
  running?.abort();
  clearTimeout(timer);
  timer = setTimeout(translate, source.value.trim() ? PAUSE : 0);
  return count <= most;
}

/** Translate what was typed; what is under way is called off. */
async function translate() {
  clearTimeout(timer);
  running?.abort();
  calm();
  busy(false);
  if (!settings.languages.length) return;
  const text = source.value;
  if (!text.trim()) {
    detected = null;
    mark();
    show("", { text: "" });
    return;
  }
  const over = Array.from(text).length - settings.limits.characters;
  if (over > 0) {
    complain(new Problem(`The text is ${over.toLocaleString("en")} characters too long.`), translate);
    return;
  }
  const mine = (running = new AbortController());
  busy(true);
  try {
    const found = await request({ text, source: from.value, scores: $("unsure").checked }, mine.signal);
    if (from.value === "auto") detected = found.source;
    mark();
    show(text, found);
    announce(`Translated into ${named(to.value)}.`);
  } catch (error) {
    if (error.name !== "AbortError") complain(error, translate);
  } finally {
    if (running === mine) busy(false);
  }
}

/** Return the translation of one text, with its alignment. */
async function request(fields, signal) {
  const json = { source: spoken(), target: to.value, alignments: true, ...fields };
  if (glossary().length) json.glossary = glossary();
  const answer = await ask("v1/translate", { method: "POST", json, signal });
  return (await answer.json()).translations[0];
}

function busy(yes) {
  $("working").hidden = !yes;
  target.setAttribute("aria-busy", yes);
}

/** Return the sentences of a translation; `begin`: where its source begins in the text. */
function sentencesOf(found, begin = 0) {
  const points = Array.from(found.text);
  let at = 0;
  const all = (found.sentences ?? []).map((each) => {
    const [first, end] = each.target;
    const gap = points.slice(at, first).join("");
    at = end;
    return {
      gap,
      text: points.slice(first, end).join(""),
      source: each.source.map((offset) => offset + begin),
      links: (each.links ?? []).map(([a, b, c, d]) => [a + begin, b + begin, c - first, d - first]),
      tokens: (each.tokens ?? []).map((token) => ({ ...token, target: token.target.map((offset) => offset - first) })),
    };
  });
  return [all, points.slice(at).join("")];
}

function show(text, found) {
  given = Array.from(text);
  [sentences, tail] = sentencesOf(found);
  target.classList.remove("stale");
  const same = found.text && found.source === to.value;
  tell($("note"), same ? `This is ${named(to.value)} already.` : "");
  for (const row of $("terms").children) {
    const use = found.glossary?.find((each) => each.source === row.term.value.trim());
    if (!use) row.said.textContent = "";
    else if (!use.found) row.said.textContent = "not in the text";
    else if (use.applied) row.said.textContent = `used ${use.applied} of ${use.found} times`;
    else row.said.textContent = "not used: the sentence would suffer";
  }
  draw();
}

/** Return the words of a text and what is between them, as [string, is a word]. */
function split(text, language) {
  let segmenter;
  try {
    segmenter = new Intl.Segmenter(language || undefined, { granularity: "word" });
  } catch {
    segmenter = new Intl.Segmenter(undefined, { granularity: "word" }); // an invented language
  }
  return Array.from(segmenter.segment(text), (part) => [part.segment, part.isWordLike]);
}

let words = []; // of the translation: {element, sentence, begin, end, prefix}, in code points of the sentence
let sourceWords = []; // {element, begin, end}

/** Show the translation with its words, and the words of the source in the mirror. */
function draw() {
  const more = settings.limits.alternatives > 0;
  words = [];
  const parts = sentences.map((sentence, index) => {
    const line = make("span");
    let [at, prefix] = [0, ""];
    for (const [piece, isWord] of split(sentence.text, to.value)) {
      const end = at + Array.from(piece).length;
      if (isWord) {
        const element = make("span", { className: "word", textContent: piece });
        const near = sentence.tokens.filter((token) => token.target[0] < end && at < token.target[1]);
        element.classList.toggle("unsure", near.some((token) => token.score < UNSURE));
        words.push({ element, sentence: index, begin: at, end, prefix });
        line.append(element);
      } else line.append(piece);
      [at, prefix] = [end, prefix + piece];
    }
    const other = make("button", { type: "button", className: "other", textContent: "▾", title: "Other translations" });
    other.setAttribute("aria-label", `Other translations of sentence ${index + 1}`);
    other.setAttribute("aria-haspopup", "menu");
    other.onclick = () => offerSentences(other, index);
    return [sentence.gap, line, ...(more ? [other] : [])];
  });
  target.replaceChildren(...parts.flat(), tail);
  if (words.length) reach(words[0]);
  $("copy").disabled = !translation().trim();
  $("hint").hidden = !more || !words.length;

  let at = 0;
  sourceWords = [];
  const pieces = split(given.join(""), spoken()).map(([piece, isWord]) => {
    const begin = at;
    at += Array.from(piece).length;
    if (!isWord) return piece;
    const element = make("span", { textContent: piece });
    sourceWords.push({ element, begin, end: at });
    return element;
  });
  if (source.value === given.join("")) $("mirror").replaceChildren(...pieces, "\u200b");
}

// Alignment

const overlap = (word, begin, end) => word.begin < end && begin < word.end;

/** Highlight the words of both sides that these links of these sentences join. */
function light(links) {
  const over = (word, ends) => links.some(([index, link]) => [undefined, index].includes(word.sentence) && ends(word, link));
  for (const word of sourceWords) word.element.classList.toggle("on", over(word, (w, [b, e]) => overlap(w, b, e)));
  for (const word of words) word.element.classList.toggle("on", over(word, (w, [, , b, e]) => overlap(w, b, e)));
}

function lightTarget(element) {
  const word = words.find((each) => each.element === element);
  const links = word ? sentences[word.sentence].links.filter(([, , b, e]) => overlap(word, b, e)) : [];
  light(links.map((link) => [word.sentence, link]));
}

function lightSource(element) {
  const word = sourceWords.find((each) => each.element === element);
  light(word ? sentences.flatMap((each, i) => each.links.filter(([b, e]) => overlap(word, b, e)).map((link) => [i, link])) : []);
}

// Other words and sentences

let choosing = null; // AbortController of the request for what is offered
let anchor = null; // what the menu belongs to

/** Make a word the one that Tab reaches. Only that one is a button, so that the others are read as text. */
function reach(word) {
  for (const { element } of words) {
    for (const name of ["tabindex", "role", "aria-haspopup", "aria-description"]) element.removeAttribute(name);
  }
  if (!(settings.limits.alternatives > 0)) return;
  for (const [name, value] of [["tabindex", "0"], ["role", "button"], ["aria-haspopup", "menu"]]) word.element.setAttribute(name, value);
  word.element.setAttribute("aria-description", "arrow keys lead to other words");
}

/** Open a menu at an element; `find` returns the choices as [what to do, content of the menu's line...]. */
async function offer(element, title, find, nothing) {
  choosing?.abort();
  const mine = (choosing = new AbortController());
  anchor = element;
  $("choices-name").textContent = title;
  $("choices-said").textContent = "Looking …";
  $("menu").replaceChildren();
  if (!$("choices").matches(":popover-open")) $("choices").showPopover();
  place();
  let [items, said] = [[], nothing];
  try {
    items = await find(mine.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    said = error.message;
  }
  if (mine.signal.aborted) return;
  $("choices-said").textContent = items.length ? "" : said;
  $("menu").replaceChildren(...items.map(([pick, ...content]) => {
    const item = make("button", { type: "button", tabIndex: -1, lang: target.lang, dir: target.dir }, ...content);
    item.setAttribute("role", "menuitem");
    item.onclick = () => ($("choices").hidePopover(), pick());
    return item;
  }));
  place();
  $("menu").firstChild?.focus();
}

/** Put the menu below what it belongs to, or above where there is no room. */
function place() {
  const [box, at] = [$("choices").getBoundingClientRect(), anchor.getBoundingClientRect()];
  const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - box.width - 8));
  const below = at.bottom + 4 + box.height < window.innerHeight || at.top < box.height + 4;
  $("choices").style.left = `${left + window.scrollX}px`;
  $("choices").style.top = `${(below ? at.bottom + 4 : at.top - 4 - box.height) + window.scrollY}px`;
}

const sourceOf = (sentence) => given.slice(...sentence.source).join("");

function offerSentences(element, index) {
  const sentence = sentences[index];
  offer(element, "Other translations", async (signal) => {
    const found = await request({ text: sourceOf(sentence), alternatives: settings.limits.alternatives }, signal);
    const others = new Set([found.text, ...(found.alternatives ?? [])].map((each) => each.trim()));
    others.delete(sentence.text);
    return [...others].map((text) => [() => take(index, text, text), text]);
  }, "There is no other.");
}

function offerWords(word) {
  const sentence = sentences[word.sentence];
  const prefix = word.prefix.trimEnd();
  const present = word.element.textContent;
  reach(word);
  offer(word.element, `Instead of “${present}”`, async (signal) => {
    const asked = { text: sourceOf(sentence), alternatives: settings.limits.alternatives };
    const found = await request(prefix ? { ...asked, prefix } : asked, signal);
    const next = new Map(); // the next word -> what follows it in the likeliest translation that has it there
    for (const text of [found.text, ...(found.alternatives ?? [])].map((each) => each.trim())) {
      if (!text.startsWith(prefix)) continue;
      const pieces = split(text.slice(prefix.length), to.value);
      const end = pieces.findIndex(([, isWord]) => isWord) + 1;
      const first = pieces.slice(0, end).map(([piece]) => piece).join("");
      if (end && first.trim() !== present && !next.has(first)) next.set(first, pieces.slice(end).map(([piece]) => piece).join(""));
    }
    return [...next].map(([first, rest]) => [
      () => take(word.sentence, prefix + first + rest, prefix + first),
      make("b", { textContent: first.trim() }), make("span", { className: "rest", textContent: rest }),
    ]);
  }, "No other word was found.");
}

/** Put `text` in the place of a sentence, then what the model makes of `prefix`, where that is another text. */
async function take(index, text, prefix) {
  running?.abort();
  const mine = (running = new AbortController());
  const sentence = sentences[index];
  const whole = text === prefix;
  Object.assign(sentence, { text, links: [], tokens: [] });
  draw();
  const at = words.find((word) => word.sentence === index && word.prefix.length >= prefix.length) ?? words[0];
  if (!whole && at) (reach(at), at.element.focus());
  busy(true);
  try {
    const found = await request({ text: sourceOf(sentence), prefix, scores: $("unsure").checked }, mine.signal);
    const [all] = sentencesOf(found, sentence.source[0]);
    // A whole sentence that was chosen stays as it is; its links are welcome.
    if (all.length === 1 && (!whole || all[0].text === text)) {
      Object.assign(sentence, all[0], { gap: sentence.gap, source: sentence.source });
      draw();
    }
    announce("Changed.");
  } catch (error) {
    // Through a third language nothing can begin with a prefix: what was chosen stays.
    if (error.name !== "AbortError" && error.status !== 400) complain(error, () => take(index, text, prefix));
  } finally {
    if (running === mine) busy(false);
  }
}

// Glossary

/** Return the terms as they stand in the box, those that are not complete too. */
const terms = () => Array.from($("terms").children, (row) => (
  { source: row.term.value.trim(), target: row.wanted.value.trim(), mode: row.mode.value }));

function keepTerms() {
  remember({ keep: $("keep").checked, glossary: $("keep").checked ? terms() : undefined });
}

function addTerm(term = {}) {
  const field = (name, value) => {
    const input = make("input", { value: String(value ?? ""), placeholder: name, autocomplete: "off" });
    input.setAttribute("aria-label", name);
    return input;
  };
  const mode = make("select", {}, new Option("if it fits", "soft"), new Option("always", "hard"));
  mode.setAttribute("aria-label", "When it is used");
  mode.value = term.mode === "hard" ? "hard" : "soft";
  const remove = make("button", { type: "button", textContent: "×", title: "Remove this term" });
  remove.setAttribute("aria-label", "Remove this term");
  const row = make("li", { term: field("Term", term.source), wanted: field("Translation", term.target), mode,
    said: make("span", { className: "soft said" }) });
  row.append(row.term, "→", row.wanted, mode, remove, row.said);
  remove.onclick = () => {
    row.remove();
    $("add").focus();
    changed();
  };
  $("terms").append(row);
  return row;
}

function changed() {
  keepTerms();
  typed();
}

// Documents

async function upload(file) {
  const status = make("span", { className: "soft" });
  const bar = make("progress");
  bar.setAttribute("aria-label", `Progress of ${file.name}`);
  const cancel = make("button", { type: "button", textContent: "Cancel" });
  const actions = make("span", { className: "actions" }, cancel);
  const row = make("li", {}, make("span", { className: "name", textContent: file.name }), bar, status, actions);
  $("uploads").append(row);
  const mine = new AbortController();
  let path = null;
  cancel.onclick = () => {
    mine.abort();
    row.remove();
    if (path) ask(path, { method: "DELETE" }).catch(() => {}); // the server forgets it in time
  };
  /** Ask until there is an answer: a server that is full, or away for a while, is waited for. */
  const patiently = async (where, options = {}) => {
    for (;;) {
      try {
        return await ask(where, { ...options, signal: mine.signal });
      } catch (error) {
        if (!error.wait) throw error;
        status.textContent = `${error.message} Trying again in ${error.wait} s …`;
        await new Promise((done) => setTimeout(done, 1000 * error.wait));
        if (mine.signal.aborted) throw error;
      }
    }
  };
  try {
    refuse(file);
    const body = new FormData();
    for (const [name, value] of [["file", file], ["source", from.value], ["target", to.value]]) body.append(name, value);
    if (glossary().length) body.append("glossary", JSON.stringify(glossary()));
    status.textContent = "Sending …";
    let state = await (await patiently("v1/documents", { method: "POST", body })).json();
    path = `v1/documents/${encodeURIComponent(state.id)}`;
    while (state.status === "waiting" || state.status === "translating") {
      if (state.total) [bar.max, bar.value] = [state.total, state.done];
      status.textContent = state.status === "waiting" ? "Waiting for its turn …" : `${state.done} of ${state.total} sentences`;
      await new Promise((done) => setTimeout(done, POLL));
      if (mine.signal.aborted) return;
      state = await (await patiently(path)).json();
    }
    if (state.status !== "done") throw new Problem(state.error?.message ?? state.error ?? "It could not be translated.");
    const download = make("button", { type: "button", textContent: "Download" });
    download.setAttribute("aria-label", `Download the translation of ${file.name}`);
    download.onclick = async () => {
      try {
        save(await (await ask(`${path}/file`)).blob(), state.name ?? file.name);
      } catch (error) {
        status.textContent = error.message;
      }
    };
    actions.prepend(download);
    status.textContent = `Translated into ${named(body.get("target"))}`;
    announce(`${file.name} is translated.`);
  } catch (error) {
    if (mine.signal.aborted) return;
    [status.className, status.textContent] = ["failed", error.message];
    announce(`${file.name}: ${error.message}`);
  }
  bar.remove();
  cancel.textContent = "Remove";
  cancel.setAttribute("aria-label", `Remove ${file.name}`);
}

/** Raise Problem for a file that the server would not take. */
function refuse(file) {
  const most = settings.limits.file_bytes;
  if (!settings.files.some((end) => file.name.toLowerCase().endsWith(end))) throw new Problem(`Not among ${settings.files.join(", ")}`);
  if (file.size > most) throw new Problem(`Larger than ${sizeOf(most)}`);
}

function sizeOf(bytes) {
  const [unit, name] = bytes < 2 ** 20 ? [2 ** 10, "KiB"] : [2 ** 20, "MiB"];
  return `${(bytes / unit).toLocaleString("en", { maximumFractionDigits: 1 })} ${name}`;
}

function save(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// Buttons and keys

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Not a secure context (an address other than localhost without TLS), or not allowed.
    const field = document.body.appendChild(make("textarea", { value: text }));
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  button.textContent = "Copied";
  announce("Copied.");
  setTimeout(() => (button.textContent = before), 1500);
}

function address() {
  const fields = new URLSearchParams({ source: from.value, target: to.value, text: source.value });
  return `${location.origin}${location.pathname}#${fields}`; // browsers send no fragment to servers
}

function keys(event) {
  const alone = event.altKey && event.shiftKey && !event.ctrlKey && !event.metaKey;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) translate();
  else if (alone && event.code === "KeyS") swap();
  else if (alone && event.code === "KeyC" && !$("copy").disabled) copy(translation(), $("copy"));
  else return;
  event.preventDefault();
}

/** From word to word by arrows, as they point; Enter and the space bar are a click. */
function keysOfWords(event) {
  const index = words.findIndex((word) => word.element === event.target);
  if (index < 0) return;
  const ahead = target.dir === "rtl" ? -1 : 1;
  const steps = { ArrowRight: ahead, ArrowLeft: -ahead, Home: -index, End: words.length - 1 - index };
  if (event.key in steps) {
    const next = words[Math.max(0, Math.min(words.length - 1, index + steps[event.key]))];
    reach(next);
    next.element.focus();
  } else if ((event.key === "Enter" && !event.ctrlKey && !event.metaKey) || event.key === " ") offerWords(words[index]);
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

function listen() {
  source.addEventListener("input", typed);
  source.addEventListener("pointermove", (event) => lightSource(document.elementsFromPoint(event.clientX, event.clientY)
    .find((element) => element.parentElement === $("mirror"))));
  source.addEventListener("pointerleave", () => light([]));
  target.addEventListener("pointerover", (event) => lightTarget(event.target));
  target.addEventListener("pointerleave", () => light([]));
  target.addEventListener("focusin", (event) => lightTarget(event.target));
  target.addEventListener("focusout", () => light([]));
  target.addEventListener("keydown", keysOfWords);
  target.addEventListener("click", (event) => {
    const word = words.find((each) => each.element === event.target);
    const selecting = !window.getSelection().isCollapsed;
    if (word && !selecting && settings.limits.alternatives > 0) offerWords(word);
  });
  $("choices").addEventListener("keydown", keysOfMenu);
  $("choices").addEventListener("toggle", (event) => event.newState === "closed" && choosing?.abort());
  document.addEventListener("keydown", keys);
  from.addEventListener("change", () => ((detected = null), offerTargets(), chosen()));
  to.addEventListener("change", chosen);
  $("swap").onclick = swap;
  $("clear").onclick = () => ((source.value = ""), typed(), source.focus());
  $("copy").onclick = () => copy(translation(), $("copy"));
  $("link").onclick = () => copy(address(), $("link"));
  $("unsure").onchange = () => (remember({ unsure: $("unsure").checked }), translate());
  $("open-help").onclick = () => $("help").showModal();
  $("key").onchange = () => (store("sessionStorage", "ziggurat-key", $("key").value), translate());
  $("add").onclick = () => addTerm().term.focus();
  $("keep").onchange = keepTerms;
  $("terms").addEventListener("input", changed);
  $("files").onchange = () => (Array.from($("files").files).forEach(upload), ($("files").value = ""));
  document.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget ?? document.body.classList.remove("dropping"));
  document.addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    if (settings.files.length) Array.from(event.dataTransfer.files).forEach(upload);
  });
  window.addEventListener("online", () => $("problem").hidden || $("again").click());
}

async function start() {
  try {
    settings = await (await ask("v1/settings")).json();
  } catch (error) {
    complain(error, start);
    return;
  }
  $("version").textContent = `Ziggurat ${settings.version}`;
  $("key-box").hidden = !settings.key_required;
  const languages = settings.languages.filter((language) => targetsOf(language.code).length);
  from.replaceChildren(...languages.map((language) => new Option(language.name, language.code)).sort((a, b) => a.text.localeCompare(b.text)));
  if (settings.detection) from.prepend(new Option("Detect language", "auto"));
  const linked = new URLSearchParams(location.hash.slice(1));
  if (linked.has("text")) history.replaceState(null, "", location.pathname); // so that the text stays in no address
  from.value = linked.get("source") ?? preferences.from ?? "";
  if (from.selectedIndex < 0) from.selectedIndex = 0;
  offerTargets(linked.get("target") ?? preferences.to ?? navigator.language.split("-")[0]);
  $("documents").hidden = !settings.files.length;
  $("files").accept = settings.files.join(",");
  $("kinds").textContent = `${settings.files.join(", ")}, up to ${sizeOf(settings.limits.file_bytes)} each`;
  if (linked.get("text")) source.value = linked.get("text");
  typed();
  translate();
}

$("key").value = stored("sessionStorage", "ziggurat-key") ?? "";
$("unsure").checked = preferences.unsure === true;
$("keep").checked = preferences.keep === true;
for (const term of [].concat(preferences.glossary ?? [{}])) addTerm({ ...term });
listen();
start();
