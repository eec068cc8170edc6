"""SIGTERM with a deadline: whatever training is doing, it finishes one unit of work, and no result changes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.cli.conftest import tiny_config
from tests.conftest import forkserver, tiny_experiment
from tests.train.runs import QUIET, outcome, records
from ziggurat.config import Experiment
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.system.errors import CheckpointError
from ziggurat.system.terminal import REPEATED
from ziggurat.train import saving
from ziggurat.train.checkpoint import load_checkpoint, read_progress
from ziggurat.train.loop import TrainingResult, train
from ziggurat.train.objective import batch_loss
from ziggurat.train.signals import GracefulStop
from ziggurat.train.update import train_update
from ziggurat.train.validate import Validation, Validator
from ziggurat.translate.search import search_by_steps

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 7
SETTINGS: dict[str, Any] = {
    "stop": {"updates": UPDATES},
    "validation": {"every_updates": 3, "metric": "bleu", "max_sentences": 6},
    "checkpoint": {"every_updates": 2, "keep_last": 2, "keep_best": 1, "average_last": 2},
    "log_every_updates": 3,
}


def train_run(run: Path, experiment: Experiment, *, resume: bool = False) -> TrainingResult:
    return train(run, experiment, resume=resume, console=QUIET)


@pytest.fixture(scope="module")
def experiment(tiny_folder: Path) -> Experiment:
    return tiny_experiment(tiny_folder, **SETTINGS)


def signal_at(number: int, patch: pytest.MonkeyPatch) -> list[int]:
    """Raise SIGTERM when validations ask for the `number`-th time whether to continue; return how often they asked."""
    real, asked = Validator.measure, [0]

    def measure(
        self: Validator, model: Any, interrupted: Callable[[], bool] | None = None, **others: Any
    ) -> Validation | None:
        if interrupted is None:  # the validation of an average, after training
            return real(self, model, **others)

        def ask() -> bool:
            asked[0] += 1
            if asked[0] == number:
                signal.raise_signal(signal.SIGTERM)
            return interrupted()

        return real(self, model, ask, **others)

    patch.setattr(Validator, "measure", measure)
    return asked


@pytest.fixture(scope="module")
def uninterrupted(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], int]:
    """The outcome of an uninterrupted run, and how often its validations ask."""
    run = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        asked = signal_at(-1, patch)
        train_run(run, experiment)
    assert [r["update"] for r in records(run, "validation")] == [3, 6, 7]
    return outcome(run), asked[0]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.45, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.2, 0.6, 0.8, 1.0))])
def test_an_interrupted_validation_is_done_first_after_resuming(
    share: float,
    experiment: Experiment,
    uninterrupted: tuple[dict[str, Any], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Signals come from the first batch of the first validation to the last step of the last one."""
    expected, times = uninterrupted
    run, number = tmp_path / "run", 1 + round(share * (times - 1))
    with monkeypatch.context() as patch:
        asked = signal_at(number, patch)
        result = train_run(run, experiment)
    assert result.reason == "SIGTERM"
    assert asked[0] == number, "it continued after the signal"
    newest = read_progress(checkpoint_folders(run)[-1])
    assert newest.validation_due
    assert newest.update == result.update
    assert result.update not in [r["update"] for r in records(run, "validation")]
    order: list[str] = []
    with monkeypatch.context() as patch:
        measure = Validator.measure
        patch.setattr(Validator, "measure", lambda *a, **k: [order.append("validation"), measure(*a, **k)][1])
        update: Callable[..., Any] = lambda *a, **k: [order.append("update"), train_update(*a, **k)][1]  # noqa: E731
        patch.setattr("ziggurat.train.loop.train_update", update)
        resumed = train_run(run, experiment, resume=True)
    assert order[0] == "validation"
    assert order.count("update") == UPDATES - result.update
    assert "updates" in resumed.reason
    assert outcome(run) == expected
    log = (run / "log.txt").read_text().splitlines()
    stops = [line for line in log if "stopped after update" in line]
    assert [line.endswith("for checkpoints since the last start)") for line in stops] == [False, True]
    (first, *_) = (line for line in log[log.index(stops[0]) :] if "dev nll" in line)
    assert "of the time" not in first, "no update of this start to compare with"


def test_repeated_interruptions(
    experiment: Experiment, uninterrupted: tuple[dict[str, Any], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same validation is interrupted three times; each resumed run gets further, and is killed after the record."""
    run = tmp_path / "run"
    for number in (1, 2, 5):
        with monkeypatch.context() as patch:
            signal_at(number, patch)
            assert (train_run(run, experiment, resume=run.exists()).update, read_progress(run / "last").update) == (
                3,
                3,
            )
    with monkeypatch.context() as patch:
        patch.setattr(saving.Saver, "amend", lambda _self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_run(run, experiment, resume=True)
    assert [r["update"] for r in records(run, "validation")] == [3]
    assert read_progress(run / "last").validation_due
    train_run(run, experiment, resume=True)
    assert outcome(run) == uninterrupted[0]


@pytest.mark.slow
def test_early_stopping_by_an_interrupted_validation(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run finds out that training is over."""
    stuck = tiny_experiment(
        tiny_folder,
        schedule={"kind": "constant", "peak": 1e-30, "warmup_updates": 0, "initial": 0.0},  # nothing ever improves
        validation={"every_updates": 2, "decode": False},
        stop={"updates": 100, "patience": 1},
    )
    with monkeypatch.context() as patch:
        batches = signal_at(-1, patch)
        assert train_run(tmp_path / "whole", stuck).update == 4
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_at(batches[0], patch)
        assert (train_run(run, stuck).reason, read_progress(run / "last").validations_since_best) == ("SIGTERM", 0)
    result = train_run(run, stuck, resume=True)
    assert (result.update, result.reason) == (4, "no better loss in 1 validations")
    assert read_progress(run / "last").validations_since_best == 1


@pytest.mark.slow
def test_written_parts_of_a_validation_survive_a_full_disk(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failing to update the checkpoint is an error; the old one is whole, and the run can be resumed."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_at(1, patch)
        train_run(run, experiment)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_meta", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(CheckpointError, match=r"step-00000003: cannot be brought up to date: No space left"):
            train_run(run, experiment, resume=True)
    assert load_checkpoint(run / "last").progress.validation_due
    assert train_run(run, experiment, resume=True).update == UPDATES


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(2, "SIGTERM"), (2, "SIGUSR1"), (3, "SIGUSR2"), (UPDATES, "SIGXCPU")])
def test_after_a_signal_in_an_update_nothing_but_that_update_is_done(
    number: int, name: str, experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the validation nor the averaging that would follow is done."""
    updates, run = count(1), tmp_path / "run"

    def update(*arguments: Any, **options: Any) -> Any:
        if next(updates) == number:
            signal.raise_signal(signal.Signals[name])
            for place in ("ziggurat.train.validate.batch_loss", "ziggurat.translate.call.search_by_steps"):
                monkeypatch.setattr(place, lambda *_, **__: pytest.fail("validated after the signal"))
        return train_update(*arguments, **options)

    monkeypatch.setattr("ziggurat.train.loop.train_update", update)
    result = train_run(run, experiment)
    assert (result.update, next(updates), result.reason) == (number, number + 1, name)
    progress = load_checkpoint(run / "last").progress
    assert (progress.update, progress.validation_due) == (number, number in (3, UPDATES))
    assert not (run / "averaged").exists()


def live(place: str, config: str, run: str, journal: str, said: str) -> None:
    """Act as `ziggurat train` in a separate process; record every unit of work, and wait in one for the signal."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    from ziggurat.cli import main
    from ziggurat.train.signals import GracefulStop

    heard: list[int] = []
    seen: dict[str, int] = {}
    handle = GracefulStop._handle

    def hear(self: GracefulStop, number: int, frame: Any) -> None:
        heard.append(number)
        handle(self, number, frame)

    def note(unit: str) -> None:
        seen[unit] = seen.get(unit, 0) + 1
        with Path(journal).open("a") as file:
            file.write(f"{unit} {len(heard)}\n")
        while unit == place and seen[unit] == 2 and not heard:
            time.sleep(0.01)

    def noted(unit: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def both(*arguments: Any, **options: Any) -> Any:
            note(unit)
            return work(*arguments, **options)

        return both

    def noted_search(scorer: Any, *arguments: Any) -> Any:
        scorer.step = noted("step", scorer.step)
        return search_by_steps(scorer, *arguments)

    patch = pytest.MonkeyPatch()
    patch.setattr(GracefulStop, "_handle", hear)
    patch.setattr("ziggurat.train.loop.train_update", noted("update", train_update))
    patch.setattr("ziggurat.train.validate.batch_loss", noted("batch", batch_loss))
    patch.setattr("ziggurat.translate.call.search_by_steps", noted_search)
    main(["train", config, "--run", run])


@pytest.mark.parametrize("place", ["update", "batch", "step"])
def test_a_live_process_exits_within_one_unit_of_work(place: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Expect status 143, a whole checkpoint of the last update, and nothing else started after the signal."""
    endless = {**SETTINGS, "stop": {"updates": 10**6}, "validation": {"every_updates": 3}, "batch": {"max_tokens": 80}}
    config = tiny_config(tmp_path, tiny_folder, **endless)
    run, journal = tmp_path / "run", tmp_path / "journal"
    said = tmp_path / "said"
    process = forkserver().Process(target=live, args=(place, str(config), str(run), str(journal), str(said)))
    process.start()
    try:
        while process.is_alive() and not (journal.exists() and journal.read_text().count(place) >= 2):
            time.sleep(0.02)
        process.terminate()
        process.join(120)
    finally:
        process.kill()
    errors = said.read_text()
    assert process.exitcode == 128 + signal.SIGTERM, errors
    assert "SIGTERM: finishing this update" in errors
    work = [line.split() for line in journal.read_text().splitlines()]
    assert [unit for unit, signals in work if signals == "1"] == []
    progress = load_checkpoint(checkpoint_folders(run)[-1]).progress
    assert progress.update == [unit for unit, _ in work].count("update")
    assert progress.validation_due == (place != "update")


WORKER = """
import os, sys, time
from pathlib import Path
from ziggurat.system.terminal import REPEATED
from ziggurat.train.signals import GracefulStop, leave_with_launcher
with GracefulStop() as stop:
    leave_with_launcher()
    Path("began").touch()
    while stop.received is None:
        time.sleep(0.01)
    stop.heeded = stop.received
    Path("reason.part").write_text(stop.reason)
os.replace("reason.part", "reason")
"""


@pytest.mark.slow
@pytest.mark.parametrize("torchrun_s", [True, False])
def test_a_worker_whose_torchrun_is_killed_is_told_to_stop(torchrun_s: bool, tmp_path: Path) -> None:
    """This does not hold for other parents: a shell may leave its processes running."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"TORCHELASTIC_RUN_ID": "x"} if torchrun_s else {})
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKER!r}])"
    launcher = subprocess.Popen([sys.executable, "-c", start], cwd=tmp_path, env=environment)
    end = time.monotonic() + 60
    while not (tmp_path / "began").exists() and time.monotonic() < end:
        time.sleep(0.01)
    (worker,) = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.wait()
    try:
        assert bool(psutil.wait_procs([worker], timeout=20 if torchrun_s else 2)[0]) == torchrun_s
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    if torchrun_s:
        assert (tmp_path / "reason").read_text() == f"SIGTERM, since torchrun (process {launcher.pid}) is gone"


def test_under_torchrun_two_signals_at_once_count_as_one() -> None:
    """The other test of a second signal is about a single process, which exits."""
    with GracefulStop(several=True) as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        stop._heard -= 6.0
        left: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "_exit", left.append)
            os.kill(os.getpid(), signal.SIGINT)
        assert left == [128 + signal.SIGINT]


@pytest.mark.parametrize("number", REPEATED)
def test_repeated_signals_of_a_scheduler_or_terminal_are_one_request(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored
    with GracefulStop(says=False) as stop, pytest.MonkeyPatch.context() as patch:
        left: list[int] = []
        patch.setattr(os, "_exit", left.append)
        for _ in range(3):
            signal.raise_signal(number)
        assert (stop.received, left) == (number, [])
        signal.raise_signal(signal.SIGTERM)
        assert left == [128 + signal.SIGTERM]
    signal.signal(number, before)


def test_a_signal_that_another_program_uses_is_left_to_it() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with GracefulStop(says=False) as stop:
            signal.raise_signal(signal.SIGUSR1)
        assert (stop.received, seen) == (None, [signal.SIGUSR1])
    finally:
        signal.signal(signal.SIGUSR1, before)
