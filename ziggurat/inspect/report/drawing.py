"""Drawing with matplotlib: the same code draws the panels of a page and the figures of a paper.

pyplot is not used, and no global setting stays changed. Text is never parsed as mathematics. Sizes are in points: a
panel is 340 wide, which fits a phone unscaled. A page has inline SVG with colours from the page, a paper one file per
figure.

Each run has one colour on light pages and one on dark pages. A test checks that both sets have a contrast of 3 : 1, and
a distance between runs for readers with protanopia and deuteranopia. Markers and dashes carry the same information
without colour.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from ziggurat.inspect.report.figure import Figure, Heat, Panel, Series, in_words
from ziggurat.system.errors import ConfigError, printable
from ziggurat.system.files import write_atomically

# Colours

INK, MUTED, GRID = "--figure-ink", "--figure-muted", "--figure-grid"
"""CSS variables for text, for lines that belong to no run, and for the grid."""

_LIGHT_RUNS = ("#22659c", "#df681b", "#119d7b", "#69144c", "#503e03", "#12197e", "#66635a", "#4e0f04")
_DARK_RUNS = ("#98cdf1", "#ef7d3b", "#5cebb1", "#df3eb6", "#f4cc4d", "#9a9ff9", "#aba8ad", "#e0321e")

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""MARKERS lists the marker of each run, in matplotlib's notation."""

DASHES: tuple[tuple[float, ...], ...] = ((), (4.0, 2.0), (1.0, 1.6), (6.0, 1.8, 1.0, 1.8), (8.0, 2.5), (2.5, 1.0))
"""DASHES lists lengths of dashes and gaps for each variant of a run's lines, in line widths; the first is solid."""


def name_of_run(run: int) -> str:
    """Return the CSS variable of the colour of run number `run`; the colours repeat after the last."""
    return f"--run-{run % len(_LIGHT_RUNS)}"


def _colour_of_run(run: int | None) -> str:
    """Return the colour of run number `run` on white; None stands for a line that belongs to no run."""
    return LIGHT[MUTED if run is None else name_of_run(run)]


def variable(colour: str) -> str | None:
    """Return CSS that lets a page replace a colour of `LIGHT` (`#rrggbb`) by a variable; None for others."""
    name = _NAMES.get(colour.lower())
    return None if name is None else f"var({name}, {colour.lower()})"


def _palette(ink: str, muted: str, grid: str, runs: tuple[str, ...]) -> dict[str, str]:
    return {INK: ink, MUTED: muted, GRID: grid} | {name_of_run(i): colour for i, colour in enumerate(runs)}


LIGHT: Mapping[str, str] = _palette("#1f2328", "#6a7079", "#dfe2e6", _LIGHT_RUNS)
"""LIGHT maps CSS variables to colours for a white page."""

DARK: Mapping[str, str] = _palette("#e6e8eb", "#969da7", "#3a3f47", _DARK_RUNS)
"""DARK maps CSS variables to colours for a page with a background of about #16181d."""

_NAMES = {colour: name for name, colour in LIGHT.items()}


# Panels

WIDTH, HEIGHT, FONT = 340.0, 250.0, 11.0
"""Size of a panel and of its text, in points (pixels on a page)."""

_LONGEST_LABEL = 45
_MARKED = 40  # lines with more points have about eight markers
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@contextlib.contextmanager
def settings(salt: str, *, scale: float = 1.0) -> Iterator[None]:
    """Context for drawing and writing; sizes are `scale` times those of a page, ids depend only on `salt`."""
    options: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text: searchable, accessible to screen readers, in the page's font
        "svg.hashsalt": salt,
        "pdf.fonttype": 42,  # fonts that journals take
        "text.parse_math": False,
        "font.family": ["DejaVu Sans"],
        "font.size": FONT * scale,
        "axes.titlesize": FONT * scale,
        "axes.labelsize": FONT * scale,
        "xtick.labelsize": (FONT - 1) * scale,
        "ytick.labelsize": (FONT - 1) * scale,
        "legend.fontsize": (FONT - 1) * scale,
        "axes.linewidth": 0.8 * scale,
        "lines.linewidth": 1.6 * scale,
        "lines.markersize": 4.2 * scale,
        "xtick.major.size": 3 * scale,
        "ytick.major.size": 3 * scale,
        "errorbar.capsize": 2.5 * scale,
        "text.color": LIGHT[INK],
        "axes.edgecolor": LIGHT[INK],
        "axes.labelcolor": LIGHT[INK],
        "xtick.color": LIGHT[INK],
        "ytick.color": LIGHT[INK],
    }
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # a user's matplotlibrc must not change reports
        mpl.rcParams.update(options)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a page uses the browser's fonts
        yield


def clean(text: str) -> str:
    """Return text on one line, without characters that XML forbids or that reverse the text direction."""
    return printable(text, 12 * len(text))  # 12, since no character is escaped to more, so nothing is cut


def shown(text: str) -> str:
    """Return a label in the form in which it is drawn: clean, with the middle of a long one left out."""
    text = clean(text)
    keep = (_LONGEST_LABEL - 1) // 2
    return text if len(text) <= _LONGEST_LABEL else f"{text[:keep]}…{text[-keep:]}"


def draw_panel(axes: Axes, panel: Panel, beside: Sequence[Panel]) -> None:
    """Draw `panel` on empty axes, inside `settings`, without a legend (see `_legend_entries`).

    The y axis also covers the values of the neighbouring panels `beside` that show the same quantity, for comparison.
    """
    axes.set_title(shown(panel.title), loc="left")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_facecolor("none")
    if panel.heat is not None:
        _draw_heat(axes, panel.heat)
        return
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=LIGHT[GRID], linewidth=axes.spines["left"].get_linewidth())
    axes.set_axisbelow(True)
    for series in panel.series:
        axes.add_line(_line_of(series, log=panel.log_y))
        _draw_spread(axes, series)
    alike = [other for other in beside if (other.y_label, other.log_y) == (panel.y_label, panel.log_y)]
    axes.update_datalim([(0.0, y) for other in alike for y in _drawable(other)], updatex=False)
    _scale_axes(axes, panel)


def _line_of(series: Series, *, log: bool = False) -> Line2D:
    """Return the line of a series: colour and marker of its run, dashes of its variant; `log` leaves out y <= 0."""
    y = np.array([math.nan if v is None or (log and v <= 0) else v for v in series.y], dtype=float)
    dashes = DASHES[series.variant % len(DASHES)]
    every = max(1, len(y) // 8) if len(y) > _MARKED else 1
    number = series.run or 0
    return Line2D(
        series.x,
        y,
        color=_colour_of_run(series.run),
        linestyle=(0, dashes) if dashes else "-",
        marker=MARKERS[number % len(MARKERS)] if series.run is not None else None,
        markevery=(number * every // 8 % every, every),
        markerfacecolor="none",  # so that coinciding points of several runs stay visible
    )


def _draw_spread(axes: Axes, series: Series) -> None:
    known = zip(series.x, series.y, series.spread, strict=True) if series.spread else ()
    bars = [(x, y, bar) for x, y, bar in known if y is not None and bar is not None]
    if bars:
        x, y, length = zip(*bars, strict=True)
        width = 0.6 * float(mpl.rcParams["lines.linewidth"])
        axes.errorbar(x, y, length, fmt="none", ecolor=_colour_of_run(series.run), elinewidth=width, capthick=width)


def _legend_entries(panels: Sequence[Panel]) -> list[Series]:
    entries = {(s.label, s.run, s.variant): s for panel in reversed(panels) for s in reversed(panel.series)}
    return list(reversed(entries.values()))


def _drawable(panel: Panel) -> list[float]:
    """Return the drawable parts of a panel's lines and error bars; on a logarithmic axis, only positive values."""
    found = []
    for series in panel.series:
        for y, bar in zip(series.y, series.spread or (None,) * len(series.y), strict=True):
            found += [] if y is None else [y - (bar or 0.0), y + (bar or 0.0)]
    return [y for y in found if y > 0 or not panel.log_y]


def _scale_axes(axes: Axes, panel: Panel) -> None:
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    axes.autoscale_view()
    for axis, log in ((axes.xaxis, panel.log_x), (axes.yaxis, panel.log_y)):
        axis.set_major_formatter(FuncFormatter(_power if log else _plain))
        if log:
            axis.set_minor_locator(NullLocator())
            axis.set_major_locator(_powers(*axis.get_view_interval()))
    if not panel.log_x and all(x == int(x) for series in panel.series for x in series.x):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if panel.perplexity:
        _add_perplexity(axes)


def _powers(low: float, high: float) -> Locator:
    """Return a locator for a logarithmic axis that gives several ticks in any range."""
    decades = math.log10(high / low)
    if decades < 1:
        return MaxNLocator(nbins=6)
    return LogLocator(subs=(1.0,) if decades > 2.5 else (1.0, 2.0, 5.0))


def _add_perplexity(axes: Axes) -> None:
    """Add an axis on the right with e to the power of the left one, and ticks at round values."""
    low, high = axes.get_ylim()
    for digits in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8)):
        ticks = [d * 10**power for power in range(7) for d in digits if low <= math.log(d * 10**power) <= high]
        if len(ticks) >= 3:
            break
    else:
        ticks = [float(f"{math.exp(low + (high - low) * k / 4):.3g}") for k in (1, 2, 3)]
    right = axes.twinx()
    right.spines[["top", "right"]].set_visible(False)
    right.set_ylim(low, high)
    right.set_yticks([math.log(tick) for tick in ticks], [_plain(tick) for tick in ticks])
    right.set_ylabel("perplexity")


def _power(value: float, _: int | None = None) -> str:
    """Return a tick label of a logarithmic axis: from 0.001 to 1000 as a number, otherwise as a power of ten."""
    if value <= 0:  # locators also propose ticks outside the axis
        return ""
    exponent = math.log10(value)
    if abs(exponent - round(exponent)) > 1e-6 or -4 < exponent < 4:
        return f"{value:g}"
    return "10" + str(round(exponent)).translate(_SUPERSCRIPT)


def _plain(value: float, _: int | None = None) -> str:
    """Return a tick label of a linear axis: above 10,000 in thousands (k), above ten million in millions (M)."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}".replace("-", "\u2212")


def _draw_heat(axes: Axes, heat: Heat) -> None:
    cells = np.array([[math.nan if v is None else v for v in row] for row in heat.values], dtype=float)
    image = axes.imshow(
        np.ma.masked_invalid(cells),
        cmap="viridis",  # its lightness grows evenly, so it is readable without colour
        vmin=heat.low,
        vmax=heat.high,
        origin="lower",
        aspect="auto",
        interpolation="none",  # one pixel per cell; the page scales the image up
    )
    for axis, labels in ((axes.xaxis, heat.columns), (axes.yaxis, heat.rows)):
        step = max(1, math.ceil(len(labels) / 7))
        axis.set_ticks(range(0, len(labels), step), [shown(label) for label in labels[::step]])
    assert axes.figure is not None
    bar = axes.figure.colorbar(image, ax=axes, label=heat.unit, format=FuncFormatter(_plain))
    bar.outline.set_visible(False)


def new_canvas(width: float, height: float) -> Canvas:
    """Return an empty transparent figure of this size in points, with automatic layout."""
    return Canvas(figsize=(width / 72, height / 72), dpi=72, facecolor="none", layout="constrained")


_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_FONT_FAMILY = re.compile(r"font-family:[^;]*;?\s*")
_ROW = "display:flex;flex-wrap:wrap;gap:4px 16px"
_SAMPLE = 30.0  # length of a line in the legend


def to_svg(figure: Figure, explained: Collection[str] = ()) -> str:
    """Return `figure` as markup: a `div` with an SVG for each entry of the legend and for each panel.

    There is no legend if the page itself explains all of its labels, which are then in `explained`.

    The panels are side by side if the page is wide enough, and stacked on a phone. Colours are the CSS
    variables of `drawing.LIGHT` (or `DARK`), which the page defines; without them the figure suits a white page.
    Nothing external is referenced; heat maps are images in `data:` URLs. Title and caption are left to the page.
    The same figure gives the same markup.
    """
    entries = _legend_entries(figure.panels)
    entries = [] if all(series.label in explained for series in entries) else entries
    key = "".join(_entry(figure, number, series) for number, series in enumerate(entries))
    panels = "".join(_panel(figure, number, panel) for number, panel in enumerate(figure.panels))
    legend = f'<div class="figure-key" style="{_ROW};margin-bottom:8px">{key}</div>' if key else ""
    return (
        f'<div class="figure-panels" role="group" aria-label="{escape(clean(figure.title))}">'
        f'{legend}<div style="{_ROW}">{panels}</div></div>'
    )


def _panel(figure: Figure, number: int, panel: Panel) -> str:
    name = f"{figure.key}-{number}"
    with settings(name):
        canvas = new_canvas(WIDTH, HEIGHT)
        draw_panel(canvas.add_subplot(), panel, figure.panels)
        svg = _svg_of(canvas)
    return _inline(svg, name, f"{figure.title}: {panel.title}", in_words([panel]))


def _entry(figure: Figure, number: int, series: Series) -> str:
    name, label = f"{figure.key}-key-{number}", shown(series.label)
    with settings(name):
        height = FONT + 5
        canvas = new_canvas(WIDTH, height)
        text = canvas.text(0, 0.5, label, va="center", fontsize=FONT)
        width = _SAMPLE + 5 + text.get_window_extent().width + 2
        canvas.set_size_inches(width / 72, height / 72)
        text.set_x((_SAMPLE + 5) / width)
        line = _line_of(Series(label, (0.0, 1.0, 2.0), (0.0, 0.0, 0.0), series.run, series.variant))
        line.set_data([1 / width, _SAMPLE / 2 / width, (_SAMPLE - 1) / width], [0.5] * 3)
        line.set_markevery([1])
        line.set_transform(canvas.transFigure)
        canvas.add_artist(line)
        return _inline(_svg_of(canvas), name, label, "")


def _svg_of(canvas: Canvas) -> bytes:
    file = io.BytesIO()
    FigureCanvasSVG(canvas).print_svg(file, metadata={"Date": None})
    return file.getvalue()


def _inline(svg: bytes, name: str, title: str, description: str) -> str:
    """Return matplotlib's SVG, changed so that a page can contain many of them.

    Identifiers get the prefix `name`, since they are global in a page. The style sheet would also be global, so it is
    removed, and its page-wide rules become attributes of the root.
    """
    root = ElementTree.fromstring(svg)
    # (1) Metadata and the style sheet
    for child in list(root):
        styles = child.tag == f"{_SVG}defs" and child.find(f"{_SVG}style") is not None
        if child.tag == f"{_SVG}metadata" or styles:
            root.remove(child)
    # (2) Identifiers: unreferenced ones are dropped to save space
    referred = {
        identifier
        for element in root.iter()
        for value in element.attrib.values()
        for identifier in re.findall(r"#([\w-]+)", value)
    }
    for element in root.iter():
        element.attrib = {
            key.replace(_LINK, "href"): _attribute(key, value, name)
            for key, value in element.attrib.items()
            if key != "id" or value in referred
        }
        element.tag = element.tag.removeprefix(_SVG)
        element.tail = None
    # (3) The root: size, style, and a title and description for screen readers
    view_box = root.get("viewBox", "")
    width = float(view_box.split()[2])
    root.attrib = {
        "xmlns": _SVG[1:-1],
        "viewBox": view_box,
        "role": "img",
        "aria-labelledby": f"{name}-title" + (f" {name}-desc" if description else ""),
        "style": f"width:100%;max-width:{width:.0f}px;height:auto;font-family:sans-serif;"
        "stroke-linejoin:round;stroke-linecap:butt",
    }
    for tag, text in (("desc", description), ("title", title)):
        if text:
            element = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
            element.text = clean(text)
            root.insert(0, element)
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, name: str) -> str:
    """Return the value of an attribute with prefixed identifiers and the page's colours."""
    if key == "id":
        return f"{name}-{value}"
    if key == _LINK:
        return f"#{name}-{value[1:]}" if value.startswith("#") else value.replace("\n", "")
    if "url(#" in value:
        return value.replace("url(#", f"url(#{name}-")
    if key == "style":
        value = _FONT_FAMILY.sub("", value)
    return _COLOUR.sub(lambda found: variable(found[0]) or found[0], value)


_SCALE = 0.72  # a panel is 245 points wide, like a column of a two-column paper, and its text has 8 points
_DOTS_PER_INCH = 300
_ACROSS = 3  # maximum number of panels in a row

FORMATS: dict[str, tuple[type[Any], dict[str, None]]] = {
    "png": (FigureCanvasAgg, {}),
    "svg": (FigureCanvasSVG, {"Date": None}),
    "pdf": (FigureCanvasPdf, {"CreationDate": None}),
}
"""FORMATS maps each format to its canvas and the dates to leave out, so that the same figure gives the same bytes."""


def save(figure: Figure, folder: Path, formats: Sequence[str] = tuple(FORMATS)) -> list[Path]:
    """Write `figure` on white, without title and caption, to `folder/KEY.FORMAT` for each format; return the paths.

    Files are replaced atomically. Text in SVG and PDF stays text.

    Raises ConfigError for a format that is not in `FORMATS`.
    """
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ConfigError(f"figures cannot be written as {unknown[0]!r}; use {', '.join(FORMATS)}")
    paths = []
    with settings(figure.key, scale=_SCALE):
        for name in formats:
            canvas = _drawn(figure)  # redone for each format, since writing one may change the layout
            writer, left_out = FORMATS[name]
            file = io.BytesIO()
            writer(canvas)
            metadata = {"Title": clean(figure.title), **left_out}
            canvas.savefig(file, format=name, dpi=_DOTS_PER_INCH, facecolor="white", metadata=metadata)
            paths.append(folder / f"{figure.key}.{name}")
            write_atomically(paths[-1], file.getvalue())
    return paths


def _drawn(figure: Figure) -> Canvas:
    across = min(_ACROSS, len(figure.panels))
    down = math.ceil(len(figure.panels) / across)
    entries = _legend_entries(figure.panels)
    columns = min(across, len(entries)) or 1
    legend_height = 1.6 * 10 * _SCALE * math.ceil(len(entries) / columns)  # text of 10 points, 1.6 lines apart
    canvas = new_canvas(WIDTH * _SCALE * across, HEIGHT * _SCALE * down + legend_height)
    for number, panel in enumerate(figure.panels, start=1):
        draw_panel(canvas.add_subplot(down, across, number), panel, figure.panels)
    if entries:
        legend = canvas.legend(
            [_line_of(series) for series in entries],
            ["?"] * len(entries),  # set below, because matplotlib drops labels that start with an underscore
            loc="outside lower center",
            ncols=columns,
            frameon=False,
        )
        for text, series in zip(legend.get_texts(), entries, strict=True):
            text.set_text(shown(series.label))
    return canvas
