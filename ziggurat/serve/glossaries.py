"""Glossaries that clients send, or store on the server, in a file if one is configured."""

from __future__ import annotations

import csv
import io
import json
import re
import threading
import time
import uuid
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from ziggurat.config.languages import main_language
from ziggurat.serve.requests import Refused
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import MAX_BYTES, JsonForm, read_json
from ziggurat.translate.terms import Term, Terms

MOST_GLOSSARIES = 1000
"""MOST_GLOSSARIES is the limit for one client, or for a server without keys."""
MOST_ENTRIES = 10_000
"""MOST_ENTRIES is the limit of terms in one glossary."""


class Glossary(JsonForm):
    """A glossary. Raises DataError for invalid entries."""

    id: str = Field(pattern="^[0-9a-f-]{36}$")
    """Random."""
    owner: str = Field(max_length=200)
    """Name of the key that may use it; empty: everyone may."""
    name: str = Field(min_length=1, max_length=1000)
    """Name given by its owner."""
    source: str = Field(max_length=50)
    target: str = Field(max_length=50)
    created: float = Field(ge=0, le=1e12)
    """Seconds since 1970."""
    entries: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = Field(max_length=MOST_ENTRIES)
    """Terms of the source language, each with its translation."""

    def model_post_init(self, context: object) -> None:
        """Check the entries."""
        Terms(Term(source, target) for source, target in self.entries)

    @cached_property
    def soft(self) -> Terms:
        """Its terms as soft terms, left to the search."""
        return Terms(Term(source, target) for source, target in self.entries)

    @cached_property
    def hard(self) -> Terms:
        """Its terms as hard terms, reproduced letter by letter."""
        return Terms(Term(source, target, "hard") for source, target in self.entries)


class _File(JsonForm):
    glossaries: list[Glossary] = Field(max_length=1_000_000)


class Glossaries:
    """The glossaries of a server. Thread-safe.

    Args:
        path: the file; None: they are lost when the server ends.

    Raises ConfigError for a damaged file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: dict[str, Glossary] = {}
        if path is None:
            return
        try:
            stored = read_json(path, _File, error=ConfigError, remedy="remove it, or name another file").glossaries
            self._known = {each.id: each for each in stored}
        except FileNotFoundError:
            self._keep({})  # now, so that an unwritable folder is reported at once
        except DataError as error:
            raise ConfigError(f"{path}: {error}") from None

    def add(self, owner: str, name: str, source: str, target: str, entries: list[tuple[str, str]]) -> Glossary:
        """Store a glossary. Raises DataError for invalid terms, Refused if there are too many."""
        made = Glossary(
            id=str(uuid.uuid4()),
            owner=owner,
            name=name,
            source=source,
            target=target,
            created=time.time(),
            entries=[[term.strip() for term in entry] for entry in entries],
        )
        with self._lock:
            if sum(each.owner == owner for each in self._known.values()) >= MOST_GLOSSARIES:
                raise Refused(456, f"at most {MOST_GLOSSARIES} glossaries are kept")
            self._keep({**self._known, made.id: made})
        return made

    def get(self, owner: str, name: str) -> Glossary:
        """Return a glossary. Raises Refused (404) if its owner has none with this id."""
        found = self._known.get(name)
        if found is None or found.owner != owner:
            raise Refused(404, "Not found, glossary does not exist.")
        return found

    def of(self, owner: str) -> list[Glossary]:
        """Return the glossaries of an owner, oldest first."""
        with self._lock:  # other threads may add some in the meantime
            own = [each for each in self._known.values() if each.owner == owner]
        return sorted(own, key=lambda each: each.created)

    def remove(self, owner: str, name: str) -> None:
        """Delete a glossary. Raises Refused (404)."""
        with self._lock:
            gone = self.get(owner, name)
            self._keep({each.id: each for each in self._known.values() if each is not gone})

    def _keep(self, known: dict[str, Glossary]) -> None:
        """Replace all glossaries by these, and rewrite the file if there is one.

        Raises Refused (456) if their total size exceeds the limit, or OSError; either way nothing has changed.
        """
        stored = [each.model_dump() for each in known.values()]
        content = json.dumps({"glossaries": stored}, ensure_ascii=False).encode() + b"\n"
        if len(content) > MAX_BYTES:
            raise Refused(456, "no room for more glossaries")
        if self._path is not None:
            write_atomically(self._path, content)
        self._known = known


_LINE_END = re.compile(r"\r\n?|\n")


def read_entries(text: str, kind: str, languages: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the entries of a glossary for these languages from text in the format `tsv` or `csv`.

    Raises Refused (400) for another format, no entries, too many entries, or a line with a wrong number of columns. It
    needs two, or in CSV four, of which the last two are the languages.
    """
    text = text.removeprefix("\ufeff")  # a file's byte order mark
    if kind == "tsv":
        rows = [line.split("\t") for line in _LINE_END.split(text) if line.strip()]
    elif kind == "csv":
        try:
            rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if any(map(str.strip, row))]
        except csv.Error as error:
            raise Refused(400, f"Invalid glossary entries provided: {error}") from None
    else:
        raise Refused(400, "Value for 'entries_format' not supported.")
    if not rows or len(rows) > MOST_ENTRIES:
        raise Refused(400, f"Invalid glossary entries provided: {len(rows)}, not 1 to {MOST_ENTRIES}")
    for number, row in enumerate(rows, start=1):
        if len(row) != 2 and not (kind == "csv" and len(row) == 4):
            raise Refused(400, f"Invalid glossary entries provided: entry {number} has {len(row)} columns")
        own = [each.strip() for each in row[2:]]
        if own and [main_language(each.lower()) for each in own] != [main_language(each.lower()) for each in languages]:
            others = "-".join(printable(each, 20) for each in own)
            raise Refused(400, f"Invalid glossary entries provided: entry {number} is in other languages: {others}")
    return [(row[0], row[1]) for row in rows]


class Entry(NamedTuple):
    """A term in a request's glossary; without a mode, the model's best one is used."""

    source: str
    target: str
    mode: Literal["soft", "hard"] | None


def entries_of(given: Any, most: int) -> list[Entry]:
    """Return a glossary from a request: a list of objects, or an object of source and target terms; may be empty.

    Raises Refused for anything else (400), or for more than `most` terms (413).
    """
    if given is None or given in ("", [], {}):
        return []
    records = [{"source": s, "target": t} for s, t in given.items()] if isinstance(given, dict) else given
    if not isinstance(records, list):
        raise Refused(400, "`glossary` is a list of objects with `source`, `target` and `mode`, or an object of terms")
    if len(records) > most:
        raise Refused(413, f"at most {most} terms in a glossary")
    return list(map(_entry, records))


def _entry(given: Any) -> Entry:
    entry = [given.get(name) for name in Entry._fields] if isinstance(given, dict) else [None] * 3
    if not all(isinstance(term, str) for term in entry[:2]) or entry[2] not in ("soft", "hard", None):
        raise Refused(400, f"`glossary`: {printable(str(given), 60)}: needs `source`, `target`, and `mode`: soft, hard")
    return Entry(*entry)
