"""The report as one HTML file: no script, nothing fetched, all text escaped."""

from __future__ import annotations

import base64
import gzip
import time
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ziggurat.config import dump
from ziggurat.duration import duration
from ziggurat.report.answer import answer, compared
from ziggurat.report.content import Content
from ziggurat.report.drawing import DARK, LIGHT, name_of_run
from ziggurat.report.figure import Figure, numbers
from ziggurat.report.inline import to_svg
from ziggurat.report.samples import as_csv

__all__ = ["MAX_BYTES", "page"]

MAX_BYTES = 5_000_000
"""Upper bound of the size of a report."""

_DOWNLOADS = 2_500_000  # bytes of all links with numbers
_PACKED = 50_000  # characters; longer tables are compressed


def page(content: Content, *, now: float | None = None) -> str:
    """Return the report as HTML; `now`, in seconds since 1970, is the date shown in it (default: the present)."""
    environment = Environment(
        loader=PackageLoader("ziggurat.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "colour": lambda run: f"var({name_of_run(run)})",
        "link": _link,
        "duration": duration,
        "number": _number,
        "p_value": lambda p: "< 0.001" if p < 0.001 else f"{p:.3f}",
        "prose": _prose,
        "svg": lambda figure: Markup(to_svg(figure)),  # escapes what it is given
        "yaml": lambda run: dump(run.experiment),
    }
    sections: dict[str, list[Figure]] = {}
    for figure in content.figures:
        sections.setdefault(figure.section, []).append(figure)
    return environment.get_template("report.html").render(
        content=content,
        title=" and ".join(run.name for run in content.runs) if len(content.runs) < 4 else f"{len(content.runs)} runs",
        compared=compared(content),
        answer=answer(content),
        sections=sections,
        downloads=_downloads(content),
        light=_variables(LIGHT),
        dark=_variables(DARK),
        made=time.strftime("%Y-%m-%d %H:%M", time.localtime(now)),
    )


def _variables(colours: Mapping[str, str]) -> Markup:
    return Markup("".join(f"{name}:{colour};" for name, colour in colours.items()))


def _link(text: str, kind: str = "text/csv") -> str:
    """Return a `data:` URL with `text`, which a browser can save without a server or a script."""
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def _downloads(content: Content) -> dict[str, tuple[str, str] | None]:
    """Return file name and link of each figure's table, and of `translations`; None where there is no room for it.

    The shortest are taken first, so only large tables are left out: heat maps of many deep runs.
    """
    tables = {figure.key: numbers(figure) for figure in content.figures}
    if (translations := _translations(content)) is not None:
        tables["translations"] = translations
    links = {name: _table(name, table) for name, table in tables.items()}
    fitting: dict[str, tuple[str, str] | None] = {}
    room = _DOWNLOADS
    for name, (file, link) in sorted(links.items(), key=lambda item: len(item[1][1])):
        room -= len(link)
        fitting[name] = (file, link) if room >= 0 else None
    return fitting


def _table(name: str, table: str) -> tuple[str, str]:
    """Return the file name and the link of a table, compressed where it is long."""
    if len(table) <= _PACKED:
        return f"{name}.csv", _link(table)
    packed = base64.b64encode(gzip.compress(table.encode(), mtime=0)).decode()
    return f"{name}.csv.gz", f"data:application/gzip;base64,{packed}"


def _translations(content: Content) -> str | None:
    """Return all translations as CSV; None where there are none."""
    found = content.translations
    if found is None:
        return None
    outputs = [None if of_run is None else of_run.outputs for of_run in found.by_run]
    return as_csv([run.name for run in content.runs], outputs, found.sentences.sources, found.sentences.references)


def _number(value: Any, digits: int = 2) -> str:
    """Return a number with separators of thousands; a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def _prose(text: str) -> Markup:
    """Return a sentence as HTML, with text between backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick is plain text
        return escape(text)
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts))
