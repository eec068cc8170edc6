"""The shared parts of report pages: templates with their filters, colours as CSS variables, tables to save.

No page has a script, nothing is fetched, and all text is escaped.
"""

from __future__ import annotations

import base64
import gzip
import time
from collections.abc import Collection, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ziggurat.inspect.report.drawing import DARK, LIGHT, to_svg
from ziggurat.inspect.report.figure import Figure
from ziggurat.system.files import GENERATOR
from ziggurat.system.terminal import duration

_PACKED = 50_000  # characters; longer tables are compressed


def page_templates(now: float | None = None) -> Environment:
    """Return the templates of pages: `light` and `dark` are CSS with the colours of figures, `made` is the date.

    `now` is the date in seconds since 1970, by default the present.
    """
    environment = Environment(
        loader=PackageLoader("ziggurat.inspect.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "link": _link,
        "duration": duration,
        "number": _number,
        "p_value": lambda p: "< 0.001" if p < 0.001 else f"{p:.3f}",
        "prose": _prose,
        "subject_mark": subject_mark,
        "svg": _svg,
    }
    environment.globals |= {
        "light": _variables(LIGHT),
        "dark": _variables(DARK),
        "generator": GENERATOR,
        "made": time.strftime("%Y-%m-%d %H:%M", time.localtime(now)),
    }
    return environment


def subject_mark(subject: str) -> Markup:
    """Return the marker near the start of a report's page that identifies its subject."""
    return Markup('<meta name="subject" content="{}">').format(subject)


def _svg(figure: Figure, explained: Collection[str] = ()) -> Markup:
    return Markup(to_svg(figure, explained))  # escapes its argument


def _variables(colours: Mapping[str, str]) -> Markup:
    return Markup("".join(f"{name}:{colour};" for name, colour in colours.items()))


def _link(text: str, kind: str = "text/csv") -> str:
    """Return a `data:` URL with `text`, which a browser can save without a server or a script."""
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def table_link(name: str, table: str) -> tuple[str, str]:
    """Return the file name and the link of a table, compressed if it is long."""
    if len(table) <= _PACKED:
        return f"{name}.csv", _link(table)
    packed = base64.b64encode(gzip.compress(table.encode(), mtime=0)).decode()
    return f"{name}.csv.gz", f"data:application/gzip;base64,{packed}"


def _number(value: Any, digits: int = 2) -> str:
    """Return a number with thousands separators; a dash for a missing one."""
    return "–" if value is None else f"{value:,.{digits}f}"


def _prose(text: str) -> Markup:
    parts = text.split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick is plain text
        return escape(text)
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts))
