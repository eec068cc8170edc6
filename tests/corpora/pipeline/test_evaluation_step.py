"""The evaluation step: which systems, and where each of them runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.corpora.pipeline.conftest import MakeContext, whole
from ziggurat.corpora.pipeline import evaluation
from ziggurat.corpora.pipeline.engine import Selection
from ziggurat.corpora.pipeline.evaluation import _against_first, _notices
from ziggurat.corpora.pipeline.steps import pipeline_of
from ziggurat.evaluate.comparison import System, compare
from ziggurat.evaluate.metrics import TestSet


class _Echo:
    """A system that copies every line."""

    origin = "nowhere"

    def translate_stream(self, texts: Sequence[str], window: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(text=text) for text in texts]


def test_our_int8_runs_on_the_cpu_whatever_the_device(
    place: Path, context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = {}

    def load_translator(folder: Path, *, device: str, precision: str = "float32") -> _Echo:
        opened[folder.parent.name, precision] = device
        return _Echo()

    monkeypatch.setattr("ziggurat.translate.translator.load_translator", load_translator)
    monkeypatch.setattr("ziggurat.model.fast.packed.available", lambda precision: True)
    unwanted: dict[str, Any] = dict.fromkeys(("quantisation", "shortlist", "export"))
    chosen = pipeline_of(context(whole(evaluation={"device": "cuda", "speed_lines": 0}, **unwanted)))
    chosen.run(Selection(last="sets"))
    next(step for step in chosen.steps if step.name == "evaluate").work(place / "w")
    assert opened == {
        ("teacher", "float32"): "cuda",
        ("student", "float32"): "cuda",
        ("student", "int8"): "cpu",
    }


def test_the_robustness_page_is_rebuilt_without_translating(
    place: Path, context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def load_translator(folder: Path, **settings: Any) -> _Echo:
        opened.append(folder)
        return _Echo()

    monkeypatch.setattr("ziggurat.translate.translator.load_translator", load_translator)
    unwanted: dict[str, Any] = dict.fromkeys(("quantisation", "shortlist", "export"))
    how = {"perturb": ["caps"], "perturb_lines": 4, "speed_lines": 0, "int8": False}
    chosen = pipeline_of(context(whole(evaluation=how, **unwanted)))
    chosen.run(Selection(last="sets"))
    step = next(step for step in chosen.steps if step.name == "evaluate")
    step.work(place / "w")
    (page,) = (place / "w" / name for name in step.pages)

    def content() -> str:  # except for the time at which it was written
        return re.sub(r"Written [-0-9: ]+ by", "", page.read_text("utf-8"))

    scores = json.loads((place / "w" / "scores.json").read_text())["tests"]["babel"]["student"]
    assert all(score["interval"] >= 0 for score in scores)  # with 95 % confidence
    before, systems = content(), len(opened)
    page.unlink()
    step.work(place / "w")
    assert content() == before
    assert len(opened) == systems == 2


def test_systems_are_tested_against_the_first_as_compare_does() -> None:
    references = [f"a small dog {n} runs home to its {n % 7} houses" for n in range(40)]
    first = [line.replace("small", "tiny") if n % 2 else line for n, line in enumerate(references)]
    second = [line.replace("home", "back") if n % 3 else line for n, line in enumerate(references)]
    test_set = TestSet([references], None, "en")
    found = _against_first(test_set.metric("bleu"), [first, second])
    (scores, *_) = compare([System("a", [first]), System("b", [second])], [references], metrics=["bleu"]).scores
    assert found == [None, scores.pairs[0].bootstrap_adjusted]
    assert _against_first(test_set.metric("bleu"), [first, first, second])[1] == 1.0
    few = TestSet([references[:29]], None, "en")
    assert _against_first(few.metric("bleu"), [first[:29], second[:29]]) == [None, None]


def test_perturbations_that_change_no_line_cost_no_scores(
    place: Path, context: MakeContext, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.translate.translator.load_translator", lambda folder, **settings: _Echo())
    unwanted: dict[str, Any] = dict.fromkeys(("quantisation", "shortlist", "export"))
    how = {"perturb": ["long"], "perturb_lines": 2, "speed_lines": 0, "int8": False}
    on = context(whole(evaluation=how, **unwanted))
    chosen = pipeline_of(on)
    chosen.run(Selection(last="sets"))
    step = next(step for step in chosen.steps if step.name == "evaluate")
    folder = on.at("evaluate")
    folder.mkdir()
    step.work(folder)
    assert json.loads((folder / "scores.json").read_text())["tests"]["babel"]["student"]
    assert json.loads((folder / "robustness.json").read_text())["left_out"] == ["long"]
    page = (folder / "robustness.html").read_text("utf-8")
    assert "teacher: no perturbation changes a line." in page
    assert "perturbation</th>" not in page  # an empty table
    notice = "evaluation.perturb: left out, since they change none of the first 2 lines of the first test set: long"
    assert f"warning: {notice}" in said
    assert _notices(on, {"evaluate"}) == [notice]


def test_a_missing_speed_measurement_is_repeated_without_translating_the_tests(
    place: Path, context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report's table has no gap, even after an interrupted call or a removed file."""
    texts = []

    class Timed(_Echo):
        target_tokenizer = SimpleNamespace(encode=lambda lines: [line.split() for line in lines])

        def translate_stream(self, lines: Sequence[str], window: int) -> list[SimpleNamespace]:
            texts.append(len(lines))
            return super().translate_stream(lines, window)

    monkeypatch.setattr("ziggurat.translate.translator.load_translator", lambda folder, **settings: Timed())
    monkeypatch.setattr("ziggurat.corpora.pipeline.evaluation._bytes_of", lambda system: 1)
    monkeypatch.setattr(evaluation, "SystemLoad", lambda: SimpleNamespace(look=lambda threads: (0.0, False)))
    unwanted: dict[str, Any] = dict.fromkeys(("quantisation", "shortlist", "export"))
    chosen = pipeline_of(context(whole(evaluation={"speed_lines": 3, "int8": False}, **unwanted)))
    chosen.run(Selection(last="sets"))
    step = next(step for step in chosen.steps if step.name == "evaluate")
    step.work(place / "w")
    assert step.pages == ("speed/teacher.json", "speed/student.json")
    scores = (place / "w" / "scores.json").read_bytes()
    (place / "w" / step.pages[1]).unlink()
    texts.clear()
    step.work(place / "w")
    assert texts == [3, 3]
    assert (place / "w" / step.pages[1]).is_file()
    assert (place / "w" / "scores.json").read_bytes() == scores


@pytest.mark.parametrize(
    ("looks", "others", "rounds"),
    [
        ([(0.1, False)] * 9, 0.0, 2),
        ([(0.5, True), (0.1, False), (0.6, True), (0.0, False)], 0.0, 4),
        ([(0.5, True)] * 9, 0.5, 6),
        ([(0.5, True), (0.1, False), *[(0.4, True)] * 9], 0.0, 6),
    ],
)
def test_speed_is_measured_again_while_other_programs_interfere(
    place: Path,
    context: MakeContext,
    monkeypatch: pytest.MonkeyPatch,
    looks: list[tuple[float, bool]],
    others: float,
    rounds: int,
) -> None:
    left = iter(looks)
    monkeypatch.setattr(evaluation, "SystemLoad", lambda: SimpleNamespace(look=lambda threads: next(left)))
    step = next(step for step in pipeline_of(context(whole())).steps if step.name == "evaluate")
    echo = _Echo()
    echo.target_tokenizer = SimpleNamespace(encode=lambda lines: [line.split() for line in lines])  # type: ignore[attr-defined]
    found = step._speed(echo, ["a b", "c"])  # type: ignore[attr-defined]
    assert (found["others"], found["lines"], found["target_pieces"]) == (others, 2, 3)
    assert len(list(left)) == len(looks) - rounds
