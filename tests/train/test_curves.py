"""The curve of a run that was killed or stopped and resumed equals that of an uninterrupted one, record by record."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_experiment
from tests.train.faulty_batches import planned, poison
from tests.train.launch import launch, run_together
from tests.train.runs import QUIET, records, same_records
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.model.run_folder import checkpoint_folders, read_meta, write_meta
from ziggurat.system.errors import CheckpointError
from ziggurat.train.average import CheckpointSelection, average_run, regular_checkpoints
from ziggurat.train.checkpoint import read_progress
from ziggurat.train.loop import train
from ziggurat.train.records import read_records
from ziggurat.train.update import train_update

UPDATES = 23
SETTINGS: dict[str, Any] = {
    "stop": {"updates": UPDATES},
    "batch": {"max_tokens": 150},
    "validation": {"every_updates": 6, "decode": False},
    "checkpoint": {"every_updates": 4, "keep_last": 2},
    "log_every_updates": 5,
}


class Killed(BaseException):
    """Ends a run like SIGKILL: no handler of errors catches it."""


def experiment(folder: Path, **training: Any) -> Experiment:
    return tiny_experiment(folder, **{**SETTINGS, **training})


def deeper(found: Experiment, **training: Any) -> Experiment:
    """Return the experiment with three encoder layers, and with settings that need them."""
    model = change_section(found.model, {"encoder": {"layers": 3}}, "model")
    return found.model_copy(update={"model": model, "training": change_section(found.training, training, "training")})


GROWTH = {"growth": {"stages": [{"layers": 1, "updates": 7}, {"layers": 2, "updates": 13}], "keep_stages": False}}
CASES: dict[str, Callable[[Path], Experiment]] = {
    "plain": experiment,
    "accumulation": lambda folder: experiment(folder, batch={"max_tokens": 80, "accumulate": 3}, log_every_updates=7),
    "growth": lambda folder: deeper(experiment(folder), **GROWTH),
    "bf16 and depth": lambda folder: experiment(
        folder, precision="bf16", diagnostics={"every_updates": 3, "max_share": None}
    ),
    "roll-back": lambda folder: experiment(
        folder,
        patience={"non_finite": 2},
        divergence={"action": "roll_back", "loss_spike": 4.0, "window": 9},
    ),
}


def killed_before(number: int, patch: pytest.MonkeyPatch) -> None:
    """Make runs die before their `number`-th update, counted from now on."""
    updates = count(1)

    def update(*arguments: Any, **options: Any) -> Any:
        if next(updates) == number:
            raise Killed
        return train_update(*arguments, **options)

    patch.setattr("ziggurat.train.loop.train_update", update)


def poisoned(case: str, configuration: Experiment, patch: pytest.MonkeyPatch) -> None:
    """Return NaN for the batches of updates 10 and 11 in the case that rolls back."""
    if case == "roll-back":
        poison(
            patch, planned(configuration, 10, 11), "encoder.layers.1.ffn.in_proj", lambda output: output * float("nan")
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in ("growth", "roll-back"))) for c in CASES]
)
def test_records_after_kills(case: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run is killed repeatedly: before and after a record, around a roll-back or a stage."""
    configuration, run = CASES[case](tiny_folder), tmp_path / "run"
    poisoned(case, configuration, monkeypatch)
    train(tmp_path / "whole", configuration, console=QUIET)
    for survived in (3, 8, 6, 7):
        with monkeypatch.context() as patch:
            killed_before(survived, patch)
            with pytest.raises(Killed):
                train(run, configuration, resume=run.exists(), console=QUIET)
    train(run, configuration, resume=True, console=QUIET)
    same_records(tmp_path / "whole", run)
    assert records(run, "train")[-1]["update"] == UPDATES
    assert read_progress(run / "last").roll_backs == (case == "roll-back")
    assert bool(read_records(run)) == (case == "bf16 and depth")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_records_of_two_processes_after_kills(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"batch": {"max_tokens": 150, "accumulate": 2}, "checkpoint": {"every_updates": 1, "keep_last": 2}}
    document = experiment(tiny_folder, **settings, distributed={"kind": kind}).model_dump_json()
    run_together("tests.train.runs", "train_part", 2, str(tmp_path / "whole"), document, "")
    run, kills = tmp_path / "run", 0
    for update in (3, 7, 9, 13):
        begun = (run / "checkpoints").is_dir()
        started = launch("tests.train.runs", "train_part", 2, str(run), document, "resume" if begun else "")
        while not (run / "checkpoints" / f"step-{update:08d}").is_dir() and started[0].process.is_alive():
            time.sleep(0.005)
        for one in started:
            kills += one.process.is_alive()
            one.process.kill()
            one.process.join()
    assert kills >= 4
    run_together("tests.train.runs", "train_part", 2, str(run), document, "resume")
    same_records(tmp_path / "whole", run)


def stopped_in(number: int, patch: pytest.MonkeyPatch) -> None:
    """Raise SIGTERM in the `number`-th update, counted from here on."""
    updates = count(1)

    def update(*arguments: Any, **options: Any) -> Any:
        if next(updates) == number:
            signal.raise_signal(signal.SIGTERM)
        return train_update(*arguments, **options)

    patch.setattr("ziggurat.train.loop.train_update", update)


def stop_again_and_again(run: Path, configuration: Experiment, *numbers: int) -> None:
    """Stop the run in the `numbers`-th update of each of its parts, then let it finish."""
    for number in numbers:
        with pytest.MonkeyPatch.context() as patch:
            stopped_in(number, patch)
            assert train(run, configuration, resume=run.exists(), console=QUIET).reason == "SIGTERM"
        assert not read_progress(run / "last").window or records(run, "train")[-1]["partial"]
    assert train(run, configuration, resume=True, console=QUIET).signal is None


@pytest.mark.slow
def test_records_after_signals(tiny_folder: Path, tmp_path: Path) -> None:
    """Resuming withdraws a stop's record of an open window: twice in one window, before a validation, at the end."""
    configuration = experiment(tiny_folder)
    train(tmp_path / "whole", configuration, console=QUIET)
    stop_again_and_again(tmp_path / "run", configuration, 2, 1, 3, 5, 11, 1)
    same_records(tmp_path / "whole", tmp_path / "run")
    last = records(tmp_path / "run")[-1]
    assert (last["update"], last["partial"]) == (UPDATES, True)


@pytest.mark.slow
def test_records_of_a_run_whose_end_a_resumed_validation_finds(tiny_folder: Path, tmp_path: Path) -> None:
    """The signal comes in the update before the validation that ends training, so nothing is left to train."""
    stuck = experiment(
        tiny_folder,
        schedule={"kind": "constant", "peak": 1e-30, "warmup_updates": 0, "initial": 0.0},
        stop={"updates": 100, "patience": 1},
    )
    train(tmp_path / "whole", stuck, console=QUIET)
    stop_again_and_again(tmp_path / "run", stuck, 3, 9)
    assert [(r["kind"], r["update"]) for r in records(tmp_path / "run")[-2:]] == [("validation", 12), ("train", 12)]
    same_records(tmp_path / "whole", tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    train(tmp_path / "run", stuck, resume=True, console=QUIET)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before, "a run that is over keeps its records"


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_has_no_sums(tiny_folder: Path, tmp_path: Path) -> None:
    """It opens, and the record that lacks the earlier updates is marked as partial."""
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        stopped_in(7, patch)
        train(run, experiment(tiny_folder), console=QUIET)
    meta = read_meta(run / "last")
    for key in ("window", "by_clock"):
        del meta["progress"][key]
    write_meta((run / "last").resolve(), meta)
    train(run, experiment(tiny_folder), resume=True, console=QUIET)
    found = [(r["update"], r.get("partial", False)) for r in records(run, "train")]
    assert found == [(5, False), (7, True), (10, True), (15, False), (20, False), (23, True)]


@pytest.mark.slow
def test_trackers_get_no_record_that_is_later_withdrawn(tiny_folder: Path, tmp_path: Path) -> None:
    told: list[tuple[int, bool]] = []

    class Tracker:
        name, failure, left_out = "tracker", None, 0

        def scalars(self, update: int, figures: dict[str, float]) -> None:
            told.append((update, "train/loss" in figures))

        def close(self, seconds: float) -> bool:
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ziggurat.train.loop.open_trackers", lambda *_: [Tracker()])
        stop_again_and_again(tmp_path / "run", experiment(tiny_folder), 2, 5)
    assert [update for update, train_record in told if train_record] == [5, 10, 15, 20, 23]


@pytest.mark.slow
def test_checkpoints_due_by_the_clock_are_not_averaged(tiny_folder: Path, tmp_path: Path) -> None:
    """Checkpoints due by the clock come in addition: the same ones are averaged, however slow the machine."""
    settings = {**SETTINGS["checkpoint"], "average_last": 2}
    counted = experiment(tiny_folder, checkpoint=settings)
    train(tmp_path / "counted", counted, console=QUIET)
    configuration = experiment(tiny_folder, checkpoint={**settings, "every_minutes": 1e-9})
    train(tmp_path / "timed", configuration, console=QUIET)
    kept = [folder.name for folder in checkpoint_folders(tmp_path / "timed")]
    assert kept == [f"step-{update:08d}" for update in (18, 20, 22, 23)]
    names = [[f.name for f in regular_checkpoints(tmp_path / run, counted.training)] for run in ("counted", "timed")]
    assert names[0] == names[1] == ["step-00000018", "step-00000020", "step-00000023"]
    averages = [(tmp_path / run / "averaged" / "model.safetensors").read_bytes() for run in ("counted", "timed")]
    assert averages[0] == averages[1]
    with pytest.raises(CheckpointError, match="clock caused"):
        average_run(tmp_path / "timed", CheckpointSelection("last", 4))
    same_records(tmp_path / "counted", tmp_path / "timed")


def test_comparing_finds_differences_not_due_to_the_clock(tiny_folder: Path, tmp_path: Path) -> None:
    train(tmp_path / "one", experiment(tiny_folder, stop={"updates": 6}), console=QUIET)
    lines = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()
    for change in ({"loss": 1.0}, {"update": 4}, {"skipped": 1}, {"surplus": 1}):
        shutil.copytree(tmp_path / "one", tmp_path / "other")
        changed = json.dumps({**json.loads(lines[0]), **change})
        (tmp_path / "other" / "metrics.jsonl").write_text("\n".join([changed, *lines[1:]]) + "\n")
        with pytest.raises(AssertionError, match="line 1"):
            same_records(tmp_path / "one", tmp_path / "other")
        shutil.rmtree(tmp_path / "other")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    (tmp_path / "other" / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(AssertionError, match="records instead of"):
        same_records(tmp_path / "one", tmp_path / "other")
