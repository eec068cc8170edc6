"""Readers of parallel corpora (text, TSV, JSON lines, Parquet), and of scores of their pairs from other tools.

Bicleaner appends a column to a TSV, or writes only numbers; OpusFilter's `score` writes JSON lines, one per pair.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.data import CorpusConfig, ScoreConfig
from ziggurat.data.lines import LineStream
from ziggurat.data.parquet import nested_hint, parquet_numbers, parquet_pairs
from ziggurat.system.compressed import compression_of
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.files import find_files

BLOCK_PAIRS = 16_384
"""Most pairs in a block; blocks of text files also end after about 1 MiB."""

PairBlock = tuple[list[str], list[str]]
"""Source and target lines of a block, the same number of each: as in the file, without line ends."""

_FORMATS = {".tsv": "tsv", ".jsonl": "jsonl", ".parquet": "parquet"}


def _format(path: Path) -> str | None:
    suffix = Path(path.stem).suffix if compression_of(path) else path.suffix
    return _FORMATS.get(suffix.lower())


@dataclass
class ReadNotes:
    """Counts of small faults that a reader corrects by itself; reported once per corpus."""

    carriage_returns: int = 0
    byte_order_marks: int = 0
    short_rows: int = 0
    """Rows that had too few columns and were skipped."""

    def add(self, stream: LineStream) -> None:
        """Add the counts of `stream`."""
        self.carriage_returns += stream.carriage_returns
        self.byte_order_marks += stream.byte_order_mark


Columns = tuple[str, str] | tuple[int, int]
"""The columns or fields of source and target in a file with both."""


@dataclass
class CorpusReader:
    """Reader of one corpus, which can be streamed any number of times in bounded memory."""

    name: str
    files: list[tuple[Path, ...]]
    """For each part (source file, target file), or (file with both sides,)."""
    kind: str
    """`text`, `tsv`, `jsonl` or `parquet`."""
    columns: Columns
    notes: ReadNotes = field(default_factory=ReadNotes)
    row_columns: int | None = None
    """`tsv`: required number of columns; rows with fewer are skipped. None: all rows have as many as the first."""
    part: int = 0
    """Number of the part that the last block came from."""

    @classmethod
    def of(cls, config: CorpusConfig, key: str, languages: tuple[str, str]) -> CorpusReader:
        """Find the files of `config`.

        `key` is that of the corpus, such as `data.train.0`, for messages; `languages` are the codes of source and
        target, the default columns of JSON lines and Parquet. Raises ConfigError for an impossible format or columns,
        DataError for missing files, or different numbers of files on the two sides.
        """
        name = config.name or Path(config.path or config.source or "").name
        if config.path is not None:
            found = find_files(config.path, f"{key}.path")
            kind = _format_of(config, key, found)
            if config.row_columns is not None and kind != "tsv":
                raise ConfigError(f"{key}.row_columns: applies only to TSV, not to {kind}; remove it")
            columns = _columns_of(config, key, kind, languages)
            return cls(name, [(path,) for path in found], kind, columns, row_columns=config.row_columns)
        if config.format not in ("auto", "text"):
            raise ConfigError(f"{key}.format: {config.format} holds both sides in one file; give `path` instead")
        if config.columns:
            raise ConfigError(
                f"{key}.columns: text files have none, whole lines are read; give `path`, one file with both"
            )
        source = find_files(config.source or "", f"{key}.source")
        target = find_files(config.target or "", f"{key}.target")
        if len(source) != len(target):
            raise DataError(
                f"{key}: {config.source} matches {len(source)} files but {config.target} matches {len(target)}; "
                "the sides are paired in sorted order, so both patterns must match the same number"
            )
        return cls(name, list(zip(source, target, strict=True)), "text", (0, 1))

    def described(self) -> str:
        """Return the file names, for messages."""
        names = [str(path) for part in self.files for path in part]
        return " and ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more files"

    def blocks(self) -> Iterator[PairBlock]:
        """Yield aligned blocks in file order; `notes` counts the corrections of this pass.

        Raises DataError, with file name and line, for any fault of a file.
        """
        self.notes = ReadNotes()
        for number, part in enumerate(self.files):
            self.part = number
            if self.kind == "text":
                yield from _text_blocks(part[0], part[1], self.notes)
            elif self.row_columns is not None:
                yield from ((source, target) for _, _, source, target in self.wide_rows(part[0], self.notes))
            elif self.kind == "tsv":
                yield from _tsv_blocks(part[0], self.columns, self.notes)
            elif self.kind == "jsonl":
                yield from _jsonl_blocks(part[0], self.columns, self.notes)
            else:
                yield from parquet_pairs(part[0], (str(self.columns[0]), str(self.columns[1])), BLOCK_PAIRS)

    def wide_rows(
        self, path: Path, notes: ReadNotes
    ) -> Iterator[tuple[list[int], list[list[str]], list[str], list[str]]]:
        """Yield line numbers, cells, sources and targets of rows with `row_columns` columns; the others are counted."""
        for first, lines in _line_blocks(path, notes):
            rows = [line.split("\t") for line in lines]
            wide = [(number, row) for number, row in enumerate(rows, first) if len(row) >= (self.row_columns or 0)]
            notes.short_rows += len(rows) - len(wide)
            source, target = map(int, self.columns)
            if wide:
                numbers, rows = [number for number, _ in wide], [row for _, row in wide]
                yield numbers, rows, [row[source] for row in rows], [row[target] for row in rows]


def _format_of(config: CorpusConfig, key: str, found: Sequence[Path]) -> str:
    if config.format == "text":
        raise ConfigError(f"{key}.format: plain text has one file per side; give `source` and `target` instead")
    if config.format != "auto":
        return config.format
    formats: dict[str, Path] = {}
    for path in found:  # by the files, not the pattern: `web-*.tsv*` ends in no known suffix
        if (kind := _format(path)) is None:
            raise ConfigError(
                f"{key}.path: cannot tell the format of {path} from its name ({', '.join(_FORMATS)} are known); "
                f"set {key}.format"
            )
        formats.setdefault(kind, path)
    if len(formats) > 1:
        shown = " and ".join(map(str, formats.values()))
        raise ConfigError(f"{key}.path: {config.path} names files of several formats, {shown}; make a corpus of each")
    return next(iter(formats))


def _columns_of(config: CorpusConfig, key: str, kind: str, languages: tuple[str, str]) -> Columns:
    columns: Any = config.columns or ((0, 1) if kind == "tsv" else languages)
    wanted: type = int if kind == "tsv" else str
    if not all(isinstance(column, wanted) for column in columns):
        need = "numbers from 0" if kind == "tsv" else "names"
        raise ConfigError(f"{key}.columns: columns of a {kind} file are {need}, not {config.columns}")
    if columns[0] == columns[1] or (kind == "tsv" and min(columns) < 0):
        raise ConfigError(f"{key}.columns: {config.columns} must be two different columns, counted from 0")
    return cast(Columns, tuple(columns))


def _text_blocks(source_path: Path, target_path: Path, notes: ReadNotes) -> Iterator[PairBlock]:
    """Yield line i of one file with line i of the other. Raises DataError for files of unequal length."""
    source, target = LineStream(source_path), LineStream(target_path)
    while True:
        count = min(source.available(), target.available(), BLOCK_PAIRS)
        if not count:
            break
        yield source.take(count), target.take(count)
    pairs = source.lines
    # One side has ended. The other is read to its end as well, so that the message can name both counts.
    if source.drain() != target.drain():
        longer = source if source.lines > target.lines else target
        one_blank = longer.lines == pairs + 1 and longer.last_line_empty
        hint = f" (the last line of {longer.path} is empty: remove it)" if one_blank else ""
        raise DataError(
            f"the sides are not aligned: {source_path} has {source.lines:,} lines but {target_path} has "
            f"{target.lines:,}{hint}; line i of one must be the translation of line i of the other, "
            "and only LF ends a line"
        )
    notes.add(source)
    notes.add(target)


def _line_blocks(path: Path, notes: ReadNotes) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the first line, lines) of one file."""
    stream = LineStream(path)
    while count := min(stream.available(), BLOCK_PAIRS):
        first = stream.lines + 1
        yield first, stream.take(count)
    notes.add(stream)


def _tsv_blocks(path: Path, columns: Columns, notes: ReadNotes) -> Iterator[PairBlock]:
    """Yield two columns of tab-separated lines of the same number of columns; quotes and backslashes are text."""
    source, target = map(int, columns)
    expected = 0
    for first, lines in _line_blocks(path, notes):
        rows = [line.split("\t") for line in lines]
        if not expected:
            expected = len(rows[0])
            if expected <= max(source, target):
                raise DataError(
                    f"{path}, line 1: {expected} columns, but column {max(source, target)} (from 0) is needed; "
                    f"the line is: {printable(lines[0])}"
                )
        for number, row in enumerate(rows, first):
            if len(row) != expected:
                raise DataError(
                    f"{path}, line {number}: {len(row)} columns instead of {expected} as in line 1 (`row_columns` of "
                    f"the corpus leaves out rows with too few): {printable(lines[number - first])}"
                )
        yield [row[source] for row in rows], [row[target] for row in rows]


def _jsonl_blocks(path: Path, columns: Columns, notes: ReadNotes) -> Iterator[PairBlock]:
    """Yield two fields of each line's JSON object. `a.b` is field b of the object a; null is an empty text."""
    source, target = map(str, columns)
    for first, lines in _line_blocks(path, notes):
        sides: PairBlock = ([], [])
        for number, line in enumerate(lines, first):
            try:
                record = json.loads(line)
                sides[0].append(_text(record, source))
                sides[1].append(_text(record, target))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise _unlike_record(error, f"{path}, line {number}", line, (source, target)) from None
        yield sides


def _unlike_record(error: Exception, where: str, line: str, names: tuple[str, str]) -> DataError:
    reason, hint = str(error), ""
    if isinstance(error, KeyError):
        reason, record = f"no field {error}", json.loads(line)
        hint = nested_hint(names, {key: list(its) for key, its in record.items() if isinstance(its, dict)})
    return DataError(
        f"{where}: {printable(reason, 120)}; expected a JSON object with the texts {names[0]!r} and {names[1]!r}"
        f"{hint}; the line is: {printable(line)}"
    )


def _steps(record: Any, name: str) -> list[str]:
    """Return the keys that a dotted name stands for in a JSON object; a key that itself contains dots wins."""
    return [name] if isinstance(record, dict) and name in record else name.split(".")


def _text(record: Any, name: str) -> str:
    """Return the text at the dotted `name` of a JSON object, on one line.

    Raises KeyError, TypeError or ValueError if there is none.
    """
    value = record
    for step in _steps(record, name):
        if not isinstance(value, dict):
            raise TypeError(f"not an object where {step!r} is looked for")
        value = value[step]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"field {name!r} is not a text but {type(value).__name__}")
    if not value.isascii():
        value.encode()  # UnicodeEncodeError (a ValueError) on a lone surrogate written as \\ud800
    return value.replace("\n", " ") if "\n" in value else value


Floats = NDArray[np.float64]


class ScoreColumn(NamedTuple):
    """A score of a corpus, with its limits."""

    key: str
    paths: Sequence[Path]
    """A file for each part of the corpus."""
    kind: str
    """`text`, `tsv`, `jsonl` or `parquet`."""
    column: str | int | None
    low: float
    high: float

    def blocks(self, path: Path) -> Iterator[Floats]:
        """Yield the scores in a file. Raises DataError, with the line, for anything that is not a number."""
        if self.kind == "parquet":
            yield from parquet_numbers(path, str(self.column))
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
                found = _number_in(json.loads(line), str(self.column))
            else:
                found = float(line)
            if math.isnan(found):
                raise ValueError("not a number")
        except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
            where = "" if self.column is None else f" in column {self.column!r}"
            hint = "; if it holds the names of columns, remove it (`tail -n +2`)" if number == 1 else ""
            raise DataError(
                f"{path}, line {number}: no score{where} ({self.key}): {printable(str(error), 100)}; "
                f"the line is: {printable(line)}{hint}"
            ) from None
        return float(found)


def _number_in(record: Any, name: str) -> float:
    """Return the number at the dotted `name` of a JSON object. Raises LookupError or TypeError if there is none."""
    found = record
    for step in _steps(record, name):
        if isinstance(found, list):
            found = found[int(step)]
        elif isinstance(found, dict):
            found = found[step]
        else:
            raise TypeError(f"nothing is inside where {step!r} is looked for")
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise TypeError(f"{name!r} is not a number but {type(found).__name__}")
    return float(found)


def find_scores(corpus: CorpusConfig, key: str, reader: CorpusReader) -> list[ScoreColumn]:
    """Return the scores of a corpus with their files found.

    Raises ConfigError for a column that the format cannot have, DataError for missing, too many or too few files.
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
                "paired in sorted order, so the numbers must agree"
            )
        kinds = {_format(path) or "text" for path in paths}
        if len(kinds) > 1:
            raise ConfigError(f"{key}.path: {score.path} names files of several formats")
        kind = kinds.pop()
        if kind == "text" and score.column is not None:
            # Bicleaner's output may have any name: with a column, the lines are read as TSV.
            kind = "jsonl" if isinstance(score.column, str) else "tsv"
    wanted: type = int if kind == "tsv" else str
    if kind != "text" and not isinstance(score.column, wanted):
        need = "a number from 0, or -1 for the last" if kind == "tsv" else "the name of a field"
        raise ConfigError(f"{key}.column: {score.column!r}; a column of a {kind} file is {need}")
    low = -math.inf if score.min is None else score.min
    return ScoreColumn(key, paths, kind, score.column, low, math.inf if score.max is None else score.max)


class ScoreStream:
    """The scores of a corpus, read along with its pairs to find those beyond a limit."""

    def __init__(self, columns: Sequence[ScoreColumn], reader: CorpusReader) -> None:
        self._columns, self._reader = columns, reader
        self._part = -1
        self._blocks: list[Iterator[Floats]] = []
        self._waiting: list[Floats] = []
        self._pairs = 0

    def unwanted(self, count: int) -> NDArray[np.bool_] | None:
        """Return the mask of the next `count` pairs, true if a score is beyond a limit; None without any scores.

        Raises DataError for a score that is not a number, or if the numbers of lines and pairs differ.
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
