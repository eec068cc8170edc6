"""Compressed streams in bounded memory: .gz, .xz and .zst, in pieces, with limits for files made to fill a disk."""

from __future__ import annotations

import contextlib
import errno
import io
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from ziggurat.errors import DataError

__all__ = ["COMPRESSIONS", "MAX_RATIO", "byte_blocks", "byte_stream", "compression_of", "uncompressed_file"]

_BLOCK_BYTES = 1 << 18
_XZ_MEMORY = 1 << 27  # a decompressor's; `xz -9` needs 65 MiB. zstd's own limit is a window of 128 MiB (`--long=27`)
_MAGIC = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd"}
COMPRESSIONS = tuple(_MAGIC)
"""File name endings that mean a compressed stream."""

MAX_RATIO = 200
"""Most bytes that a byte of a compressed file may become, once it has become 16 MiB. Text becomes 3 to 8, one sentence
repeated for ever some hundreds by gzip; zeros become 1,030 by gzip, 7,000 by xz, 32,000 by zstd."""

_RATIO_FREE = 1 << 24
_SPARE_BYTES = 1 << 26  # of a disk, left to others when a file is unpacked to it
_UNPACK = "unpack it yourself and give the unpacked file, if you trust it"


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
    """Yield the content of `path` in blocks of at most 256 KiB, decompressed by its name's ending.

    Members (frames) that follow each other are one stream, as `cat a.gz b.gz` makes them. Memory is bounded whatever
    the file holds: by the blocks, and by what a decompressor may ask for.

    Raises:
        DataError: unreadable, content of another kind than the name says, data that ends early, a wrong
            checksum, bytes after the compressed data, or more than MAX_RATIO times the bytes of the file.
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
                while block := file.read(_BLOCK_BYTES):
                    yield block
            else:
                yield from _within_ratio(path, _decompressed(path, file, compression), file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _within_ratio(path: Path, blocks: Iterator[bytes], file: BinaryIO) -> Iterator[bytes]:
    """Yield `blocks` until they are out of all proportion to what was read of `file` for them."""
    unpacked = 0
    for block in blocks:
        unpacked += len(block)
        if unpacked > _RATIO_FREE and unpacked > MAX_RATIO * file.tell():
            raise DataError(
                f"{path}: {file.tell():,} bytes become more than {unpacked:,}, {MAX_RATIO} times as many; text does "
                f"not compress so well, such files are made to fill memory or disk; {_UNPACK}"
            )
        yield block


def _decompressed(path: Path, file: BinaryIO, compression: str) -> Iterator[bytes]:
    """Yield the decompressed blocks of all members of `file`. Raises DataError."""
    try:
        yield from _zstd(file) if compression == ".zst" else _members(file, _DECOMPRESSORS[compression])
    except EOFError:
        raise DataError(f"{path}: the compressed data ends early (truncated file?); nothing of it was used") from None
    except _BytesFollowError as error:
        raise DataError(f"{path}: bytes follow the compressed data ({error}); nothing of it was used") from None
    except (zlib.error, lzma.LZMAError) as error:
        if "limit" in str(error):
            raise DataError(f"{path}: takes more than 128 MiB of memory to unpack; {_UNPACK}") from None
        raise DataError(f"{path}: the compressed data is damaged ({error}); nothing of it was used") from error


class _BytesFollowError(Exception):
    """Behind the last member is something that is none."""


def _members(file: BinaryIO, decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the pieces of all members of a .gz or .xz file, none larger than _BLOCK_BYTES.

    lzma's file object does not do: it ignores bytes after the stream. Raises EOFError: the last member has no end.
    """
    member, members, begun = decompressor(), 0, False
    data, full, ended = b"", False, False
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
            if members and not begun:
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
        else:  # zlib gives back what it did not come to, lzma keeps it
            data = getattr(member, "unconsumed_tail", b"")
            full = not getattr(member, "needs_input", True)


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".xz": lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_XZ_MEMORY),
}


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    """Yield the blocks of all frames of a .zst file.

    By Arrow, whose blocks are bounded: the package zstandard takes a truncated frame for its end where it bounds them.
    """
    stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
    while True:
        try:
            block = stream.read(_BLOCK_BYTES)
        except OSError as error:
            if "Truncated" in str(error):
                raise EOFError from None
            if "Unknown frame descriptor" in str(error):  # the first frame's was looked at before
                raise _BytesFollowError(str(error)) from None
            if error.errno is not None:  # of the file, not of what is in it
                raise
            raise zlib.error(str(error).replace("requires too much memory", "limit of memory")) from None
        if not block:
            return
        yield block


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
    """Open `path` for random access; a compressed one is first unpacked to a temporary file (`TMPDIR`).

    Raises DataError: what byte_blocks raises, or a disk that is too small.
    """
    if compression_of(path) is None:
        with path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as file:
        _unpack(path, file)
        file.seek(0)
        yield file


def _unpack(path: Path, file: BinaryIO) -> None:
    """Write the content of `path` to the temporary `file`, while its disk has room."""
    folder = tempfile.gettempdir()
    too_large = (
        f"{path}: does not fit into {folder}, where it is unpacked to; set TMPDIR to a larger disk, or {_UNPACK}"
    )
    unchecked = 0
    for block in byte_blocks(path):
        try:
            if unchecked <= 0:
                if shutil.disk_usage(folder).free < _SPARE_BYTES:
                    raise DataError(too_large)
                unchecked = _SPARE_BYTES // 2
            file.write(block)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise DataError(too_large) from None
            raise
        unchecked -= len(block)
