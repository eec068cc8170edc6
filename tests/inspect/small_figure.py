"""A figure to draw. Imports nothing heavy, for tests that draw it in another process."""

from __future__ import annotations

from ziggurat.inspect.report.figure import Figure, Heat, Panel, Series


def small(label: str = "a", key: str = "small") -> Figure:
    """A figure with a line and a map."""
    lines = (Series(label, (1, 2, 3), (0.1, None, 0.001), 0), Series(label, (1, 2, 3), (0.2, 0.1, 0.05), 1, 1))
    heat = Heat(((1.0, None), (0.5, 0.25)), ("0", "1"), ("0", "1"), "weight", 0, 1)
    panels = (Panel(label, "layer", "norm", lines, log_y=True), Panel("map", "source", "consumer", heat=heat))
    return Figure(key, "Depth", label, "caption", "alt", panels)
