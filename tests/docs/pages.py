"""Readers of the repository's Markdown for the tests of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "docs" / "api"
"""Pages that `make docs` writes and that may not exist."""


def pages() -> list[Path]:
    """Return every page of the site that is in the repository."""
    from tools.site import PAGES

    found = {path for pattern in PAGES for path in ROOT.glob(pattern.replace("**", "**/*"))}
    return sorted(path for path in found if GENERATED not in path.parents)


def without_blocks(text: str) -> str:
    """Return Markdown without fenced and indented blocks; lines stay where they are."""
    kept, fenced, before = [], False, ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        indented = line.startswith("    ") and (not before.strip() or before.startswith("    "))
        before = line
        kept.append("" if fenced or indented else line)
    return "\n".join(kept)


def without_code(text: str) -> str:
    """Return Markdown without blocks and code spans."""
    return re.sub(r"`[^`]*`", "", without_blocks(text))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    found: dict[str, int] = {}
    names = set()
    fenced = False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        heading = None if fenced else re.match(r"#{1,6} +(.*)", line)
        if heading:
            words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).lower().strip()
            name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            number = found[name] = found.get(name, -1) + 1
            names.add(f"{name}-{number}" if number else name)
    return names


def blocks(text: str) -> list[str]:
    """Return the blocks of code of a page: fenced ones, and those indented by four blanks."""
    found = [match[1] for match in re.finditer(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.finditer(r"(?:^|\n\n)((?: {4}.*(?:\n|$)|\n(?= {4}))+)", rest)
    return found + [re.sub(r"^ {4}", "", match[1], flags=re.MULTILINE) for match in indented]
