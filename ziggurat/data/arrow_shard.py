"""One Arrow file of a store, memory-mapped; its checksum is compared before it is parsed, its offsets are checked too.

Arrow trusts the offsets in a file: one beyond its buffer is a crash, not an error.
"""

from __future__ import annotations

import os
import re
import resource
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ziggurat.system.checksums import is_intact
from ziggurat.system.errors import DataError, printable, refuse_passing

_SIDES = ("source", "target")
_PARSERS_ERRORS = (pa.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError, TypeError)


_SPARE_FILES = 512


def allow_open_files(more: int) -> None:
    """Raise this process's soft limit of open files, usually 1,024, where `more` and some to spare would not fit.

    A mapped file takes one. The hard limit stays, usually many thousands.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + more + _SPARE_FILES
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Shard:
    """One Arrow file, mapped when this object is created and parsed on first use.

    A mapped file stays the same for this process when another store takes its place.

    Args:
        path: the file.
        pairs: number of pairs in it.
        has_text: whether it has the text columns.
        checksum: its fingerprint; None: not known.
        has_links: whether it has the column of word alignments.

    Attributes:
        checked_elsewhere: whether other code compares the fingerprint (ziggurat.data.store_checks.Verification), and
            discards everything computed from damaged pairs; if not, it is compared before the file is first parsed.
    """

    def __init__(
        self, path: Path, pairs: int, has_text: bool, checksum: str | None, *, has_links: bool = False
    ) -> None:
        self.path = path
        self.checked_elsewhere = checksum is None
        self._pairs, self._has_text, self._checksum = pairs, has_text, checksum
        self._has_links = has_links
        try:
            self._file = pa.memory_map(str(path))
        except (pa.ArrowException, OSError) as error:
            refuse_passing(path, error)
            raise refuse_damaged(path, f"cannot be read: {error}") from None

    def verify(self) -> None:
        """Compare the file with its fingerprint, once. Raises DataError when they differ or it cannot be read."""
        if (expected := self._checksum) is None:  # already compared, or no fingerprint to compare with
            return
        try:
            # This very file, by the mapping's descriptor: the name may belong to another one by now.
            whole = is_intact(Path(f"/dev/fd/{self._file.fileno()}"), expected)
        except DataError as error:
            raise refuse_damaged(self.path, error) from None
        if not whole:
            raise refuse_damaged(self.path, "wrong checksum")
        self._checksum = None

    @cached_property
    def _contents(self) -> tuple[list[ShardBatch], list[int]]:
        if not self.checked_elsewhere:
            self.verify()
        try:
            reader = pa.ipc.open_file(self._file)
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            for batch in batches:
                batch.validate()  # raises for buffers that are too short for the rows
        except _PARSERS_ERRORS as error:
            raise refuse_damaged(self.path, error) from None
        self._refuse_other_columns(batches)
        starts = np.cumsum([0, *(batch.num_rows for batch in batches)]).tolist()
        if starts[-1] != self._pairs:
            raise refuse_damaged(self.path, f"{starts[-1]:,} pairs instead of {self._pairs:,}")
        return [ShardBatch(self.path, batch) for batch in batches], starts

    def _refuse_other_columns(self, batches: Sequence[pa.RecordBatch]) -> None:
        wanted = {name: pa.list_(pa.int32()) for name in _SIDES}
        if self._has_text:
            wanted |= {f"{name}_text": pa.large_string() for name in _SIDES}
        if self._has_links:
            wanted["links"] = pa.list_(pa.int32())
        for batch in batches:
            try:
                types = dict(zip(batch.schema.names, batch.schema.types, strict=True))
            except UnicodeDecodeError as error:  # Arrow decodes the names of columns only when asked for them
                raise refuse_damaged(self.path, error) from None
            if types != wanted or any(column.null_count for column in batch.columns):
                raise refuse_damaged(self.path, "other columns than a store has")

    def locate(self, row: int) -> tuple[ShardBatch, int]:
        """Return the batch with `row` of this shard, and the row within it. Raises DataError for a damaged file."""
        batches, starts = self._contents
        number = bisect_right(starts, row) - 1
        return batches[number], row - starts[number]


class ShardBatch:
    """One record batch, its columns as numpy views of the mapped file. Raises DataError where it is damaged."""

    def __init__(self, path: Path, batch: pa.RecordBatch) -> None:
        self.path = path
        self._batch = batch

    @cached_property
    def sides(self) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """(offsets [pairs + 1], ids [pieces]) of source and target."""
        return [self._lists(name) for name in _SIDES]

    @cached_property
    def _links(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return self._lists("links")

    def links(self, row: int) -> NDArray[np.int32]:
        """Return the word alignment of one pair, [links, 4]: first unit and end of source word and target word."""
        offsets, values = self._links
        numbers = values[offsets[row] : offsets[row + 1]]
        if len(numbers) % 4 or (numbers[::2] < 0).any() or (numbers[::2] > numbers[1::2]).any():
            raise refuse_damaged(self.path, "a word alignment that is none")
        return numbers.reshape(-1, 4)

    def _lists(self, name: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return offsets [pairs + 1] and values of a column; offsets never decrease and stay within the values."""
        column = self._batch.column(name)
        try:
            offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
        except _PARSERS_ERRORS as error:
            raise refuse_damaged(self.path, error) from None
        self._check(offsets, len(values), name)
        return offsets, values

    @cached_property
    def _texts(self) -> dict[str, tuple[NDArray[np.int64], memoryview]]:
        """(offsets [pairs + 1], bytes) of source and target text."""
        found = {}
        for name in _SIDES:
            column = self._batch.column(f"{name}_text")
            _, offsets, content = column.buffers()
            starts = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
            data = memoryview(content) if content is not None else memoryview(b"")
            self._check(starts, len(data), f"{name}_text")
            found[name] = starts, data
        return found

    def text(self, side: str, row: int) -> str:
        """Return the text of one pair."""
        offsets, data = self._texts[side]
        try:
            return str(data[int(offsets[row]) : int(offsets[row + 1])], "utf-8")
        except UnicodeDecodeError as error:
            raise refuse_damaged(self.path, f"{side} text of a pair: {error}") from None

    def _check(self, offsets: NDArray[np.integer], size: int, name: str) -> None:
        if len(offsets) != self._batch.num_rows + 1 or offsets[0] < 0 or offsets[-1] > size:
            raise refuse_damaged(self.path, f"offsets of {name} leave its values")
        if (offsets[1:] < offsets[:-1]).any():
            raise refuse_damaged(self.path, f"offsets of {name} run backwards")


def refuse_damaged(path: Path, what: object) -> DataError:
    """Return the error to raise for a damaged file of a store, with the way out."""
    said = printable(re.sub(r"\s+", " ", str(what)), 200)
    return DataError(f"{path}: damaged ({said}); run `ziggurat prepare --force` again")
