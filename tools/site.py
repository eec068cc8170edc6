"""Checks of the documentation site that Sphinx lacks, and the page at the site's root.

    python -m tools.site build/site

Readers' browsers must not fetch anything from other hosts: no fonts, styles, scripts or pictures. Links that readers
click may lead anywhere.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

PAGES = [
    "docs/**.md",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "experiments/*/README.md",
    "tests/golden/README.md",
]
"""PAGES are the pages of the site; all links among them are checked."""

_FETCHED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
_FETCHED |= {"video": "src", "audio": "src", "embed": "src", "image": "href", "use": "href"}
_ELSEWHERE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
_IN_STYLES = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')]*)""", re.IGNORECASE)
_NOT_FETCHED = {"canonical", "license", "edit", "author", "next", "prev", "search", "index"}  # values of <link rel=...>


class _Fetches(HTMLParser):
    """Collects the addresses that a browser fetches by itself to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(_FETCHED.get(tag, ""))
        if tag == "link" and set((values.get("rel") or "").split()) & _NOT_FETCHED:
            address = None
        if address and _ELSEWHERE.match(address):
            self.found.append(f"<{tag}> {address}")
        self.found += [f"srcset {part}" for part in (values.get("srcset") or "").split(",") if _ELSEWHERE.match(part)]
        self.found += _IN_STYLES.findall(values.get("style") or "")


def fetched_elsewhere(site: Path) -> list[str]:
    """Return `file: address` for everything in a built site that a browser would fetch from another host."""
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".svg"):
            parser = _Fetches()
            parser.feed(path.read_text(encoding="utf-8"))
            found += [f"{path.relative_to(site)}: {address}" for address in parser.found]
        if path.suffix in (".html", ".svg", ".css"):
            styles = _IN_STYLES.findall(path.read_text(encoding="utf-8"))
            found += [f"{path.relative_to(site)}: {address}" for address in styles]
    return sorted(set(found))


def write_door(app: Any, error: Exception | None) -> None:
    """Write index.html, which leads to the first page, at the root of a built site."""
    if error is None and app.builder.name == "html":
        refresh = f'<meta http-equiv="refresh" content="0; url={app.config.root_doc}.html">'
        door = f'<!doctype html><meta charset="utf-8"><title>Ziggurat</title>{refresh}\n'
        (Path(app.outdir) / "index.html").write_text(door, encoding="utf-8")


if __name__ == "__main__":
    if found := fetched_elsewhere(Path(sys.argv[1])):
        sys.exit("the site would fetch from other hosts:\n" + "\n".join(found))
