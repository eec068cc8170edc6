"""The documentation site (`make docs`): Sphinx reads the repository's Markdown where it lies and fetches nothing.

Why Sphinx (November 2026): MkDocs 1 gets no releases, Material for MkDocs ends on 5 May 2027, and its successor
Zensical is at 0.1. Sphinx and MyST are maintained, and take the repository itself as their source, so that the links of
README.md and experiments/ are checked with the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import api_pages, site  # noqa: E402
from ziggurat.config import choices, reference  # noqa: E402

project = "Ziggurat"
author = "the authors of Ziggurat"
release = version = api_pages.version(ROOT)
root_doc = "docs/index"
extensions = ["myst_parser"]
include_patterns = site.PAGES
exclude_patterns = [".*", "build", "dist", "demo", "runs", "stores"]  # spares a walk through environments and runs

myst_heading_anchors = 4  # anchors as GitHub makes them
myst_enable_extensions = ["dollarmath"]
suppress_warnings: list[str] = []  # none: `make docs` turns every warning into an error

html_math_renderer = "mathml"  # which browsers draw themselves; MathJax would be fetched from another host

language = "en-GB"
html_theme = "furo"
html_title = f"Ziggurat {release}"
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
highlight_language = "text"  # of blocks that name none: commands and their output


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f"<div>{tex2mathml(node.astext(), as_block=True)}</div>\n")
    raise nodes.SkipNode


def _generate(app: Sphinx) -> None:
    folder = ROOT / "docs" / "api"
    api_pages.write(ROOT, folder)
    (folder / "config.md").write_text(reference.markdown(), encoding="utf-8")
    (folder / "pipeline-keys.md").write_text(choices.pipeline_markdown(), encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Write the generated pages before Sphinx looks for pages, and the front door at the end."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("builder-inited", _generate)
    app.connect("build-finished", site.write_door)
