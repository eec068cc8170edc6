"""Lines of text: read from UTF-8 files in blocks, normalised, and measured fairly between scripts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from ziggurat.system.compressed import byte_blocks, compression_of
from ziggurat.system.errors import DataError, printable

MAX_LINE_BYTES = 1 << 26
"""Longest line, 64 MiB. It bounds memory; a file with longer lines is not line-separated text."""
_BLOCK_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_FEED = 10


_RECORDS = {
    ".tsv": "`cut -f 1 FILE` writes its first column",
    ".jsonl": "`jq -r .text FILE` writes its field `text`",
    ".parquet": "DuckDB or pandas write a column of it",
}
"""Suffix of a file of records, as `prepare` reads them -> how to extract the text of one language."""


def refuse_records(path: Path, option: str) -> None:
    """Raise DataError for a file of records, by its name: its lines are not sentences but would be translated."""
    ending = (path.with_suffix("") if compression_of(path) else path).suffix.lower()
    if ending in _RECORDS:
        raise DataError(
            f"{option}: {printable(str(path), 4096)} holds records, not lines of text: give the text alone "
            f"({_RECORDS[ending]})",
            key=option,
        )


class LineStream:
    """Reader of a file's lines in blocks. Only LF ends a line; a carriage return before it is removed and counted.

    A UTF-8 byte order mark at the start of the file is removed. The last line may lack its LF. Raises (from any
    method): DataError naming file, line (from 1) and byte (from 0) of bytes that are not UTF-8, and the errors of
    `byte_blocks`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        self.carriage_returns = 0
        self.byte_order_mark = False
        self.last_line_empty = False
        self._source = byte_blocks(path)
        self._buffer = b""
        self._start = 0  # index in the buffer of the first byte not taken yet
        self._offset = 0  # position of the buffer's first byte in the uncompressed file
        self._ends: NDArray[np.int64] = np.zeros(0, np.int64)  # positions of the line feeds in the buffer
        self._next_end = 0  # index in _ends of the first line not taken yet
        self._at_start = True

    def available(self) -> int:
        """Return the number of whole lines in memory, reading more if there is none; 0 at the end of the file."""
        if self._next_end == len(self._ends):
            self._fill()
        return len(self._ends) - self._next_end

    def take(self, count: int) -> list[str]:
        """Return the next `count` lines, at most as many as `available()` returned."""
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
            found = False  # end of the file: the rest is a complete line even without LF
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
        """Return the message for an encoding error: its position in the file, and the likely cause."""
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


# White space and controls except NUL; format characters that show nothing, fillers of Hangul and Khmer, variation
# selectors, braille's blank pattern, noncharacters (U+FFFE is a byte order mark read the wrong way round), controls of
# shorthand, music and hieroglyphs, tags. Listed by number, so that what is dropped does not change with the version of
# the Unicode tables.
_INVISIBLE = (
    r"\s\x01-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    r"\u2060-\u206f\u2800\u3164\ufdd0-\ufdef\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    r"\U00013430-\U00013442\U00016fe4\U0001bca0-\U0001bca3\U0001d159\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_VISIBLE = re.compile(f"[^{_INVISIBLE}]")
INVISIBLE = re.compile(f"[{_INVISIBLE}]")
"""INVISIBLE matches a character that is invisible on its own, such as white space."""


def is_blank(text: str) -> bool:
    """Return True if `text` has only white space and other invisible characters.

    A zero-width space, a byte order mark, a soft hyphen, a direction mark, a variation selector or a filler is no more
    text than a space. NUL counts as visible, because it is a fault with its own count.
    """
    # Most lines start with a visible ASCII character, which is found in a third of the time.
    return not "!" <= text[:1] <= "~" and _VISIBLE.search(text) is None


UnicodeForm = Literal["none", "nfc", "nfkc"]


def normalise(texts: Sequence[str], form: UnicodeForm) -> list[str]:
    """Return each text on one line, trimmed, with runs of plain white space collapsed, in Unicode form `form`.

    Plain white space is U+0020, tab, carriage return and line feed: it would otherwise become stray pieces of the
    vocabulary or break files with one sentence per line. All other white space (U+00A0, U+3000, U+2028, ...) has a
    meaning in some script and is kept; `nfkc` turns some of it into spaces, which are then collapsed.
    """
    # On the whole list at once, since usually nothing has to change.
    joined = "\n".join(texts)
    if joined.count("\n") != max(len(texts) - 1, 0):
        texts = [text.replace("\n", " ") for text in texts]
        joined = "\n".join(texts)
    changed = False
    if form != "none" and not joined.isascii():
        name = cast(Literal["NFC", "NFKC"], form.upper())
        # No character composes with a line feed or decomposes to one, so the lines stay the same.
        if not unicodedata.is_normalized(name, joined):
            joined, changed = unicodedata.normalize(name, joined), True
    spare = ("  ", "\t", "\r", " \n", "\n ")
    if any(blanks in joined for blanks in spare) or joined.startswith(" ") or joined.endswith(" "):
        joined = joined.replace("\t", " ").replace("\r", " ")
        while "  " in joined:  # each round halves the runs of spaces; many times faster than a regular expression
            joined = joined.replace("  ", " ")
        joined = joined.replace(" \n", "\n").replace("\n ", "\n").strip(" ")
        changed = True
    return joined.split("\n") if changed else list(texts)


Lengths = NDArray[np.int64]

_TENTHS = 10  # weight of a Latin, Cyrillic, Greek or Arabic letter and of all others not in a table below
_WORD = 50  # weight of a word: five letters
_UNSPACED = {
    29: ("2e80-2fd5 3005 3007 3021-3029 3038-303b 3400-4dbf 4e00-9fff f900-faff 17000-18d8f 20000-3fffd",),  # Han
    14: ("3041-3096 309d-309f 30a1-30fa 30fc-30ff 31f0-31ff ff66-ff9d 1b000-1b16f",),  # kana
    10: (
        "0e01-0e3a 0e40-0e5b 0e81-0eff 3105-312f 31a0-31bf",  # Thai, Lao, bopomofo
        "1950-19df 1a20-1aaf 1b00-1b7f a980-a9df aa00-aa5f aa80-aadf",  # Tai scripts, Balinese, Javanese, Cham
    ),
    8: ("1000-109f a9e0-a9ff aa60-aa7f 1780-17b3 17b6-17ff 19e0-19ff",),  # Burmese, Khmer
    7: ("0f00-0fff",),  # Tibetan: its dots stand between syllables
}
"""_UNSPACED is weight -> characters of scripts that write no space between words."""
_SPACED = {
    21: "ac00-d7a3",  # Hangul
    8: "1100-115e 1161-11ff",  # the letters that its syllables are made of, where they are decomposed
    15: "1200-139f",  # Ethiopic
    0: "0300-034e 0350-036f 3099-309a",  # accents: a decomposed letter is no longer than a composed one
}
"""_SPACED is weight -> characters of other scripts that carry more or less meaning than a letter."""
_BOUNDARIES = "3001-3004 3008-3020 3030 303d 30fb ff01-ff0f ff1a-ff20 ff3b-ff40 ff5b-ff65"
"""_BOUNDARIES are marks of scripts without spaces: a word of another script ends there."""


@lru_cache(maxsize=1)
def _tables() -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return two weights and two facts for each character.

    They are its weight, the same but 0 for invisible characters, whether its script has no spaces, and whether a word
    of another script may contain it.
    """
    weights = np.full(0x110000, _TENTHS, np.uint8)
    unspaced = np.zeros(0x110000, np.bool_)
    wordly = np.ones(0x110000, np.bool_)
    for first, last in _ranges(_BOUNDARIES):
        wordly[first:last] = False
    for weight, rows in _UNSPACED.items():
        for first, last in _ranges(" ".join(rows)):
            weights[first:last], unspaced[first:last], wordly[first:last] = weight, True, False
    for weight, row in _SPACED.items():
        for first, last in _ranges(row):
            weights[first:last] = weight
    plane = "".join(chr(code) for code in (*range(0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE1000)))
    invisible = np.fromiter(map(ord, INVISIBLE.findall(plane)), np.int64)
    visible = weights.copy()
    visible[invisible], wordly[invisible] = 0, False
    return weights, visible, unspaced, wordly


def _ranges(written: str) -> list[tuple[int, int]]:
    """Return the first character of each range, and the one after its last."""
    ends = [part.partition("-")[::2] for part in written.split()]
    return [(int(first, 16), int(last or first, 16) + 1) for first, last in ends]


def _codes(texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the characters of all texts as numbers, each text after a line feed, and where each text starts."""
    joined = "\n" + "\n".join(texts)
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts)) + 1
    return codes, np.cumsum(lengths) - lengths


def _sums(values: NDArray[np.generic], starts: NDArray[np.int64]) -> Lengths:
    return np.add.reduceat(values, starts, dtype=np.int64) if len(starts) else np.zeros(0, np.int64)


def has_unspaced(texts: Sequence[str]) -> NDArray[np.bool_]:
    """Return which texts have a character of a script without spaces between words, [texts]."""
    if "".join(texts).isascii():
        return np.zeros(len(texts), np.bool_)
    codes, starts = _codes(texts)
    return _sums(_tables()[2][codes], starts) > 0


def visible_lengths(texts: Sequence[str]) -> Lengths:
    """Return the weight of the visible characters of each text in tenths of a letter, [texts]; at least 1."""
    codes, starts = _codes(texts)
    return np.maximum(_sums(_tables()[1][codes], starts), 1)


def character_lengths(texts: Sequence[str]) -> Lengths:
    """Return the weight of the characters of each text, spaces included, in tenths of a letter, [texts]."""
    if "".join(texts).isascii():
        return np.fromiter(map(len, texts), np.int64, len(texts)) * _TENTHS
    codes, starts = _codes(texts)
    return _sums(_tables()[0][codes], starts) - _TENTHS  # the line feed before it


def word_counts(texts: Sequence[str]) -> Lengths:
    """Return the number of words of each text, [texts]; characters of scripts without spaces count by weight."""
    counts = np.fromiter((len(text.split()) for text in texts), np.int64, len(texts))
    if not (places := has_unspaced(texts).nonzero()[0]).size:
        return counts
    codes, starts = _codes([texts[place] for place in places.tolist()])
    weights, _, unspaced, wordly = _tables()
    of_words = wordly[codes]
    begins = of_words[1:] & ~of_words[:-1]  # every text follows a line feed
    words = _sums(np.append(False, begins), starts)
    counts[places] = words + -(-_sums(np.where(unspaced[codes], weights[codes], 0), starts) // _WORD)
    return counts
