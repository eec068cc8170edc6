"""Records of a run's depth measures: their file, and the numbers and heat maps that are drawn of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from ziggurat.system.errors import DataError, other_format
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import built, json_safe, parse_json, read_json_lines

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
