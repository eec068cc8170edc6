"""UTF-8 lines of a text file, compressed or not, many at a time, with the place of every fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.compressed import byte_blocks, compression_of
from ziggurat.errors import DataError

__all__ = ["MAX_LINE_BYTES", "LineStream"]

MAX_LINE_BYTES = 1 << 26
"""A longer line (64 MiB) is refused: memory stays bounded, and such a file is not line-separated text."""

_BLOCK_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_FEED = 10


class LineStream:
    """Reads lines in blocks. Only LF ends a line; a carriage return before it is removed and counted.

    A UTF-8 byte order mark at the start of the file is removed. The last line may lack its LF.

    Raises (from any method): DataError naming file, line (from 1) and byte (from 0) for bytes that are not
    UTF-8, and what `byte_blocks` raises.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        """Lines taken so far."""
        self.carriage_returns = 0
        """Lines so far that ended in CR LF."""
        self.byte_order_mark = False
        """Whether the file began with a byte order mark."""
        self.last_line_empty = False
        """Whether the last line taken was empty."""
        self._source = byte_blocks(path)
        self._buffer = b""
        self._start = 0  # first byte of the buffer that was not taken
        self._offset = 0  # of the buffer's first byte in the uncompressed file
        self._ends: NDArray[np.int64] = np.zeros(0, np.int64)  # where lines in the buffer end (exclusive, LF left out)
        self._next_end = 0
        self._at_start = True

    def available(self) -> int:
        """Return how many whole lines are in memory, reading on if there is none; 0 at the end of the file."""
        if self._next_end == len(self._ends):
            self._fill()
        return len(self._ends) - self._next_end

    def take(self, count: int) -> list[str]:
        """Return the next `count` lines; no more than `available()` said."""
        last = self._next_end + count - 1
        end = int(self._ends[last])
        piece = self._buffer[self._start : end]
        try:
            text = piece.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(self._encoding_message(piece, error)) from None
        self._start = end + 1
        self._next_end = last + 1
        if "\r" in text:
            self.carriage_returns += text.count("\r\n") + text.endswith("\r")
            text = text.replace("\r\n", "\n").removesuffix("\r")
        lines = text.split("\n")
        self.lines += count
        self.last_line_empty = not lines[-1]
        return lines

    def drain(self) -> int:
        """Read to the end of the file, checking the encoding, and return the number of all its lines."""
        while count := self.available():
            self.take(count)
        return self.lines

    def _fill(self) -> None:
        """Read until at least one whole line is in memory or the file ends."""
        rest = self._buffer[self._start :]
        self._offset += self._start
        parts, size, found = [rest], len(rest), False
        for block in self._source:
            parts.append(block)
            size += len(block)
            found = found or b"\n" in block
            if found and size >= _BLOCK_BYTES:
                break
            if not found and size > MAX_LINE_BYTES:
                raise DataError(
                    f"{self.path}, line {self.lines + 1}: longer than {MAX_LINE_BYTES >> 20} MiB; "
                    "is this text with LF at the end of each line?"
                )
        else:
            found = False  # end of file: whatever is there is complete
        self._buffer, self._start = b"".join(parts), 0
        if self._at_start:
            self._at_start = False
            self.byte_order_mark = self._buffer.startswith(_BYTE_ORDER_MARK)
            self._start = len(_BYTE_ORDER_MARK) if self.byte_order_mark else 0
        self._ends = np.flatnonzero(np.frombuffer(self._buffer, np.uint8) == _LINE_FEED)
        self._next_end = 0
        if not found and len(self._buffer) > self._start and not self._buffer.endswith(b"\n"):
            self._ends = np.append(self._ends, len(self._buffer))

    def _encoding_message(self, piece: bytes, error: UnicodeDecodeError) -> str:
        """Say where in the file `error` lies and what may be the matter."""
        line = self.lines + piece.count(b"\n", 0, error.start) + 1
        in_line = error.start - (piece.rfind(b"\n", 0, error.start) + 1)
        in_file = self._offset + self._start + error.start
        found = piece[error.start : max(error.end, error.start + 1)][:4].hex(" ").upper()
        hint = "convert the file to UTF-8"
        if in_file == 0 and self._buffer[:2] in (b"\xff\xfe", b"\xfe\xff"):
            hint = "it looks like UTF-16: convert it, for example with `iconv -f UTF-16 -t UTF-8`"
        whole = "uncompressed file" if compression_of(self.path) else "file"
        place = f"byte {in_line} of the line, {in_file} of the {whole}, from 0"
        return f"{self.path}, line {line}: not valid UTF-8: {found} ({place}); {hint}"
