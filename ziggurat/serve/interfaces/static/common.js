// What the parts of the page share: elements, what is remembered, requests.
//
// Text of users and of the server becomes part of the page as text only (textContent), never as markup.

export const $ = (id) => document.getElementById(id);

/** What the server offers, as GET v1/settings says it. */
export const settings = { languages: [], pairs: [], limits: {}, files: [] };

export const named = (code) => settings.languages.find((language) => language.code === code)?.name ?? code;

/** Return a new element with these properties and what it contains. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Return a button; `label`: what it does, where its text alone does not say it. */
export function button(text, onclick, label = "") {
  const element = make("button", { type: "button", textContent: text, title: label, onclick });
  if (label) element.setAttribute("aria-label", label);
  return element;
}

let announcing;
/** Let screen readers say a text, even if it is the one that they said last. */
export function announce(text) {
  clearTimeout(announcing);
  $("announcement").textContent = "";
  announcing = setTimeout(() => ($("announcement").textContent = text), 50);
}

/** Return what a storage has under a name, or null where the browser forbids it. */
export function stored(storage, name) {
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

export function store(storage, name, value) {
  try {
    window[storage].setItem(name, value);
  } catch {
    // Forbidden by the browser, or full: the page works without.
  }
}

/** What this browser remembers: languages, ticks, and terms if that was asked for. */
export let preferences = {};
try {
  preferences = { ...JSON.parse(stored("localStorage", "ziggurat")) };
} catch {
  // Not ours: it is replaced.
}

export function remember(changes) {
  preferences = { ...preferences, ...changes };
  store("localStorage", "ziggurat", JSON.stringify(preferences));
}

/** What went wrong, in words; `wait`: seconds after which another try may succeed, where one may. */
export class Problem extends Error {
  constructor(message, { status = 0, wait = 0 } = {}) {
    super(message);
    Object.assign(this, { status, wait });
  }
}

/** Return the server's answer to a request. Raises Problem, or AbortError where `signal` called it off. */
export async function ask(path, { method, json, body, signal } = {}) {
  const headers = json ? { "Content-Type": "application/json" } : {};
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: json ? JSON.stringify(json) : body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(navigator.onLine ? "The server does not answer." : "You are offline.", { wait: 5 });
  }
  if (answer.ok) return answer;
  const said = await answer.json().then((found) => found.error?.message, () => "");
  const status = answer.status;
  const words = {
    401: "The API key is not accepted",
    403: "The API key is not accepted",
    429: "Too many requests",
    502: "The server cannot be reached",
    503: "The server cannot translate at the moment",
    504: "The translation took too long",
  }[status] ?? `The server refused (${status})`;
  const again = [429, 502, 503].includes(status);
  const wait = again ? Number.parseInt(answer.headers.get("Retry-After"), 10) || 10 : 0;
  throw new Problem(said ? `${words}: ${said.replace(/\.$/, "")}.` : `${words}.`, { status, wait });
}

let counting;
/** Show a problem; with `again`, a button for it, and where waiting helps a countdown to it. */
export function complain(problem, again) {
  if (!(problem instanceof Problem)) throw problem;
  calm();
  $("problem").hidden = false;
  $("again").hidden = !again;
  $("again").onclick = () => (calm(), again());
  let left = problem.wait;
  const count = () => ($("countdown").textContent = left ? `in ${left} s` : "");
  $("complaint").textContent = problem.message + (left ? " It will be tried again" : "");
  count();
  if (!left) return;
  counting = setInterval(() => {
    left -= 1;
    count();
    if (!left) $("again").click();
  }, 1000);
}

export function calm() {
  clearInterval(counting);
  $("problem").hidden = true;
  $("complaint").textContent = "";
}
