"""The documentation site: pages from docstrings, and the check that browsers fetch nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tools import api_pages
from tools.site import fetched_elsewhere


def test_every_module_is_on_an_api_page() -> None:
    text = "\n".join(api_pages.pages(ROOT).values())
    for path in (ROOT / "ziggurat").rglob("*.py"):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert f"`{dotted.removeprefix('ziggurat.')}`" in text or f"[{dotted}](" in text, dotted


@pytest.mark.slow
def test_api_pages_are_made_without_importing_the_package(tmp_path: Path) -> None:
    code = "import sys; from tools import api_pages; from pathlib import Path; "
    code += "api_pages.write(Path('.'), Path(sys.argv[1])); assert 'ziggurat' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)
    assert (tmp_path / "ziggurat.model.md").is_file()


def test_docstrings_become_markdown() -> None:
    docstring = """One <bt> in `a<b`, see docs/training.md.

    Args:
        first, second: both, and
            a second line.

    Raises ConfigError.
    """
    assert api_pages.prose(docstring) == (
        "One \\<bt> in `a<b`, see [docs/training.md](../training.md).\n\n\n**Args:**\n\n"
        "- `first, second`: both, and\n  a second line.\n\nRaises ConfigError."
    )


@pytest.mark.parametrize(
    ("element", "found"),
    [
        ('<script src="https://cdn.example/x.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', True),
        ('<img src="pictures/a.svg">', False),
        ('<img srcset="a.png 1x, https://x.example/b.png 2x">', True),
        ('<a href="https://example.org/">elsewhere</a>', False),
        ('<link rel="canonical" href="https://example.org/">', False),
        ("<style>@import 'https://x.example/a.css';</style>", True),
        ('<p style="background: url(https://x.example/a.png)">', True),
        ('<svg xmlns="http://www.w3.org/2000/svg"><use href="#a"/></svg>', False),
    ],
)
def test_fetches_from_other_hosts_are_found(tmp_path: Path, element: str, found: bool) -> None:
    (tmp_path / "page.html").write_text(f"<!doctype html><title>x</title>{element}", encoding="utf-8")
    assert bool(fetched_elsewhere(tmp_path)) is found


def test_headings_go_down_one_level_at_a_time() -> None:
    """The strict build of the site demands this, but is not part of the quick suite."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
        levels = [len(marks) for marks in re.findall(r"(?m)^(#+) ", text)]
        assert levels[0] == 1, page
        assert all(below <= above + 1 for above, below in pairwise(levels)), page
