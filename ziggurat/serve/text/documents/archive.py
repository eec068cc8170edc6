"""Archives (zip) of documents, read within limits, and written again member by member in their order."""

from __future__ import annotations

import copy
import io
import zipfile
import zlib
from collections.abc import Mapping

from ziggurat.serve.text.settings import TAGS, Limits
from ziggurat.system.errors import DataError, printable

_MAX_RATIO = 200
"""_MAX_RATIO is the most bytes that one byte of an archive may expand to, checked from _RATIO_FREE bytes on."""
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
        if total > _RATIO_FREE and total > _MAX_RATIO * packed:
            raise DataError(
                f"{self.name}: {packed:,} bytes expand to {total:,}, over {_MAX_RATIO} times as many; documents "
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
