"""Settings of every kind of document, and archives (zip) of documents.

Settings are how text is cut, its languages, and the limits for files of strangers. Archives are read within these
limits, and written again member by member in their order.
"""

from __future__ import annotations

import copy
import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import regex

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

    def refuse_languages(self, source: str, target: str, name: str) -> None:
        """Raise DataError for a file called `name` from or into another language; empty codes are not known ones."""
        pairs = ((source, self.source), (target, self.target))
        if any(_differ(of_file, own) for of_file, own in pairs):
            raise DataError(
                f"{name}: is from {printable(source or '?')!r} to {printable(target or '?')!r}, and the model from "
                f"{self.source or '?'!r} to {self.target or '?'!r}; take another model, or change the file's languages"
            )


_SAME = {"iw": "he", "in": "id", "ji": "yi", "nb": "no", "nn": "no", "cmn": "zh", "tl": "fil", "sh": "sr", "mo": "ro"}
"""Codes of languages, and the codes by which they also go."""


def _differ(one: str, other: str) -> bool:
    """Return whether two codes are of two languages; a code of three letters is not compared with one of two."""
    one, other = (regex.split("[-_]", code.strip().lower())[0] for code in (one, other))
    one, other = _SAME.get(one, one), _SAME.get(other, other)
    is_known = one not in ("", "und", "mul", "mis", "zxx", "x", "i", "*all*") and 1 < len(one) == len(other) < 4
    return is_known and one != other


_RATIO_FREE = 1 << 24
_BLOCK = 1 << 18
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Archive:
    """A zip archive in memory. Nothing of it is ever written under a name that it holds.

    Raises DataError: damaged, encrypted, beyond the limits, packed in an unusual way, or with names that are doubled or
    lead out of a folder.
    """

    def __init__(self, content: bytes, name: str, limits: Limits) -> None:
        self.name, self.limits = name, limits
        self._pieces = 0
        # Every entry of the directory has this mark: counted before zipfile makes an object of each.
        if content.count(b"PK\x01\x02") > limits.members:
            raise DataError(f"{name}: more than {limits.members:,} members")
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(content))
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, UnicodeError) as error:
            raise DataError(f"{name}: not a zip archive, or a damaged one ({error})") from None
        self.names = [info.filename for info in self._zip.infolist()]
        self._check(len(content))

    def _check(self, packed: int) -> None:
        """Raise DataError for an archive that is not read."""
        if len(set(self.names)) != len(self.names):
            raise DataError(f"{self.name}: two members have the same name")
        total = 0
        for info in self._zip.infolist():
            shown = f"{self.name}: member {printable(info.filename)!r}"
            parts = info.filename.replace("\\", "/").split("/")
            if ".." in parts or info.filename.startswith(("/", "\\")) or ":" in parts[0]:
                raise DataError(f"{shown} has a name that leads out of the archive")
            if info.flag_bits & 1:
                raise DataError(f"{shown} is encrypted; save the document without a password")
            if info.compress_type not in _METHODS:
                raise DataError(f"{shown} is packed in a way that documents do not use")
            total += info.file_size
        if total > self.limits.unpacked:
            raise DataError(f"{self.name}: its members have {total:,} bytes, more than {self.limits.unpacked:,}")
        if total > _RATIO_FREE and total > self.limits.ratio * packed:
            raise DataError(
                f"{self.name}: {packed:,} bytes expand to {total:,}, over {self.limits.ratio} times as many; documents "
                "do not compress so well"
            )

    def read(self, member: str) -> bytes:
        """Return the content of a member, never more than the directory says that it has.

        Raises DataError: there is none of this name, or it is damaged.
        """
        try:
            with self._zip.open(member) as file:
                return b"".join(iter(lambda: file.read(_BLOCK), b""))
        except KeyError:
            raise DataError(f"{self.name}: has no {printable(member)!r}; is it a document of another kind?") from None
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, ValueError) as error:
            raise DataError(f"{self.name}: member {printable(member)!r} is damaged ({error})") from None

    def markup(self, member: str) -> bytes:
        """Return the content of a member that is markup. Raises DataError, also where it has too many pieces."""
        content = self.read(member)
        self._pieces += sum(map(content.count, TAGS))
        self.limits.refuse_many(self._pieces, self.name)
        return content

    def replaced(self, members: Mapping[str, bytes]) -> bytes:
        """Return the archive with the content of some members replaced; order, names, dates and methods are as before.

        Raises DataError where a member is damaged.
        """
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as packed:
            packed.comment = self._zip.comment
            for info in self._zip.infolist():
                content = members.get(info.filename)
                packed.writestr(copy.copy(info), self.read(info.filename) if content is None else content)
        return out.getvalue()
