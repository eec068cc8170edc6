"""Figures for a paper: all panels of a figure in one PNG, SVG or PDF file."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from ziggurat.inspect.report.drawing import (
    HEIGHT,
    WIDTH,
    clean,
    draw_panel,
    legend_entries,
    line_of,
    new_canvas,
    settings,
    shown,
)
from ziggurat.inspect.report.figure import Figure
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import write_atomically

_SCALE = 0.72  # a panel is 245 points wide, a column of a two-column paper, and its text 8 points high
_DOTS_PER_INCH = 300
_ACROSS = 3  # panels in a row, at most

FORMATS: dict[str, tuple[type[Any], dict[str, None]]] = {
    "png": (FigureCanvasAgg, {}),
    "svg": (FigureCanvasSVG, {"Date": None}),
    "pdf": (FigureCanvasPdf, {"CreationDate": None}),
}
"""Format -> its canvas, and the dates to leave out so that the same figure gives the same bytes."""


def save(figure: Figure, folder: Path, formats: Sequence[str] = tuple(FORMATS)) -> list[Path]:
    """Write `figure` on white, without title and caption, to `folder/KEY.FORMAT` for each format; return the paths.

    A file has either its old content or the complete new one. Text in SVG and PDF stays text.

    Raises ConfigError for a format that is not in `FORMATS`.
    """
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ConfigError(f"figures cannot be written as {unknown[0]!r}; use {', '.join(FORMATS)}")
    paths = []
    with settings(figure.key, scale=_SCALE):
        for name in formats:
            canvas = _drawn(figure)  # for each format, since writing one may move parts of the layout
            writer, left_out = FORMATS[name]
            file = io.BytesIO()
            writer(canvas)
            metadata = {"Title": clean(figure.title), **left_out}
            canvas.savefig(file, format=name, dpi=_DOTS_PER_INCH, facecolor="white", metadata=metadata)
            paths.append(folder / f"{figure.key}.{name}")
            write_atomically(paths[-1], file.getvalue())
    return paths


def _drawn(figure: Figure) -> Canvas:
    """Return a canvas with all panels in rows and the legend below them."""
    across = min(_ACROSS, len(figure.panels))
    down = math.ceil(len(figure.panels) / across)
    entries = legend_entries(figure.panels)
    columns = min(across, len(entries)) or 1
    legend_height = 1.6 * 10 * _SCALE * math.ceil(len(entries) / columns)  # text of 10 points, 1.6 lines apart
    canvas = new_canvas(WIDTH * _SCALE * across, HEIGHT * _SCALE * down + legend_height)
    for number, panel in enumerate(figure.panels, start=1):
        draw_panel(canvas.add_subplot(down, across, number), panel, figure.panels)
    if entries:
        legend = canvas.legend(
            [line_of(series) for series in entries],
            ["?"] * len(entries),  # set below: matplotlib drops labels that begin with an underscore
            loc="outside lower center",
            ncols=columns,
            frameon=False,
        )
        for text, series in zip(legend.get_texts(), entries, strict=True):
            text.set_text(shown(series.label))
    return canvas
