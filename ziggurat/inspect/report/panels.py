"""Panels of figures, made from the records of runs: lines over training, lines over depth, heat maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ziggurat.inspect.report.figure import Heat, Panel, Row, Series
from ziggurat.inspect.report.runs import ReportRun
from ziggurat.train.diagnosis.records import Record

STACKS = {"encoder": "encoder", "decoder": "decoder"}
"""Stack -> title of its panel."""

_POINTS = 400  # of a line at most: more cannot be seen and would make the page heavy


def finite(values: Iterable[Any]) -> Row:
    """Return the values with None for what is missing or not finite."""
    return tuple(float(v) if v is not None and math.isfinite(v) else None for v in values)


# Lines


def line_over_training(label: str, run: int, x: Sequence[float], y: Row, variant: int = 0) -> Series:
    """Return a line over training. In a long one, each point is the mean of several, drawn at the last of them."""
    each = math.ceil(len(x) / _POINTS)  # 0 without points
    if each > 1:
        bins = [slice(i, i + each) for i in range(0, len(x), each)]
        x, y = [x[b][-1] for b in bins], tuple(_mean(y[b]) for b in bins)
    return Series(label, tuple(x), y, run, variant)


def _mean(values: Row) -> float | None:
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None


def lines_of_records(run: ReportRun, path: Sequence[str | int], *, what: str = "", variant: int = 0) -> list[Series]:
    """Return one number of the depth records as a line over training; empty where no record has it.

    Args:
        run: the run with the records.
        path: keys and indices that lead to the number in a record's values.
        what: words after the run's name in the label.
        variant: number of the line among those of the run in a panel.
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
    line = line_over_training(f"{run.name}, {what}" if what else run.name, run.colour, x, finite(y), variant)
    return [line] if any(v is not None for v in line.y) else []


def moments(run: ReportRun, key: str) -> list[Record]:
    """Return the first and the last record with the measure `key`: two, one if they are the same, or none."""
    records = [record for record in run.depth if record.values.get(key)]
    return records[:1] + records[-1:] if len(records) > 1 else records


def when(record: Record) -> str:
    """Return the moment of a record in words."""
    return f"update {record.update:,}" if record.update else "before training"


def part_of(record: Record, key: str, part: str) -> list[Any] | None:
    """Return a measure of one part: a stack or a sub-layer type, '' for a measure without parts; None if empty."""
    values = record.values[key]
    return (values.get(part) if part else values) or None


def training_panel(
    title: str,
    y_label: str,
    lines: Sequence[Series],
    *,
    x_label: str = "update",
    log_y: bool = False,
    perplexity: bool = False,
) -> tuple[Panel, ...]:
    """Return a panel of lines over training, by update unless `x_label` says otherwise; empty where there are none."""
    return (Panel(title, x_label, y_label, tuple(lines), log_y=log_y, perplexity=perplexity),) if lines else ()


def depth_panels(
    runs: Sequence[ReportRun],
    key: str,
    parts: Mapping[str, str],
    y_label: str,
    *,
    log_y: bool = False,
    bottom: int = 1,
    skip: int = 0,
) -> tuple[Panel, ...]:
    """Return a panel for each part of the measure `key`, with its values over depth.

    The last record is solid, the first dashed.

    Args:
        runs: the runs to draw.
        key: name of the measure in the records.
        parts: part -> title of its panel; '' stands for a measure without parts.
        y_label: name of the measure.
        log_y: whether its axis is logarithmic.
        bottom: depth of the lowest value.
        skip: number of the lowest values to leave out.
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


# Heat maps


def square(rows: Sequence[Sequence[float | None]]) -> tuple[Row, ...]:
    """Return rows padded with blanks to the length of the longest."""
    width = max((len(row) for row in rows), default=0)
    return tuple(finite(row) + (None,) * (width - len(row)) for row in rows)


def stack_maps(
    runs: Sequence[ReportRun], key: str, cells: Callable[[list[Any]], tuple[Row, ...]]
) -> list[tuple[str, tuple[Row, ...]]]:
    """Return the matrix `key` of each stack at the last record of each run, titled; `cells` makes its rows."""
    maps = []
    for run in runs:
        for record in moments(run, key)[-1:]:
            for stack in STACKS:
                if values := part_of(record, key, stack):
                    maps.append((f"{run.name}, {stack}", cells(values)))
    return maps


def heat_panels(
    maps: Sequence[tuple[str, tuple[Row, ...]]],
    *,
    x_label: str | Sequence[str],
    y_label: str,
    unit: str,
    columns: Sequence[Sequence[str]] | None = None,
    first_row: int = 0,
) -> tuple[Panel, ...]:
    """Return a panel for each map, all on one colour scale.

    Args:
        maps: titles and values, the lowest row first.
        x_label: name of the columns; a list where the maps differ.
        y_label: name of the rows.
        unit: name of the values.
        columns: labels below the columns of each map; default: numbers from 0.
        first_row: number of the lowest row.
    """
    known = [value for _, rows in maps for row in rows for value in row if value is not None]
    if not known:
        return ()
    low, high = min(known), max(known)
    high = high if high > low else low + 1.0  # a map of equal values still needs a scale
    panels = []
    for i, (title, rows) in enumerate(maps):
        below = columns[i] if columns is not None else [str(c) for c in range(len(rows[0]))]
        beside = tuple(str(r) for r in range(first_row, first_row + len(rows)))
        label = x_label if isinstance(x_label, str) else x_label[i]
        panels.append(Panel(title, label, y_label, heat=Heat(rows, tuple(below), beside, unit, low, high)))
    return tuple(panels)
