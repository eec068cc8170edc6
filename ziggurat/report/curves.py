"""Lines from the records of runs: over training, and over depth at two moments of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ziggurat.diagnosis.records import Record
from ziggurat.report.figure import Panel, Row, Series
from ziggurat.report.runs import ReportRun

__all__ = ["STACKS", "finite", "moments", "over_training", "part_of", "profiles", "series_of_records", "when"]

STACKS = {"encoder": "encoder", "decoder": "decoder"}
"""Titles of the panels of measures that the stacks have."""

_POINTS = 400  # of a line; more would not be seen and would make a page heavy


def finite(values: Iterable[Any]) -> Row:
    """Return the values with None for what is missing or not finite."""
    return tuple(float(v) if v is not None and math.isfinite(v) else None for v in values)


def over_training(label: str, run: int, x: Sequence[float], y: Row, variant: int = 0) -> Series:
    """Return a line over training; of a long one each point is the mean of several, at the last of them."""
    each = math.ceil(len(x) / _POINTS)  # 0 for no points
    if each > 1:
        bins = [slice(i, i + each) for i in range(0, len(x), each)]
        x, y = [x[b][-1] for b in bins], tuple(_mean(y[b]) for b in bins)
    return Series(label, tuple(x), y, run, variant)


def series_of_records(run: ReportRun, path: Sequence[str | int], *, what: str = "", variant: int = 0) -> list[Series]:
    """Return one number of the depth records as a line over training; no line where no record has it.

    Args:
        run: whose records.
        path: keys and indices that lead to the number in a record's values.
        what: said after the run's name.
        variant: of the run's lines in the panel.
    """
    x, y = [], []
    for record in run.depth:
        value: Any = record.values
        try:
            for step in path:
                value = value[step]
        except LookupError:
            continue
        x.append(record.update)
        y.append(value)
    line = over_training(f"{run.name}, {what}" if what else run.name, run.colour, x, finite(y), variant)
    return [line] if any(v is not None for v in line.y) else []


def moments(run: ReportRun, key: str) -> list[Record]:
    """Return the first and the last record with the measure `key`; one where they are the same, none without any."""
    records = [record for record in run.depth if record.values.get(key)]
    return records[:1] + records[-1:] if len(records) > 1 else records


def when(record: Record) -> str:
    """Return the moment of a record in words."""
    return f"update {record.update:,}" if record.update else "before training"


def part_of(record: Record, key: str, part: str) -> list[Any] | None:
    """Return a measure of one stack or sub-layer type; a measure that has no parts is the part ''."""
    values = record.values[key]
    return (values.get(part) if part else values) or None


def profiles(
    runs: Sequence[ReportRun],
    key: str,
    parts: Mapping[str, str],
    y_label: str,
    *,
    log_y: bool = False,
    bottom: int = 1,
    skip: int = 0,
) -> tuple[Panel, ...]:
    """Return a panel for each part of the measure `key` that a run has: its values over depth.

    The last record is solid, the first dashed.

    Args:
        runs: whose records.
        key: of the measure in the records.
        parts: titles of the panels by part; '' is the part of a measure that has none.
        y_label: what the measure is.
        log_y: whether its axis is logarithmic.
        bottom: depth of its lowest value.
        skip: so many of the lowest values are left out.
    """
    panels = []
    for part, title in parts.items():
        series = []
        for run in runs:
            for variant, record in enumerate(reversed(moments(run, key))):
                if (values := part_of(record, key, part)) and len(values) > skip:
                    x = tuple(float(bottom + i) for i in range(skip, len(values)))
                    series.append(Series(f"{run.name}, {when(record)}", x, finite(values[skip:]), run.colour, variant))
        if any(y is not None for line in series for y in line.y):
            panels.append(Panel(title, "layer", y_label, tuple(series), log_y=log_y))
    return tuple(panels)


def _mean(values: Row) -> float | None:
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None
