"""The report of two real runs in a browser: plain deep post-norm next to ADMIN, on Multi30k."""

from __future__ import annotations

import base64
import gzip
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.conftest import tiny_experiment
from tests.inspect.browser import contrasts, opened, shown
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.data.prepare import prepare
from ziggurat.inspect.report.content import Content, gather
from ziggurat.inspect.report.figure import numbers
from ziggurat.inspect.report.page import page
from ziggurat.inspect.report.runs import dev_sentences, read_runs
from ziggurat.train.loop import train

HOSTILE = "<script>alert(1)</script>"


def deep(folder: Path, corpus: Path) -> Experiment:
    """4-4 layers, very narrow, on the first pairs of Multi30k; the first dev sentence is hostile on both sides."""
    for split, name, count in (("train", "train", 300), ("dev", "val", 12)):
        for language in ("de", "en"):
            with gzip.open(corpus / f"{name}.{language}.gz", "rt", encoding="utf-8") as file:
                lines = [line.rstrip("\n") for line in itertools.islice(file, count)]
            lines[0] = f"{lines[0]} {HOSTILE}"
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    plain = tiny_experiment(folder)
    data = {
        "source_language": "de",
        "target_language": "en",
        **{s: [{"source": f"{folder}/{s}.de", "target": f"{folder}/{s}.en"}] for s in ("train", "dev")},
    }
    model = {"encoder": {"layers": 4}, "decoder": {"layers": 4}}
    training = {
        "stop": {"updates": 6},
        "log_every_updates": 2,
        "validation": {"every_updates": 3},
        "diagnostics": {"every_updates": 3, "tokens": 100, "max_share": None},
    }
    changed = {"data": data, "model": model, "training": training, "decoding": {"beam_size": 1}}
    return change_section(plain, changed, "experiment")


pytestmark = pytest.mark.slow  # it trains two runs


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened() as found:
        yield found


@pytest.fixture(scope="module")
def two_runs(browser: Any, tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> list[Path]:
    """Trained runs of plain post-norm and of ADMIN; nothing is trained if there is no browser."""
    folder = tmp_path_factory.mktemp("deep")
    experiment = deep(folder, shared_data / "multi30k")
    prepare(experiment.data)
    quiet = Console(file=io.StringIO(), stderr=False)
    kinds: dict[str, dict[str, Any]] = {
        "post": {"residual": "post"},
        "admin": {"residual": "admin", "init": {"kind": "admin"}},
    }
    for name, model in kinds.items():
        train(folder / name, change_section(experiment, {"model": model}, "experiment"), console=quiet)
    return [folder / name for name in kinds]


@pytest.fixture(scope="module")
def content(two_runs: list[Path]) -> Content:
    runs = read_runs(two_runs)
    return gather(runs, lambda: dev_sentences(runs, 12))


@pytest.fixture(scope="module")
def report(content: Content, two_runs: list[Path]) -> Path:
    path = two_runs[0].parent / "report.html"
    path.write_text(page(content), encoding="utf-8")
    return path


def test_it_opens_without_errors_and_requests_nothing_else(browser: Any, report: Path) -> None:
    with shown(browser, report) as window:
        assert window.said == []
        assert window.requested == [report.as_uri()]
        assert window.page.locator("script").count() == 0
        assert window.page.title() == "Report: post and admin"


def test_every_figure_is_drawn_within_its_box(browser: Any, report: Path, content: Content) -> None:
    assert {figure.section for figure in content.figures} >= {"Learning"}
    assert len(content.figures) >= 10  # learning, speed and depth
    with shown(browser, report) as window:
        for figure in content.figures:
            drawn = window.page.locator(f"#figure-{figure.key} .figure-panels > div:last-child > svg").evaluate_all(
                """panels => panels.map(svg => {
                     const box = svg.getBoundingClientRect();
                     return [...svg.querySelectorAll('path, use, image')].filter(e => {
                       const b = e.getBoundingClientRect();
                       return b.width + b.height > 0 && b.left >= box.left - 2 && b.right <= box.right + 2
                         && b.top >= box.top - 2 && b.bottom <= box.bottom + 2; }).length; })"""
            )
            assert len(drawn) == len(figure.panels), figure.key
            assert all(count >= 3 for count in drawn), (figure.key, drawn)
            told = window.page.locator(f"#figure-{figure.key} svg desc").all_text_contents()
            assert len(told) == len(figure.panels)
            assert all(len(text) > 20 and text in figure.alt for text in told)


def test_a_run_has_one_colour_everywhere(browser: Any, report: Path, content: Content) -> None:
    with shown(browser, report) as window:
        root = "getComputedStyle(document.documentElement).getPropertyValue('--run-{}').trim()"
        colours = [window.page.evaluate(root.format(run.colour)) for run in content.runs]
        assert len(set(colours)) == 2
        chips = window.page.locator(".run").evaluate_all(
            "chips => chips.map(e => [e.textContent, getComputedStyle(e, '::before').backgroundColor])"
        )
    by_name = {name: {colour for n, colour in chips if n == name} for name in ("post", "admin")}
    for colour, name in zip(colours, ("post", "admin"), strict=True):
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert by_name[name] == {f"rgb({red}, {green}, {blue})"}


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_never_scrolls_sideways(browser: Any, report: Path, width: int) -> None:
    with shown(browser, report, width=width, height=844) as window:
        window.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert window.page.evaluate("document.documentElement.scrollWidth") <= width
        over = window.page.locator("table, pre").evaluate_all(
            f"""all => all.filter(e => {{ const box = e.closest('.scroll, pre').getBoundingClientRect();
                  return box.right > {width} || box.left < 0; }}).length"""
        )
        assert over == 0


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_can_be_read(browser: Any, report: Path, dark: bool) -> None:
    with shown(browser, report, dark=dark) as window:
        window.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        background = window.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert background == ("rgb(22, 24, 29)" if dark else "rgb(255, 255, 255)")
        found = contrasts(window.page)
    assert len(found) > 200
    assert found[0][0] >= 4.5, found[:5]


def test_downloads_hold_the_numbers(browser: Any, report: Path, content: Content, tmp_path: Path) -> None:
    figure = content.figures[0]
    with shown(browser, report) as window:
        with window.page.expect_download() as waited:
            window.page.click(f"#figure-{figure.key} > a[download]")
        waited.value.save_as(tmp_path / "found.csv")
        assert waited.value.suggested_filename == f"{figure.key}.csv"
        links = window.page.locator("a[download]").evaluate_all("all => all.map(a => [a.download, a.href])")
    assert (tmp_path / "found.csv").read_text(encoding="utf-8") == numbers(figure)
    held = {name: _unpacked(name, base64.b64decode(href.partition(",")[2])) for name, href in links}
    tables = {name.partition(".")[0]: text for name, text in held.items()}
    assert {f.key: tables[f.key] for f in content.figures} == {f.key: numbers(f) for f in content.figures}
    assert HOSTILE in tables["translations"]


def _unpacked(name: str, content: bytes) -> str:
    return (gzip.decompress(content) if name.endswith(".gz") else content).decode()


def test_a_script_in_the_data_is_text(browser: Any, report: Path) -> None:
    with shown(browser, report) as window:
        window.page.on("dialog", lambda dialog: pytest.fail(f"it ran: {dialog.message}"))
        texts = window.page.locator("dd").all_text_contents()
    assert sum(HOSTILE in text for text in texts) >= 2  # as a source and as a reference
    assert HOSTILE not in report.read_text(encoding="utf-8")
