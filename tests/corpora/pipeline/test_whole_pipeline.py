"""A whole pipeline with models of a few thousand parameters: all steps, and which of them a change repeats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.corpora.pipeline.conftest import MakeContext, whole
from ziggurat.corpora.pipeline.steps import pipeline_of

STEPS = (
    "sets",
    "clean",
    "monolingual",
    "backward-data",
    "backward",
    "backtranslate",
    "teacher-data",
    "teacher",
    "distil",
    "distil-monolingual",
    "filter",
    "align",
    "student-data",
    "student",
    "quantise",
    "shortlist",
    "export-ctranslate2",
    "evaluate",
    "report",
)


@pytest.mark.slow
def test_all_steps_and_then_only_those_that_depend_on_a_change(place: Path, context: MakeContext) -> None:
    assert pipeline_of(context(whole())).run().done == STEPS
    assert pipeline_of(context(whole())).run().done == ()
    found = json.loads((place / "w/report/report.json").read_bytes())
    assert [name for name, _ in found["systems"] if name != "student-int8"] == [
        "teacher",
        "student",
        "student-ctranslate2",
    ]
    assert {row["name"]: row["layers"] for row in found["models"]} == {
        "backward": [1, 1],
        "teacher": [2, 1],
        "student": [1, 1],
    }
    assert {row["name"] for row in found["steps"]} == set(STEPS[:-1])
    assert found["speed"][0]["lines"] > 0
    page = (place / "w/report/report.html").read_text("utf-8")
    assert "student-ctranslate2" in page
    assert "../evaluate/robustness.html" in page
    # A test set affects no model: its sentences are removed from training text, which had none of them.
    (place / "data/test.qhi").write_text("a\n" * 8)
    assert pipeline_of(context(whole())).run().done == ("sets", "clean", "monolingual", "evaluate", "report")
    changed = whole(quantisation=None)
    assert pipeline_of(context(changed)).run().done == ("export-ctranslate2", "evaluate", "report")
    assert pipeline_of(context(changed)).left_over() == ["quantise"]
