"""LibreTranslate itself and our server with the same model give the same statuses, shapes and errors, case by case.

$ZIGGURAT_LIBRETRANSLATE_PYTHON is the Python of an environment with libretranslate 1.9.6.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from benchmarks.serve import free_port
from tests.exchange.test_argos import model_directory
from tests.serve.programs import running
from tests.vocabulary import SENTENCES, trained_tokenizer
from ziggurat.exchange.exporter import export_model

pytestmark = pytest.mark.slow

PEER = Path(__file__).resolve().parents[2] / "benchmarks" / "libretranslate_peer.py"


class Case(NamedTuple):
    """A request."""

    method: str
    path: str
    more: dict[str, Any]


def post(path: str, **more: Any) -> Case:
    return Case("POST", path, more)


GOOD = {"q": "Ein Hund rennt.", "source": "de", "target": "en"}


def translate(**fields: Any) -> Case:
    return post("/translate", json={**GOOD, **fields})


def without(*names: str) -> Case:
    return post("/translate", json={name: value for name, value in GOOD.items() if name not in names})


def file(name: str, content: bytes, **fields: Any) -> Case:
    return post(
        "/translate_file", files={"file": (name, io.BytesIO(content))}, data={"source": "de", "target": "en"} | fields
    )


CASES: dict[str, Case] = {
    "a text": translate(),
    "a form": post("/translate", data=GOOD),
    "the query": post("/translate", params=GOOD),
    "a list": translate(q=["The dog runs.", ""]),
    "an empty list": translate(q=[]),
    "an empty text": translate(q=""),
    "blanks alone": translate(q="  "),
    "alternatives": translate(alternatives=2),
    "alternatives of a list": translate(q=["The dog runs.", "A house"], alternatives=1),
    "alternatives as a text": translate(alternatives="2"),
    "alternatives beyond the limit": translate(alternatives=9),
    "alternatives that are no number": translate(alternatives="many"),
    "alternatives below none": translate(alternatives=-1),
    "HTML": translate(q="<p>The <b>dog</b> runs.</p>", format="html"),
    "HTML in a list": translate(q=["<p>The <b>dog</b></p>", "a"], format="html"),
    "another format": translate(format="pdf"),
    "no format": translate(format=""),
    "auto": translate(source="auto"),
    "auto of a list": translate(q=["The dog runs.", "A house"], source="auto"),
    "no text": without("q"),
    "no source": without("source"),
    "no target": without("target"),
    "nothing": post("/translate", json={}),
    "no body": post("/translate"),
    "an unknown source": translate(source="zz"),
    "an unknown target": translate(target="zz"),
    "a direction that there is not": translate(source="en", target="de"),
    "into its own language": translate(target="de"),
    "too many texts": translate(q=["a"] * 4),
    "a text too long": translate(q="a" * 201),
    "texts too long": translate(q=["a" * 150] * 2),
    "a number as text": translate(q=7),
    "an object as text": translate(q={"a": 1}),
    "numbers in a list": translate(q=[1, 2]),
    "a number as source": translate(source=3),
    "a list as target": translate(target=["en"]),
    "broken JSON": post("/translate", content=b"{bad", headers={"content-type": "application/json"}),
    "JSON that is a list": post("/translate", content=b"[1]", headers={"content-type": "application/json"}),
    "JSON that is null": post("/translate", content=b"null", headers={"content-type": "application/json"}),
    "not UTF-8": post("/translate", content=b'{"q": "\xff"}', headers={"content-type": "application/json"}),
    "read instead of asked": Case("GET", "/translate", {}),
    "languages": Case("GET", "/languages", {}),
    "languages, posted": Case("POST", "/languages", {}),
    "settings": Case("GET", "/frontend/settings", {}),
    "health": Case("GET", "/health", {}),
    "a language": post("/detect", data={"q": "Hello there, how are you today?"}),
    "a language as JSON": post("/detect", json={"q": "Hello there, how are you today?"}),
    "no text to detect": post("/detect", json={}),
    "an empty text to detect": post("/detect", json={"q": ""}),
    "a suggestion": post("/suggest", data={"q": "a", "s": "b", "source": "de", "target": "en"}),
    "a file": file("a.txt", b"The dog runs.\n"),
    "a file of another kind": file("a.exe", b"MZ"),
    "a file without a name": file("", b"a"),
    "no file": post("/translate_file", data={"source": "de", "target": "en"}),
    "a file into no language": file("a.txt", b"a", target="zz"),
    "a file from no language": file("a.txt", b"a", source="zz"),
    "a file that there is not": Case("GET", "/download_file/nothing.txt", {}),
    "a file upwards": Case("GET", "/download_file/..%2f..%2fetc%2fpasswd", {}),
    "a path that there is not": Case("GET", "/nothing", {}),
}
_BROKEN = "LibreTranslate answers 500"
DIFFERENT = {
    "alternatives that are no number": _BROKEN,
    "a number as text": _BROKEN,
    "an object as text": _BROKEN,
    "numbers in a list": _BROKEN,
    "a file that there is not": _BROKEN,
    "texts too long": "our limit is for all texts of a request together: they are what a request costs",
    "languages, posted": "Argos Translate's own client posts; LibreTranslate refuses",
    "settings": "we read other kinds of documents",
    "health": "we also tell how each model is",
}
"""DIFFERENT maps a case to why we answer differently; the difference is asserted, so the table stays true."""


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Addresses of LibreTranslate and of our server."""
    python = os.environ.get("ZIGGURAT_LIBRETRANSLATE_PYTHON")
    if python is None:
        pytest.skip("no environment with LibreTranslate: $ZIGGURAT_LIBRETRANSLATE_PYTHON")
    folder = tmp_path_factory.mktemp("oracle")
    joint = trained_tokenizer(SENTENCES, 340, [])
    model = model_directory(folder, joint, joint)
    (text := folder / "text").write_text("".join(f"{line}\n" for line in SENTENCES), encoding="utf-8")
    export_model(model, "argos", folder / "argos", verify=text)
    (package,) = (folder / "argos").glob("*.argosmodel")
    config = folder / "serve.yaml"
    ports = free_port(), free_port()
    config.write_text(
        f"models: [{{path: {model}, threads: 1}}]\nport: {ports[1]}\n"
        "limits: {characters: 200, texts: 3, alternatives: 3}\n",
        encoding="utf-8",
    )
    limits = ["--char-limit", "200", "--batch-limit", "3", "--alternatives-limit", "3"]
    theirs = [python, str(PEER), "--port", str(ports[0]), *limits]
    ours = [sys.executable, "-m", "ziggurat", "serve", "--config", str(config)]
    first, second = (f"http://127.0.0.1:{port}" for port in ports)
    with running(theirs, first, 900, ARGOS_FILES=str(package)), running(ours, second):
        yield first, second


def shape(value: Any, key: str = "") -> Any:
    """Return a value with equal placeholders for texts and numbers; errors stay unchanged.

    Only the nesting of alternatives counts: ours omits those that did not end within the limit. The order of languages
    does not count, since LibreTranslate starts with English.
    """
    if isinstance(value, dict):
        return {name: shape(each, name) for name, each in value.items()}
    if isinstance(value, list):
        found = sorted((shape(each, key) for each in value), key=str)
        return [each for each in found if key != "alternatives" or isinstance(each, list)]
    if key == "error" or isinstance(value, bool) or value is None:
        return value
    return 0.0 if isinstance(value, (int, float)) else ""


def answer_shape(address: str, case: Case) -> Any:
    """Return status, kind and shape of the answer."""
    for stream in (content[1] for content in case.more.get("files", {}).values()):
        stream.seek(0)
    answer = httpx.request(case.method, address + case.path, timeout=60, **case.more)
    kind = answer.headers.get("content-type", "").partition(";")[0]
    return answer.status_code, kind, shape(answer.json()) if kind == "application/json" else None


@pytest.mark.parametrize("name", CASES)
def test_the_answers_are_alike(name: str, addresses: tuple[str, str]) -> None:
    theirs, ours = (answer_shape(address, CASES[name]) for address in addresses)
    if name in DIFFERENT:
        assert ours != theirs, f"no longer true: {DIFFERENT[name]}"
        assert ours[0] < 500
    else:
        assert ours == theirs
