"""The content of a figure, before it is drawn: panels of lines or heat maps, and a table.

Two forms need no drawing: the numbers as CSV, and a text description for readers who cannot see the figure.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

Row = tuple[float | None, ...]
"""Values in a row; None if a value is missing or not finite."""


@dataclass(frozen=True)
class Series:
    """One line of a panel.

    Args:
        label: text of the legend; lines with the same label, run and variant share an entry.
        x: positions of the points.
        y: their values, as many as `x`; None leaves a gap.
        run: number of the run, which gives colour and marker; None: the line belongs to no run.
        variant: number of the line among those of its run, which gives the dashes; 0 is solid.
        spread: half the length of each point's error bar, in the unit of `y`; None: a point without one. Empty: no
            point has one.
        name: its run, method or corpus, if that is not the whole label.
        update: update of its record; None for a line over training.
    """

    label: str
    x: tuple[float, ...]
    y: Row
    run: int | None = None
    variant: int = 0
    spread: Row = ()
    name: str = field(default="", compare=False)
    update: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or (self.spread and len(self.spread) != len(self.y)):
            spread = f" and {len(self.spread)} error bars" if self.spread else ""
            raise ValueError(f"{self.label}: {len(self.x)} positions for {len(self.y)} values{spread}")


@dataclass(frozen=True)
class Heat:
    """A heat map: one cell for each value.

    Args:
        values: rows of equal length, the lowest row first; None leaves a cell blank.
        columns: labels below the columns.
        rows: labels of the rows.
        unit: label of the colour bar.
        low, high: values at the ends of the colour bar; equal in maps that should be comparable.
        name, update: its run and record; None for a map over training.
    """

    values: tuple[Row, ...]
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    unit: str
    low: float
    high: float
    name: str = ""
    update: int | None = None

    def __post_init__(self) -> None:
        if len(self.values) != len(self.rows) or any(len(row) != len(self.columns) for row in self.values):
            raise ValueError(f"{self.unit}: the values do not fill {len(self.rows)} rows of {len(self.columns)} cells")


@dataclass(frozen=True)
class Panel:
    """One pair of axes, with lines or a heat map.

    Args:
        title: short title, unique in the figure.
        x_label, y_label: labels of the axes, with units.
        series: the lines.
        heat: a heat map, instead of lines.
        log_x, log_y: logarithmic axes; with `log_y`, values of 0 or less are gaps.
        perplexity: y is in nats; a second axis on the right shows the perplexity, e^y.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...] = ()
    heat: Heat | None = None
    log_x: bool = False
    log_y: bool = False
    perplexity: bool = False


@dataclass(frozen=True)
class Table:
    """A table of text, with formatted numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """One figure of a report.

    Args:
        key: a slug, unique in a report, used as file name and prefix of identifiers.
        section: heading in the report; figures of a section are consecutive.
        title: title on one line.
        caption: the quantities drawn, the figure of a paper that they follow, and how to read them; plain text.
        alt: description of the values for readers who cannot see the figure; plain text.
        panels: the panels, drawn side by side.
        table: the same as numbers, if a paper has a table; shown below the panels.
    """

    key: str
    section: str
    title: str
    caption: str
    alt: str
    panels: tuple[Panel, ...] = field(default=())
    table: Table | None = None


def numbers(figure: Figure) -> str:
    """Return the numbers of a figure as CSV with the columns panel, series, run, update, x, y, value.

    A point of a line has no `value`, a cell of a heat map no `series`; gaps and blank cells are empty. In figures of
    methods or corpora, `run` is one of these. A figure with error bars has a column `spread`.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spread = any(series.spread for panel in figure.panels for series in panel.series)
    writer.writerow(["panel", "series", "run", "update", "x", "y", "value", *(["spread"] if spread else [])])
    for panel in figure.panels:
        for series in panel.series:
            bars = series.spread or (None,) * len(series.y)
            of = [panel.title, series.label, series.name or series.label, series.update]
            for x, y, bar in zip(series.x, series.y, bars, strict=True):
                writer.writerow([*of, x, y, None, *([bar] if spread else [])])
        if panel.heat is not None:
            for row, values in zip(panel.heat.rows, panel.heat.values, strict=True):
                for column, value in zip(panel.heat.columns, values, strict=True):
                    writer.writerow([panel.title, None, panel.heat.name, panel.heat.update, column, row, value])
    return text.getvalue()


# In words

_DESCRIBED = 12  # lines of a panel described individually


def described(
    key: str, section: str, title: str, caption: str, panels: tuple[Panel, ...], table: Table | None = None
) -> Figure | None:
    """Return a figure with the description of its panels; None without panels."""
    return Figure(key, section, title, caption, in_words(panels), panels, table) if panels else None


def in_words(panels: Sequence[Panel]) -> str:
    """Return a description: ends and range of each line, extremes of each heat map and their cells."""
    return " ".join(_panel(panel) for panel in panels)


def _panel(panel: Panel) -> str:
    if panel.heat is not None:
        return f"{panel.title}: heat map, {panel.y_label} against {panel.x_label}, {_heat(panel.heat)}."
    lines = [_series(series, panel.x_label) for series in panel.series[:_DESCRIBED]]
    more = [f"{len(panel.series) - _DESCRIBED} more lines"] if len(panel.series) > _DESCRIBED else []
    return f"{panel.title}: {panel.y_label} by {panel.x_label}; {'; '.join(lines + more)}."


def _series(series: Series, x_label: str) -> str:
    points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]
    if not points:
        return f"{series.label}: no finite value"
    (first, begin), (last, end) = points[0], points[-1]
    if len(points) == 1:
        return f"{series.label}: {begin:.3g} at {x_label} {first:g}"
    values = [y for _, y in points]
    ends = f"{begin:.3g} at {x_label} {first:g}, {end:.3g} at {last:g}"
    return f"{series.label}: {ends}, between {min(values):.3g} and {max(values):.3g}"


def _heat(heat: Heat) -> str:
    cells = [
        (value, row, column)
        for row, values in zip(heat.rows, heat.values, strict=True)
        for column, value in zip(heat.columns, values, strict=True)
        if value is not None
    ]
    size = f"{len(heat.rows)} rows of {len(heat.columns)} cells"
    if not cells:
        return f"{size}, all blank"
    (low, low_row, low_column), (high, high_row, high_column) = min(cells), max(cells)
    blank = len(heat.rows) * len(heat.columns) - len(cells)
    return (
        f"{size}, {blank} of them blank; {heat.unit} from {low:.3g} (row {low_row}, column {low_column}) "
        f"to {high:.3g} (row {high_row}, column {high_column})"
    )
