"""Faults in one of two processes: both handle them in the same way, or both end and report where the fault was."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.faulty_batches import planned, poison
from tests.train.launch import finish, launch, run_together
from tests.train.runs import QUIET, Case, assert_resumed_equals_whole, outcome
from tests.train.test_parallel import tiny, together
from ziggurat.config import Experiment, dump, load_experiment
from ziggurat.data.prepare import prepare
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.system.errors import ConfigError, ZigguratError
from ziggurat.train import loop, objective
from ziggurat.train.checkpoint import read_progress
from ziggurat.train.distributed import joined
from ziggurat.train.loop import train
from ziggurat.train.run import refuse_unshared
from ziggurat.train.validate import dev_loss

HERE = "tests.train.test_parallel_faults"
LAYER = "encoder.layers.1.ffn.in_proj"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare(tiny(folder).data)
    return folder


def faulty(run: str, config: str, fault: str, resume: str = "") -> None:
    """Run in both processes: train, with a fault in the second one."""
    experiment = load_experiment(Path(config))
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1" and fault:
            FAULTS[fault](patch, experiment)
        try:
            result = train(Path(run), experiment, resume=bool(resume), console=QUIET)
        except ZigguratError as error:
            print(f"{type(error).__name__}: {error}")
            sys.exit(3)
        print(json.dumps([result.update, result.signal]))


def hangs(patch: pytest.MonkeyPatch, _: Experiment) -> None:
    """Sleep instead of starting update 3."""
    calls: list[int] = []
    update = loop.train_update

    def sleepy(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            time.sleep(60)
        return update(*arguments, **options)

    patch.setattr(loop, "train_update", sleepy)


def is_told_to_stop(patch: pytest.MonkeyPatch, _: Experiment) -> None:
    """A signal comes while it scores its part of the dev set after update 3."""

    def signalled(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return dev_loss(*arguments)

    patch.setattr("ziggurat.train.validate.dev_loss", signalled)


def has_no_room_on_disk(patch: pytest.MonkeyPatch, _: Experiment) -> None:
    """Forbid files as large as the moments."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def runs_out_of_memory(patch: pytest.MonkeyPatch, _: Experiment) -> None:
    """Run out of memory in update 4, before the backward pass."""
    calls: list[int] = []
    update, loss = loop.train_update, objective.Objective.forward

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return update(*arguments, **options)

    def short(*arguments: Any, **options: Any) -> Any:
        if len(calls) == 4:
            raise MemoryError("no room")
        return loss(*arguments, **options)

    patch.setattr(loop, "train_update", counted)
    patch.setattr(objective.Objective, "forward", short)


def meets_nan(patch: pytest.MonkeyPatch, experiment: Experiment) -> None:
    """A layer of its model gives NaN for the batches of update 4."""
    poison(patch, planned(experiment, 4, 4), LAYER, lambda output: output * float("nan"))


FAULTS: dict[str, Callable[[pytest.MonkeyPatch, Experiment], None]] = {
    f.__name__: f for f in (hangs, is_told_to_stop, has_no_room_on_disk, runs_out_of_memory, meets_nan)
}


def start(run: Path, experiment: Experiment, fault: str, resume: str = "") -> list[tuple[int, str]]:
    """Train in two processes; return the status and the last line of each."""
    config = run.parent / f"{run.name}.yaml"
    config.write_text(dump(experiment), encoding="utf-8")
    ended = finish(launch(HERE, "faulty", 2, str(run), str(config), fault, resume))
    assert all(status in (0, 3) for status, _, _ in ended), "\n".join(errors for _, _, errors in ended)
    return [(status, output.splitlines()[-1]) for status, output, _ in ended]


@pytest.mark.slow
def test_a_worker_that_hangs_is_named(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tmp_path / "run.yaml"
    config.write_text(dump(tiny(data, distributed={"timeout_minutes": 0.1})), encoding="utf-8")
    started = launch(HERE, "faulty", 2, str(run), str(config), "hangs")
    started[0].process.join(60)
    assert started[0].process.exitcode == 3, started[0].errors.read_text()
    message = started[0].output.read_text().splitlines()[-1]
    assert message.startswith("TrainingError: the processes lost contact at update 3; behind: process 1 (in or after u")
    for one in started:
        one.process.kill()
        one.process.join()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_signal_to_one_process_during_a_validation_stops_both_without_loss(
    kind: str, data: Path, tmp_path: Path
) -> None:
    experiment = tiny(data, distributed={"kind": kind})
    ended = start(tmp_path / "run", experiment, "is_told_to_stop")
    assert ended == [(0, json.dumps([3, signal.SIGTERM]))] * 2
    assert read_progress(tmp_path / "run" / "last").validation_due
    start(tmp_path / "run", experiment, "", "resume")
    together(tmp_path / "whole", experiment, 2)
    expected, found = outcome(tmp_path / "whole"), outcome(tmp_path / "run")
    assert {what for what in expected if found[what] != expected[what]} == set()


@pytest.mark.slow
def test_a_process_that_cannot_write_its_part_of_a_checkpoint_ends_both(data: Path, tmp_path: Path) -> None:
    for status, message in start(tmp_path / "run", tiny(data), "has_no_room_on_disk"):
        assert status == 3
        assert message.startswith("CheckpointError: ")
        assert "step-00000003: cannot be written: File too large" in message
    assert checkpoint_folders(tmp_path / "run") == []
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "counted"), [("runs_out_of_memory", "out_of_memory"), ("meets_nan", "skipped")])
def test_an_update_that_fails_in_one_process_is_skipped_by_both(
    fault: str, counted: str, data: Path, tmp_path: Path
) -> None:
    ended = start(tmp_path / "run", tiny(data), fault)
    assert ended == [(0, "[6, null]")] * 2
    progress = read_progress(tmp_path / "run" / "last")
    assert getattr(progress, counted) == 1
    (line,) = [line for line in (tmp_path / "run" / "log.txt").read_text().splitlines() if "update skipped" in line]
    place = {"runs_out_of_memory": "out of memory on process 1: ", "meets_nan": f"process 1: {LAYER}: output is NaN"}
    assert "update 4: " in line
    assert place[fault] in line


@pytest.mark.slow
def test_with_fsdp_one_process_out_of_memory_ends_the_run(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(dump(tiny(data, distributed={"kind": "fsdp"})), encoding="utf-8")
    started = launch(HERE, "faulty", 2, str(tmp_path / "run"), str(config), "runs_out_of_memory")
    ended = finish(started)
    assert [status for status, _, _ in ended] == [3, 3]
    assert "TrainingError: process 1 ran out of memory, and with `training.distributed.kind: fsdp`" in ended[1][1]
    assert "TrainingError: the processes lost contact at update" in ended[0][1]


def in_two(run: str, document: str, resume: str) -> None:
    """Like train_part, in two processes."""
    run_together("tests.train.runs", "train_part", 2, run, document, resume)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("bf16", growth=True, accumulate=2),
        pytest.param(Case(accumulate=2), marks=pytest.mark.slow),
        pytest.param(Case("bf16", accumulate=3), marks=pytest.mark.slow),
        pytest.param(Case(growth=True, accumulate=2, compile="layers"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_eight_updates_and_eight_more_are_sixteen_in_two_processes(case: Case, data: Path, tmp_path: Path) -> None:
    assert_resumed_equals_whole(case, data, tmp_path, in_two)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_growing_in_two_processes_is_growing_in_one(kind: str, data: Path, tmp_path: Path) -> None:
    from tests.train.test_parallel import assert_alike

    stages = {"stages": [{"layers": 1, "updates": 2}], "moments": "copy"}
    experiment = tiny(data, distributed={"kind": kind}, growth=stages)
    together(tmp_path / "run", experiment, 2)
    train(tmp_path / "alone", experiment, console=QUIET)
    assert_alike(tmp_path / "run", tmp_path / "alone")
    grown = "stages/001-layers/model.safetensors"
    assert (tmp_path / "run" / grown).stat().st_size == (tmp_path / "alone" / grown).stat().st_size


def elsewhere(folder: str, own: str) -> None:
    """Run in both processes: look for a common folder; with `own`, each has its own folder of that name."""
    run = Path(folder) / os.environ["RANK"] if own else Path(folder)
    run.mkdir(exist_ok=True)
    with joined(timeout_minutes=1.0) as processes:
        try:
            refuse_unshared(run, processes)
            print("shared")
        except ConfigError as error:
            print(error)


def test_processes_without_a_common_folder_are_refused(tmp_path: Path) -> None:
    for message in run_together(HERE, "elsewhere", 2, str(tmp_path), "own"):
        assert "processes 1 do not see the folder that the first process writes to" in message
    assert [message.strip() for message in run_together(HERE, "elsewhere", 2, str(tmp_path), "")] == ["shared"] * 2
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_process_without_a_batch_does_not_look_for_a_fault() -> None:
    from tests.small import small_config
    from tests.train.batches import batches
    from ziggurat.config.train import LossConfig
    from ziggurat.model.build import build_model
    from ziggurat.train.recovery import find_fault

    fault = find_fault(
        build_model(small_config(1, 1), 20, 20), [batches([7])[0].idle()], LossConfig(), precision="fp32"
    )
    assert fault == ("had no tokens in this update", False)
