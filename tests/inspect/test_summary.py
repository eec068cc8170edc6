"""Verdicts and answers in plain words, on records whose outcome is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_experiment
from tests.inspect.runs import train_record, validation_record, write_run
from ziggurat.config.load import change_section
from ziggurat.inspect.report.content import differing, gather, set_away, standing
from ziggurat.inspect.report.page import answer, compared
from ziggurat.inspect.report.runs import read_run, read_runs
from ziggurat.train.diagnosis.records import Record, write_records


def verdict_of(folder: Path, metrics: list[dict[str, Any]], floor: float | None = 5.9, **values: Any) -> str:
    run = write_run(folder, metrics, log=["first update", "stopped after update 9: reached (1 s)"])
    if values:
        write_records(run, [Record(300, 0.0, {"encoder": 2, "decoder": 2}, values)])
    return standing(read_run(run), floor).verdict


def dev(*nlls: float, bleu: float = 0.0) -> list[dict[str, Any]]:
    """Training to update 300 with these dev losses on the way."""
    places = [300 * (i + 1) // len(nlls) for i in range(len(nlls))]
    scored = [validation_record(place, nll=nll, bleu=bleu) for place, nll in zip(places, nlls, strict=True)]
    return [train_record(150), train_record(300), *scored]


@pytest.mark.parametrize(
    ("metrics", "options", "verdict"),
    [
        ([], {}, "no record"),
        (dev(5.2, 4.7), {}, "trains"),
        (dev(6.1, 8.1), {}, "did not train"),  # as plain post-norm, 18-18 (experiments/depth-trainability)
        (dev(5.7), {}, "did not train"),
        ([train_record(300, nll=5.67)], {}, "did not train"),
        ([train_record(300, nll=4.0)], {}, "trains"),
        ([train_record(60, nll=6.5)], {}, "too early"),
        (dev(5.0, math.nan), {}, "diverged"),
        ([*dev(5.0), {"kind": "validation", "update": 400}], {}, "diverged"),  # not finite, so left out
        ([train_record(300, nll=math.inf)], {}, "diverged"),
        (dev(4.0, 4.6), {}, "got worse"),
        (dev(4.0, 4.4), {}, "trains"),
        (dev(4.0), {"source_dependence": 0.001}, "ignores its source so far"),
        (dev(4.0), {"source_dependence": 0.8}, "trains"),
        (dev(4.0), {"floor": None}, "unclear"),
        (dev(4.0, bleu=12.0), {"floor": None}, "trains"),
        (dev(4.0), {"floor": None, "source_dependence": 0.8}, "trains"),
    ],
)
def test_verdicts(tmp_path: Path, metrics: list[dict[str, Any]], options: dict[str, Any], verdict: str) -> None:
    assert verdict_of(tmp_path / "a", metrics, **options) == verdict


def test_what_went_wrong_is_counted(tmp_path: Path) -> None:
    metrics = [train_record(10, skipped=2, data_wait_share=0.5), train_record(20, skipped=1, roll_backs=1)]
    its = standing(read_run(write_run(tmp_path / "a", metrics)), 5.9)
    said = " ".join(its.complaints)
    assert "3 updates were skipped" in said
    assert "rolled back to an earlier checkpoint 1 time." in said
    assert "26 % of its time waiting" in said
    assert "Not finished" in said


def test_waiting_counts_by_time_and_not_by_record(tmp_path: Path) -> None:
    """As a short partial record at the end of a run may have it."""
    waits = [(100.0, 0.0), (200.0, 0.0), (202.0, 0.9)]
    metrics = [train_record(n, seconds=now, data_wait_share=share) for n, (now, share) in enumerate(waits, start=1)]
    its = standing(read_run(write_run(tmp_path / "a", metrics)), 5.9)
    assert "waiting" not in " ".join(its.complaints)
    metrics[1]["data_wait_share"] = 0.3
    its = standing(read_run(write_run(tmp_path / "b", metrics)), 5.9)
    assert "16 % of its time waiting" in " ".join(its.complaints)


def test_measures_outside_their_bands_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", dev(4.0), log=["first update", "stopped after update 300: reached (1 s)"])
    healthy = {"gradient_norm": {"encoder": [1.0, 0.5], "decoder": [1.0, 1.0]}}
    starved = {"gradient_norm": {"encoder": [1e-4, 1.0], "decoder": [1.0, 1.0]}}
    layers = {"encoder": 2, "decoder": 2}
    write_records(folder, [Record(0, 0.0, layers, starved), Record(300, 0.0, layers, healthy)])
    assert standing(read_run(folder), 5.9).complaints == ()
    write_records(folder, [Record(0, 0.0, layers, healthy), Record(300, 0.0, layers, starved)])
    its = standing(read_run(folder), 5.9)
    assert len(its.complaints) == 1
    assert its.complaints[0].startswith("The gradient of the first encoder layer is 1.0e-04 of the last one's")
    assert its.complaints[0].endswith("the lower layers hardly learn.")
    assert len(its.remedies) == 1
    assert its.remedies[0].startswith("Use methods for deep models")


def test_the_best_run_is_named_with_its_lead(tmp_path: Path) -> None:
    experiment = tiny_experiment(tmp_path)
    deeper = change_section(experiment, {"model": {"encoder": {"layers": 9}}}, "experiment")
    shallow = write_run(tmp_path / "shallow", dev(4.0, bleu=10.0), experiment=experiment)
    deep = write_run(tmp_path / "deep", dev(4.5, bleu=12.5), experiment=deeper)
    content = gather(read_runs([shallow, deep]), None)
    assert compared(content) == "2 runs, on the same data. They differ in `model.encoder.layers` (2 / 9)."
    assert answer(content) == ["deep stands best with a dev BLEU of 12.5, 2.5 more than shallow."]


def test_where_nothing_translates_the_loss_decides(tmp_path: Path) -> None:
    metrics = {"a": dev(4.0, bleu=0.3), "b": dev(4.5, bleu=0.9)}
    content = gather(read_runs([write_run(tmp_path / name, its) for name, its in metrics.items()]), None)
    assert answer(content)[0] == "a stands best with a dev loss of 4.00, 0.50 less than b."


@pytest.mark.parametrize(
    ("bleu", "dev_set", "vocabulary", "said"),
    [
        (10.0, "other.qhi", b"a\n", "Dev scores are not ranked: the dev sets"),
        (0.0, "other.qhi", b"a\n", "Dev scores are not ranked: the dev sets"),
        (0.0, "dev.qhi", b"b\n", "Dev losses, which are per token, are not ranked: the vocabularies"),
        (0.0, "dev.qhi", b"a\n", "a stands best with a dev loss"),
        (10.0, "dev.qhi", b"b\n", "b stands best with a dev BLEU"),
    ],
)
def test_only_what_can_be_compared_is_ranked(
    tmp_path: Path, bleu: float, dev_set: str, vocabulary: bytes, said: str
) -> None:
    mine = tiny_experiment(tmp_path)
    elsewhere = [{"source": "elsewhere/dev.qlo", "target": f"elsewhere/{dev_set}"}]
    other = change_section(mine, {"data": {"dev": elsewhere}}, "experiment")
    a = write_run(tmp_path / "a", dev(4.0, bleu=bleu), experiment=mine)
    b = write_run(tmp_path / "b", dev(4.5, bleu=bleu + 0.9), experiment=other, vocabulary=vocabulary)
    assert answer(gather(read_runs([a, b]), None))[0].startswith(said)


def test_settings_that_differ_and_those_set(tmp_path: Path) -> None:
    experiment = tiny_experiment(tmp_path)
    other = change_section(experiment, {"training": {"seed": 7}, "decoding": {"banned": ["x"]}}, "experiment")
    assert {s.key: s.values for s in differing([experiment, other, experiment])} == {
        "training.seed": (str(experiment.training.seed), "7", str(experiment.training.seed)),
        "decoding.banned": ("[]", '["x"]', "[]"),
    }
    assert differing([experiment, experiment]) == []
    away = {s.key: s.values for s in set_away(experiment)}
    assert away["model.d_model"] == ("512", "16")
    assert "training.seed" not in away
