"""What the report of a pipeline tells of what its steps left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.pipeline.conftest import parsed, whole
from ziggurat.config.load import parse_as
from ziggurat.config.pipeline import PipelineConfig
from ziggurat.pipeline import summary
from ziggurat.pipeline.road import Road
from ziggurat.pipeline.times import Times
from ziggurat.report.pipeline import StepRow, pipeline_page


def test_the_page_tells_notices_and_of_how_many_lines_an_export_kept_the_translation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "_models", lambda road: [])
    road = Road(parse_as(PipelineConfig, json.dumps(whole(folder=str(tmp_path))), "a test"))
    notice = "3 of 5 sentences of the test set babel are in training text"
    for path, content in {
        road.at("clean", "report.json"): {"corpora": {}, "notices": [notice]},
        road.at("export-ctranslate2", "ctranslate2", "export.json"): {
            "verification": {"lines": 990, "identical": 990},
            "quantized": {"lines": 1000, "identical": 995},
        },
    }.items():
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
    page = pipeline_page(summary._summary(road, [], Times(tmp_path / "times.json")))
    assert f'<p class="warning">{notice}</p>' in page
    assert "990 of 990 lines as the model in fp32,\n995 of 1,000 after quantisation" in page


def test_the_time_of_all_steps_says_what_it_is_the_sum_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "_models", lambda road: [])
    road = Road(parsed(whole(folder=str(tmp_path), teacher={"existing": "run"})))
    found = replace(
        summary._summary(road, [], Times(tmp_path / "times.json")), steps=[StepRow("clean", "", 250.0, 1, 0)] * 2
    )
    said = "The 2 steps below, each as it was done last, took 8:20 together; the teacher, which was there before"
    assert f"<p>{said}, is not counted.</p>" in pipeline_page(found)
    assert found.as_record()["existing"] == ["teacher"]
