// Documents: each is sent, watched while it is translated, and saved.

import { $, Problem, announce, ask, button, make, named, settings } from "./common.js";
import { glossary } from "./glossary.js";

const POLL = 700; // milliseconds between two status requests for a document

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

function sizeOf(bytes) {
  const [unit, name] = bytes < 2 ** 20 ? [2 ** 10, "KiB"] : [2 ** 20, "MiB"];
  return `${(bytes / unit).toLocaleString("en", { maximumFractionDigits: 1 })} ${name}`;
}

/** Throw Problem for a file that the server would not accept. */
function refuse(file) {
  const [kinds, most] = [settings.files, settings.limits.file_bytes];
  const known = kinds.some((end) => file.name.toLowerCase().endsWith(end));
  if (!known) throw new Problem(`This kind of file cannot be translated. These can: ${kinds.join(", ")}`);
  if (file.size > most) throw new Problem(`The file is larger than ${sizeOf(most)}.`);
}

/** Translate a file into the currently selected language, and offer the result. */
async function translateFile(file) {
  const status = make("span", { className: "soft" });
  const bar = make("progress");
  bar.setAttribute("aria-label", `Progress of ${file.name}`);
  const called = new AbortController();
  let path = null; // path of the document on the server
  const forget = button("Cancel", () => {
    called.abort();
    row.remove();
    $("files").focus();
    if (path) ask(path, { method: "DELETE" }).catch(() => {}); // the server deletes it later anyway
  });
  const actions = make("span", { className: "actions" }, forget);
  const row = make("li", {}, make("span", { className: "name", textContent: file.name }), bar, status, actions);
  $("uploads").append(row);

  /** Repeat a request until it is answered, waiting while the server is full or unreachable. */
  const patiently = async (where, options) => {
    for (;;) {
      try {
        return await (await ask(where, { ...options, signal: called.signal })).json();
      } catch (error) {
        if (!error.wait) throw error;
        status.textContent = `${error.message} Trying again in ${error.wait} s.`;
        await pause(1000 * error.wait);
        called.signal.throwIfAborted();
      }
    }
  };
  try {
    refuse(file);
    const body = new FormData();
    for (const [name, value] of [["file", file], ["source", $("from").value], ["target", $("to").value]]) body.append(name, value);
    if (glossary().length) body.append("glossary", JSON.stringify(glossary()));
    status.textContent = "Sending …";
    let state = await patiently("v1/documents", { method: "POST", body });
    path = `v1/documents/${encodeURIComponent(state.id)}`;
    while (["waiting", "translating"].includes(state.status)) {
      if (state.total) [bar.max, bar.value] = [state.total, state.done];
      status.textContent = state.status === "waiting" ? "Waiting for its turn …" : `${state.done} of ${state.total} sentences`;
      await pause(POLL);
      state = await patiently(path);
    }
    if (state.status !== "done") throw new Problem(state.error?.message ?? state.error ?? "It could not be translated.");
    const download = async () => {
      try {
        save(await (await ask(`${path}/file`)).blob(), state.name ?? file.name);
      } catch (error) {
        status.textContent = error.message;
      }
    };
    actions.prepend(button("Download", download, `Download the translation of ${file.name}`));
    status.textContent = `Translated into ${named(body.get("target"))}`;
    announce(`${file.name} is translated.`);
  } catch (error) {
    if (called.signal.aborted) return;
    [status.className, status.textContent] = ["failed", error.message];
    announce(`${file.name}: ${error.message}`);
  }
  bar.remove();
  forget.textContent = "Remove";
}

/** Save a fetched file; a plain link could not send the API key. */
function save(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Accept chosen or dropped files, if the server translates documents. */
export function startDocuments() {
  if (!settings.files.length) return;
  const take = (files) => Array.from(files).forEach(translateFile);
  const dropping = (yes) => document.body.classList.toggle("dropping", yes);
  $("documents").hidden = false;
  $("files").accept = settings.files.join(",");
  $("files").onchange = () => (take($("files").files), ($("files").value = ""));
  $("kinds").textContent = settings.files.join(", ");
  $("most").textContent = sizeOf(settings.limits.file_bytes);
  document.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return; // dragged text is handled by the element it is dropped on
    event.preventDefault();
    dropping(true);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget ?? dropping(false));
  document.addEventListener("drop", (event) => {
    dropping(false);
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    take(event.dataTransfer.files);
  });
}
