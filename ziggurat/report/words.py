"""Figures in words, for those who cannot see them."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.report.figure import Figure, Heat, Panel, Series, Table

__all__ = ["described", "in_words"]

_TOLD = 12  # lines of a panel that are told one by one


def described(
    key: str, section: str, title: str, caption: str, panels: tuple[Panel, ...], table: Table | None = None
) -> Figure | None:
    """Return a figure with what its panels show in words; None where there are no panels."""
    return Figure(key, section, title, caption, in_words(panels), panels, table) if panels else None


def in_words(panels: Sequence[Panel]) -> str:
    """Return what the panels show: of each line its ends and its range, of each heat map its range and where it is."""
    return " ".join(_panel(panel) for panel in panels)


def _panel(panel: Panel) -> str:
    if panel.heat is not None:
        return f"{panel.title}: heat map, {panel.y_label} against {panel.x_label}, {_heat(panel.heat)}."
    told = [_series(series, panel.x_label) for series in panel.series[:_TOLD]]
    more = [f"{len(panel.series) - _TOLD} more lines"] if len(panel.series) > _TOLD else []
    return f"{panel.title}: {panel.y_label} by {panel.x_label}; {'; '.join(told + more)}."


def _series(series: Series, place: str) -> str:
    points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]
    if not points:
        return f"{series.label}: no finite value"
    (first, begin), (last, end) = points[0], points[-1]
    if len(points) == 1:
        return f"{series.label}: {begin:.3g} at {place} {first:g}"
    values = [y for _, y in points]
    ends = f"{begin:.3g} at {place} {first:g}, {end:.3g} at {last:g}"
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
    (low, *below), (high, *above) = min(cells), max(cells)
    blank = len(heat.rows) * len(heat.columns) - len(cells)
    return (
        f"{size}, {blank} of them blank; {heat.unit} from {low:.3g} (row {below[0]}, column {below[1]}) "
        f"to {high:.3g} (row {above[0]}, column {above[1]})"
    )
