"""docs/papers.md: every recipe and figure that it names exists, and no recipe of a paper is missing."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.docs.pages import ROOT, blocks, without_blocks
from tests.inspect.hand_made import trained
from ziggurat.config.recipes import SUFFIX, paper_keys, paper_recipes
from ziggurat.inspect.report.figures import figures_of

TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
RECIPES = {name for key in paper_keys() for name in paper_recipes(key)}
WORD = re.compile(rf"(?<![\w/.=-])(?:{'|'.join(paper_keys())})-[\w{{}},-]*[\w}}]")

PRESET = re.compile(r"--figure [\w-]+")
FIGURE = re.compile(r"\[`([\w-]+)`\]\(report\.md#figures\)")


def expanded(pattern: str) -> list[str]:
    """Return the words to which a shell expands a pattern with braces that are not nested."""
    parts = [part[1:-1].split(",") if part[0] == "{" else [part] for part in re.findall(r"\{[^{}]*\}|[^{}]+", pattern)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def named(text: str) -> list[str]:
    """Return the recipes that a text's code names, with patterns expanded; a small one counts as its full form."""
    code = "\n".join([*blocks(text), *re.findall(r"`([^`\n]+)`", FIGURE.sub("", without_blocks(text)))])
    code = PRESET.sub("", code)  # figures have names like recipes
    return [name.removesuffix(SUFFIX) for pattern in WORD.findall(code) for name in expanded(pattern)]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a-6-6", ["a-6-6"]),
        ("a{,-rpr}{,-sdt}", ["a", "a-sdt", "a-rpr", "a-rpr-sdt"]),
        ("a-{6,12}-6-b", ["a-6-6-b", "a-12-6-b"]),
    ],
)
def test_patterns_are_expanded_as_a_shell_does(pattern: str, words: list[str]) -> None:
    assert expanded(pattern) == words


def test_every_recipe_that_is_named_exists() -> None:
    assert [name for name in named(TEXT) if name not in RECIPES] == []


def test_every_recipe_of_a_paper_has_a_row_in_its_section() -> None:
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    for key in paper_keys():
        (section,) = [one for one in sections if f"`ziggurat recipes {key}`." in one]
        rows = "\n".join(line for line in section.splitlines() if line.startswith("| "))
        assert set(paper_recipes(key)) - set(named(rows)) == set(), key


def test_every_figure_that_is_named_is_one_of_a_report() -> None:
    figures = FIGURE.findall(TEXT)
    assert len(figures) > 10
    assert set(figures) <= {figure.key for figure in figures_of([trained()])}
