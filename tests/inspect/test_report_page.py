"""The page for hand-written runs: missing data, hostile text, and the page's size."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_experiment
from tests.inspect import hand_made
from tests.inspect.runs import train_record, validation_record, write_run
from ziggurat.data.prepare import prepare
from ziggurat.inspect.report import runs as samples
from ziggurat.inspect.report.content import Content, as_record, gather
from ziggurat.inspect.report.figure import numbers
from ziggurat.inspect.report.page import page
from ziggurat.inspect.report.runs import Sentences, Translated, read_runs
from ziggurat.train.records import Record, write_records

HOSTILE = "<script>alert(1)<"
AS_TEXT = "&lt;script&gt;alert(1)&lt;"


class Tags(HTMLParser):
    """A parser that collects a page's tags and links; `unclosed` is empty at the end of a well-formed page."""

    VOID = frozenset(("meta", "link", "br", "img", "hr", "input"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("href", "src", "action", "srcset")]
        self.handlers += [key for key, _ in attrs if key.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())


def sound(text: str) -> Tags:
    """Return the tags of a page, and check that it is well formed, runs nothing and fetches nothing."""
    found = Tags(text)
    assert found.open == []
    assert "script" not in found.tags
    assert found.handlers == []
    assert all(link.startswith(("data:", "#")) for link in found.links)
    assert "default-src 'none'" in text
    return found


def content_of(*folders: Path) -> Content:
    return gather(read_runs(folders), None)


def curves(updates: int, **values: Any) -> list[dict[str, Any]]:
    train = [train_record(update, **values) for update in range(10, updates + 1, 10)]
    return [*train, *(validation_record(update) for update in range(100, updates + 1, 100))]


@pytest.mark.slow
def test_names_and_settings_are_escaped_everywhere(tmp_path: Path) -> None:
    experiment = tiny_experiment(tmp_path)
    banned = experiment.decoding.model_copy(update={"banned": ["</pre><script>alert(1)</script>", "`{{ 7 * 7 }}`"]})
    hostile = write_run(tmp_path / HOSTILE, curves(200), experiment=experiment.model_copy(update={"decoding": banned}))
    plain = write_run(tmp_path / '"><img src=x onerror=alert(1)>', curves(200), experiment=experiment)
    for folder in (hostile, plain):
        write_records(folder, [hand_made.record(0), hand_made.record(200, 0.5)])
    text = page(content_of(hostile, plain))
    found = sound(text)
    assert "img" not in found.tags
    assert AS_TEXT in text
    assert "{{ 7 * 7 }}" in text
    assert text.count(AS_TEXT) > 20  # legend, cards, tables, figures, settings


@pytest.mark.slow
def test_hostile_sentences_are_escaped_in_every_translation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = read_runs([write_run(tmp_path / name, curves(200)) for name in ("a", "b")])
    bad = "<script>alert(1)</script> <b onclick=x>"
    lines = {"a": [bad, "one two"], "b": ["a mouse", "&lt; three"]}
    monkeypatch.setattr(
        "ziggurat.inspect.report.content.translated", lambda run, *_: Translated(bad, "beam", lines[run.name], 0)
    )
    sentences = Sentences(bad, [bad, "eins"], [bad, "one"], [None, None], "en")
    content = gather(runs, lambda: sentences)
    assert content.translations is not None
    text = page(content)
    found = sound(text)
    assert "b" not in found.tags
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 5
    assert "&amp;lt;" in text  # text that was already escaped in the data is unchanged
    assert "; 2 are too few to rule out chance." in text
    assert text.count("<td>too few sentences to tell</td>") == len(content.translations.comparison.scores)


@pytest.mark.parametrize("missing", ["everything", "validations", "bleu", "checkpoint"])
def test_failed_runs_show_what_is_missing_and_how_to_get_it(tmp_path: Path, missing: str) -> None:
    records = {
        "everything": [],
        "validations": [train_record(10)],
        "bleu": [train_record(10), {k: v for k, v in validation_record(10).items() if k != "bleu"}],
        "checkpoint": curves(200),
    }[missing]
    folder = write_run(tmp_path / "a", records)
    runs = read_runs([folder])
    prepare(runs[0].experiment.data)
    content = gather(runs, lambda: samples.dev_sentences(runs, 5))
    sound(page(content))
    told = {lack.what: lack.way for lack in content.missing}
    expected = {
        "everything": {"learning curves": "log.txt", "profiles over depth": "ziggurat diagnose"},
        "validations": {"validations": "training.validation.every_updates"},
        "bleu": {"BLEU over training": "training.validation.decode"},
        "checkpoint": {"translations": "no checkpoint yet"},
    }[missing]
    for what, way in expected.items():
        assert way in told[what]


@pytest.mark.slow
def test_without_a_store_the_page_is_valid_and_reports_it(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a", curves(200))])
    content = gather(runs, lambda: samples.dev_sentences(runs, 5))
    sound(page(content))
    told = {lack.what: lack.way for lack in content.missing}
    assert "no store" in told["translations"]
    assert "--source" in told["translations"]
    assert "no store" in told["loss that word frequencies alone give"]


@pytest.mark.slow
def test_numbers_that_are_not_finite_and_a_depth_that_grew(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [*curves(100), train_record(110, nll=math.nan, loss=math.inf)])
    shallow = {"gradient_norm": {"encoder": [1.0], "decoder": [1.0, None]}, "nll": None}
    deep = {"gradient_norm": {"encoder": [1e-5, 0.5, 1.0], "decoder": [1.0, 1.0]}, "nll": 5.0}
    write_records(
        folder,
        [Record(50, 0.0, {"encoder": 1, "decoder": 2}, shallow), Record(100, 0.0, {"encoder": 3, "decoder": 2}, deep)],
    )
    content = content_of(folder)
    sound(page(content))
    assert "NaN" not in str(as_record(content))
    assert any("encoder" in complaint for complaint in content.standings[0].complaints)


@pytest.mark.slow
def test_eight_deep_runs_of_many_updates_stay_under_five_megabytes(tmp_path: Path) -> None:
    norms = {"encoder": [1.0 + i / 7 for i in range(60)], "decoder": [1.0 + i / 9 for i in range(12)]}
    square = [[math.exp(-abs(i - j) / 9) for j in range(61)] for i in range(61)]
    values = {"gradient_norm": norms, "similarity": square, "nll": 5.0}
    folders = []
    for name in "abcdefgh":
        metrics = [train_record(update, nll=5 + 1 / update) for update in range(100, 100_001, 400)]
        metrics += [validation_record(update) for update in range(1000, 100_001, 1000)]
        folders.append(write_run(tmp_path / name, metrics))
        write_records(folders[-1], [Record(update, 0.0, {"encoder": 60, "decoder": 12}, values) for update in (0, 9)])
    text = page(content_of(*folders))
    assert len(text.encode()) < 5_000_000
    assert text.count('<li><span class="run"') >= 8
    assert 'download="similarity-map.csv.gz"' in text


@pytest.mark.slow
def test_tables_left_out_for_size_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = content_of(write_run(tmp_path / "a", curves(200)))
    tables = {figure.key: len(numbers(figure)) for figure in content.figures}
    monkeypatch.setattr("ziggurat.inspect.report.page._DOWNLOADS", 2 * min(tables.values()))
    text = page(content)
    shortest = min(tables, key=lambda key: tables[key])
    assert re.findall(r'download="([\w-]+)\.csv', text) == [shortest]
    assert text.count("too many for this page") == len(tables) - 1


def test_the_same_content_gives_the_same_page(tmp_path: Path) -> None:
    content = content_of(write_run(tmp_path / "a", [validation_record(10)]))
    assert content.figures
    assert page(content, now=0.0) == page(content, now=0.0)
