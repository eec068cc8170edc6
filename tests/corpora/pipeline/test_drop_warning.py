"""The warning that many lines gave no pair compares them with the bitext's own pairs before it blames the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.corpora.pipeline.conftest import parsed, whole
from ziggurat.corpora.jobs.job import JobOutcome
from ziggurat.corpora.pipeline import synthesis
from ziggurat.corpora.pipeline import synthesis as dropped
from ziggurat.corpora.pipeline.context import PipelineContext
from ziggurat.corpora.pipeline.evaluation import _notices
from ziggurat.corpora.pipeline.steps import steps_of
from ziggurat.corpora.pipeline.synthesis import drop_warning, share_beyond
from ziggurat.corpora.synthesis.backtranslation import Report
from ziggurat.corpora.synthesis.lines import PairFilter


class Words:
    """A tokenizer whose pieces are words."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[0] * len(text.split()) for text in texts]


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped, "load_tokenizers", lambda folder: (Words(), Words()))


def bitext(folder: Path, *pairs: tuple[int, int]) -> tuple[Path, Path]:
    """The files of pairs with these numbers of words."""
    files = folder / "a.de", folder / "a.en"
    for side, file in enumerate(files):
        file.write_text("".join("w " * pair[side] + "\n" for pair in pairs))
    return files


def test_the_bitext_is_measured_by_the_same_rule(tmp_path: Path) -> None:
    files = bitext(tmp_path, (2, 8), (2, 9), (10, 10), (251, 250), (3, 0))
    assert share_beyond(PairFilter(), [files], tmp_path) == 0.5  # the blank one is not a pair
    assert share_beyond(PairFilter(ratio_slack=0), [files], tmp_path) == 0.75
    assert share_beyond(PairFilter(), [bitext(tmp_path)], tmp_path) is None


@pytest.mark.parametrize(
    ("kept", "lost", "pairs", "message"),
    [
        (90, {"ratio": 10}, [(2, 9)], None),
        (80, {"ratio": 18, "copy": 2}, [(2, 9)] + 9 * [(2, 3)],
         "20.0 % of 100 lines gave no pair (2 copy, 18 ratio); by `distillation.max_ratio: 1.5`, `ratio_slack: 5` and "
         "`max_pieces: 250` 10.0 % of the bitext's own pairs would be dropped, too: raise them"),
        (80, {"ratio": 20}, [(2, 3)], "0.0 % of the bitext's own pairs would be dropped, too: the model may be weak"),
        (80, {"unfinished": 20}, [(2, 9)], "20.0 % of 100 lines gave no pair (20 unfinished): the model may be weak"),
    ],
)  # fmt: skip
def test_the_warning(
    kept: int, lost: dict[str, int], pairs: list[tuple[int, int]], message: str | None, tmp_path: Path
) -> None:
    report = Report(100, kept, lost, {})
    notice = drop_warning(report, PairFilter(), "distillation", [bitext(tmp_path, *pairs)], tmp_path)
    assert notice is None if message is None else notice is not None and notice.endswith(message)


def test_the_report_repeats_the_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome: JobOutcome[Any] = JobOutcome(1, Report(100, 50, {"unfinished": 50}, {}))
    monkeypatch.setattr("ziggurat.corpora.pipeline.synthesis.back_translate", lambda job, work: outcome)
    monkeypatch.setattr(synthesis, "locate_weights", lambda folder: (folder, tmp_path))
    told: list[str] = []
    context = PipelineContext(parsed(whole(folder=str(tmp_path))), told.append)
    step = next(step for step in steps_of(context) if step.name == "distil")
    (tmp_path / "distil").mkdir()
    step.work(tmp_path / "distil")
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean" / "report.json").write_text(json.dumps({"notices": ["of cleaning"]}))
    notice = "50.0 % of 100 lines gave no pair (50 unfinished): the model may be weak"
    assert told[-1] == f"warning: {notice}"
    assert _notices(context, {"distil"}) == ["of cleaning", f"distil: {notice}"]
    assert _notices(context, set()) == ["of cleaning"]
