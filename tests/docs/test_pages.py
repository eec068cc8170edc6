"""Every page is in the navigation, every link leads somewhere, every name in Python code exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.docs.pages import GENERATED, ROOT, anchors, blocks, pages, without_code

PAGES = pages()


def navigation() -> set[Path]:
    """Return the pages that the trees of docs/index.md name."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    found: set[Path] = set()
    for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in filter(None, (line for line in tree.splitlines() if not line.startswith(":"))):
            name = line + ".md"
            matches = [path.resolve() for path in (ROOT / "docs").glob(name)] if "*" in name else []
            found.update(matches or [(ROOT / "docs" / name).resolve()])
    return found


def test_every_page_is_in_the_navigation() -> None:
    index = ROOT / "docs" / "index.md"
    known = {path for path in navigation() if GENERATED not in path.parents}
    assert set(PAGES) - known == {index}
    assert known <= set(PAGES), "the navigation names pages that are not there"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if GENERATED in there.parents:
            continue
        if not there.is_file() or (anchor and anchor not in anchors(there.read_text(encoding="utf-8"))):
            wrong.append(target)
    assert not wrong


def test_readme_and_tutorial_take_the_same_steps_in_the_same_order() -> None:
    def steps(path: Path) -> list[str]:
        found = re.findall(r"^ {4}(?:.*\| )?ziggurat (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        return list(dict.fromkeys(found))

    tutorial = steps(ROOT / "docs" / "tutorial.md")
    assert tutorial[:2] == ["prepare", "inspect"], "inspect then measures on the user's own data"
    readme = [verb for verb in steps(ROOT / "README.md") if verb in tutorial]
    assert set(readme) == set(tutorial)
    anywhere = ("report", "serve")  # the README shows these on the demonstration first
    assert [verb for verb in readme if verb not in anywhere] == [verb for verb in tutorial if verb not in anywhere]


def imported(text: str) -> list[tuple[str, str]]:
    """Return module and name of every import of the package in a page's code."""
    found = []
    for block in blocks(text):
        for module, names in re.findall(r"^\s*from (ziggurat[\w.]*) import ([\w, ]+)", block, re.MULTILINE):
            found += [(module, name.strip()) for name in names.split(",")]
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_that_pages_import_exist(path: Path) -> None:
    for module, name in imported(path.read_text(encoding="utf-8")):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_promised_python_names_exist() -> None:
    names = re.findall(
        r"^\| `(ziggurat[\w.]+)`", (ROOT / "docs" / "versioning.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(names) > 10
    for name in names:
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last), name


def test_code_is_found_in_both_forms() -> None:
    text = "a\n\n    one\n    two\n\nb\n\n```python\nthree\n```\n"
    assert blocks(text) == ["three\n", "one\ntwo\n"]
