"""One split (`train` or `dev`) of a store: Arrow shards and arrays of lengths, with a writer and a mapped reader.

train-00000.arrow ...       record batches: source, target (lists of int32 ids), with text: source_text, target_text;
                            where there are word alignments also links: lists of int32, four a link (data/word_links.py)
train-source-lengths.npy train-target-lengths.npy   int32 [pairs]: pieces, tag included, eos not
train-corpora.npy           uint16 [pairs]: number of each pair's corpus

Arrow trusts the offsets in a file, and one beyond its buffer would crash the process, so they are checked.
"""

from __future__ import annotations

import os
import re
import resource
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from ziggurat.system.errors import DataError, Problem, Remedy, printable, refuse_passing
from ziggurat.system.files import is_intact

Lists = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Lists of numbers: all of them, concatenated, and the length of each list."""

_SIDES = ("source", "target")
_PARSERS_ERRORS = (pa.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError, TypeError)


_SPARE_FILES = 512


def _allow_open_files(more: int) -> None:
    """Raise this process's soft limit on open files, usually 1,024, if `more` and some spare ones would not fit.

    A mapped file takes one. The hard limit stays, usually many thousands.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + more + _SPARE_FILES
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ArrowShard:
    """One Arrow file, mapped when this object is created and parsed on first use.

    A mapped file stays the same for this process even if another store replaces it. `checksum` is its fingerprint, or
    None if unknown.

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
            # Opened by the mapping's descriptor, since the name may now belong to another file.
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
        wanted = dict(_types(self._has_text, self._has_links))
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
    """One record batch, with columns as numpy views of the mapped file. Raises DataError if it is damaged."""

    def __init__(self, path: Path, batch: pa.RecordBatch) -> None:
        self.path = path
        self._batch = batch

    @cached_property
    def sides(self) -> list[Lists]:
        """(offsets [pairs + 1], ids [pieces]) of source and target."""
        return [self._lists(name) for name in _SIDES]

    @cached_property
    def _links(self) -> Lists:
        return self._lists("links")

    def links(self, row: int) -> NDArray[np.int32]:
        """Return the word alignment of one pair, [links, 4]: first unit and end of source word and target word."""
        offsets, values = self._links
        numbers = values[offsets[row] : offsets[row + 1]]
        if len(numbers) % 4 or (numbers[::2] < 0).any() or (numbers[::2] > numbers[1::2]).any():
            raise refuse_damaged(self.path, "an impossible word alignment")
        return numbers.reshape(-1, 4)

    def _lists(self, name: str) -> Lists:
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


def _types(has_text: bool, has_links: bool) -> list[tuple[str, pa.DataType]]:
    """Return names and types of the columns of a table."""
    ids = pa.list_(pa.int32())
    texts = [(f"{side}_text", pa.large_string()) for side in _SIDES] if has_text else []
    return [*((side, ids) for side in _SIDES), *texts, *([("links", ids)] if has_links else [])]


def refuse_damaged(path: Path, what: object) -> DataError:
    """Return the error to raise for a damaged file of a store, with a remedy."""
    said = printable(re.sub(r"\s+", " ", str(what)), 200)
    return refuse_store(path, f"damaged ({said})")


def refuse_store(path: Path, what: str) -> DataError:
    """Return the error to raise for a file without which a store is not whole, with a remedy."""
    return DataError(Problem("", f"{path}: {what}", Remedy.PREPARE_ANEW))


SHARD_PAIRS = 1_000_000
"""Size of a shard, which is closed after the first batch that brings it to this many pairs."""

_LENGTH_TYPE = np.dtype("<i4")
_CORPUS_TYPE = np.dtype("<u2")


class TableWriter:
    """Writer of one split (`train` or `dev`), batch by batch; memory does not grow with the number of pairs."""

    def __init__(
        self, directory: Path, split: str, *, has_text: bool, has_links: bool = False, shard_pairs: int = SHARD_PAIRS
    ) -> None:
        self._directory, self._split, self._shard_pairs = directory, split, shard_pairs
        self._has_text, self._has_links = has_text, has_links
        self._schema = pa.schema(_types(has_text, has_links))
        self._lengths = [_ArrayWriter(directory / f"{split}-{s}-lengths.npy", _LENGTH_TYPE) for s in _SIDES]
        self._corpora = _ArrayWriter(directory / f"{split}-corpora.npy", _CORPUS_TYPE)
        self._file: BinaryIO | None = None
        self._writer: Any = None
        self._shards: list[dict[str, Any]] = []
        self._pieces = [0, 0]
        self.counts = [np.zeros(0, np.int64), np.zeros(0, np.int64)]
        """Number of occurrences of each source and target piece, up to the last that occurs."""

    def write(
        self,
        corpus: int,
        source: Lists,
        target: Lists,
        texts: tuple[Sequence[str], Sequence[str]] | None = None,
        links: Lists | None = None,
    ) -> None:
        """Append pairs of the corpus of this number within the split: the ids of both sides.

        `texts` are both sides as text [pairs], required if and only if the table has text, and `links` the word
        alignments, four numbers a link, if and only if it has links.
        """
        pairs = len(source[1])
        if not pairs:
            return
        columns = [list_array(*source), list_array(*target)]
        if self._has_text:
            assert texts is not None
            columns += [pa.array(side, pa.large_string()) for side in texts]
        if self._has_links:
            assert links is not None
            columns.append(list_array(*links))
        if self._writer is None:
            name = f"{self._split}-{len(self._shards):05d}.arrow"
            self._file = (self._directory / name).open("wb")
            self._writer = pa.ipc.new_file(self._file, self._schema)
            self._shards.append({"file": name, "pairs": 0})
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._shards[-1]["pairs"] += pairs
        for number, (ids, lengths) in enumerate((source, target)):
            self._lengths[number].write(lengths)
            self._pieces[number] += len(ids)
            found = np.bincount(ids, minlength=len(self.counts[number]))
            found[: len(self.counts[number])] += self.counts[number]
            self.counts[number] = found
        self._corpora.write(np.full(pairs, corpus))
        if self._shards[-1]["pairs"] >= self._shard_pairs:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._writer is not None and self._file is not None:
            self._writer.close()
            _sync(self._file)
            self._writer = self._file = None

    def close(self) -> dict[str, Any]:
        """Finish all files; return the table's entry in the manifest."""
        self._close_shard()
        for array in (*self._lengths, self._corpora):
            array.close()
        return {
            "pairs": sum(shard["pairs"] for shard in self._shards),
            "source_pieces": self._pieces[0],
            "target_pieces": self._pieces[1],
            "has_text": self._has_text,
            **({"has_links": True} if self._has_links else {}),
            "shards": self._shards,
        }


def list_array(ids: NDArray[np.int32], lengths: NDArray[np.int32]) -> pa.ListArray:
    """Return `Lists` as an array of Arrow."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids, pa.int32()))


class _ArrayWriter:
    """Streaming writer of a one-dimensional array to a `.npy` file; `close` writes the final length to the header."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._file: BinaryIO = path.open("wb")
        self._dtype = dtype
        self._count = 0
        self._header()

    def _header(self) -> None:
        # numpy pads this header to a multiple of 64 bytes with room for a longer shape, so its size stays the same.
        description = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._count,)}
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, description)

    def write(self, values: NDArray[Any]) -> None:
        self._file.write(values.astype(self._dtype).tobytes())
        self._count += len(values)

    def close(self) -> None:
        self._header()
        _sync(self._file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


class PairTable:
    """The pairs of one split, memory-mapped: they take no memory, however many there are.

    `entry` is the table's in the manifest, and `corpora` those of the split's corpora there. Each shard is compared
    with its fingerprint of `checksums` before it is first parsed. `vocabulary` are the numbers of source and target
    ids. Raises DataError: a file is missing or damaged, or differs from its description in the manifest.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        entry: Mapping[str, Any],
        corpora: Sequence[Mapping[str, Any]],
        *,
        checksums: Mapping[str, str] | None = None,
        vocabulary: tuple[int, int] | None = None,
    ) -> None:
        self.has_text = bool(entry["has_text"])
        self.has_links = bool(entry.get("has_links", False))
        lengths = [directory / f"{split}-{side}-lengths.npy" for side in _SIDES]
        self.source_lengths = _mapped(lengths[0], entry["pairs"], _LENGTH_TYPE)
        """Pieces of each source, int32 [pairs], tag included, eos not."""
        self.target_lengths = _mapped(lengths[1], entry["pairs"], _LENGTH_TYPE)
        """Pieces of each target, int32 [pairs], without eos."""
        numbers = directory / f"{split}-corpora.npy"
        self.corpora = _mapped(numbers, entry["pairs"], _CORPUS_TYPE)
        """Number of each pair's corpus, uint16 [pairs]."""
        self.corpus_names = [str(corpus["name"]) for corpus in corpora]
        self.corpus_weights = [float(corpus["weight"]) for corpus in corpora]
        self._pairs = int(entry["pairs"])
        self._vocabulary = vocabulary
        _allow_open_files(len(entry["shards"]))
        self.shards = [
            ArrowShard(
                directory / shard["file"],
                int(shard["pairs"]),
                self.has_text,
                (checksums or {}).get(shard["file"]),
                has_links=self.has_links,
            )
            for shard in entry["shards"]
        ]
        self._starts = np.cumsum([0, *(int(shard["pairs"]) for shard in entry["shards"])]).tolist()
        if self._pairs and int(self.corpora.max()) >= len(corpora):
            raise refuse_damaged(numbers, f"corpus {int(self.corpora.max())} of {len(corpora)}")
        sums = int(entry["source_pieces"]), int(entry["target_pieces"])
        for path, found, wanted in zip(lengths, (self.source_lengths, self.target_lengths), sums, strict=True):
            if self._pairs and (int(found.min()) < 0 or int(found.sum(dtype=np.int64)) != wanted):
                raise refuse_damaged(path, f"lengths that do not add up to {wanted:,}")

    def __len__(self) -> int:
        return self._pairs

    def _locate(self, indices: ArrayLike) -> Iterable[tuple[ShardBatch, int]]:
        for index in np.asarray(indices, np.int64).tolist():
            if not 0 <= index < self._pairs:
                raise IndexError(f"pair {index} of {self._pairs}")
            number = bisect_right(self._starts, index) - 1
            yield self.shards[number].locate(index - self._starts[number])

    def pairs(self, indices: ArrayLike) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]]:
        """Return the ids of the pairs at `indices` [n], in that order, as read-only views of the mapped files.

        They are sources and targets, each n arrays int32 [pieces]; no bos, no eos; the corpus's tag in front of the
        source. Raises DataError: a shard is damaged: ids outside the vocabulary, or lengths that differ from those
        stored.
        """
        sources, targets = [], []
        found = list(self._locate(indices))
        for batch, row in found:
            (source_offsets, source), (target_offsets, target) = batch.sides
            sources.append(source[source_offsets[row] : source_offsets[row + 1]])
            targets.append(target[target_offsets[row] : target_offsets[row + 1]])
        at = np.asarray(indices, np.int64)
        for side, (ids, lengths) in enumerate(((sources, self.source_lengths), (targets, self.target_lengths))):
            self._check(side, ids, lengths[at], [batch for batch, _ in found])
        return sources, targets

    def _check(self, side: int, ids: list[NDArray[np.int32]], lengths: NDArray[Any], found: list[ShardBatch]) -> None:
        """Raise DataError unless `ids` have these lengths and are in the vocabulary: the model's error is obscure."""
        name = _SIDES[side]
        for row in np.flatnonzero(np.fromiter(map(len, ids), np.int64, len(ids)) != lengths)[:1]:
            raise refuse_damaged(found[row].path, f"a {name} of {len(ids[row])} pieces instead of {lengths[row]}")
        if self._vocabulary is None or not ids:
            return
        size, together = self._vocabulary[side], np.concatenate(ids)
        if len(together) and not 0 <= together.min() <= together.max() < size:
            row = next(n for n, each in enumerate(ids) if len(each) and not 0 <= each.min() <= each.max() < size)
            raise refuse_damaged(found[row].path, f"a {name} with an id outside the vocabulary of {size:,}")

    def links(self, indices: ArrayLike) -> list[NDArray[np.int32]]:
        """Return the word alignments of the pairs at `indices`, [links, 4] each: units of source and target word.

        Raises DataError: a shard is damaged. The table must have links.
        """
        return [batch.links(row) for batch, row in self._locate(indices)]

    def texts(self, indices: ArrayLike) -> tuple[list[str], list[str]]:
        """Return source and target texts of the pairs at `indices`, without tags.

        Training pairs: the normalised text that was segmented. Development pairs: the target as in the file, since it
        is the reference of scores (pre-segmented text with `@@ ` joined). Raises DataError: the table was written
        without text, or a shard is damaged.
        """
        if not self.has_text:
            raise DataError(
                "the store holds no training text: set data.subword.regularisation before `ziggurat prepare`",
                key="data.subword.regularisation",
            )
        found = list(self._locate(indices))
        return [batch.text("source", row) for batch, row in found], [batch.text("target", row) for batch, row in found]


def _mapped(path: Path, pairs: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not pairs:
        return np.zeros(0, dtype)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        refuse_passing(path, error)
        raise refuse_damaged(path, error) from None
    # numpy parses the header as Python source, and raises Python's errors about invalid source.
    except (ValueError, SyntaxError, TokenError, OverflowError, MemoryError, RecursionError) as error:
        raise refuse_damaged(path, error) from None
    if array.shape != (pairs,) or array.dtype != dtype:
        raise refuse_damaged(path, f"not {pairs} numbers")
    return cast(NDArray[Any], array)
