"""The paths that the page requests, answered from a table, so that its content can be predicted word for word.

Alternatives, links and scores follow docs/serve.md; other tests cover the server's answers from models.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ziggurat.serve.interfaces.native import page_routes

LANGUAGES = {"de": "German", "en": "English", "ar": "Arabic", "qlo": "Qlo"}
PAIRS = {"de": ["en"], "en": ["de", "ar", "qlo"], "ar": ["en"]}

TABLE = {  # the translations of a sentence, best first; the dog takes two units of UTF-16
    ("de", "en", "Der Hund 🐕 läuft schnell."): [
        "The dog 🐕 runs fast.",
        "The dog 🐕 walks quickly.",
        "The dog 🐕 is running fast.",
    ],
    ("de", "en", "Er bellt laut."): ["It barks loudly.", "He barks loudly."],
    ("en", "de", "The dog 🐕 runs fast."): ["Der Hund 🐕 läuft schnell."],
    ("en", "ar", "The dog runs."): ["الكلب يجري.", "يجري الكلب."],
}
ONWARDS = {  # the model's continuation of a prefix
    "The dog 🐕 walks": "The dog 🐕 walks briskly.",
    "It": "Its bark is loud.",
}
LEXICON = {
    *(("Der", "The"), ("Hund", "dog"), ("läuft", "runs"), ("läuft", "walks"), ("schnell", "fast")),
    *(("Er", "It"), ("Er", "He"), ("bellt", "barks"), ("laut", "loudly"), ("schnell", "briskly")),
    *(("dog", "الكلب"), ("The", "الكلب"), ("runs", "يجري")),
}
DOUBTFUL = {"fast", "It"}


def _words(text: str) -> list[tuple[str, int, int]]:
    return [(found[0], *found.span()) for found in re.finditer(r"\w+", text)]


@dataclass
class FakeServer:
    """The state of the server.

    Attributes:
        address: where it is.
        asked: JSON of the requested translations, or the form of documents.
        failures: answers to the next requests for translations: status, message and headers.
        document_failures: the same for documents.
        start_failures: the same for settings.
        key: the key that is needed.
        delay: seconds before each translation is answered.
        called_off: requests whose client left before they were answered.
        documents: finished sentences of each; it has three.
        gate: documents proceed while it is set.
        exported: its models have no alignments.
        hard: the language pair whose model accepts only hard terms.
    """

    address: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    failures: list[tuple[int, str, dict[str, str]]] = field(default_factory=list)
    document_failures: list[tuple[int, str, dict[str, str]]] = field(default_factory=list)
    start_failures: list[tuple[int, str, dict[str, str]]] = field(default_factory=list)
    key: str | None = None
    delay: float = 0.0
    called_off: int = 0
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    gate: bool = True
    exported: bool = False
    hard: tuple[str, str] | None = None

    def reset(self) -> None:
        """Forget all requests."""
        self.__dict__.update(FakeServer(self.address).__dict__)

    def app(self) -> Starlette:
        """Return the application."""
        return Starlette(
            routes=[
                *page_routes(),
                Route("/v1/settings", self._settings),
                Route("/v1/translate", self._translate, methods=["POST"]),
                Route("/v1/documents", self._begin, methods=["POST"]),
                Route("/v1/documents/{id}", self._document, methods=["GET", "DELETE"]),
                Route("/v1/documents/{id}/file", self._file),
            ]
        )

    async def _settings(self, request: Request) -> Response:
        if self.start_failures:
            return _failure(*self.start_failures.pop(0))
        return JSONResponse(
            {
                "version": "1.2.3",
                "limits": {"characters": 200, "texts": 10, "alternatives": 3, "file_bytes": 2048},
                "key_required": self.key is not None,
                "languages": [{"code": c, "name": LANGUAGES[c], "targets": PAIRS.get(c, [])} for c in LANGUAGES],
                "pairs": [
                    {"source": s, "target": t, "models": ["m"], "soft_terms": (s, t) != self.hard, "prefixes": True}
                    for s, targets in PAIRS.items()
                    for t in targets
                ],
                "detection": True,
                "files": [".txt", ".html"],
            }
        )

    def _refusal(self, request: Request, failures: list[tuple[int, str, dict[str, str]]]) -> Response | None:
        if failures:
            return _failure(*failures.pop(0))
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return _failure(403, "Invalid API key", {})
        return None

    async def _translate(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked)
        if (refusal := self._refusal(request, self.failures)) is not None:
            return refusal
        if self.exported and asked.get("alignments"):
            return _failure(400, "de-en is an exported model, which tells no `alignments`", {})
        if self.delay:
            await asyncio.sleep(self.delay)
            if await request.is_disconnected():
                self.called_off += 1
        return JSONResponse({"translations": [self._translation(asked)]})

    def _translation(self, asked: dict[str, Any]) -> dict[str, Any]:
        text, source, target = asked["text"], asked["source"], asked["target"]
        found: dict[str, Any] = {}
        if source == "auto":
            source = "de" if re.search("Hund|bellt", text) else "en"
            found["detected"] = {"language": source, "confidence": 97.0}
        found |= {"source": source, "text": "", "alternatives": [], "sentences": []}
        prefix = asked.get("prefix", "")
        at = 0
        for sentence in re.finditer(r"\S[^.]*\.?", text):
            choices = TABLE.get((source, target, sentence[0]), [f"<b>{sentence[0].upper()}</b>"])
            if source == target:
                choices = [sentence[0]]
            if prefix:
                choices = [each for each in [ONWARDS.get(prefix, ""), *choices] if each.startswith(prefix)]
            found["text"] += text[at : sentence.start()]
            begin, at = len(found["text"]), sentence.end()
            found["text"] += choices[0]
            found["sentences"].append(self._sentence(sentence, begin, choices, asked))
            if asked.get("alternatives"):
                found["alternatives"] = choices[1 : asked["alternatives"] + 1]
        found["text"] += text[at:]
        if "glossary" in asked:
            found["glossary"] = [
                {
                    **term,
                    "found": text.count(term["source"]),
                    "applied": int(term["mode"] == "hard"),
                    "dropped": int(term["mode"] == "soft"),
                }
                for term in asked["glossary"]
            ]
        return found

    def _sentence(
        self, sentence: re.Match[str], begin: int, choices: list[str], asked: dict[str, Any]
    ) -> dict[str, Any]:
        words = _words(choices[0])
        found: dict[str, Any] = {
            "source": list(sentence.span()),
            "target": [begin, begin + len(choices[0])],
            "alternatives": [{"text": each, "score": -0.5} for each in choices[1:]],
            "score": -0.2,
        }
        if asked.get("scores"):
            found["tokens"] = [
                {"target": [begin + b, begin + e], "score": -2.0 if word in DOUBTFUL else -0.1} for word, b, e in words
            ]
        if asked.get("alignments"):
            found["links"] = [
                [sentence.start() + a, sentence.start() + b, begin + c, begin + d]
                for source, a, b in _words(sentence[0])
                for target, c, d in words
                if (source, target) in LEXICON
            ]
        return found

    async def _begin(self, request: Request) -> Response:
        async with request.form() as form:
            content = await form["file"].read()  # type: ignore[union-attr]
            name = form["file"].filename  # type: ignore[union-attr]
            self.asked.append({k: str(v) for k, v in form.items() if k != "file"})
        if (refusal := self._refusal(request, self.document_failures)) is not None:
            return refusal
        key = f"d{len(self.documents)}"
        self.documents[key] = {"done": -1, "content": content, "name": name}
        return JSONResponse(self._state(key), 202)

    def _state(self, key: str) -> dict[str, Any]:
        done = self.documents[key]["done"]
        status = "waiting" if done < 0 else "translating" if done < 3 else "done"
        if status == "done" and b"damaged" in self.documents[key]["content"]:
            status = "failed"
        return {
            "id": key, "status": status, "done": max(0, done), "total": 3, "name": f"en-{self.documents[key]['name']}",
            **({"error": "the file is damaged"} if status == "failed" else {}),
        }  # fmt: skip

    async def _document(self, request: Request) -> Response:
        key = request.path_params["id"]
        if request.method == "DELETE":
            del self.documents[key]
            return Response(status_code=204)
        if (refusal := self._refusal(request, self.document_failures)) is not None:
            return refusal
        if self.gate or self.documents[key]["done"] < 1:
            self.documents[key]["done"] += 1
        return JSONResponse(self._state(key))

    async def _file(self, request: Request) -> Response:
        return Response(self.documents[request.path_params["id"]]["content"].upper())


def _failure(status: int, message: str, headers: dict[str, str]) -> Response:
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return Response(json.dumps({"error": error}), status, headers, "application/json")


@contextmanager
def served(app: Starlette) -> Iterator[str]:
    """Serve an application at a free port of this machine; return the address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # before the server's thread is ready; clients that connect now wait
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
