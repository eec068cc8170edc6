"""Colours of figures: one for each run, told apart by colour-blind readers too, on light and on dark pages.

A test holds both sets to a contrast of 3 : 1 with their background and to a distance between any two runs' colours, as
people with normal vision, protanopia and deuteranopia see them. Markers and dashes tell the same apart without colour.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DARK", "DASHES", "GRID", "INK", "LIGHT", "MARKERS", "colour_of_run", "name_of_run", "variable"]

INK, MUTED, GRID = "--figure-ink", "--figure-muted", "--figure-grid"
"""Names of the CSS variables of text, of lines that belong to no run, and of the lines behind."""

_LIGHT_RUNS = ("#22659c", "#df681b", "#119d7b", "#69144c", "#503e03", "#12197e", "#66635a", "#4e0f04")
_DARK_RUNS = ("#98cdf1", "#ef7d3b", "#5cebb1", "#df3eb6", "#f4cc4d", "#9a9ff9", "#aba8ad", "#e0321e")

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Marker of each run, in matplotlib's letters."""

DASHES: tuple[tuple[float, ...], ...] = ((), (4.0, 2.0), (1.0, 1.6), (6.0, 1.8, 1.0, 1.8), (8.0, 2.5), (2.5, 1.0))
"""Lengths of dash and gap of each variant of a run's lines, in line widths; the first is solid."""


def name_of_run(run: int) -> str:
    """Return the CSS variable of the colour of run number `run`; after the last colour the first comes again."""
    return f"--run-{run % len(_LIGHT_RUNS)}"


def colour_of_run(run: int | None) -> str:
    """Return the colour of run number `run` on white paper; None: of a line that belongs to no run."""
    return LIGHT[MUTED if run is None else name_of_run(run)]


def variable(colour: str) -> str | None:
    """Return CSS for a colour of `LIGHT` (`#rrggbb`) that a page can change by its variable; None for others."""
    name = _NAMES.get(colour.lower())
    return None if name is None else f"var({name}, {colour.lower()})"


def _palette(ink: str, muted: str, grid: str, runs: tuple[str, ...]) -> dict[str, str]:
    return {INK: ink, MUTED: muted, GRID: grid} | {name_of_run(i): colour for i, colour in enumerate(runs)}


LIGHT: Mapping[str, str] = _palette("#1f2328", "#6a7079", "#dfe2e6", _LIGHT_RUNS)
"""CSS variables of a page with a white background, by name."""

DARK: Mapping[str, str] = _palette("#e6e8eb", "#969da7", "#3a3f47", _DARK_RUNS)
"""The same for a page with a background about #16181d."""

_NAMES = {colour: name for name, colour in LIGHT.items()}
