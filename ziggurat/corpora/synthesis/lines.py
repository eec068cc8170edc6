"""Lines of text files and the pairs made from them: counting them, reading them, and dropping each for one reason.

A line is decoded to text or to the reason why it gives no pair; filters drop pairs of a synthetic corpus.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from ziggurat.config.data import FilterConfig
from ziggurat.config.pipeline_models import MAX_RATIO, RATIO_SLACK
from ziggurat.data.lines import is_blank, normalise, refuse_records
from ziggurat.system.compressed import byte_blocks
from ziggurat.system.errors import DataError
from ziggurat.system.files import find_files

Reason = Literal["encoding", "nul", "empty", "too_long", "unfinished", "ratio", "copy", "cross_entropy"]
"""Reason why a line gives no pair:

- `encoding`: not valid UTF-8;
- `nul`: contains U+0000, so it is not text;
- `empty`: the line, or its translation, is blank;
- `too_long`: the line or its translation has too many pieces, or the line more than MAX_CHARACTERS;
- `unfinished`: the translation was cut at the length limit;
- `ratio`: the sides differ too much in length;
- `copy`: the translation is the text itself;
- `cross_entropy`: the pair is among the least likely (ziggurat.corpora.synthesis.cross_entropy).
"""

MAX_CHARACTERS = FilterConfig().max_characters or 4000
"""Longest line that is used, as in `prepare`."""
_BYTE_ORDER_MARK = "\ufeff"


def readable(raw: bytes | None, *, first_of_file: bool = False) -> tuple[str, Reason | None]:
    """Return the text of a line, trimmed and without its line end, and None; or "" and the reason to drop it.

    `raw` is None if the line had too many bytes to keep; a byte order mark is removed at the start of a file.
    """
    if raw is None:
        return "", "too_long"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "", "encoding"
    (text,) = normalise([text.removeprefix(_BYTE_ORDER_MARK) if first_of_file else text], "none")
    if "\0" in text:
        return "", "nul"
    if is_blank(text):
        return "", "empty"
    return ("", "too_long") if len(text) > MAX_CHARACTERS else (text, None)


@dataclass(frozen=True)
class PairFilter:
    """The filters of fairseq's back-translation recipe (Edunov et al. 2018), milder for short sentences, and of copies.

    The longer side may have `max_ratio` times as many pieces as the shorter side, plus `ratio_slack`. The ratio alone
    suits only long sentences: a correct translation of four pieces by seven exceeds it.
    """

    max_pieces: int = FilterConfig().max_pieces or 250
    """Maximum number of subword pieces of either side, by the tokenizers of the model that translated."""
    max_ratio: float = MAX_RATIO
    ratio_slack: int = RATIO_SLACK
    """Pieces that the longer side may have beyond the ratio."""

    def reason(self, text: str, translation: str, text_pieces: int, translation_pieces: int) -> Reason | None:
        """Return the first reason, in this order, to drop the pair, or None."""
        if is_blank(translation):
            return "empty"
        if max(text_pieces, translation_pieces) > self.max_pieces:
            return "too_long"
        if self.uneven(text_pieces, translation_pieces):
            return "ratio"
        return "copy" if text == translation else None

    def uneven(self, pieces: int, others: int) -> bool:
        """Return whether the sides of a pair differ too much in length."""
        shorter, longer = sorted((pieces, others))
        return longer > self.max_ratio * shorter + self.ratio_slack


_MAX_BYTES = 4 * MAX_CHARACTERS + 5  # a UTF-8 character has up to 4 bytes, a byte order mark 3, CR and LF 2


@dataclass
class Line:
    """A line of text, unchanged from its file.

    Decoding takes ten times as long as reading, so it is done only when the text is requested, by the worker that does
    the shard.
    """

    raw: bytes | None
    """Bytes of the line; None: too many to keep."""
    first_of_file: bool = False
    translation: Line | None = None
    """The line's reference translation."""

    @cached_property
    def _found(self) -> tuple[str, Reason | None]:
        return readable(self.raw, first_of_file=self.first_of_file)

    @property
    def text(self) -> str:
        """The text, or "" if there is a reason to drop it."""
        return self._found[0]

    @property
    def reason(self) -> Reason | None:
        """Reason to drop the line, or None."""
        return self._found[1]

    @property
    def reference(self) -> str:
        """The text of its translation; "" if there is none or it cannot be read."""
        return "" if self.translation is None else self.translation.text


def text_files(patterns: Sequence[str], option: str) -> list[Path]:
    """Return the text files that paths or globs name, in order. Raises DataError for none, and for records."""
    found = [path for pattern in patterns for path in find_files(pattern, option)]
    for path in found:
        refuse_records(path, option)
    return found


def raw_lines(path: Path) -> Iterator[bytes | None]:
    """Yield the lines of a file as bytes without LF, decompressed by its suffix; None for a line that is too long.

    Memory does not grow with the file or a line. Raises DataError for a file that cannot be read or decompressed.
    """
    begun, too_long = b"", False  # the start of a line whose end is in a later block
    for block in byte_blocks(path):
        *ended, rest = block.split(b"\n")
        for piece in ended:
            whole = begun + piece
            yield None if too_long or len(whole) > _MAX_BYTES else whole
            begun, too_long = b"", False
        begun += rest
        # Discard the start of a line that is too long, so that memory does not grow with it.
        if len(begun) > _MAX_BYTES:
            begun, too_long = b"", True
    if begun or too_long:
        yield None if too_long else begun


def count_lines(files: Sequence[Path]) -> int:
    """Return the number of lines of all files together. Raises DataError as `raw_lines` does."""
    return sum(1 for path in files for _ in raw_lines(path))


def readable_lines(files: Sequence[Path], references: Sequence[Path] = ()) -> Iterator[Line]:
    """Yield the lines of all files, in order, with the lines of `references`, if any, as their references.

    Raises DataError as `raw_lines` does, or if the numbers of references and lines differ.
    """
    lines = _lines(files)
    if not references:
        yield from lines
        return
    for line, reference in zip_longest(lines, _lines(references)):
        if line is None or reference is None:
            raise DataError(f"the files became shorter while they were read: {', '.join(map(str, references))} or text")
        yield Line(line.raw, line.first_of_file, reference)


def _lines(files: Sequence[Path]) -> Iterator[Line]:
    for path in files:
        for in_file, raw in enumerate(raw_lines(path)):
            yield Line(raw, in_file == 0)
