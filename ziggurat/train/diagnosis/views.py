"""Views of records for experiment trackers: curves, and heat maps on fixed scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ziggurat.train.diagnosis.records import Record

_COLUMNS = 240
"""Most columns of a heat map by update."""


@dataclass(frozen=True)
class Scale:
    """Scale of a heat map's colours, the same for all runs, so that maps of different runs can be compared.

    Attributes:
        low, high: values of the first and of the last colour.
        logarithmic: colours follow the logarithm.
    """

    low: float
    high: float
    logarithmic: bool = False

    def share(self, value: float | None) -> float | None:
        """Return the place of a value, 0 at `low` and 1 at `high`; None, a blank, for a value that was not finite."""
        if value is None:
            return None
        if not self.logarithmic:
            return (value - self.low) / (self.high - self.low)
        return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)


SCALES: Mapping[str, Scale] = {
    "gradient_norm": Scale(1e-5, 10, logarithmic=True),
    "scaled_gradient_norm": Scale(1e-2, 1e3, logarithmic=True),
    "update_ratio": Scale(1e-6, 1e-1, logarithmic=True),
    "variance": Scale(1e-2, 1e4, logarithmic=True),
    "output_change": Scale(1e-4, 1, logarithmic=True),
    "attention_entropy": Scale(0, 4),
    "residual_dependency": Scale(0, 1),
    "history_weights": Scale(-1, 1),
    "transparent_weights": Scale(0, 1),
    "similarity": Scale(-1, 1),
}
"""Measures that have heat maps. The first six are lists over layers: layer by update. The rest are layer by layer."""

_BY_UPDATE = tuple(SCALES)[:6]


@dataclass(frozen=True)
class HeatMap:
    """A heat map.

    Attributes:
        name: measure, place, and axes.
        rows: shares of the measure's scale, the top row first; None is a blank. Layers by update: the top layer first,
            the newest update last in each row. Layer by layer: row and column 0 are the lowest, as papers draw them.
    """

    name: str
    rows: list[list[float | None]]


def scalars(record: Record) -> dict[str, float]:
    """Return the figures of a record for curves: the mean of a list over layers; of gradients its first and last."""
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


def heat_maps(records: Sequence[Record]) -> list[HeatMap]:
    """Return heat maps of the last record's measures: lists over layers by update, matrices of that record alone."""
    if not records:
        return []
    last = records[-1].values
    found = [
        HeatMap(f"{_key(name, place)} by layer and update", _by_update(records, name, place))
        for name, place, value in _figures(last)
        if name in _BY_UPDATE and isinstance(value, list)
    ]
    for name in (name for name in SCALES if name not in _BY_UPDATE):
        matrices = last.get(name, {})
        for place, matrix in (matrices if isinstance(matrices, dict) else {"": matrices}).items():
            rows = [[SCALES[name].share(value) for value in row] for row in matrix]
            if any(rows):
                found.append(HeatMap(f"{_key(name, place)} by layer and layer", rows))
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
    """Yield measure, place and value, except for lists of lists, and for a number that only describes a measure."""
    for name, measured in values.items():
        if name == "gradient_batches":
            continue
        for place, value in (measured if isinstance(measured, dict) else {"": measured}).items():
            if not (isinstance(value, list) and any(isinstance(row, list) for row in value)):
                yield name, place, value


def _key(name: str, place: str) -> str:
    return f"{name}.{place}" if place else name
