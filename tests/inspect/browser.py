"""A browser for tests: the system's Chromium, which can reach only the page that it shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_QUIET = (
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str:
    """Return the path of Chromium; skip the test if there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on PATH; `make test` installs Debian's in CI")
    return found


class Shown:
    """A page in the browser.

    Attributes:
        page: Playwright's.
        said: messages and errors of the console.
        requested: requested addresses, without those inside the page (`data:`).
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.requested: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith("data:"):
            self.requested.append(request.url)


@contextmanager
def opened() -> Iterator[Any]:
    """Start the browser."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
    path = chromium()
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(_QUIET))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def shown(browser: Any, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Shown]:
    """Show `file` in a window of this size."""
    scheme = "dark" if dark else "light"
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        found = Shown(page)
        page.goto(file.as_uri())
        yield found
    finally:
        page.close()


def contrasts(page: Any) -> list[tuple[float, str]]:
    """Return the contrast (WCAG 2.1) of every text on the page with its background, lowest first."""
    return sorted((float(ratio), str(text)) for ratio, text in page.evaluate(_CONTRASTS))


_CONTRASTS = """() => {
  const parts = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => { const f = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
  const behind = e => { for (; e; e = e.parentElement) { const c = parts(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const e = node.parentElement;
    if (!node.data.trim() || ['TITLE', 'DESC'].includes(e.tagName.toUpperCase())) continue;
    const style = getComputedStyle(e);
    const ink = parts(e.closest('svg') ? style.fill : style.color);
    const [a, b] = [light(ink), light(behind(e))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.data.trim().slice(0, 60)]);
  }
  return found;
}"""
