"""Settings of every kind of document: how text is cut, its languages, keys that are left, limits of files."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import regex

from ziggurat.config.languages import main_language
from ziggurat.serve.text.sentences import Options
from ziggurat.system.errors import DataError, printable

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
        members: most members of an archive.
        pieces: most tags and entities, lines or strings of a file, or of all of an archive's members that are read,
            counted in the bytes before anything is read.
    """

    size: int = 64 << 20
    unpacked: int = 256 << 20
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
        leave: keys whose text stays, in formats with keys (`DocumentKind.keyed`); `*` stands for any characters.
        limits: limits of the file.
    """

    options: Options
    source: str = ""
    target: str = ""
    leave: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def refuse_languages(self, source: str, target: str, name: str) -> None:
        """Raise DataError for a file called `name` from or into another language; empty codes are not known ones."""
        pairs = ((source, self.source), (target, self.target))
        if any(_differ(of_file, own) for of_file, own in pairs):
            raise DataError(
                f"{name}: is from {printable(source or '?')!r} to {printable(target or '?')!r}, and the model from "
                f"{self.source or '?'!r} to {self.target or '?'!r}; take another model, or change the file's languages"
            )

    def becomes_target(self, language: str, name: str) -> bool:
        """Return whether a file's language, which its translation says too, is the source and becomes the target.

        Raises DataError for another language than these two: a copy that is to be translated may say the target's.
        """
        if not language.strip() or language_of(language) == language_of(self.target):
            return False
        self.refuse_languages(language, "", name)
        return bool(self.target)

    def leaves(self, *keys: str) -> bool:
        """Return whether what these keys lead to is left as it is: one of them, or dotted all up to one, is named."""
        dotted = [".".join(keys[:number]) for number in range(2, len(keys) + 1)]
        return any(key == named or fnmatchcase(key, named) for named in self.leave for key in (*keys, *dotted))


_SAME = {"iw": "he", "in": "id", "ji": "yi", "nb": "no", "nn": "no", "tl": "fil", "sh": "sr", "mo": "ro"}
"""_SAME maps codes of languages to the codes by which they also go."""


def language_of(code: str) -> str:
    """Return the code of a language without region, script and character set, of two letters where there is one."""
    first = regex.split("[-_@.]", code.strip().lower())[0]
    short = main_language(first)
    return _SAME.get(short, short)


def _differ(one: str, other: str) -> bool:
    """Return whether two codes are of two languages; a code of three letters is not compared with one of two."""
    one, other = language_of(one), language_of(other)
    is_known = one not in ("", "und", "mul", "mis", "zxx", "x", "i", "*all*") and 1 < len(one) == len(other) < 4
    return is_known and one != other
