"""Compressed streams in bounded memory: .gz, .xz and .zst, with limits against files designed to fill memory or disk.

`byte_blocks` is the core; `byte_stream` and `uncompressed_file` build on it. One decompressor loop serves .gz and
.xz; .zst goes through Arrow.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ziggurat.system.errors import DamageError, DataError, is_full_disk
from ziggurat.system.small_files import MAX_POINTER_BYTES, refuse_pointer

_BLOCK_BYTES = 1 << 18
# Memory for one xz decompressor: `xz -9` needs 65 MiB. zstd has its own limit, a window of 128 MiB (`--long=27`).
_XZ_MEMORY = 1 << 27
_MAGIC = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd"}
"""_MAGIC maps the suffix of a file's name to the first bytes of the compressed stream."""

MAX_RATIO = 200
"""MAX_RATIO is the maximum number of bytes that one byte of a compressed file may expand to, checked after 16 MiB.

Text expands 3 to 8 times, one endlessly repeated sentence about a hundred times (gzip), and zeros 1,030 times (gzip),
7,000 times (xz) or 32,000 times (zstd).
"""

_RATIO_FREE = 1 << 24  # bytes of output before checking starts; memory and disk have room for these
_SPARE_BYTES = 1 << 26  # bytes left free on the disk where a file is unpacked
_UNPACK = "unpack it yourself and give the unpacked file, if you trust it"


def compression_of(path: Path) -> str | None:
    """Return `.gz`, `.xz` or `.zst` if the file name ends with it, otherwise None."""
    return path.suffix.lower() if path.suffix.lower() in _MAGIC else None


def byte_stream(path: Path, compression: str | None = "") -> BinaryIO:
    """Open a file as a stream of bytes, decompressed according to the suffix of its name or to `compression`.

    Reading raises the errors of `byte_blocks`.
    """
    if not path.is_file():  # a pipe can be read only once, so its first bytes cannot be checked
        try:
            return path.open("rb")
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return io.BufferedReader(_Blocks(path, compression))


def byte_blocks(path: Path, compression: str | None = "") -> Iterator[bytes]:
    """Yield the content of `path` in blocks of at most 256 KiB, decompressed.

    `compression` is `.gz`, `.xz`, `.zst` or None for no compression; "" stands for the suffix of the name.

    Several members (frames), as from `cat a.gz b.gz`, are read as one stream. Memory is bounded whatever the file
    contains: by the blocks, and by the limit on the decompressor's own memory. Raises DamageError if the content does
    not match the name's suffix, ends early, has a wrong checksum, or is followed by other bytes. Raises DataError if
    the file is unreadable, a Git LFS pointer file, or expands more than MAX_RATIO times.
    """
    compression = compression_of(path) if compression == "" else compression
    try:
        with path.open("rb") as file:
            head = file.read(MAX_POINTER_BYTES + 1)
            if not head:  # empty, whatever its name; the count of pairs rejects it later
                return
            refuse_pointer(path, head)
            _check_magic(path, head, compression)
            file.seek(0)
            if compression is None:
                while block := file.read(_BLOCK_BYTES):
                    yield block
            else:
                yield from _within_ratio(path, _decompressed(path, file, compression), file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def uncompressed_file(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for random access; a compressed file is first unpacked to a temporary file (in `TMPDIR`).

    Raises DataError for a compressed file, as byte_blocks does or if the disk has too little room, and OSError if a
    plain file cannot be opened.
    """
    if compression_of(path) is None:
        with path.open("rb") as file:
            refuse_pointer(path, file.read(MAX_POINTER_BYTES + 1))
            file.seek(0)
            yield file
        return
    with tempfile.TemporaryFile() as file:
        _unpack(path, file)
        file.seek(0)
        yield file


def _check_magic(path: Path, head: bytes, compression: str | None) -> None:
    actual = next((suffix for suffix, magic in _MAGIC.items() if head.startswith(magic)), None)
    if actual == compression:
        return
    if compression is None:
        raise DataError(f"{path}: this is {actual} data, but the name does not say so; name it {path.name}{actual}")
    what = f"{actual} data" if actual else "not compressed data of that kind"
    raise DamageError(f"{path}: the name ends in {compression} but the content is {what}; rename or compress it again")


def _within_ratio(path: Path, blocks: Iterator[bytes], file: BinaryIO) -> Iterator[bytes]:
    unpacked = 0
    for block in blocks:
        unpacked += len(block)
        if unpacked > _RATIO_FREE and unpacked > MAX_RATIO * file.tell():
            raise DataError(
                f"{path}: {file.tell():,} bytes expand to at least {unpacked:,}, over {MAX_RATIO} times as many; text "
                f"does not compress so well; such files are made to fill memory or disk; {_UNPACK}"
            )
        yield block


def _decompressed(path: Path, file: BinaryIO, compression: str) -> Iterator[bytes]:
    try:
        yield from _zstd(file) if compression == ".zst" else _members(file, _DECOMPRESSORS[compression])
    except EOFError:
        raise DamageError(f"{path}: the compressed data ends early (truncated file?); none of it was used") from None
    except _BytesFollowError as error:
        raise DamageError(f"{path}: bytes follow the compressed data ({error}); none of it was used") from None
    except (zlib.error, lzma.LZMAError) as error:
        if "limit" in str(error):
            raise DataError(f"{path}: takes more than 128 MiB of memory to unpack; {_UNPACK}") from None
        raise DamageError(f"{path}: the compressed data is damaged ({error}); none of it was used") from error


class _BytesFollowError(Exception):
    """Raised if the bytes after the last member are not another member."""


def _members(file: BinaryIO, decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the pieces of all members of a .gz or .xz file, none larger than _BLOCK_BYTES.

    Python's lzma.LZMAFile cannot be used, since it ignores bytes after the stream. Raises EOFError if the last member
    has no end.
    """
    member, members, begun = decompressor(), 0, False  # begun: the current member has consumed some input
    data, full, ended = b"", False, False  # full: the decompressor has more output without more input
    while True:
        if not data and not full:
            data = file.read(_BLOCK_BYTES)
            ended = not data
        if members and not begun:
            data = data.lstrip(b"\x00")  # padding with zeros is allowed between members and after the last
            if not data:
                if ended:
                    return
                continue
        try:
            block = member.decompress(data, _BLOCK_BYTES)
        except (zlib.error, lzma.LZMAError) as error:
            if members and not begun:  # the bytes after a whole member are not the start of another
                raise _BytesFollowError(str(error)) from None
            raise
        begun = True
        if block:
            yield block
        if member.eof:
            data, full = member.unused_data, False
            member, members, begun = decompressor(), members + 1, False
        elif not block and ended:
            raise EOFError
        else:  # input beyond the output limit: zlib gives it back (unconsumed_tail), lzma keeps it (needs_input)
            data = getattr(member, "unconsumed_tail", b"")
            full = not getattr(member, "needs_input", True)


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".xz": lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_XZ_MEMORY),
}


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    """Yield the blocks of all frames of a .zst file.

    Arrow reads them in bounded blocks. With bounded blocks the package zstandard would take a truncated frame for the
    end of the stream.
    """
    import pyarrow as pa  # takes 0.1 s, which `ziggurat --version` should not cost

    stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
    while True:
        try:
            block = stream.read(_BLOCK_BYTES)
        except OSError as error:
            if "Truncated" in str(error):
                raise EOFError from None
            if "Unknown frame descriptor" in str(error):  # not the first frame's, which _check_magic has checked
                raise _BytesFollowError(str(error)) from None
            if error.errno is not None:  # the system's error, not one about the content
                raise
            # _decompressed recognises memory errors by the word "limit", which lzma uses.
            raise zlib.error(str(error).replace("requires too much memory", "limit of memory")) from None
        if not block:
            return
        yield block


class _Blocks(io.RawIOBase):
    def __init__(self, path: Path, compression: str | None) -> None:
        self._blocks = byte_blocks(path, compression)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)  # whose slices are not copies
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _unpack(path: Path, file: BinaryIO) -> None:
    folder = tempfile.gettempdir()
    too_large = f"{path}: does not fit into {folder}, where it is unpacked; set TMPDIR to a larger disk, or {_UNPACK}"
    unchecked = 0  # bytes that may be written before the room is checked again
    for block in byte_blocks(path):
        try:
            if unchecked <= 0:
                if shutil.disk_usage(folder).free < _SPARE_BYTES:
                    raise DataError(too_large)
                unchecked = _SPARE_BYTES // 2
            file.write(block)
        except OSError as error:
            if is_full_disk(error):
                raise DataError(too_large) from None
            raise
        unchecked -= len(block)
