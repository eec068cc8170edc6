"""Runs with `training.quantise`: they resume exactly, start from ordinary weights, and serve what was validated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_experiment
from tests.int8_engines import engine
from tests.train.runs import QUIET, final_bytes, records
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.data.corpus import Store
from ziggurat.train.loop import train
from ziggurat.translate.translator import load_translator

EVERYTHING: dict[str, Any] = {
    "precision": "bf16",
    "batch": {"accumulate": 2},
    "recompute": {"encoder": 1, "decoder": "segments"},
    "growth": {"stages": [{"layers": 1, "updates": 1}], "keep_stages": False},
}
RNMT: dict[str, Any] = {"family": "rnmt", "embedding": {"positions": "none", "sharing": "none"}, "dropout": {}}


@pytest.fixture(scope="module")
def experiment(tiny_folder: Path) -> Experiment:
    return tiny_experiment(
        tiny_folder,
        stop={"updates": 4},
        checkpoint={"every_updates": 2},
        validation={"every_updates": 4, "decode": False},
        log_every_updates=2,
    )


def changed(experiment: Experiment, **training: Any) -> Experiment:
    return change_section(experiment, {"training": training}, "")


@pytest.mark.slow
@pytest.mark.parametrize("choices", [{}, EVERYTHING], ids=["plain", "bf16, accumulation, recomputing, growth"])
def test_a_run_resumes_exactly(choices: dict[str, Any], experiment: Experiment, tmp_path: Path) -> None:
    whole = changed(experiment, quantise="int8", **choices)
    train(tmp_path / "whole", whole, console=QUIET)
    train(tmp_path / "parts", changed(whole, stop={"updates": 2}), console=QUIET)
    train(tmp_path / "parts", whole, resume=True, console=QUIET)
    assert final_bytes(tmp_path / "parts", 4) == final_bytes(tmp_path / "whole", 4)


@pytest.mark.cpu("int8 translation is for CPUs")
def test_it_starts_from_an_ordinary_model_and_serves_what_it_validated(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "before", experiment, console=QUIET)
    start = {"quantise": "int8", "start_from": str(tmp_path / "before"), "stop": {"updates": 1}}
    train(tmp_path / "run", changed(experiment, **start, validation={"every_updates": 1}), console=QUIET)
    (found,) = records(tmp_path / "run", "validation")
    dev = Store.open(experiment.data.store).dev
    assert dev is not None

    def nll(**decoding: Any) -> float:
        scores = load_translator(tmp_path / "run", **decoding).score(*dev.texts(range(len(dev))))
        tokens = sum(len(score.token_log_probabilities) for score in scores)
        return -sum(score.log_probability for score in scores) / tokens

    with engine("arithmetic", monkeypatch):
        assert nll(precision="int8") == pytest.approx(found["nll"], rel=1e-6)
    assert nll() != pytest.approx(found["nll"], rel=1e-5)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (RNMT, "leaves LSTM cells in fp32"),
        ({"decoder": {"residual": "fixup"}}, "the decoder has `residual: fixup`, and int8 translation leaves its maps"),
    ],
)
def test_models_that_int8_cannot_compute_are_refused(
    model: dict[str, Any], complaint: str, experiment: Experiment
) -> None:
    values = experiment.model_dump()
    values["training"]["quantise"] = "int8"
    Experiment.model_validate(values)
    values["model"] |= {**model, "init": {}}
    with pytest.raises(ValueError, match=complaint):
        Experiment.model_validate(values)
