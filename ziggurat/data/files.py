"""Files below the corpora: which ones a pattern names, compressed streams, fingerprints, atomic writes."""

from __future__ import annotations

import contextlib
import glob
import io
import lzma
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from re import Pattern
from typing import Any, BinaryIO, Protocol

import xxhash
import zstandard

from ziggurat.errors import DataError, written_whole

__all__ = [
    "atomic_file",
    "byte_blocks",
    "byte_stream",
    "compression_of",
    "find_files",
    "fingerprint",
    "holds_only",
    "uncompressed_file",
    "write_atomically",
]

_READ_BYTES = 1 << 18
_MAGIC = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd"}


def _umask() -> int:
    """Return the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


_UMASK = _umask()  # once: setting it in one thread would change what another is creating


class _Decompressor(Protocol):
    """What zlib, lzma and zstandard have in common: one member (frame) at a time."""

    def decompress(self, data: bytes, /) -> bytes: ...

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...


_DECOMPRESSORS: dict[str, Callable[[], _Decompressor]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".xz": lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ),
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


def find_files(pattern: str, key: str) -> list[Path]:
    """Return the files that `pattern` (a path or a glob, `**` included) names, sorted.

    `key` is the configuration key that holds the pattern, for the message.

    Raises:
        DataError: nothing there, something that is not a regular file, or a file both packed and unpacked, which
            would be read twice.
    """
    plain = Path(pattern).expanduser()
    if plain.exists() or not glob.has_magic(pattern):
        found = [plain]
    else:
        found = sorted(Path(name) for name in glob.glob(str(plain), recursive=True) if os.path.isfile(name))
        if not found:
            raise DataError(f"{key}: no file matches {pattern!r} (looked in {Path.cwd()})")
    together = set(found)
    for path in found:
        if not path.exists():
            raise DataError(f"{key}: no such file: {path} (relative paths start from {Path.cwd()})")
        if not path.is_file():
            raise DataError(f"{key}: {path} is not a regular file; corpora are read more than once")
        if compression_of(path) and (unpacked := path.with_suffix("")) in together:
            raise DataError(f"{key}: {pattern!r} names {path} and {unpacked}; remove one, or name it more closely")
    return found


def compression_of(path: Path) -> str | None:
    """Return `.gz`, `.xz` or `.zst` where the file name ends so, else None."""
    return path.suffix.lower() if path.suffix.lower() in _MAGIC else None


def _check_magic(path: Path, head: bytes, compression: str | None) -> None:
    """Refuse content that is not what the file name says."""
    actual = next((suffix for suffix, magic in _MAGIC.items() if head.startswith(magic)), None)
    if actual == compression:
        return
    if compression is None:
        raise DataError(f"{path}: this is {actual} data although the name does not say so; name it {path.name}{actual}")
    what = f"{actual} data" if actual else "not compressed data of that kind"
    raise DataError(f"{path}: the name ends in {compression} but the content is {what}; rename or compress it again")


def byte_blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of `path` in blocks, decompressed by its name's ending, in bounded memory.

    Members (frames) that follow each other are one stream, as `cat a.gz b.gz` makes them.

    Raises:
        DataError: unreadable, content of another kind than the name says, data that ends early, a wrong
            check sum, or bytes after the compressed data.
    """
    compression = compression_of(path)
    try:
        with path.open("rb") as file:
            head = file.read(16)
            if not head:  # an empty file is an empty corpus whatever its name: refused later, with its count
                return
            _check_magic(path, head, compression)
            file.seek(0)
            if compression is None:
                while block := file.read(_READ_BYTES):
                    yield block
            else:
                yield from _decompressed(path, file, compression)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _decompressed(path: Path, file: BinaryIO, compression: str) -> Iterator[bytes]:
    """Yield decompressed blocks of all members of `file`.

    The standard library's file objects do not do: lzma's ignores bytes after the stream and zstandard's
    takes a truncated frame for its end.
    """
    member = _DECOMPRESSORS[compression]()
    started = False  # whether the current member has taken any byte
    members = 0  # whole members so far
    data = b""
    while data or (data := file.read(_READ_BYTES)):
        if not started and members:
            # gzip and xz allow zero padding between and after members
            data = data.lstrip(b"\x00") if compression != ".zst" else data
            if not data:
                continue
        try:
            block = member.decompress(data)
        except (zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            reason = "bytes follow the compressed data" if members and not started else "the compressed data is damaged"
            raise DataError(f"{path}: {reason} ({error}); nothing of it was used") from error
        started = True
        if block:
            yield block
        data = b""
        if member.eof:
            data = member.unused_data
            member = _DECOMPRESSORS[compression]()
            members, started = members + 1, False
    if started:
        raise DataError(f"{path}: the compressed data ends early (truncated file?); nothing of it was used")


def byte_stream(path: Path) -> BinaryIO:
    """Open a file as a stream of bytes, decompressed by its name's ending: the one way in which text is opened.

    Reading raises what `byte_blocks` does.
    """
    if not path.is_file():  # a pipe: it can be read only once, so it is taken as it comes
        try:
            return path.open("rb")
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return io.BufferedReader(_Blocks(path))


class _Blocks(io.RawIOBase):
    """The blocks of a (compressed) file as a raw stream."""

    def __init__(self, path: Path) -> None:
        self._blocks = byte_blocks(path)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = block
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


@contextlib.contextmanager
def uncompressed_file(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for random access; a compressed one is first unpacked to a temporary file (`TMPDIR`)."""
    if compression_of(path) is None:
        with path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as file:
        for block in byte_blocks(path):
            file.write(block)
        file.seek(0)
        yield file


def fingerprint(path: Path) -> str:
    """Return the 128-bit xxHash of the file's bytes in hexadecimal (an identity, not a signature)."""
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return str(digest.hexdigest())


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` so that `path` has either its old content or all of the new, even after a power cut."""
    with atomic_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` at the end of the block; after an error there is no trace of it."""
    with written_whole(path):
        yield from _atomic_file(path)


def _atomic_file(path: Path) -> Iterator[BinaryIO]:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_UMASK)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def holds_only(folder: Path, names: Pattern[str]) -> bool:
    """Whether `folder` is a folder with nothing in it but files called so (an empty one is)."""
    return folder.is_dir() and all(entry.is_file() and names.fullmatch(entry.name) for entry in folder.iterdir())
