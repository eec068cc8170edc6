"""Downloads: the download folder, mirrors and the network, in this order; and members of archives.

A download of `https://HOST/PATH` is at `HOST/PATH` in the folder, as with `wget --force-directories`, so the folder of
one machine can be the mirror of another. `PATH.origin.json` next to it has its origin and checksum.

Members of zip and tar archives are extracted under names of our choice, so an archive cannot decide where files are
written. They are read in bounded memory, and refused if they expand further than text ever does
(ziggurat.system.compressed.MAX_RATIO).
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import json
import lzma
import os
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from ziggurat.corpora.fetch.network import Network
from ziggurat.corpora.fetch.registry import Remote
from ziggurat.corpora.fetch.transfer import Progress, download, read_small, refuse_content, size_of
from ziggurat.system.compressed import MAX_RATIO, byte_stream, compression_of
from ziggurat.system.errors import ConfigError, DamageError, DataError, is_full_disk, printable
from ziggurat.system.files import content_checksum, has_checksum, write_atomically
from ziggurat.system.small_files import check_regular, read_bounded

_MOST_BYTES = 1 << 20
_HOST = r"[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*\.?"


@dataclass(frozen=True)
class Held:
    """A local file, with its size in bytes."""

    path: Path
    url: str
    """Its URL in the registry."""
    came_from: str
    """URL that it came from, after redirects; the path in a mirror if the mirror's notes do not give the URL."""
    bytes: int
    sha256: str

    def document(self) -> dict[str, Any]:
        """Return its entry in records."""
        moved = {} if self.came_from == self.url else {"came_from": self.came_from}
        return {"url": self.url, **moved, "bytes": self.bytes, "sha256": self.sha256}


def default_folder() -> Path:
    """Return the default download folder: that in ZIGGURAT_DOWNLOADS, or one in the user's cache."""
    if given := os.environ.get("ZIGGURAT_DOWNLOADS"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ziggurat" / "downloads"


def place_of(url: str) -> str:
    """Return the path of `url` in a download folder or mirror: `HOST/PATH`, with any query at the end of the name.

    Raises ConfigError for an invalid URL, or one that leads out of the folder.
    """
    if not re.fullmatch(rf"(https?|ftp)://{_HOST}(:\d{{1,5}})?/[!-~]+", url) or "\\" in url:
        raise ConfigError(f"{printable(url, 300)}: not an address such as https://host/path/file.gz, without login")
    parts = urlsplit(url)
    steps = [parts.netloc.replace(":", "_"), *parts.path.removeprefix("/").removesuffix("/").split("/")]
    if any(step in ("", ".", "..") or len(step) > 200 for step in steps):
        raise ConfigError(f"{printable(url, 300)}: its path has a part that is empty, too long or `..`")
    if parts.query:
        query = parts.query.replace("/", "%2F")
        if len(steps[-1]) + len(query) > 200:
            query = hashlib.sha256(query.encode()).hexdigest()
        steps[-1] += f"?{query}"
    return "/".join(steps)


@dataclass
class Downloads:
    """Source of files by URL."""

    folder: Path
    mirrors: Sequence[str] = ()
    """Folders and URLs that have files at `HOST/PATH`; folders are tried first, the files' own servers last."""
    offline: bool = False
    network: Network = field(default_factory=Network)
    progress: Progress = lambda phase, done, total: None

    def get(self, remote: Remote) -> Held:
        """Return the file of `remote`, fetched if necessary. Raises ConfigError or DataError with a remedy."""
        place = place_of(remote.url)
        path = self.folder / place
        if (held := self._here(remote, path, remote.url, "the download")) is not None:
            return held
        for mirror in self._folders():
            if (held := self._here(remote, mirror / place, str(mirror / place), "the mirror's file")) is not None:
                return held
        addresses = self._mirrored(place) + ([] if remote.by_hand else [remote.url])
        if not addresses or self.offline:
            why = remote.by_hand or "is not here, and `--offline` forbids the network"
            raise DataError(f"{remote.url}: {why}. Put it at {path}, or into a mirror at {place} (`--mirror`)")
        problems, kept = [], list[Held]()
        for address in addresses:
            try:
                download(address, path, self.network, self.progress, partial(self._noted, kept, remote, path))
                return kept[-1] if kept else self.get(remote)  # another process may have fetched it meanwhile
            except DataError as error:
                problems.append(str(error))
        raise DataError("; ".join(problems))

    def get_small(self, url: str) -> bytes:
        """Return the current index at `url`, which is not cached. Raises DataError."""
        place = place_of(url)
        for mirror in self._folders():
            if (found := mirror / place).exists():
                return read_bounded(found, 1 << 26)
        if self.offline:
            raise DataError(f"{url}: needs the network, which `--offline` forbids; name the corpus in full")
        for address in self._mirrored(place):
            with contextlib.suppress(DataError):
                return read_small(address, self.network)
        return read_small(url, self.network)

    def size(self, remote: Remote) -> int | None:
        """Return the size of a file, from its server if neither folder nor registry has it."""
        place = place_of(remote.url)
        with contextlib.suppress(OSError):
            return os.path.getsize(self.folder / place)
        for mirror in self._folders():
            with contextlib.suppress(OSError):
                return os.path.getsize(mirror / place)
        if remote.bytes is not None or self.offline or remote.by_hand:
            return remote.bytes
        return size_of(remote.url, self.network)

    def discard(self, held: Held) -> str:
        """Remove a damaged download, unless it is in a mirror; return what was done, for a message."""
        if not held.path.is_relative_to(self.folder):
            return "it is in a mirror: replace it there"
        _origin(held.path).unlink(missing_ok=True)
        held.path.unlink(missing_ok=True)
        return "it was removed: run this again to fetch it again"

    def _folders(self) -> list[Path]:
        return [Path(mirror).expanduser() for mirror in self.mirrors if not _is_address(mirror)]

    def _mirrored(self, place: str) -> list[str]:
        """Return the URLs of a path in the mirrors that are servers; a `?` in its name is part of the path."""
        servers = [mirror.rstrip("/") for mirror in self.mirrors if _is_address(mirror) and not self.offline]
        return [f"{server}/{place.replace('?', '%3F')}" for server in servers]

    def _here(self, remote: Remote, path: Path, came_from: str, what: str) -> Held | None:
        """Return the file at `path`, compared with its checksums; None if there is none.

        `came_from` is its origin if no notes are next to it; a mirror's notes were made where it was fetched.
        """
        if not path.exists():
            return None
        known = None
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            notes = json.loads(read_bounded(_origin(path), _MOST_BYTES))
            if has_checksum(notes):
                came_from, known = str(notes["came_from"]), str(notes["sha256"])
        held = self._checked(remote, path, came_from, what)
        if known is not None and held.sha256 != known:
            raise DataError(
                f"{path}: damaged or changed since it was fetched, as {_origin(path).name} shows; {self.discard(held)}"
            )
        return held

    def _noted(self, kept: list[Held], remote: Remote, path: Path, file: Path, came_from: str) -> None:
        """Check `file`, which has just arrived and will be `path`, record its origin, and add it to `kept`."""
        held = self._checked(remote, file, came_from, "what came", path)
        notes: dict[str, Any] = {"format": 1, **held.document(), "came_from": came_from}
        notes["checksum"] = content_checksum(notes)
        write_atomically(_origin(path), json.dumps(notes, indent=1).encode() + b"\n")
        kept.append(held)

    def _checked(self, remote: Remote, file: Path, came_from: str, what: str, path: Path | None = None) -> Held:
        """Return `file`, which is or will be `path`. Raises DataError if it differs from the registry's description."""
        path = path or file
        check_regular(file)
        found = {name: hashlib.new(name, usedforsecurity=False) for name in ("sha256", "md5")}
        size, head = 0, b""
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                head = head or block[:512]
                size += len(block)
                for digest in found.values():
                    digest.update(block)
                self.progress(f"check {path.name}", size, None)
        held = Held(path, remote.url, came_from, size, found["sha256"].hexdigest())
        refuse_content(str(path), head)
        length = None if remote.bytes is None else f"{remote.bytes:,} bytes"
        for name, came, wanted in (
            ("length", f"{size:,} bytes", length),
            ("sha256", held.sha256, remote.sha256),
            ("md5", found["md5"].hexdigest(), remote.md5),
        ):
            if wanted is not None and came != wanted:
                raise DataError(
                    f"{remote.url}: {what} has the {name} {came}, but the registry says {wanted}: it is damaged, or "
                    f"was changed at its origin (then give the new {name} in a registry of your own); "
                    f"{self.discard(held)}"
                )
        return held


def _is_address(mirror: str) -> bool:
    return mirror.startswith(("http://", "https://"))


def _origin(path: Path) -> Path:
    return path.with_name(f"{path.name}.origin.json")


_TAR = re.compile(r"\.(tar|tgz|txz|tar\.(gz|xz|zst))$", re.IGNORECASE)
_MOST_MEMBERS = 1_000_000
_MOST_HEADER_BYTES = 1 << 20  # limit on a tar header with a long name or extended attributes
_FREE_BYTES = 1 << 24  # the ratio is not checked below this many bytes of output
_SPARE_BYTES = 1 << 26  # bytes left free on the disk
_BLOCK_BYTES = 1 << 20
_SHADOW = re.compile(r"(^|/)(__MACOSX/|\._[^/]*$|\.DS_Store$|Thumbs\.db$|desktop\.ini$)", re.IGNORECASE)
"""_SHADOW matches members with metadata that macOS and Windows add to archives."""
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
    """A member of an archive: its name there, and the path of its copy."""

    name: str
    path: Path


def is_archive(path: PurePath) -> bool:
    """Return True if the name of a file has the suffix of a zip or tar archive."""
    return path.suffix.lower() == ".zip" or _TAR.search(path.name) is not None


def take_out(archive: Path, patterns: Sequence[str], folder: Path) -> tuple[dict[str, list[Member]], dict[str, str]]:
    """Copy the members that match `patterns` into `folder`; return them by pattern, sorted by name, and terms of use.

    Members are compared without a leading `./`, and `*` also matches slashes. The terms are the first 32 short files at
    any depth that are called LICENSE, README or COPYING: name -> text.

    Raises DamageError, or DataError if the archive is encrypted, made to fill memory or disk, or the disk is full.
    """
    found: dict[str, list[Member]] = {pattern: [] for pattern in patterns}
    terms: dict[str, str] = {}
    try:
        members = _zip_members(archive) if archive.suffix.lower() == ".zip" else _tar_members(archive)
        for number, (name, size, file) in enumerate(one for one in members if not _SHADOW.search(one[0])):
            if number >= _MOST_MEMBERS:
                raise DataError(f"{archive}: more than {_MOST_MEMBERS:,} members, which no corpus has")
            if (pattern := next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)) is not None:
                # Only a known suffix of the name is kept; it decides whether the copy is decompressed again.
                copy = folder / f"{archive.name}.{number}{compression_of(Path(name)) or ''}"
                _copy(archive, name, file, copy)
                found[pattern].append(Member(name, copy))
            elif len(terms) < _MOST_TERMS and size <= _MOST_TERMS_BYTES and _TERMS.search(name):
                terms[name] = file.read(_MOST_TERMS_BYTES).decode("utf-8", "replace")
    except (*_DAMAGE, OSError) as error:
        # Errors of bz2 have no number, and seeking to a damaged offset of a member fails; others come from the disk.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise DamageError(f"{archive}: damaged, or not such an archive ({printable(str(error), 120)})") from None
    return {pattern: sorted(members) for pattern, members in found.items()}, terms


def _zip_members(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield name, size and content of each file in a zip; the content must be read before the next member."""
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
            opened.members = []  # type: ignore[attr-defined]  # otherwise it keeps all of them
            if member.isreg() and not member.issparse() and (file := opened.extractfile(member)) is not None:
                yield member.name.removeprefix("./"), member.size, file
        # The archive ends before its compressed stream, which is also read to its end, where the checksum is.
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
    """Copy a member. Raises DataError if it expands too much or the disk has too little room."""
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
