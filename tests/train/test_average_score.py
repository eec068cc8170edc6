"""The average at the end of a run: its score on the dev set decides whether it is the default."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from tests.conftest import tiny_experiment
from tests.train.launch import run_together
from tests.train.runs import QUIET, outcome, records, same_records
from ziggurat.config import Experiment, dump, load_experiment
from ziggurat.model.directory import AverageScore, open_model, weights_origin, write_score
from ziggurat.system.errors import CheckpointError
from ziggurat.train.average import CheckpointSelection, average_run
from ziggurat.train.loop import train

HERE = "tests.train.test_average_score"


def short(folder: Path, updates: int = 12, metric: str = "loss", kind: str = "ddp") -> Experiment:
    """A run that learns fast until the end, so that the average of its checkpoints is worse than the last one."""
    return tiny_experiment(
        folder,
        batch={"max_tokens": 200, "accumulate": 2},
        schedule={"peak": 3e-2, "warmup_updates": 12},
        validation={"every_updates": 4, "metric": metric, "max_sentences": 4, "decode": metric != "loss"},
        checkpoint={"every_updates": 4, "keep_last": 3, "average_last": 3},
        stop={"updates": updates},
        distributed={"kind": kind},
    )


@pytest.fixture(scope="module")
def finished_run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run, and its messages."""
    run, said = tmp_path_factory.mktemp("ended") / "run", io.StringIO()
    train(run, short(tiny_folder), console=Console(file=said, width=1000))
    return run, said.getvalue()


def score_of(run: Path) -> AverageScore:
    found = json.loads((run / "averaged" / "validation.json").read_text())
    del found["checksum"]
    return AverageScore(**found)


def test_a_worse_average_is_not_the_default_and_every_verb_reports_it(finished_run: tuple[Path, str]) -> None:
    run, messages = finished_run
    found = score_of(run)
    assert found.value is not None
    assert found.value > found.rival_value == records(run, "validation")[-1]["nll"]
    (record,) = records(run, "average")
    assert (record["update"], record["nll"]) == (12, found.value)
    assert "bleu" not in record  # the loss decides, so nothing is translated
    values = f"dev loss {found.value:.4f}, best {found.rival_value:.4f}"
    assert f"averaged: dev nll {found.value:.4f}" in messages
    assert f"WORSE than best ({values})" in messages
    opened = open_model(run)
    assert opened.weights == run / "best" / "model.safetensors"
    assert opened.origin == f"{run}: best, update 12 (averaged/ is worse: {values}; `--which averaged` uses it)"
    assert open_model(run, which="averaged").origin == f"{run}: averaged checkpoints"
    assert open_model(run, which="best").origin == f"{run}: best, update 12"
    assert weights_origin(run, opened.weights) == opened.origin


def test_the_score_is_the_averaged_models_even_after_resuming(
    finished_run: tuple[Path, str], tiny_folder: Path, tmp_path: Path
) -> None:
    """A run with one update that starts from the averaged weights finds the same loss on the same dev set."""
    run = shutil.copytree(finished_run[0], tmp_path / "run", symlinks=True)
    before, found = outcome(run), score_of(run)
    (run / "averaged" / "validation.json").unlink()  # as in a run that was killed earlier
    train(run, short(tiny_folder), resume=True, console=QUIET)
    assert (outcome(run), score_of(run)) == (before, found)
    tuned = tiny_experiment(
        tiny_folder,
        start_from=str(run / "averaged"),
        schedule={"peak": 1e-12, "warmup_updates": 1},
        stop={"updates": 1},
    )
    train(tmp_path / "tuned", tuned, console=QUIET)
    assert records(tmp_path / "tuned", "validation")[-1]["nll"] == pytest.approx(found.value, abs=1e-5)


def test_a_resumed_run_has_the_records_of_an_uninterrupted_one(tiny_folder: Path, tmp_path: Path) -> None:
    train(tmp_path / "whole", short(tiny_folder, 16), console=QUIET)
    train(tmp_path / "parts", short(tiny_folder), console=QUIET)
    train(tmp_path / "parts", short(tiny_folder, 16), resume=True, console=QUIET)
    same_records(tmp_path / "whole", tmp_path / "parts")
    assert score_of(tmp_path / "parts") == score_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("metric", "value", "taken"),
    [
        ("loss", 2.0, "averaged"),
        ("loss", 1.9, "averaged"),
        ("loss", 2.1, "best"),
        ("chrf", 2.0, "averaged"),
        ("chrf", 2.1, "averaged"),
        ("chrf", 1.9, "best"),
        ("loss", float("nan"), "best"),
        ("loss", None, "best"),
    ],
)
def test_the_better_model_is_the_default(
    metric: str, value: float | None, taken: str, finished_run: tuple[Path, str], tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run[0], tmp_path / "run", symlinks=True)
    write_score(run / "averaged", AverageScore(metric, value, "best", 2.0))
    assert open_model(run).weights.parent.name == taken


def test_a_damaged_score_is_an_error_and_an_average_by_hand_has_none(
    finished_run: tuple[Path, str], tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run[0], tmp_path / "run", symlinks=True)
    path = run / "averaged" / "validation.json"
    for content in ("", "[]", "{}", path.read_text().replace("best", "last")):
        path.write_text(content)
        with pytest.raises(CheckpointError, match=r"validation\.json"):
            open_model(run)
        assert open_model(run, which="best")
    average_run(run, CheckpointSelection("last", 2))
    assert not path.exists()
    assert open_model(run).origin == f"{run}: averaged checkpoints"


def test_metrics_of_translations_need_translations(tiny_folder: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", short(tiny_folder, metric="chrf"), console=QUIET)
    found = score_of(tmp_path / "run")
    assert found.metric == "chrf"
    assert records(tmp_path / "run", "average")[0]["chrf"] == found.value


def train_in_process(run: str, config: str) -> None:
    """Run in every process: train with `config`."""
    train(Path(run), load_experiment(Path(config)), console=QUIET)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_share_the_measurement(
    kind: str, finished_run: tuple[Path, str], tiny_folder: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(dump(short(tiny_folder, kind=kind)), encoding="utf-8")
    run_together(HERE, "train_in_process", 2, str(tmp_path / "run"), str(config))
    found, expected = score_of(tmp_path / "run"), score_of(finished_run[0])
    assert found.worse
    assert (found.value, found.rival_value) == pytest.approx((expected.value, expected.rival_value), rel=1e-2)
