"""Settings of every kind of document: how text is cut, its languages, the limits for files of strangers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ziggurat.serve.text.sentences import Options
from ziggurat.system.errors import DataError

LINES = tuple(end.encode() for end in "\n\r\v\f\x85\u2028\u2029")
"""Bytes in UTF-8 of which each line of a file has one."""

TAGS = (b"<", b"&")
"""Bytes of which each piece of markup has one: tags, comments, entities."""


@dataclass(frozen=True)
class Limits:
    """Limits of a document.

    Attributes:
        size: most bytes of the file.
        unpacked: most bytes of all members of an archive, unpacked.
        ratio: most bytes that one byte of an archive may expand to, checked from 16 MiB on.
        members: most members of an archive.
        pieces: most tags and entities, lines or strings of a file, or of all of an archive's members that are read,
            counted in the bytes before anything is read.
    """

    size: int = 64 << 20
    unpacked: int = 256 << 20
    ratio: int = 200
    members: int = 10_000
    pieces: int = 2_000_000

    def refuse_many(self, count: int, name: str) -> None:
        """Raise DataError for a document called `name` with more than `pieces` pieces."""
        if count > self.pieces:
            raise DataError(f"{name}: more than {self.pieces:,} tags, lines or strings; divide it")


@dataclass(frozen=True)
class Settings:
    """Settings of the translation of a document.

    Attributes:
        options: how text is cut and put together again.
        source, target: language codes, for formats that hold them; empty: not known.
        attributes: whether attributes of HTML that people read are translated (`alt`, `title`, ...).
        limits: limits of the file.
    """

    options: Options
    source: str = ""
    target: str = ""
    attributes: bool = True
    limits: Limits = field(default_factory=Limits)
