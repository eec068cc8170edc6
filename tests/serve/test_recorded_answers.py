"""Recorded answers of LibreTranslate 1.9.6 compared with ours: status, kind, shape, and errors word for word.

The recording itself, if there is one, is next to the repository. Of translations only the shape is compared, because
their texts depend on the models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import write_model
from tests.vocabulary import SENTENCES
from ziggurat.serve.config import ServeConfig
from ziggurat.serve.server import app_of

RECORDING = Path(__file__).resolve().parents[3] / "shared" / "field" / "serving" / "libretranslate-1.9.6-answers.txt"

TEXT = {"translatedText": "text"}
DETECTED = {"confidence": "number", "language": "text"}
LANGUAGE = {"code": "text", "name": "text"}
BROKEN = "The browser (or proxy) sent a request that this server could not understand."


class Case(NamedTuple):
    """A request as given to curl, and LibreTranslate's answer: a shape, or an error word for word."""

    curl: str
    status: int
    answer: Any


CASES = {
    "the languages": Case("/languages", 200, [{**LANGUAGE, "targets": ["text"]}]),
    "the settings": Case(
        "/frontend/settings",
        200,
        {
            **dict.fromkeys(("apiKeys", "filesTranslation", "keyRequired", "suggestions"), "flag"),
            **dict.fromkeys(("charLimit", "frontendTimeout"), "number"),
            "language": {"source": LANGUAGE, "target": LANGUAGE},
            "supportedFilesFormat": ["text"],
        },
    ),
    "a text": Case('-X POST /translate  -d {"q":"A dog.","source":"en","target":"qh"}', 200, TEXT),
    "a list, one text empty, with alternatives": Case(
        '-X POST /translate  -d {"q":["' + SENTENCES[0] + '",""],"source":"en","target":"qh","alternatives":2}',
        200,
        {"alternatives": [["text"], []], "translatedText": ["text"]},
    ),
    "a form, the language detected": Case(
        "-X POST /translate -d q=A dog.&source=auto&target=qh", 200, {**TEXT, "detectedLanguage": DETECTED}
    ),
    "a list, the languages detected": Case(
        '-X POST /translate  -d {"q":["A dog.","Dogs."],"source":"auto","target":"qh"}',
        200,
        {"translatedText": ["text"], "detectedLanguage": [DETECTED]},
    ),
    "HTML": Case(
        '-X POST /translate  -d {"q":"<p>A <b>dog</b> runs <br/> to <i>us</i>.</p>","source":"en","target":"qh",'
        '"format":"html"}',
        200,
        TEXT,
    ),
    "no text": Case(
        '-X POST /translate  -d {"source":"en","target":"qh"}', 400, {"error": "Invalid request: missing q parameter"}
    ),
    "an unknown language": Case(
        '-X POST /translate  -d {"q":"x","source":"en","target":"zz"}', 400, {"error": "zz is not supported"}
    ),
    "an unavailable direction": Case(
        '-X POST /translate  -d {"q":"x","source":"qh","target":"en"}',
        400,
        {"error": "Qlo (en) is not available as a target language from Qhi (qh)"},
    ),
    "too many texts": Case(
        '-X POST /translate  -d {"q":["a","b","c","d"],"source":"en","target":"qh"}',
        400,
        {"error": "Invalid request: request (4) exceeds text limit (3)"},
    ),
    "a text that is too long": Case(
        f'-X POST /translate  -d {{"q":"{"a" * 300}","source":"en","target":"qh"}}',
        400,
        {"error": "Invalid request: request (300) exceeds text limit (200)"},
    ),
    "an unknown format": Case(
        '-X POST /translate  -d {"q":"x","source":"en","target":"qh","format":"pdf"}',
        400,
        {"error": "pdf format is not supported"},
    ),
    "too many alternatives": Case(
        '-X POST /translate  -d {"q":"x","source":"en","target":"qh","alternatives":9}',
        400,
        {"error": "Invalid request: alternatives parameter must be <= 3"},
    ),
    "broken JSON": Case("-X POST /translate  -d {bad", 400, {"error": BROKEN}),
    "JSON that is not an object": Case("-X POST /translate  -d [1]", 400, {"error": "Invalid JSON format"}),
    "GET instead of POST": Case("/translate", 405, "a page"),
    "detection": Case("-X POST /detect -d q=Hello there, how are you today?", 200, [DETECTED]),
    "detection of nothing": Case("-X POST /detect  -d {}", 400, {"error": "Invalid request: missing q parameter"}),
    "everything in the query": Case("-X POST /translate?q=Hi&source=en&target=qh", 200, TEXT),
    "a suggestion": Case(
        "-X POST /suggest -d q=a&s=b&source=en&target=qh",
        403,
        {"error": "Suggestions are disabled on this server."},
    ),
    "a file": Case(
        "-X POST /translate_file -F file=@f.txt -F source=en -F target=qh", 200, {"translatedFileUrl": "text"}
    ),
    "no file": Case("-X POST /translate_file -F source=en -F target=qh", 400, {"error": BROKEN}),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, vocabularies: Path) -> Iterator[TestClient]:
    """A server with the languages and limits of the recording."""
    model = tmp_path_factory.mktemp("recorded") / "en-qh"
    write_model(model, vocabularies, "en", "qh", 4)
    config = ServeConfig.model_validate(
        {
            "models": [{"path": str(model), "threads": 1}],
            "names": {"en": "Qlo", "qh": "Qhi"},
            "limits": {"characters": 200, "texts": 3, "alternatives": 3},
        }
    )
    with TestClient(app_of(config, lambda text: None)) as client:
        yield client


def send_curl(client: TestClient, curl: str) -> tuple[int, str, str]:
    """Send what curl would send; return status, kind and text of the answer."""
    found = re.fullmatch(r"(-X POST )?(/\S+) *(?:-d (.*)|(-F .*))?", curl, flags=re.DOTALL)
    assert found is not None, curl
    post, path, data, form = found.groups()
    content: dict[str, Any] = {}
    if form:
        fields = dict(part.split("=", 1) for part in form.removeprefix("-F ").split(" -F "))
        named = {name: (None, value) for name, value in fields.items() if not value.startswith("@")}
        files = {name: (value[1:], b"A dog.\n") for name, value in fields.items() if value.startswith("@")}
        content = {"files": {**named, **files}}
    elif data is not None and data[0] in "{[":
        content = {"content": data.encode(), "headers": {"content-type": "application/json"}}
    elif data is not None:
        content = {"data": dict(parse_qsl(data))}
    answer = client.request("POST" if post else "GET", path, **content)
    return answer.status_code, answer.headers["content-type"], answer.text


def shape(value: Any, key: str = "") -> Any:
    """Return a value with placeholders for texts, numbers and flags, and with lists reduced to one item per shape."""
    if isinstance(value, dict):
        return {name: shape(each, name) for name, each in value.items()}
    if isinstance(value, list):
        shapes: list[Any] = []
        for each in value:
            if (found := shape(each, key)) not in shapes:
                shapes.append(found)
        return shapes
    if key == "error":
        return value
    return "flag" if isinstance(value, bool) else "number" if isinstance(value, (int, float)) else "text"


def table_entry(status: int, kind: str, text: str) -> Any:
    """Return an answer in the table's format."""
    if kind.startswith("text/html"):
        return status, "a page"
    assert kind == "application/json"
    return status, shape(json.loads(text))


@pytest.mark.parametrize("name", CASES)
def test_ours(name: str, client: TestClient) -> None:
    assert table_entry(*send_curl(client, CASES[name].curl)) == CASES[name][1:]


def recorded() -> Iterator[tuple[str, int, str, str]]:
    """Yield the recording's requests with status, kind and text of each answer."""
    for part in re.split(r"^--- ", RECORDING.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        found = re.fullmatch(r"(.*?)\n(.*)  \[(\d+) ([^\]]+)\] \s*", part, flags=re.DOTALL)
        assert found is not None, part
        yield found[1], int(found[3]), found[4], found[2]


@pytest.mark.skipif(not RECORDING.exists(), reason="no recording next to the repository")
def test_the_recording() -> None:
    """The table matches the recording: the same requests except for their texts, in the same order, and their
    answers.
    """
    every = list(recorded())
    assert len(every) == len(CASES)
    quoted = re.compile(r'(?<="q":)(\[.*?\]|"[^"]*"?)|(?<=\bq=)[^&]*')
    for (curl, *answer), case in zip(every, CASES.values(), strict=True):
        ours = quoted.sub("", case.curl)
        assert quoted.sub("", curl) in (ours, ours.partition(',"source"')[0]), curl  # one is cut off in the recording
        assert table_entry(*answer) == case[1:], curl
