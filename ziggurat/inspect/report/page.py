"""The report as one HTML file: no script, nothing fetched, all text escaped."""

from __future__ import annotations

from ziggurat.config import dump
from ziggurat.inspect.report.answer import answer, compared
from ziggurat.inspect.report.content import Content
from ziggurat.inspect.report.drawing import name_of_run
from ziggurat.inspect.report.figure import Figure, numbers
from ziggurat.inspect.report.samples import as_csv
from ziggurat.inspect.report.template import page_templates, table_link

_DOWNLOADS = 2_500_000  # bytes of all links with numbers


def page(content: Content, *, now: float | None = None) -> str:
    """Return the report as HTML; `now`, in seconds since 1970, is the date shown in it (default: the present)."""
    environment = page_templates(now)
    environment.filters |= {
        "colour": lambda run: f"var({name_of_run(run)})",
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
    )


def _downloads(content: Content) -> dict[str, tuple[str, str] | None]:
    """Return file name and link of each figure's table, and of `translations`; None where there is no room for it.

    The shortest are taken first, so only large tables are left out: heat maps of many deep runs.
    """
    tables = {figure.key: numbers(figure) for figure in content.figures}
    if (translations := _translations(content)) is not None:
        tables["translations"] = translations
    links = {name: table_link(name, table) for name, table in tables.items()}
    fitting: dict[str, tuple[str, str] | None] = {}
    room = _DOWNLOADS
    for name, (file, link) in sorted(links.items(), key=lambda item: len(item[1][1])):
        room -= len(link)
        fitting[name] = (file, link) if room >= 0 else None
    return fitting


def _translations(content: Content) -> str | None:
    """Return all translations as CSV; None where there are none."""
    found = content.translations
    if found is None:
        return None
    outputs = [None if of_run is None else of_run.outputs for of_run in found.by_run]
    return as_csv([run.name for run in content.runs], outputs, found.sentences.sources, found.sentences.references)
