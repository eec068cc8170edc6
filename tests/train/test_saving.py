"""Checkpoints written during training: the same files, one checkpoint at a time, and failing writes."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from tests.conftest import tiny_experiment
from tests.train.runs import QUIET, final_bytes, records, timeless_progress
from ziggurat.config import Experiment
from ziggurat.config.lifecycle import CheckpointConfig
from ziggurat.data.corpus import Store
from ziggurat.data.store_checks import StoreWatch
from ziggurat.model.directory import open_model
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.model.tensors import weights
from ziggurat.system.errors import CheckpointError, MachineError
from ziggurat.train import saving
from ziggurat.train.checkpoint import Checkpoint, RunProgress, load_checkpoint, save_checkpoint
from ziggurat.train.distributed import Processes
from ziggurat.train.learner import Learner
from ziggurat.train.loop import train
from ziggurat.train.run_log import RunLog
from ziggurat.train.saving import Buffers, Saver, clear_leftovers, prune

FULL = OSError(errno.ENOSPC, "No space left on device")


class Trainee:
    """A learner, its progress and the saver of its run, without a training loop."""

    def __init__(self, experiment: Experiment, run: Path) -> None:
        (run / "checkpoints").mkdir(parents=True)
        self.run, store = run, Store.open(experiment.data.store)
        self.said = io.StringIO()
        self.learner = Learner(experiment, store, torch.device("cpu"))
        self.progress = RunProgress()
        log = RunLog(run, Console(file=self.said, width=500))
        self.saver = Saver(run, experiment, StoreWatch(store), self.progress, log)

    def update(self) -> None:
        """Change every weight and every moment."""
        for parameter in self.learner.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.learner.optimiser.set_rate(1e-2)
        self.learner.optimiser.step()
        self.progress.update += 1

    def save(self) -> None:
        self.saver.save(self.learner, interim=False)

    def poll(self) -> None:
        """Do what the loop does after every update, until the current write has ended."""
        while self.saver._writing is not None:
            self.saver.poll()

    def state(self) -> dict[str, torch.Tensor]:
        both = {**weights(self.learner.model), **self.learner.optimiser.state()}
        return {name: tensor.clone() for name, tensor in both.items()}

    @property
    def kept(self) -> list[int]:
        return [int(folder.name[5:]) for folder in checkpoint_folders(self.run)]


def saved_state(run: Path, update: int) -> dict[str, torch.Tensor]:
    checkpoint = load_checkpoint(run / "checkpoints" / f"step-{update:08d}")
    return {**checkpoint.weights, **checkpoint.optimiser}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Event:
    """The disk waits for this event before it accepts a checkpoint."""
    go = Event()

    def slow(*arguments: Any) -> Path:
        assert go.wait(60)
        return save_checkpoint(*arguments)

    monkeypatch.setattr(saving, "save_checkpoint", slow)
    return go


def test_copies_reuse_the_memory_of_earlier_ones() -> None:
    buffers = Buffers()
    first = buffers.copy({"a": torch.ones(2, 3), "b": torch.tensor(1.0), "c": torch.ones(4)})
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    turned = torch.arange(6.0).reshape(3, 2).T
    second = buffers.copy({"a": turned, "b": torch.tensor(2.0), "c": torch.ones(5), "d": torch.ones(1)})
    assert second["a"].data_ptr() == places["a"]
    assert second["b"].data_ptr() == places["b"]
    assert second["c"].shape == (5,)
    assert second["a"].is_contiguous()
    assert torch.equal(second["a"], turned)
    assert buffers.copy({"a": turned}).keys() == {"a"}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_written_state_is_that_at_the_time_of_the_copy(
    asynchronous: bool, tiny_folder: Path, tmp_path: Path, held: Event
) -> None:
    trainee = Trainee(tiny_experiment(tiny_folder, checkpoint={"asynchronous": asynchronous}), tmp_path / "run")
    expected = []
    for number in range(2):
        trainee.update()
        expected.append(trainee.state())
        if not asynchronous:
            held.set()
        trainee.save()
        trainee.update()  # with asynchronous saving this is before anything is on disk
        trainee.progress.scores["later"] = 1.0
        assert trainee.kept == [1, 3][: number if asynchronous else number + 1]
        if asynchronous:
            held.set()
            trainee.saver.wait()
            held.clear()
            assert trainee.kept == [1, 3][: number + 1]
    for update, state in zip((1, 3), expected, strict=True):
        assert_same(saved_state(trainee.run, update), state)
        folder = trainee.run / "checkpoints" / f"step-{update:08d}"
        assert load_checkpoint(folder).progress.update == update
    assert load_checkpoint(trainee.run / "checkpoints" / "step-00000001").progress.scores == {}
    assert trainee.saver.waited_seconds > 0


def test_one_write_at_a_time(tiny_folder: Path, tmp_path: Path, held: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save waits for the first, before it overwrites the copies."""
    trainee = Trainee(tiny_experiment(tiny_folder), tmp_path / "run")
    order: list[str] = []
    copied = Buffers.copy

    def copy(self: Buffers, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        order.append(f"copy with {trainee.kept} on disk")
        return copied(self, tensors)

    monkeypatch.setattr(Buffers, "copy", copy)
    trainee.update()
    with trainee.saver:
        trainee.save()
        trainee.update()
        held.set()  # nothing else sets it, so a save that did not wait would find nothing on disk
        trainee.save()
    assert order == ["copy with [] on disk"] * 2 + ["copy with [1] on disk"] * 2
    assert trainee.kept == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "growth", [pytest.param(None, marks=pytest.mark.slow), {"stages": [{"layers": 1, "updates": 5}], "moments": "copy"}]
)
def test_asynchronous_runs_leave_what_synchronous_ones_do(
    growth: dict[str, Any] | None, tiny_folder: Path, tmp_path: Path
) -> None:
    folders = []
    for asynchronous in (True, False):
        checkpoint = {"every_updates": 2, "keep_last": 2, "keep_every": 4, "asynchronous": asynchronous}
        experiment = tiny_experiment(
            tiny_folder,
            stop={"updates": 11},
            growth=growth,
            checkpoint={**checkpoint, "average_last": 2},
            validation={"every_updates": 3, "decode": False},
        )
        run = tmp_path / str(asynchronous)
        train(run, experiment, console=QUIET)
        assert [f.name[-2:] for f in checkpoint_folders(run)] == ["04", "08", "09", "10", "11"]
        assert not list((run / "checkpoints").glob(".*"))
        folders.append(run)
    one, other = folders
    assert os.readlink(one / "best") == os.readlink(other / "best")
    assert os.readlink(one / "last") == os.readlink(other / "last") == "checkpoints/step-00000011"
    for folder in checkpoint_folders(one):
        twin = other / "checkpoints" / folder.name
        for file in folder.rglob("*.safetensors"):
            assert file.read_bytes() == (twin / file.relative_to(folder)).read_bytes()
        mine, its = map(timeless_progress, (folder, twin))
        assert mine == its
    assert mine["scores"].keys() <= {f.name for f in checkpoint_folders(one)}  # other scores are forgotten


def test_the_wait_is_recorded(tiny_folder: Path, tmp_path: Path) -> None:
    experiment = tiny_experiment(
        tiny_folder, checkpoint={"every_updates": 1, "asynchronous": False}, log_every_updates=2
    )
    train(tmp_path / "run", experiment, console=QUIET)
    waits = [record["checkpoint_wait"] for record in records(tmp_path / "run", "train")]
    assert len(waits) == 4
    assert all(wait > 0 for wait in waits)
    assert "for checkpoints)" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_write_stops_the_run_at_the_next_update(
    asynchronous: bool, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainee = Trainee(tiny_experiment(tiny_folder, checkpoint={"asynchronous": asynchronous}), tmp_path / "run")
    trainee.update()
    trainee.save()
    trainee.saver.wait()
    monkeypatch.setattr("ziggurat.train.checkpoint.write_shards", lambda *_: (_ for _ in ()).throw(FULL))
    trainee.update()
    message = r"step-00000002: cannot be written: No space left on device.*MB are free"
    with pytest.raises(CheckpointError, match=message), trainee.saver:  # noqa: PT012 - leaving it waits
        trainee.save()
        trainee.poll()
    assert [p.name for p in (trainee.run / "checkpoints").iterdir()] == ["step-00000001"]
    assert load_checkpoint(trainee.run / "checkpoints" / "step-00000001").progress.update == 1
    assert "NOT WRITTEN" not in trainee.said.getvalue()  # the run ends with this error, once


@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_continues_if_configured_and_the_next_save_tries_again(
    asynchronous: bool, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([False, True, False, True])

    def sometimes(*arguments: Any) -> Path:
        if next(left):
            raise CheckpointError("no room")
        return save_checkpoint(*arguments)

    monkeypatch.setattr(saving, "save_checkpoint", sometimes)
    checkpoint = {"asynchronous": asynchronous, "on_error": "continue"}
    trainee = Trainee(tiny_experiment(tiny_folder, checkpoint=checkpoint), tmp_path / "run")
    with pytest.raises(CheckpointError, match="no room"), trainee.saver:  # noqa: PT012 - nothing follows the last one
        for update in (1, 2, 3, 4):
            trainee.update()
            trainee.save()
            trainee.poll()
            assert trainee.kept == {1: [1], 2: [1], 3: [1, 3], 4: [1, 3]}[update]
    assert trainee.said.getvalue().count("CHECKPOINT NOT WRITTEN: no room") == 2


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_write_that_failed_while_a_roll_back_waited_is_reported_and_is_not_rolled_back_to(
    on_error: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainee = Trainee(tiny_experiment(tiny_folder, checkpoint={"on_error": on_error}), tmp_path / "run")
    with trainee.saver as saver:
        saver.save(trainee.learner, interim=False, good=True)
        saver.wait()
        with monkeypatch.context() as patch:
            patch.setattr("ziggurat.train.checkpoint.write_shards", lambda *_: (_ for _ in ()).throw(FULL))
            trainee.update()
            saver.save(trainee.learner, interim=False, good=True)
            saver.wait()
        assert trainee.progress.good == "step-00000000"
        trainee.update()
        with pytest.raises(CheckpointError, match="No space left") if on_error == "stop" else nullcontext():
            saver.save(trainee.learner, interim=False)
        saver.save(trainee.learner, interim=False, good=True)
    assert trainee.said.getvalue().count("NOT WRITTEN") == (on_error == "continue")
    assert trainee.kept == [0, 2]
    assert trainee.progress.good == "step-00000002"


def test_an_error_of_training_is_not_hidden_by_one_of_the_disk(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.train.checkpoint.write_shards", lambda *_: (_ for _ in ()).throw(FULL))
    trainee = Trainee(tiny_experiment(tiny_folder), tmp_path / "run")
    with pytest.raises(ZeroDivisionError), trainee.saver:  # noqa: PT012 - leaving it waits
        trainee.update()
        trainee.save()
        raise ZeroDivisionError
    assert "CHECKPOINT NOT WRITTEN" in trainee.said.getvalue()


@pytest.fixture
def files_limited_to() -> Iterator[Any]:
    """Limit the size of files that this process writes, so that the kernel itself refuses (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_the_kernel_refuses_a_file(tiny_folder: Path, tmp_path: Path, files_limited_to: Any) -> None:
    """After one refusal, a run that continues writes its next checkpoint, and ends like one without a refusal."""
    whole = tmp_path / "whole"
    settings: dict[str, Any] = {"stop": {"updates": 9}, "log_every_updates": 3}
    train(whole, tiny_experiment(tiny_folder, checkpoint={"every_updates": 3}, **settings), console=QUIET)
    run = tmp_path / "run"
    said = io.StringIO()

    def limit(wanted: int) -> None:
        files_limited_to(40_000 if 4 <= wanted <= 7 else resource.RLIM_INFINITY)

    checkpoint = {"every_updates": 3, "on_error": "continue", "asynchronous": False}
    updates = iter(range(1, 10))
    with pytest.MonkeyPatch.context() as patch:
        from ziggurat.train.update import train_update

        def update(*arguments: Any, **options: Any) -> Any:
            limit(next(updates))
            return train_update(*arguments, **options)

        patch.setattr("ziggurat.train.loop.train_update", update)
        train(
            run, tiny_experiment(tiny_folder, checkpoint=checkpoint, **settings), console=Console(file=said, width=500)
        )
    assert f"{run}/checkpoints/step-00000006: cannot be written: File too large" in said.getvalue()
    assert [f.name[-1] for f in checkpoint_folders(run)] == ["3", "9"]
    assert not list((run / "checkpoints").glob(".*"))
    assert final_bytes(run, 9) == final_bytes(whole, 9)


def test_a_full_disk(tiny_folder: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here")
    if done.returncode:
        pytest.skip("only root can make a small file system")
    try:
        run = disk / "run"
        said = io.StringIO()
        checkpoint = {"every_updates": 1, "keep_last": 9, "on_error": "continue"}
        experiment = tiny_experiment(tiny_folder, stop={"updates": 6}, checkpoint=checkpoint, log_every_updates=1)
        with pytest.raises(
            CheckpointError, match=r"cannot be written: No space left on device. A checkpoint takes 0\.\d MB"
        ):
            train(run, experiment, console=Console(file=said, width=500))
        assert "training continues" in said.getvalue()
        names = [f.name for f in (run / "checkpoints").iterdir()]
        assert sorted(names) == [f"step-{n + 1:08d}" for n in range(len(names))]
        assert 1 <= len(names) < 6
        assert load_checkpoint(run / "last").progress.update == len(names)
        assert open_model(run, which="last").model.vocabulary_size == 400
        for folder in (run / "checkpoints").iterdir():  # there is room again, so the run continues and ends normally
            if folder.name != names[-1]:
                subprocess.run(["rm", "-r", str(folder)], check=True)
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert train(run, experiment, resume=True, console=QUIET).update == 6
        whole = tmp_path / "whole"
        train(whole, experiment, console=QUIET)
        assert final_bytes(run, 6) == final_bytes(whole, 6)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # an exception may still hold a file open


@pytest.mark.parametrize("kind", ["CheckpointError", "DataError", "MachineError", "disk"])
def test_all_processes_learn_of_a_checkpoint_that_the_first_cannot_write(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as an ordinary error, which is subject to `on_error`."""
    monkeypatch.setattr(Processes, "texts", lambda *_: [[kind, "no room"]])
    with pytest.raises(CheckpointError, match="no room"):
        save_checkpoint(tmp_path, Checkpoint(RunProgress(), {}, {}, "store"), (2, 2), Processes(1, 2))


def test_retention_keeps_the_newest_the_best_and_every_nth(tmp_path: Path) -> None:
    kept = CheckpointConfig(every_updates=5, keep_last=2, keep_best=1, keep_every=10)
    progress = RunProgress(scores={"step-00000015": 1.0, "step-00000025": 2.0}, interim=["step-00000020"])
    for update in (5, 10, 15, 20, 25, 30, 35, 40, 45, 46):
        progress.update = update
        save_checkpoint(tmp_path, Checkpoint(progress, {"w": torch.ones(1)}, {}, "store"), (2, 2))
    prune(tmp_path, progress, kept, smaller_is_better=True)
    # 10, 30, 40: every ten, but not 20, which only an interruption left; 15: the best; 45, 46: the newest.
    assert [int(f.name[5:]) for f in checkpoint_folders(tmp_path)] == [10, 15, 30, 40, 45, 46]
    assert (tmp_path / "best").resolve().name == "step-00000015"
    assert progress.scores == {"step-00000015": 1.0}
    assert progress.interim == []
    with pytest.raises(ValidationError, match=r"`keep_every` \(7\) must be a multiple of `every_updates` \(5\)"):
        CheckpointConfig(every_updates=5, keep_every=7)


def test_links_to_the_best_are_removed_with_their_targets(tmp_path: Path) -> None:
    """A run may be resumed with a configuration that keeps no best checkpoints."""
    scores = {"step-00000001": 1.0, "step-00000002": 2.0}
    progress = RunProgress(scores=dict(scores), direction_scores={"en-de": dict(scores)})
    for progress.update in (1, 2, 3):
        save_checkpoint(tmp_path, Checkpoint(progress, {"w": torch.ones(1)}, {}, "store"), (2, 2))
    prune(tmp_path, progress, CheckpointConfig(keep_last=2, keep_best_per_direction=1), smaller_is_better=True)
    assert (tmp_path / "best").resolve() == (tmp_path / "best-en-de").resolve() == checkpoint_folders(tmp_path)[0]
    prune(tmp_path, progress, CheckpointConfig(keep_last=2, keep_best=0), smaller_is_better=True)
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step-00000002", "step-00000003"]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "last"}


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, Checkpoint(RunProgress(update=3), {"w": torch.ones(1)}, {}, "store"), (2, 2))
    (tmp_path / ".shared").touch()
    (tmp_path / ".last.linking_.tmp").symlink_to(folder)
    clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "last"}
    assert list((tmp_path / "checkpoints").iterdir()) == [folder]


def test_too_many_open_files_while_old_checkpoints_go_do_not_end_a_run_that_is_to_continue(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"stop": {"updates": 4}, "checkpoint": {"every_updates": 1, "keep_last": 1, "on_error": "continue"}}
    original, refused = saving.prune, []

    def prune(*args: Any, **options: Any) -> None:
        if not refused:
            refused.append(True)
            raise MachineError("meta.json: cannot be read: Too many open files")
        original(*args, **options)

    monkeypatch.setattr(saving, "prune", prune)
    assert train(tmp_path / "run", tiny_experiment(tiny_folder, **settings), console=QUIET).update == 4
    assert "old checkpoints cannot be deleted: meta.json: cannot be read" in (tmp_path / "run" / "log.txt").read_text()
    assert [f.name for f in checkpoint_folders(tmp_path / "run")] == ["step-00000004"]
