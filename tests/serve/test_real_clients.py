"""Third-party client libraries against a running server, each in its own environment.

$ZIGGURAT_CLIENTS_PYTHON is a Python with libretranslatepy, deep-translator, deepl and openai, $ZIGGURAT_ARGOS_PYTHON
one with argostranslate, and $ZIGGURAT_CLIENTS_NODE a folder in which deepl-node is installed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vocabulary import SENTENCES
from ziggurat.serve.access import new_key
from ziggurat.translate.translator import load_translator

pytestmark = pytest.mark.slow

LINES = [SENTENCES[0], SENTENCES[1]]
PROGRAMS = {
    "libretranslatepy": """
from libretranslatepy import LibreTranslateAPI
api = LibreTranslateAPI(url + "/", api_key=key)
found = [api.translate(line, "en", "de") for line in lines]
result = [found, api.languages()[0]["code"], api.detect(german)[0]["language"]]
expected = [wanted, "de", "de"]
""",
    "argostranslate": """
from argostranslate.apis import LibreTranslateAPI
api = LibreTranslateAPI(url, api_key=key)
result = [[api.translate(line, "en", "de") for line in lines], [each["code"] for each in api.languages()],
          api.detect(german)[0]["language"]]
expected = [wanted, ["de", "en", "qlo"], "de"]
""",
    "deep-translator": """
from deep_translator import LibreTranslator
LibreTranslator._BASE_URLS = {}
translator = LibreTranslator(source="en", target="de", api_key=key, custom_url=url + "/")
result, expected = [translator.translate(line) for line in lines], wanted
""",
    "deepl": """
import deepl
translator = deepl.Translator(key, server_url=url)
found = translator.translate_text(lines, source_lang="EN", target_lang="DE")
detected = translator.translate_text(german, target_lang="EN-US")
used = translator.get_usage()
result = [[each.text for each in found], detected.detected_source_lang, used.character.valid,
          "DE" in [language.code for language in translator.get_target_languages()]]
expected = [wanted, "DE", True, True]
import io
entries = {"little": "the", "cat": "Katze"}
glossary = translator.create_glossary("animals", source_lang="EN", target_lang="DE", entries=entries)
result += [translator.get_glossary_entries(glossary), [g.name for g in translator.list_glossaries()]]
result.append(glossary.entry_count)
with_it = translator.translate_text(lines, source_lang="EN", target_lang="DE", glossary=glossary)
translator.delete_glossary(glossary)
result += [[each.text for each in with_it], len(translator.list_glossaries())]
expected += [entries, ["animals"], 2, glossed, 0]
document, output = io.BytesIO("\\n".join(lines).encode()), io.BytesIO()
document.name = "a.txt"
status = translator.translate_document(document, output, source_lang="EN", target_lang="DE")
result += [output.getvalue().decode().split("\\n"), status.done, status.billed_characters]
expected += [wanted, True, sum(map(len, lines))]
marked = translator.translate_text("<a><b>A dog</b><c/></a>", source_lang="EN", target_lang="DE", tag_handling="xml",
    outline_detection=False, splitting_tags=["b"], non_splitting_tags=["a"], ignore_tags=["c"], split_sentences="0",
    preserve_formatting=True, context="animals")
result.append("".join(c for c in marked.text if c in "<>/"))
expected.append("<><></></></>")
try:
    deepl.Translator("wrong", server_url=url).translate_text("a", target_lang="DE")
    result.append("no error")
except deepl.AuthorizationException:
    result.append("refused")
expected.append("refused")
""",
    "openai": """
import openai
client = openai.OpenAI(base_url=url + "/v1", api_key=key)
ask = lambda text: client.chat.completions.create(model="en-de", messages=[{"role": "user", "content": text}])
stream = client.chat.completions.create(model="en-de", messages=[{"role": "user", "content": lines[0]}], stream=True)
result = [[ask(line).choices[0].message.content for line in lines],
          "".join(event.choices[0].delta.content or "" for event in stream), [m.id for m in client.models.list()]]
expected = [wanted, wanted[0], ["de-en", "en-de", "en-qlo"]]
try:
    client.models.retrieve("gpt")
except openai.NotFoundError as error:
    result += [client.models.retrieve("en-de").id, error.body["type"]]
expected += ["en-de", "invalid_request_error"]
""",
}
NODE = """
const deepl = require("deepl-node");
const [url, key, lines] = JSON.parse(process.argv[1]);
const client = new deepl.Translator(key, {serverUrl: url});
(async () => {
  const found = await client.translateText(lines, "en", "de");
  const marked = await client.translateText("A <b>dog</b> runs.", "en", "de", {tagHandling: "html"});
  const usage = await client.getUsage();
  const entries = new deepl.GlossaryEntries({entries: {little: "the"}});
  const glossary = await client.createGlossary("g", "en", "de", entries);
  const kept = await client.getGlossaryEntries(glossary);
  const glossed = (await client.translateText(lines, "en", "de", {glossary})).map(each => each.text);
  await client.deleteGlossary(glossary);
  const file = Buffer.from(lines.join("\\n"));
  const handle = await client.uploadDocument(file, "en", "de", {filename: "a.txt"});
  const {status} = await client.isDocumentTranslationComplete(handle);
  const out = require("fs").createWriteStream(process.argv[2]);
  await client.downloadDocument(handle, out);
  const tags = marked.text.replace(/[^<>b/]/g, "");
  const document = require("fs").readFileSync(process.argv[2], "utf8").split("\\n");
  const texts = found.map(each => each.text);
  console.log(JSON.stringify([texts, tags, usage.anyLimitReached(), kept.entries(), status.status, document, glossed]));
})();
"""


@pytest.fixture(scope="module")
def server(folders: dict[tuple[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of a server in a separate process, and a key."""
    keys = tmp_path_factory.mktemp("clients") / "keys"
    key = new_key(keys, "client")
    command = [
        sys.executable,
        "-m",
        "ziggurat",
        "serve",
        *map(str, folders.values()),
        "--port",
        "0",
        "--keys",
        str(keys),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        yield found[0], key
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, 143)


@pytest.fixture(scope="module")
def wanted(folders: dict[tuple[str, str], Path]) -> list[str]:
    return [translation.text for translation in load_translator(folders["en", "de"]).translate(LINES)]


@pytest.fixture(scope="module")
def glossed(folders: dict[tuple[str, str], Path], wanted: list[str]) -> list[str]:
    """Return the lines' translations with a glossary that maps `little`, which is in the first line, to `the`."""
    assert ["little" in line for line in LINES] == [True, False]
    translator = load_translator(folders["en", "de"])
    found = translator.translate([LINES[0]], constraints=[["the"]], endings="candidates", beam_size=4)[0].text
    assert "the" in found
    assert "the" not in wanted[0]
    return [found, wanted[1]]


@pytest.mark.parametrize("client", PROGRAMS)
def test_clients_for_python(client: str, server: tuple[str, str], wanted: list[str], glossed: list[str]) -> None:
    variable = "ZIGGURAT_ARGOS_PYTHON" if client == "argostranslate" else "ZIGGURAT_CLIENTS_PYTHON"
    python = os.environ.get(variable)
    if python is None:
        pytest.skip(f"${variable} is not set to a Python with {client}")
    given: dict[str, Any] = {"url": server[0], "key": server[1], "lines": LINES, "wanted": wanted, "glossed": glossed}
    given["german"] = "Das Haus steht am Fluss, und der Hund schläft vor der Tür."
    program = f"import json, sys\nglobals().update(json.loads(sys.argv[1]))\n{PROGRAMS[client]}\n"
    program += "print(json.dumps([result, expected]))\n"
    done = subprocess.run([python, "-c", program, json.dumps(given)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    result, expected = json.loads(done.stdout)
    assert result == expected


def test_deepl_for_node(server: tuple[str, str], wanted: list[str], glossed: list[str], tmp_path: Path) -> None:
    folder = os.environ.get("ZIGGURAT_CLIENTS_NODE")
    if folder is None:
        pytest.skip("$ZIGGURAT_CLIENTS_NODE is not set to a folder in which deepl-node is installed")
    given = json.dumps([*server, LINES])
    command = ["node", "-e", NODE, given, str(tmp_path / "out.txt")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [wanted, "<b></b>", False, {"little": "the"}, "done", wanted, glossed]
