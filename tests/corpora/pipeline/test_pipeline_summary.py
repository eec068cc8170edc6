"""A pipeline's report on the results of its steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.corpora.pipeline.conftest import parsed, small_step, whole
from tests.evaluate.test_robustness import REFERENCES, TRIALS
from tests.inspect.hand_made import trained
from ziggurat.config.load import parse_as
from ziggurat.config.pipeline import PipelineConfig
from ziggurat.corpora.pipeline import evaluation
from ziggurat.corpora.pipeline.context import PipelineContext
from ziggurat.corpora.pipeline.engine import TIMES, Pipeline, Selection
from ziggurat.corpora.pipeline.step import MANIFEST, Times, write_document
from ziggurat.corpora.pipeline.steps import steps_of
from ziggurat.evaluate.metrics import TestSet
from ziggurat.evaluate.significance import PerturbedScore, judge
from ziggurat.inspect.report.page import PipelineSummary, SpeedRow, StepRow, pipeline_page


def test_the_page_shows_notices_and_how_many_lines_an_export_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_models", lambda context: [])
    context = PipelineContext(parse_as(PipelineConfig, json.dumps(whole(folder=str(tmp_path))), "a test"))
    notice = "3 of 5 sentences of the test set babel are in training text"
    score = {"name": "BLEU", "value": 14.1, "interval": 1.26, "signature": "s", "sentences": 300}
    for path, content in {
        context.at("evaluate", "scores.json"): {
            "systems": [["student", "w"]],
            "tests": {"babel": {"student": [score]}},
        },
        context.at("clean", "report.json"): {"corpora": {}, "notices": [notice]},
        context.at("export-ctranslate2", "ctranslate2", "export.json"): {
            "verification": {"lines": 990, "identical": 990},
            "quantized": {"lines": 1000, "identical": 995},
        },
    }.items():
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
    evaluated = next(step for step in steps_of(context) if step.name == "evaluate")
    page = pipeline_page(evaluation._summary(context, [evaluated], Times(tmp_path / "times.json")))
    assert '<td class="n">14.1 ± 1.3</td>' in page
    assert f'<p class="warning">{notice}</p>' in page
    assert "990 of 990 lines as the model in fp32,\n995 of 1,000 after quantisation" in page


def test_the_page_draws_how_its_models_learned() -> None:
    summary = PipelineSummary(("de", "en"), [], [], [])
    runs = [trained("teacher"), trained("student", 1)]
    assert "Learning curves" in pipeline_page(summary, runs=runs)
    assert "<figure" not in pipeline_page(summary)


def test_the_table_of_perturbations_has_cases_and_unperturbed_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unperturbed scores are not those of the whole test set, because rows cover different lines."""
    monkeypatch.setattr(evaluation, "_models", lambda context: [])
    context = PipelineContext(parse_as(PipelineConfig, json.dumps(whole(folder=str(tmp_path))), "a test"))
    (ideal, _), (outputs, _) = TRIALS[2].ideal, TRIALS[2].found
    trials = [
        PerturbedScore(name, "", REFERENCES[:cases], [REFERENCES[:cases]], [outputs[:cases]], [ideal[:cases]])
        for name, cases in (("strong", 40), ("few", 9))
    ]
    judged = judge(["teacher"], [""], trials, ["chrf"], TestSet([REFERENCES]), resamplings=50)
    score = {"name": "chrF2", "value": 20.6, "signature": "s", "sentences": 500}
    folder = context.at("evaluate")
    folder.mkdir(parents=True)
    for name, content in {
        "scores.json": {"systems": [["teacher", "a model"]], "tests": {"babel": {"teacher": [score]}}},
        "robustness.json": judged.as_record(),
    }.items():
        (folder / name).write_text(json.dumps(content))
    evaluate = small_step("evaluate", title="evaluates", outputs=())
    found = evaluation._summary(context, [evaluate], Times(tmp_path / "times.json"))
    assert (found.disturbed_lines, found.cases) == (40, {"strong": 40, "few": 9})
    page = pipeline_page(found)
    assert "chrF2 on the first 40 lines of babel" in page
    for cases, mark, effect in zip((40, 9), ("*", ""), found.effects, strict=True):
        cell = f"{effect.undisturbed:.1f} → {effect.disturbed:.1f} ({effect.difference:+.1f}{mark})"
        assert f'<td class="n">{cases}</td>\n<td class="n">{cell}</td>' in page
    assert "fewer than 30 cases" in page


def test_the_total_time_names_the_steps_it_covers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_models", lambda context: [])
    context = PipelineContext(parsed(whole(folder=str(tmp_path), teacher={"existing": "run"})))
    found = replace(
        evaluation._summary(context, [], Times(tmp_path / "times.json")), steps=[StepRow("clean", "", 250.0, 1, 0)] * 2
    )
    said = "The 2 steps below took 8:20 in total (the last run of each); the teacher, which was there before"
    assert f"<p>{said}, is not counted.</p>" in pipeline_page(found)
    assert found.as_record()["existing"] == ["teacher"]


def test_work_with_an_unchanged_result_is_still_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed and times are not outputs of a step, but the page shows them, even those of an earlier call."""
    monkeypatch.setattr(evaluation, "_models", lambda context: [])
    monkeypatch.setattr(evaluation, "_runs", lambda context: [])
    context = PipelineContext(parsed(whole(folder=str(tmp_path / "w"), export=None, shortlist=None)))
    measured = {"lines": 4, "source_words": 9, "target_pieces": 9, "threads": 1, "bytes": 1}

    def work(folder: Path) -> None:
        write_document(folder / "scores.json", {"systems": [["teacher", "a model"]], "tests": {}})
        measured["seconds"] = measured.get("seconds", 0) + 1
        (folder / "speed").mkdir(exist_ok=True)
        write_document(folder / "speed/teacher.json", measured)

    evaluate = small_step("evaluate", work, title="evaluates", outputs=("scores.json",), pages=("speed/teacher.json",))
    report = evaluation.ReportStep(context, [evaluate], context.folder / TIMES)

    def shown(last: str = "report", *forced: str) -> tuple[tuple[str, ...], list[float]]:
        done = Pipeline(context.folder, [evaluate, report]).run(Selection(last=last, forced=frozenset(forced))).done
        found = json.loads(context.at("report", evaluation.RECORD).read_bytes())
        return done, [found["speed"][0]["lines"], *(row["calls"] for row in found["steps"])]

    assert shown() == (("evaluate", "report"), [4.0, 1])
    manifest = context.at("report", MANIFEST).read_bytes()
    assert shown() == ((), [4.0, 1])
    context.at("evaluate", "speed/teacher.json").unlink()
    assert shown() == (("evaluate", "report"), [2.0, 2])
    assert shown("evaluate", "evaluate") == (("evaluate",), [2.0, 2])
    assert shown() == (("report",), [4 / 3, 1])
    assert context.at("report", MANIFEST).read_bytes() == manifest


def summary_of(*scores: tuple[str, float, float | None], metric: str = "BLEU", speed: Sequence[SpeedRow] = ()) -> Any:
    """Facts about systems: name, score and half of its interval."""
    by_system = {
        name: [{"name": metric, "value": value, "interval": interval, "signature": "s", "sentences": 60}]
        for name, value, interval in scores
    }
    systems = [(name, "somewhere") for name, _, _ in scores]
    return PipelineSummary(("de", "en"), [], [], [], systems, {"held": by_system}, speed)


@pytest.mark.parametrize(
    ("metric", "scores", "kind"),
    [
        ("BLEU", [("teacher", 1.9, 0.9), ("student", 2.2, 0.9)], "useless"),
        ("BLEU", [("teacher", 20.0, 0.9), ("student", 4.9, 0.9)], "useless"),
        ("BLEU", [("teacher", 4.9, 0.3), ("student", 5.5, 0.3)], "better"),
        ("BLEU", [("teacher", 20.0, 0.9), ("student", 21.2, 0.9)], "none"),
        ("BLEU", [("teacher", 20.0, 0.9), ("student", 18.8, 0.9)], "none"),
        ("BLEU", [("teacher", 20.0, 0.9), ("student", 21.4, 0.9)], "better"),
        ("BLEU", [("teacher", 20.0, 0.9), ("int8", 90.0, 0.9), ("student", 18.6, 0.9)], "worse"),
        ("BLEU", [("teacher", 20.0, None), ("student", 20.1, None)], "better"),
        ("BLEU", [("student", 20.0, 0.9)], "alone"),
        ("BLEU", [("student", 2.0, 0.9)], "useless"),
        ("TER", [("teacher", 60.0, 1.0), ("student", 50.0, 1.0)], "better"),
        ("chrF2", [("teacher", 3.0, 0.1), ("student", 4.0, 0.1)], "better"),
    ],
)
def test_scores_are_judged(metric: str, scores: list[tuple[str, float, float | None]], kind: str) -> None:
    summary = summary_of(*scores, metric=metric)
    (verdict,) = summary.as_record()["verdicts"]
    assert (verdict["of"], verdict["kind"]) == ("held", kind)
    assert f"{scores[-1][1]:.1f}" in verdict["said"]
    assert verdict["said"] in pipeline_page(summary)


@pytest.mark.parametrize(
    ("metric", "student", "p", "kind"),
    [
        ("BLEU", 21.4, 0.05, "none"),
        ("BLEU", 20.3, 0.049, "better"),
        ("BLEU", 19.9, 0.001, "worse"),
        ("TER", 19.9, 0.001, "better"),
        ("BLEU", 2.0, 0.001, "useless"),
    ],
)
def test_a_paired_test_decides_where_there_is_one(metric: str, student: float, p: float, kind: str) -> None:
    summary = summary_of(("teacher", 20.0, 0.9), ("student", student, 0.9), metric=metric)
    summary.scores["held"]["student"][0]["p"] = p
    (verdict,) = summary.as_record()["verdicts"]
    assert verdict["kind"] == kind
    assert f"(p = {p:.3f})" in pipeline_page(summary)


@pytest.mark.parametrize(
    ("rates", "others", "kind"),
    [
        ((100.0, 360.0), (0.0, 0.0), "faster"),
        ((100.0, 75.0), (0.0, 0.0), "slower"),
        ((100.0, 75.0), (0.0, 0.45), "disturbed"),
        ((100.0, 360.0), (0.6, 0.0), "disturbed"),
    ],
)
def test_speeds_measured_next_to_other_programs_are_marked_and_not_compared(
    rates: tuple[float, float], others: tuple[float, float], kind: str
) -> None:
    names = "teacher", "student"
    speed = [SpeedRow(*row, 1.0, 1.0, 1, 1, busy) for *row, busy in zip(names, rates, others, strict=True)]
    summary = summary_of(*((name, 20.0, 1.0) for name in names), speed=speed)
    assert [verdict["kind"] for verdict in summary.as_record()["verdicts"]] == ["none", kind]
    page = pipeline_page(summary)
    assert page.count("machine busy") == sum(busy > 0 for busy in others)
