"""Heat maps side by side, on one colour scale."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.report.curves import finite
from ziggurat.report.figure import Heat, Panel, Row

__all__ = ["heat_panels", "square"]


def square(rows: Sequence[Sequence[float | None]]) -> tuple[Row, ...]:
    """Return rows of any lengths as rows of the longest one's; what is missing is blank."""
    width = max((len(row) for row in rows), default=0)
    return tuple(finite(row) + (None,) * (width - len(row)) for row in rows)


def heat_panels(
    maps: Sequence[tuple[str, tuple[Row, ...]]],
    *,
    x_label: str | Sequence[str],
    y_label: str,
    unit: str,
    columns: Sequence[Sequence[str]] | None = None,
    first_row: int = 0,
) -> tuple[Panel, ...]:
    """Return a panel for each of the titled maps, with one colour scale for all.

    Args:
        maps: titles and values, the lowest row first.
        x_label: what columns are; in each of the maps, where they differ.
        y_label: what rows are.
        unit: what the values are.
        columns: what stands below the columns of each map; without it they are numbered from 0.
        first_row: number of the lowest row.
    """
    known = [value for _, rows in maps for row in rows for value in row if value is not None]
    if not known:
        return ()
    low, high = min(known), max(known)
    high = high if high > low else low + 1.0  # a map of one value still has a scale
    panels = []
    for i, (title, rows) in enumerate(maps):
        below = columns[i] if columns is not None else [str(c) for c in range(len(rows[0]))]
        beside = tuple(str(r) for r in range(first_row, first_row + len(rows)))
        label = x_label if isinstance(x_label, str) else x_label[i]
        panels.append(Panel(title, label, y_label, heat=Heat(rows, tuple(below), beside, unit, low, high)))
    return tuple(panels)
