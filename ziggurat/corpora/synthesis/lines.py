"""Lines of text files: counted, read, and decoded to text or to the reason why no pair can be made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

from ziggurat.corpora.synthesis.filters import MAX_CHARACTERS, Reason, readable
from ziggurat.system.compressed import byte_blocks
from ziggurat.system.errors import DataError

_MAX_BYTES = 4 * MAX_CHARACTERS + 5  # a UTF-8 character has up to 4 bytes, a byte order mark 3, CR and LF 2


@dataclass
class Line:
    """A line of text as it stands in its file.

    It is decoded, which takes ten times as long as reading it, when its text is asked for: by the worker that has its
    shard, and not where other calls do the shard.
    """

    raw: bytes | None
    """Its bytes; None: too many to keep."""
    first_of_file: bool = False
    translation: Line | None = None
    """Its translation as somebody else has it."""

    @cached_property
    def _found(self) -> tuple[str, Reason | None]:
        return readable(self.raw, first_of_file=self.first_of_file)

    @property
    def text(self) -> str:
        """The text, or "" where there is a reason."""
        return self._found[0]

    @property
    def reason(self) -> Reason | None:
        """Reason to drop the line, or None."""
        return self._found[1]

    @property
    def reference(self) -> str:
        """The text of its translation; "" where there is none, or none that can be read."""
        return "" if self.translation is None else self.translation.text


def raw_lines(path: Path) -> Iterator[bytes | None]:
    """Yield the lines of a file as bytes without LF, unpacked by its name's ending; None for a line that is too long.

    Memory does not grow with the file or a line. Raises DataError for a file that cannot be read or unpacked.
    """
    begun, too_long = b"", False  # the beginning of a line whose end is in a later block
    for block in byte_blocks(path):
        *ended, rest = block.split(b"\n")
        for piece in ended:
            whole = begun + piece
            yield None if too_long or len(whole) > _MAX_BYTES else whole
            begun, too_long = b"", False
        begun += rest
        # Forget the beginning of a line that is too long, so that memory does not grow with it.
        if len(begun) > _MAX_BYTES:
            begun, too_long = b"", True
    if begun or too_long:
        yield None if too_long else begun


def count_lines(files: Sequence[Path]) -> int:
    """Return the number of lines of all files together. Raises DataError as `raw_lines` does."""
    return sum(1 for path in files for _ in raw_lines(path))


def readable_lines(files: Sequence[Path], references: Sequence[Path] = ()) -> Iterator[Line]:
    """Yield the lines of all files, in order, with those of `references`, if there are any, as their references.

    Raises DataError as `raw_lines` does, or where there are not as many references as lines.
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
