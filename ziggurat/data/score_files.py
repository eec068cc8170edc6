"""Scores of pairs that other tools wrote: lines of numbers, columns of TSV, fields of JSON lines or Parquet.

Bicleaner appends a column to a TSV, or writes numbers alone; OpusFilter's `score` writes JSON lines, an object a pair.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ziggurat.config.data import CorpusConfig
from ziggurat.config.filters import ScoreConfig
from ziggurat.data.lines import LineStream
from ziggurat.data.readers import CorpusReader
from ziggurat.system.compressed import compression_of, uncompressed_file
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.files import find_files

Floats = NDArray[np.float64]
_KINDS = {".tsv": "tsv", ".jsonl": "jsonl", ".parquet": "parquet"}


class ScoreColumn(NamedTuple):
    """A score of a corpus, with its limits."""

    key: str
    """Key in the configuration, such as `data.train.0.scores.1`."""
    paths: Sequence[Path]
    """A file for each part of the corpus."""
    kind: str
    """`text`, `tsv`, `jsonl` or `parquet`."""
    column: str | int | None
    low: float
    high: float

    def blocks(self, path: Path) -> Iterator[Floats]:
        """Yield the scores in a file. Raises DataError naming the line of what is no number."""
        if self.kind == "parquet":
            yield from _parquet(path, str(self.column))
            return
        stream = LineStream(path)
        while count := stream.available():
            first = stream.lines + 1
            lines = stream.take(count)
            yield np.array([self._number(line, path, number) for number, line in enumerate(lines, first)])

    def _number(self, line: str, path: Path, number: int) -> float:
        try:
            if self.kind == "tsv":
                found: Any = float(line.split("\t")[int(self.column or 0)])
            elif self.kind == "jsonl":
                found = _field(json.loads(line), str(self.column))
            else:
                found = float(line)
            if math.isnan(found):
                raise ValueError("not a number")
        except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
            where = "" if self.column is None else f" in column {self.column!r}"
            raise DataError(
                f"{path}, line {number}: no score{where} ({self.key}): {printable(str(error), 100)}; "
                f"the line is: {printable(line)}"
            ) from None
        return float(found)


def _field(record: Any, name: str) -> float:
    """Return the number at the dotted `name` of a JSON object. Raises LookupError or TypeError where there is none."""
    found = record
    for step in [name] if isinstance(record, dict) and name in record else name.split("."):
        if isinstance(found, list):
            found = found[int(step)]
        elif isinstance(found, dict):
            found = found[step]
        else:
            raise TypeError(f"nothing is inside where {step!r} is looked for")
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise TypeError(f"{name!r} is not a number but {type(found).__name__}")
    return float(found)


def _parquet(path: Path, name: str) -> Iterator[Floats]:
    row = 0
    try:
        with uncompressed_file(path) as file, pq.ParquetFile(file) as table:
            if name not in table.schema_arrow.names:
                known = ", ".join(table.schema_arrow.names)
                raise DataError(f"{path}: no column {name!r}; it has: {printable(known, 200)}")
            for batch in table.iter_batches(columns=[name]):
                column = batch.column(0)
                if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
                    raise DataError(f"{path}: column {name!r} has no numbers but {column.type}")
                found = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
                if np.isnan(found).any():  # null as well
                    place = row + int(np.isnan(found).argmax()) + 1
                    raise DataError(f"{path}: no number in column {name!r} of row {place}")
                row += len(found)
                yield found
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {printable(str(error), 200)}") from error


def find_scores(corpus: CorpusConfig, key: str, reader: CorpusReader) -> list[ScoreColumn]:
    """Return the scores of a corpus with their files found.

    Raises ConfigError: a column that the format cannot have; DataError: missing files, or too many or few.
    """
    return [_found(score, f"{key}.scores.{number}", reader) for number, score in enumerate(corpus.scores)]


def _found(score: ScoreConfig, key: str, reader: CorpusReader) -> ScoreColumn:
    if score.path is None:
        if reader.kind == "text":
            raise ConfigError(f"{key}: the corpus is plain text, without columns; give `path`, a file with the scores")
        paths, kind = [part[0] for part in reader.files], reader.kind
    else:
        paths = find_files(score.path, f"{key}.path")
        if len(paths) != len(reader.files):
            raise DataError(
                f"{key}: {score.path} matches {len(paths)} files, but the corpus has {len(reader.files)}; they are "
                "paired in sorted order, so there must be equally many"
            )
        suffixes = {Path(path.stem).suffix if compression_of(path) else path.suffix for path in paths}
        kinds = {_KINDS.get(suffix.lower(), "text") for suffix in suffixes}
        if len(kinds) > 1:
            raise ConfigError(f"{key}.path: {score.path} names files of several formats")
        kind = kinds.pop()
        if kind == "text" and score.column is not None:
            # Bicleaner's output has any name: with a column, the lines are taken for TSV.
            kind = "jsonl" if isinstance(score.column, str) else "tsv"
    wanted: type = int if kind == "tsv" else str
    if kind != "text" and not isinstance(score.column, wanted):
        need = "a number from 0, or -1 for the last" if kind == "tsv" else "the name of a field"
        raise ConfigError(f"{key}.column: {score.column!r}; a column of a {kind} file is {need}")
    low = -math.inf if score.min is None else score.min
    return ScoreColumn(key, paths, kind, score.column, low, math.inf if score.max is None else score.max)


class ScoreStream:
    """The scores of a corpus, read along with its pairs: which of them are beyond a limit?

    Args:
        columns: its scores.
        reader: its reader, whose `part` says which part the last block came from.
    """

    def __init__(self, columns: Sequence[ScoreColumn], reader: CorpusReader) -> None:
        self._columns, self._reader = columns, reader
        self._part = -1
        self._blocks: list[Iterator[Floats]] = []
        self._waiting: list[Floats] = []
        self._pairs = 0

    def unwanted(self, count: int) -> NDArray[np.bool_] | None:
        """Return the mask of the next `count` pairs, True where a score is beyond a limit; None without any scores.

        Raises DataError: no number, or not as many lines as the corpus has.
        """
        if not self._columns:
            return None
        if self._part != self._reader.part:
            self.end()
            self._part, self._pairs = self._reader.part, 0
            self._blocks = [column.blocks(column.paths[self._part]) for column in self._columns]
            self._waiting = [np.zeros(0)] * len(self._columns)
        self._pairs += count
        found = np.zeros(count, np.bool_)
        for number, column in enumerate(self._columns):
            waiting = [self._waiting[number]]
            while (have := sum(map(len, waiting))) < count:
                block = next(self._blocks[number], None)
                if block is None:
                    raise self._unlike(column, self._pairs - count + have, "at least ")
                waiting.append(block)
            scores = np.concatenate(waiting)
            self._waiting[number] = scores[count:]
            found |= (scores[:count] < column.low) | (scores[:count] > column.high)
        return found

    def end(self) -> None:
        """Check that no scores are left of the last part. Raises DataError."""
        for number, column in enumerate(self._columns if self._part >= 0 else ()):
            left = len(self._waiting[number]) + sum(map(len, self._blocks[number]))
            if left:
                raise self._unlike(column, self._pairs + left, "")

    def _unlike(self, column: ScoreColumn, scores: int, least: str) -> DataError:
        files = " and ".join(str(path) for path in self._reader.files[self._part])
        return DataError(
            f"{column.paths[self._part]} has {scores:,} scores ({column.key}), but {files} has {least}{self._pairs:,} "
            "pairs; line i must be the score of pair i"
        )
