"""Figures for a web page: inline SVG, with colours from the page and scaled to the screen."""

from __future__ import annotations

import io
import re
from html import escape
from xml.etree import ElementTree

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from ziggurat.inspect.report.drawing import (
    FONT,
    HEIGHT,
    WIDTH,
    clean,
    draw_panel,
    legend_entries,
    line_of,
    new_canvas,
    settings,
    shown,
    variable,
)
from ziggurat.inspect.report.figure import Figure, Panel, Series, in_words

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_FONT_FAMILY = re.compile(r"font-family:[^;]*;?\s*")
_ROW = "display:flex;flex-wrap:wrap;gap:4px 16px"
_SAMPLE = 30.0  # length of a line in the legend


def to_svg(figure: Figure) -> str:
    """Return `figure` as markup: a `div` with an SVG for each entry of the legend and for each panel.

    The panels stand side by side where the page is wide enough, and below each other on a phone. Colours are the CSS
    variables of `drawing.LIGHT` (or `DARK`), which the page defines; without them the figure suits a white page.
    Nothing external is referenced; heat maps are images in `data:` URLs. Title and caption are left to the page.
    The same figure gives the same markup.
    """
    key = "".join(_entry(figure, number, series) for number, series in enumerate(legend_entries(figure.panels)))
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
    """Return one entry of the legend: a piece of the line and its label."""
    name, label = f"{figure.key}-key-{number}", shown(series.label)
    with settings(name):
        height = FONT + 5
        canvas = new_canvas(WIDTH, height)
        text = canvas.text(0, 0.5, label, va="center", fontsize=FONT)
        width = _SAMPLE + 5 + text.get_window_extent().width + 2
        canvas.set_size_inches(width / 72, height / 72)
        text.set_x((_SAMPLE + 5) / width)
        line = line_of(Series(label, (0.0, 1.0, 2.0), (0.0, 0.0, 0.0), series.run, series.variant))
        line.set_data([1 / width, _SAMPLE / 2 / width, (_SAMPLE - 1) / width], [0.5] * 3)
        line.set_markevery([1])
        line.set_transform(canvas.transFigure)
        canvas.add_artist(line)
        return _inline(_svg_of(canvas), name, label, "")


def _svg_of(canvas: Canvas) -> bytes:
    """Return matplotlib's SVG of a canvas."""
    file = io.BytesIO()
    FigureCanvasSVG(canvas).print_svg(file, metadata={"Date": None})
    return file.getvalue()


def _inline(svg: bytes, name: str, title: str, description: str) -> str:
    """Return matplotlib's SVG changed so that many of them fit into one page.

    Identifiers get the prefix `name`, since they are global in a page. So would be its style sheet, which is removed:
    the page-wide rules become attributes of the root.
    """
    root = ElementTree.fromstring(svg)
    # (1) Metadata and the style sheet
    for child in list(root):
        styles = child.tag == f"{_SVG}defs" and child.find(f"{_SVG}style") is not None
        if child.tag == f"{_SVG}metadata" or styles:
            root.remove(child)
    # (2) Identifiers: those that nothing refers to are dropped, to save space
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
