// Shared by the parts of the page: elements, stored preferences, requests.
//
// Text from users and from the server enters the page only as text (textContent), never as markup.

export const $ = (id) => document.getElementById(id);

/** The server's features, as returned by GET v1/settings. */
export const settings = { languages: [], pairs: [], limits: {}, files: [] };

export const named = (code) => settings.languages.find((language) => language.code === code)?.name ?? code;

/** Return a new element with these properties and children. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Return a button; `label` describes its action if the text alone does not. */
export function button(text, onclick, label = "") {
  const element = make("button", { type: "button", textContent: text, title: label, onclick });
  if (label) element.setAttribute("aria-label", label);
  return element;
}

let announcing;
/** Let screen readers announce a text, even if it repeats the last announcement. */
export function announce(text) {
  clearTimeout(announcing);
  $("announcement").textContent = "";
  announcing = setTimeout(() => ($("announcement").textContent = text), 50);
}

/** Return the value that a storage has under a name, or null if the browser forbids access. */
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
    // Forbidden by the browser, or full: the page works without it.
  }
}

/** Preferences stored in this browser: languages, checkboxes, and terms if requested. */
export let preferences = {};
try {
  preferences = { ...JSON.parse(stored("localStorage", "ziggurat")) };
} catch {
  // Not written by this page, so it is replaced.
}

export function remember(changes) {
  preferences = { ...preferences, ...changes };
  store("localStorage", "ziggurat", JSON.stringify(preferences));
}

/** An error message for the user; `wait`: seconds after which another attempt may succeed, or 0. */
export class Problem extends Error {
  constructor(message, { status = 0, wait = 0 } = {}) {
    super(message);
    Object.assign(this, { status, wait });
  }
}

/** Return the server's response to a request. Throws Problem, or AbortError if `signal` cancelled it. */
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
/** Show a problem, with a button that calls `again` if given, and a countdown to it if waiting helps. */
export function complain(problem, again) {
  if (!(problem instanceof Problem)) throw problem;
  calm();
  $("problem").hidden = false;
  $("again").hidden = !again;
  $("again").onclick = () => (calm(), again());
  let left = problem.wait;
  const count = () => ($("countdown").textContent = left ? `in ${left} s` : "");
  $("complaint").textContent = problem.message + (left ? " Trying again" : "");
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
