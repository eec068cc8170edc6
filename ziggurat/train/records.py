"""Records of a run: metrics, depth measures and messages, and their delivery to trackers and users."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import Field, TypeAdapter
from rich.console import Console

from ziggurat.model.run_folder import refuse_replaced
from ziggurat.system.errors import CheckpointError, DataError, TrainingError, other_format
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import built, check_regular, json_safe, parse_json, read_json_lines
from ziggurat.system.terminal import print_message, safe
from ziggurat.train.trackers import Listener, draw

_RECORD_FORMAT = 1
"""_RECORD_FORMAT is the format version of the records."""

DEPTH_FILE = Path("diagnostics") / "depth.jsonl"
"""DEPTH_FILE is the file of the depth records in a run's folder."""


_Number = float | None
_NAMES: dict[TypeAdapter[Any], str] = {
    TypeAdapter(Annotated[int, Field(ge=1)]): "gradient_batches",
    TypeAdapter(_Number): "nll source_dependence",
    TypeAdapter(dict[str, _Number | list[_Number]]): "gradient_norm scaled_gradient_norm update_ratio",
    TypeAdapter(dict[str, _Number]): "r effective_depth",
    TypeAdapter(dict[str, list[_Number]]): "beta_ln beta_rc beta variance output_change attention_entropy "
    "pruning_curve pruning_bleu logit_lens",
    TypeAdapter(dict[str, list[list[_Number]]]): "residual_dependency history_weights angular_distance causal_score "
    "permutation_score loss_without",
    TypeAdapter(list[list[_Number]]): "transparent_weights similarity",
    TypeAdapter(list[_Number]): "embedding_similarity adjacent_similarity inter_similarity",
}
_FORMS = {name: form for form, names in _NAMES.items() for name in names.split()}
"""_FORMS maps every measure to its form; a record may also contain other values."""


@dataclass(frozen=True)
class Record:
    """Measures at one moment of training.

    Attributes:
        update: updates done before it.
        time: seconds since 1970.
        layers: number of layers of `encoder` and `decoder` at that moment; a growing run has several depths.
        values: measures by name; None for a number that is undefined or not finite.
    """

    update: Annotated[int, Field(ge=0, le=10**12)]
    time: float
    layers: dict[str, Annotated[int, Field(ge=0, le=1 << 20)]]
    values: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the record in the form written to file, with None for numbers that are not finite."""
        return {"format": _RECORD_FORMAT, **asdict(self), "values": json_safe(self.values)}

    def line(self) -> str:
        """Return the record as one line of the file, including the line feed."""
        return json.dumps(self.as_dict(), allow_nan=False) + "\n"


def read_records(run: Path) -> list[Record]:
    """Return the records of a run in the order of updates; of two records for one update, the later one.

    Returns none if there is no file. A last line truncated by a kill is ignored. Raises DataError, with file and line,
    for a damaged record, or one of another format.
    """
    found = {record.update: record for record in read_json_lines(run / DEPTH_FILE, _record, "a record of measures")}
    return [found[update] for update in sorted(found)]


def _record(document: Any, place: str) -> Record:
    version = document.pop("format")
    if version != _RECORD_FORMAT:
        raise DataError(other_format(place, version, _RECORD_FORMAT, "remove the file"))
    record = built(Record, document)
    for name, form in _FORMS.items():
        if name in record.values:
            form.validate_python(record.values[name])
    return record


def write_records(run: Path, records: Iterable[Record]) -> Path:
    """Replace the records of a run, atomically; return the file. Raises OSError."""
    path = run / DEPTH_FILE
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, "".join(record.line() for record in records).encode())
    return path


def cut_records(run: Path, update: int) -> None:
    """Remove the records after `update`, at which a run restarts, and damaged lines; at 0 remove all.

    Raises OSError.
    """
    keep_lines(run / DEPTH_FILE, lambda record: update > 0 and record["update"] <= update)


def keep_lines(path: Path, stays: Callable[[Any], bool]) -> None:
    """Rewrite a file of JSON lines with those that are kept; damaged or truncated lines are dropped.

    Raises OSError.
    """

    def whole(line: bytes) -> bool:
        try:
            return line.endswith(b"\n") and stays(parse_json(line, ""))
        except (DataError, KeyError, TypeError):
            return False

    if path.is_file():  # the null device is not a file
        lines = path.read_bytes().splitlines(keepends=True)
        write_atomically(path, b"".join(line for line in lines if whole(line)))


_COLUMNS = 240
"""_COLUMNS is the largest number of columns of a heat map by update."""


@dataclass(frozen=True)
class ColourScale:
    """Colour scale of a heat map, the same for all runs, so that their maps can be compared.

    Attributes:
        low, high: values of the first and of the last colour.
        logarithmic: whether colours follow the logarithm.
    """

    low: float
    high: float
    logarithmic: bool = False

    def share(self, value: float | None) -> float | None:
        """Return the position of a value, 0 at `low` and 1 at `high`; None, a blank cell, if it is not finite."""
        if value is None:
            return None
        if not self.logarithmic:
            return (value - self.low) / (self.high - self.low)
        return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)


SCALES: Mapping[str, ColourScale] = {
    "gradient_norm": ColourScale(1e-5, 10, logarithmic=True),
    "scaled_gradient_norm": ColourScale(1e-2, 1e3, logarithmic=True),
    "update_ratio": ColourScale(1e-6, 1e-1, logarithmic=True),
    "variance": ColourScale(1e-2, 1e4, logarithmic=True),
    "output_change": ColourScale(1e-4, 1, logarithmic=True),
    "attention_entropy": ColourScale(0, 4),
    "residual_dependency": ColourScale(0, 1),
    "history_weights": ColourScale(-1, 1),
    "transparent_weights": ColourScale(0, 1),
    "similarity": ColourScale(-1, 1),
}
"""Colour scales of the measures with heat maps. The first six are lists over layers: layer by update. The rest are
layer by layer."""

_BY_UPDATE = tuple(SCALES)[:6]


def scalars(record: Record) -> dict[str, float]:
    """Return the figures of a record for curves: the mean of a list over layers; for gradients, the first and last."""
    found: dict[str, float | None] = {}
    for name, place, value in _figures(record.values):
        if isinstance(value, list):
            finite = [v for v in value if isinstance(v, int | float)]
            if name == "gradient_norm" and value:
                found[f"{name}.{place}.first"], found[f"{name}.{place}.last"] = value[0], value[-1]
            elif finite:
                found[_key(name, place)] = sum(finite) / len(finite)
        else:
            found[_key(name, place)] = value
    return {name: float(value) for name, value in found.items() if value is not None}


def heat_maps(records: Sequence[Record]) -> dict[str, list[list[float | None]]]:
    """Return heat maps of the last record's measures: lists over layers by update, matrices of that record alone.

    Each is keyed by its name (measure, place, and axes) and has positions on the measure's scale, top row first; None
    is a blank cell. Layers by update: the top layer first, the newest update last in each row. Layer by layer: row and
    column 0 are the lowest, as in papers.
    """
    if not records:
        return {}
    last = records[-1].values
    found = {
        f"{_key(name, place)} by layer and update": _by_update(records, name, place)
        for name, place, value in _figures(last)
        if name in _BY_UPDATE and isinstance(value, list)
    }
    for name in (name for name in SCALES if name not in _BY_UPDATE):
        matrices = last.get(name, {})
        for place, matrix in (matrices if isinstance(matrices, dict) else {"": matrices}).items():
            rows = [[SCALES[name].share(value) for value in row] for row in matrix]
            if any(rows):
                found[f"{_key(name, place)} by layer and layer"] = rows
    return found


def thinned(records: Sequence[Record]) -> Sequence[Record]:
    """Return every k-th record, counted from the last, with the smallest k that leaves at most 240."""
    step = -(-len(records) // _COLUMNS) or 1
    return records[::-1][::step][::-1]


def _by_update(records: Sequence[Record], name: str, place: str) -> list[list[float | None]]:
    having = [r for r in records if (r.values.get(name, {}).get(place) if place else r.values.get(name))]
    found = (r.values[name][place] if place else r.values[name] for r in thinned(having))
    columns = [[SCALES[name].share(value) for value in values] for values in found]
    height = max(map(len, columns))
    return [[c[layer] if layer < len(c) else None for c in columns] for layer in reversed(range(height))]


def _figures(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield measure, place and value, except for lists of lists and numbers that only describe a measure."""
    for name, measured in values.items():
        if name == "gradient_batches":
            continue
        for place, value in (measured if isinstance(measured, dict) else {"": measured}).items():
            if not (isinstance(value, list) and any(isinstance(row, list) for row in value)):
                yield name, place, value


def _key(name: str, place: str) -> str:
    return f"{name}.{place}" if place else name


CLOCK_FIELDS = frozenset(
    (
        *("time", "seconds", "target_tokens_per_second", "source_tokens_per_second"),
        *("data_wait_share", "checkpoint_wait"),
    )
)
"""CLOCK_FIELDS are the values of a record that depend on the clock; all others are the same in any run with one
configuration, data and seed, regardless of interruptions."""

_METRICS = "metrics.jsonl"
_GONE = "was removed or replaced while training wrote to it; from here on there is a new file"
_CLOSING_SECONDS = 30.0
"""_CLOSING_SECONDS is the time for all trackers together to send their last records at the end."""


def _is_gone(path: Path, file: TextIO) -> bool:
    """Return whether an open file of a run was removed or replaced, so that writes to it would be lost."""
    if os.fstat(file.fileno()).st_nlink:
        return False
    try:
        refuse_replaced(path.parent)
    except TrainingError:  # the whole folder, as the next checkpoint reports; new content belongs to another run
        return False
    return True


class MetricsWriter:
    """Appends records to `metrics.jsonl` and passes them to trackers.

    Args:
        run: folder of the run; None: nothing is written (all processes except the first).
        log: reports, once each, that records cannot be written and that a tracker failed.
        update: where training starts; records after it, left by a run that was killed, are removed.
        trackers: receivers of the records; one that fails is left out from then on.
        validated: False when the validation of `update` is still to be done; a record of it, left by a run that was
            killed right after, is also removed.
        goes_on: True when the window of a partial record of `update` is continued, so that the record is removed.
    """

    def __init__(
        self,
        run: Path | None,
        log: RunLog,
        *,
        update: int,
        trackers: Sequence[Listener] = (),
        validated: bool = True,
        goes_on: bool = False,
    ) -> None:
        self._log, self._gaps = log, False
        self._trackers = list(trackers)
        # Other processes write to the null device, so that all run the same code.
        self._path = Path(os.devnull) if run is None else run / _METRICS
        last = {"train": update, "validation": update if validated else update - 1}
        if run is not None and self._path.exists():
            check_regular(self._path, error=CheckpointError)

        def stays(record: Any) -> bool:
            taken_back = goes_on and record["update"] == update and "partial" in record
            return bool(record["update"] <= last[record["kind"]]) and not taken_back

        self._file = self._open(stays)

    def _open(self, stays: Callable[[Any], bool]) -> TextIO:
        try:
            keep_lines(self._path, stays)
            return self._path.open("a", encoding="utf-8")
        except OSError as error:
            # Nothing is appended to records that could not be removed, because some would then be duplicated.
            self._complain(error)
            return Path(os.devnull).open("a", encoding="utf-8")

    def write(
        self,
        kind: str,
        update: int,
        values: Mapping[str, float | int | None],
        *,
        partial: bool = False,
        track: bool = True,
    ) -> None:
        """Add one record.

        Figures that are None are left out, and in the file also those that are not finite. `partial` marks a record
        that is not at a multiple of `training.log_every_updates`; `track` also passes it to trackers.
        """
        record = {"kind": kind, "update": update, "time": round(time.time(), 3), **values}
        record |= {"partial": True} if partial else {}
        # JSON has no numbers that are not finite.
        record = {k: v for k, v in record.items() if isinstance(v, str) or (v is not None and math.isfinite(v))}
        try:
            if not self._gaps and _is_gone(self._path, self._file):
                self._log.say(f"{self._path} {_GONE}", "yellow")
                self._file = self._path.open("a", encoding="utf-8")
            # Flushed at once: a killed run that resumes from a later checkpoint does not write this record again.
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._complain(error)
        if track:
            self.tell(kind, update, {name: value for name, value in values.items() if value is not None})

    def tell(self, kind: str, update: int, values: Mapping[str, float | int]) -> None:
        """Pass figures to trackers only, as `kind/name`."""
        figures = {f"{kind}/{name}": float(value) for name, value in values.items()}
        for tracker in self._working():
            tracker.scalars(update, figures)

    def draw(self, name: str, update: int, rows: Sequence[Sequence[float | None]]) -> None:
        """Pass a heat map of shares from 0 to 1 to trackers, top row first (ziggurat.train.trackers)."""
        for tracker in self._working():
            tracker.image(update, name, partial(draw, rows))

    def _working(self) -> list[Listener]:
        """Return the trackers that have not failed; log once why one has."""
        for tracker in self._trackers:
            if tracker.failure is not None:
                self._log.say(
                    f"{tracker.name} is left out from now on; training continues: {tracker.failure}", "yellow"
                )
        self._trackers = [tracker for tracker in self._trackers if tracker.failure is None]
        return self._trackers

    def _complain(self, error: OSError) -> None:
        if not self._gaps:
            self._gaps = True
            self._log.say(f"{self._path} cannot be written: {error.strerror}", "bold red")

    def close(self) -> None:
        """Flush and close; trackers have half a minute in total to send their last records."""
        try:
            with self._file:
                self._file.flush()
                # fsync fails on /dev/null, to which all processes except the first write.
                if self._file.name != os.devnull:
                    os.fsync(self._file.fileno())
        except OSError as error:
            self._complain(error)
        end = time.monotonic() + _CLOSING_SECONDS
        for tracker in self._working():
            if not tracker.close(max(0.0, end - time.monotonic())):
                self._log.say(
                    f"{tracker.name} has not taken all records in time; training no longer waits for it", "yellow"
                )
            elif tracker.left_out:
                self._log.say(f"{tracker.name} was too slow: {tracker.left_out} records are missing there", "yellow")
        self._working()  # a tracker may have failed while it sent the rest


class RunLog:
    """Messages of a run, to the console (standard error) and, with the time, to `log.txt`.

    When one of them cannot be written, the other reports it once. Without `run` there is no file.
    """

    def __init__(self, run: Path | None, console: Console) -> None:
        self._path = Path(os.devnull) if run is None else run / "log.txt"
        self._console = safe(console)
        self._gaps = self._deaf = False
        if run is not None and self._path.exists():
            check_regular(self._path, error=CheckpointError)
        self._file = self._open()

    def _open(self) -> TextIO:
        # A path in a message may contain bytes that are not UTF-8; written as escapes, they do not end a run.
        try:
            return self._path.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self._complain(error)
            return Path(os.devnull).open("a", encoding="utf-8")

    def say(self, message: str, style: str | None = None) -> None:
        """Print and log one line; markup in it is printed verbatim."""
        print_message(self._console, message, style)
        self._write(message)
        # ziggurat.system.terminal.Messages, to which the console writes, remembers why a message was lost.
        reason = getattr(self._console.file, "failure", None)
        if reason is not None and not self._deaf:
            self._deaf = True
            self._write(
                f"standard error cannot be written ({reason}): from here on messages may appear in this file only"
            )

    def _write(self, message: str) -> None:
        try:
            if not self._gaps and _is_gone(self._path, self._file):
                self._file = self._open()
                message = f"{self._path} {_GONE}\n{message}"
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}\n")
            self._file.flush()
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._gaps:
            self._gaps = True
            print_message(self._console, f"{self._path} cannot be written: {error.strerror}", "bold red")

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            self._complain(error)
