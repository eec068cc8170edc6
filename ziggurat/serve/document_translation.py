"""One document: what is known of it, and how it is translated."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import regex

from ziggurat.serve.asking import Asking, Recorded
from ziggurat.serve.config import DocumentsConfig
from ziggurat.serve.lines import Asked
from ziggurat.serve.queue import SearchOptions
from ziggurat.serve.requests import Refused
from ziggurat.serve.text.documents.kinds import document, document_kind
from ziggurat.serve.text.documents.settings import Limits, Settings
from ziggurat.serve.text.glossary import Tally, Terms
from ziggurat.serve.text.sentences import Options
from ziggurat.serve.text.work import Outcome, Work
from ziggurat.serve.translations import Translations
from ziggurat.system.errors import DataError

_UNSAFE = regex.compile(r"[^A-Za-z0-9_-]++")
_PLAIN = ("text/plain", "text/markdown")  # files that are text and little else
_DETECTED = 2000  # characters by which the language of a document is detected


@dataclass(eq=False)
class Document:
    """A document that waits, is translated or is done.

    Attributes:
        id: random; whoever has it may have the document.
        key: another random text, for an interface that asks for one.
        client: who sent it.
        name: as the client calls it, without folders; for people and for the kind, never a path.
        source, target: language codes; `auto` until it is detected.
        terms: a glossary.
        status: `waiting`, `translating`, `done` or `failed`.
        done, total: sentences that are translated, and that are known of.
        characters: of the sentences, of which one that occurs again counts once.
        error: why it failed.
        tally: what came of the glossary.
        size: bytes that it takes in the folder.
        ended: `time.monotonic()` when it was done or failed.
    """

    client: str
    name: str
    source: str
    target: str
    terms: Terms | None = None
    id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    status: str = "waiting"
    done: int = 0
    total: int = 0
    characters: int = 0
    error: Exception | None = None
    tally: Tally = field(default_factory=Tally)
    size: int = 0
    ended: float = 0.0
    began: float = 0.0
    task: asyncio.Task[None] | None = None

    @property
    def file_name(self) -> str:
        """A name for the translated file: the random one, and what of the client's name is safe anywhere."""
        return f"{self.id}.{self.translated_name}"

    @property
    def translated_name(self) -> str:
        """A name for people, such as `letter_en.docx`."""
        ending = Path(self.name).suffix.lower()
        stem = _UNSAFE.sub("_", self.name[: -len(ending)]).strip("_")[:50] or "document"
        return f"{stem}_{_UNSAFE.sub('_', self.target)}{ending}"


async def translated(
    given: Document,
    content: bytes,
    server: Translations,
    config: DocumentsConfig,
    run: Callable[[Callable[[], Any]], Awaitable[Any]],
) -> bytes:
    """Return a document's translation; `run` calls what takes long in a thread.

    Its characters count against the client's limit as soon as they are known. Raises DataError for a damaged, hostile
    or too long document, Refused where no model translates its language or beyond the client's limit (429; 413 where
    no minute has room for it), Late after `config.seconds`, ModelFailed.
    """
    # Told before it is decoded: a character has four bytes at most.
    if document_kind(given.name).media_type in _PLAIN and len(content) > 4 * config.characters:
        raise DataError(f"{given.name}: {len(content):,} bytes are more than {config.characters:,} characters")
    limits = Limits(size=server.limits.file_bytes, unpacked=config.unpacked_bytes, pieces=config.pieces)
    if given.source == "auto":
        beginning = await run(lambda: _beginning(given, content, limits))
        ((given.source, _),) = await server.detect_sources([beginning], given.target)
    if given.source == given.target:
        return content
    route = server.route(given.source, given.target)
    if not route:
        raise Refused(400, f"no model translates from {given.source} into {given.target}")
    terms = given.terms
    asked = Asked(
        given.client,
        time.monotonic() + config.seconds,
        SearchOptions(alignments=True),
        terms=terms if terms is not None and terms.soft else None,
        patient=True,
    )

    def progress(done: int, total: int) -> None:
        given.done, given.total = done, total

    cut = replace(server.cut(given.source, route, terms, given.tally), admit=_Bound(given.name, config).admit)
    settings = Settings(cut, given.source, given.target, limits=limits)

    def counted(characters: int) -> None:
        server.access.spend(given.client, characters)
        given.characters = characters

    work = _counted(document(content, given.name, settings), counted)
    (outcome,) = await Asking(asked, run, progress).results([work], [Recorded(route)])
    server.used[server.access.account(given.client)] += given.characters
    return outcome.value


class _Bound:
    """The limits of a document's text, which are known before it is cut into sentences."""

    def __init__(self, name: str, config: DocumentsConfig) -> None:
        self._name, self._config = name, config
        self._characters = self._paragraphs = 0

    def admit(self, texts: Sequence[str]) -> None:
        """Take paragraphs. Raises DataError beyond the limits."""
        self._characters += sum(map(len, texts))
        self._paragraphs += len(texts)
        for found, most, kind in (
            (self._characters, self._config.characters, "characters"),
            (self._paragraphs, self._config.paragraphs, "paragraphs, cells, strings or lines"),
        ):
            if found > most:
                raise DataError(f"{self._name}: more than {most:,} {kind}; divide it")


def _counted(work: Work[Outcome[bytes]], counted: Callable[[int], None]) -> Work[Outcome[bytes]]:
    """Return the same work, which tells the characters of all sentences before the first of them is translated."""
    try:
        asked = next(work)
        counted(sum(len(sentence.text) for sentence in asked))
        while True:
            asked = work.send((yield asked))
    except StopIteration as ended:
        outcome: Outcome[bytes] = ended.value
        return outcome
    finally:
        work.close()


def _beginning(given: Document, content: bytes, limits: Limits) -> str:
    """Return the first paragraphs of a document."""
    found: list[str] = []

    def admit(texts: Sequence[str]) -> None:
        for text in texts:
            found.append(text[:_DETECTED])
            if sum(map(len, found)) > _DETECTED:
                raise _EnoughError

    settings = Settings(Options(split=None, admit=admit), target=given.target, limits=limits)
    work = document(content, given.name, settings)
    with contextlib.suppress(_EnoughError, StopIteration):
        next(work)
    work.close()
    return "\n".join(found)


class _EnoughError(Exception):
    """Enough of a document is known."""
