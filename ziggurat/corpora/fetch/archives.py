"""Members of zip and tar archives, copied out under names of ours: nothing of an archive decides where anything lands.

Archives are read in bounded memory, and refused when they expand beyond all text
(ziggurat.system.compressed.MAX_RATIO).
"""

from __future__ import annotations

import errno
import fnmatch
import lzma
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple

from ziggurat.system.compressed import MAX_RATIO, byte_stream, compression_of
from ziggurat.system.errors import DamageError, DataError, is_full_disk, printable

_TAR = re.compile(r"\.(tar|tgz|txz|tar\.(gz|xz|zst))$", re.IGNORECASE)
_MOST_MEMBERS = 1_000_000
_MOST_HEADER_BYTES = 1 << 20  # of one tar header that holds a long name or extended attributes
_FREE_BYTES = 1 << 24  # of output that is not checked against the ratio
_SPARE_BYTES = 1 << 26  # left free on the disk
_BLOCK_BYTES = 1 << 20
_TERMS = re.compile(r"(^|/)(licen[cs]e|readme|copying)(\.(txt|md))?$", re.IGNORECASE)
_MOST_TERMS = 32
_MOST_TERMS_BYTES = 1 << 18
_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
    ValueError,
    IndexError,
)
"""Errors of damaged and odd archives; ValueError and IndexError: names in a zip that are not UTF-8, or empty."""


class Member(NamedTuple):
    """A member of an archive that was copied out."""

    name: str
    """Its name in the archive, for messages."""
    path: Path
    """The copy."""


def is_archive(path: PurePath) -> bool:
    """Return True if the name of a file ends as a zip or tar archive's."""
    return path.suffix.lower() == ".zip" or _TAR.search(path.name) is not None


def take_out(archive: Path, patterns: Sequence[str], folder: Path) -> tuple[dict[str, list[Member]], dict[str, str]]:
    """Copy the members that match `patterns` into `folder`; return them by pattern, sorted by name, and terms of use.

    Members are compared without a leading `./`, and `*` also matches slashes. The terms are the first 32 short files at
    any depth that are called LICENSE, README or COPYING: name -> text.

    Raises DamageError; DataError: encrypted, made to fill memory or disk, or a disk without room.
    """
    found: dict[str, list[Member]] = {pattern: [] for pattern in patterns}
    terms: dict[str, str] = {}
    try:
        for number, (name, size, file) in enumerate(_members(archive)):
            if number >= _MOST_MEMBERS:
                raise DataError(f"{archive}: more than {_MOST_MEMBERS:,} members, which no corpus has")
            if (pattern := next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)) is not None:
                # Only a known ending is kept of the name; it decides whether the copy is unpacked again.
                copy = folder / f"{archive.name}.{number}{compression_of(Path(name)) or ''}"
                _copy(archive, name, file, copy)
                found[pattern].append(Member(name, copy))
            elif len(terms) < _MOST_TERMS and size <= _MOST_TERMS_BYTES and _TERMS.search(name):
                terms[name] = file.read(_MOST_TERMS_BYTES).decode("utf-8", "replace")
    except (*_DAMAGE, OSError) as error:
        # bz2 gives no number, and a damaged place of a member is one that cannot be sought; others are the disk's.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise DamageError(f"{archive}: damaged, or not such an archive ({printable(str(error), 120)})") from None
    return {pattern: sorted(members) for pattern, members in found.items()}, terms


def _members(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield name, size and content of each file in an archive; the content is to be read before the next member."""
    return _zip_members(archive) if archive.suffix.lower() == ".zip" else _tar_members(archive)


def _zip_members(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            if member.is_dir():
                continue
            if member.flag_bits & 1:
                raise DataError(f"{archive}: {printable(member.filename)} is encrypted; unpack it yourself")
            with opened.open(member) as file:
                yield member.filename.removeprefix("./"), member.file_size, file


def _tar_members(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    ending = archive.name.lower().rpartition(".")[2]
    compression = {"tgz": ".gz", "txz": ".xz", "tar": None}.get(ending, f".{ending}")
    with (
        byte_stream(archive, compression) as stream,
        tarfile.open(fileobj=stream, mode="r|", tarinfo=_BoundedHeader) as opened,
    ):
        for member in opened:
            opened.members = []  # type: ignore[attr-defined]  # else it remembers all of them
            if member.isreg() and not member.issparse() and (file := opened.extractfile(member)) is not None:
                yield member.name.removeprefix("./"), member.size, file
        # The archive ends before its compressed stream does: that is read to its end too, where its checksum stands.
        while stream.read(_BLOCK_BYTES):
            pass


class _BoundedHeader(tarfile.TarInfo):
    """A tar header whose extension is read into memory only if it is short."""

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        extended = self.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if (extended or self.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)) and (
            self.size > _MOST_HEADER_BYTES
        ):
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]  # meant to be overridden, but not in typeshed


def _copy(archive: Path, name: str, file: IO[bytes], copy: Path) -> None:
    """Copy a member. Raises DataError where it expands too much, or the disk has too little room."""
    most, size = MAX_RATIO * archive.stat().st_size, 0
    too_large = f"{archive}: {printable(name)} does not fit into {copy.parent}; set TMPDIR to a larger disk"
    with copy.open("xb") as output:
        while block := file.read(_BLOCK_BYTES):
            size += len(block)
            if size > max(_FREE_BYTES, most):
                raise DataError(
                    f"{archive}: {printable(name)} expands to over {MAX_RATIO} times the archive, as no text does; "
                    "such files are made to fill memory or disk"
                )
            if size % (_BLOCK_BYTES << 5) < _BLOCK_BYTES and shutil.disk_usage(copy.parent).free < _SPARE_BYTES:
                raise DataError(too_large)
            try:
                output.write(block)
            except OSError as error:
                if is_full_disk(error):
                    raise DataError(too_large) from None
                raise
