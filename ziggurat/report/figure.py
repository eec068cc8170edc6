"""What a figure shows, apart from how it is drawn: series, heat maps, panels, tables and their numbers as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field

__all__ = ["Figure", "Heat", "Panel", "Row", "Series", "Table", "numbers"]

Row = tuple[float | None, ...]
"""Values in a row; None where there is none, or none that is finite."""


@dataclass(frozen=True)
class Series:
    """One line of a panel.

    Args:
        label: what the legend says; lines of several panels with one label are one entry.
        x: where the points are.
        y: their values, as many as `x`; None leaves a gap.
        run: number of the run, which gives colour and marker; None: the line is of no run.
        variant: which of a run's lines in this panel it is; gives the dashes. 0 is solid.
    """

    label: str
    x: tuple[float, ...]
    y: Row
    run: int | None = None
    variant: int = 0

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"{self.label}: {len(self.x)} places for {len(self.y)} values")


@dataclass(frozen=True)
class Heat:
    """A heat map: one cell for each value.

    Args:
        values: rows of equal length, the lowest row first; None leaves a cell blank.
        columns: what stands below each column.
        rows: what stands beside each row.
        unit: what a value is, beside the colour bar.
        low, high: values at the ends of the colour bar; maps to be compared have the same.
    """

    values: tuple[Row, ...]
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    unit: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if len(self.values) != len(self.rows) or any(len(row) != len(self.columns) for row in self.values):
            raise ValueError(f"{self.unit}: the values do not fill {len(self.rows)} rows of {len(self.columns)} cells")


@dataclass(frozen=True)
class Panel:
    """One pair of axes, with lines or a heat map.

    Args:
        title: short; of a figure's panels no two have the same.
        x_label, y_label: what the axes are, with units.
        series: the lines.
        heat: or a heat map.
        log_x, log_y: logarithmic axes; on such a `log_y` a value of 0 is a gap.
        perplexity: y is in nats; the axis on the right has perplexity, e^y.
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
    """Figures in rows; numbers are printed already."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """One figure of a report.

    Args:
        key: a slug, unique in a report: name of its files, prefix of its identifiers.
        section: heading of the report that it stands under; figures of a section follow each other.
        title: one line.
        caption: what is drawn, from which paper's figure, and how to read it; plain text.
        alt: what a person who cannot see it should know: the values in words; plain text.
        panels: drawn side by side.
        table: the same in figures, where a paper has a table; shown below the panels.
    """

    key: str
    section: str
    title: str
    caption: str
    alt: str
    panels: tuple[Panel, ...] = field(default=())
    table: Table | None = None


def numbers(figure: Figure) -> str:
    """Return what is drawn as CSV with the columns panel, series, x, y, value.

    A point of a line has no `value`, a cell of a heat map no `series`; blank cells and gaps are empty.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["panel", "series", "x", "y", "value"])
    for panel in figure.panels:
        for series in panel.series:
            writer.writerows([panel.title, series.label, x, y, None] for x, y in zip(series.x, series.y, strict=True))
        if panel.heat is not None:
            for row, values in zip(panel.heat.rows, panel.heat.values, strict=True):
                for column, value in zip(panel.heat.columns, values, strict=True):
                    writer.writerow([panel.title, None, column, row, value])
    return text.getvalue()
