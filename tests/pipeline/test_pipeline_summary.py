"""What the report of a pipeline tells of what its steps left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pipeline.conftest import whole
from ziggurat.config.load import parse_as
from ziggurat.config.pipeline import PipelineConfig
from ziggurat.pipeline import summary
from ziggurat.pipeline.road import Road
from ziggurat.pipeline.table import steps_of
from ziggurat.pipeline.times import Times
from ziggurat.report.pipeline import pipeline_page


def test_the_page_tells_notices_and_of_how_many_lines_an_export_kept_the_translation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "_models", lambda road: [])
    road = Road(parse_as(PipelineConfig, json.dumps(whole(folder=str(tmp_path))), "a test"))
    notice = "3 of 5 sentences of the test set babel are in training text"
    score = {"name": "BLEU", "value": 14.1, "interval": 1.26, "signature": "s", "sentences": 300}
    for path, content in {
        road.at("evaluate", "scores.json"): {"systems": [["student", "w"]], "tests": {"babel": {"student": [score]}}},
        road.at("clean", "report.json"): {"corpora": {}, "notices": [notice]},
        road.at("export-ctranslate2", "ctranslate2", "export.json"): {
            "verification": {"lines": 990, "identical": 990},
            "quantized": {"lines": 1000, "identical": 995},
        },
    }.items():
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
    evaluated = next(step for step in steps_of(road) if step.name == "evaluate")
    page = pipeline_page(summary._summary(road, [evaluated], Times(tmp_path / "times.json")))
    assert '<td class="n">14.1 ± 1.3</td>' in page
    assert f'<p class="warning">{notice}</p>' in page
    assert "990 of 990 lines as the model in fp32,\n995 of 1,000 after quantisation" in page
