"""Every file of a checkpoint, truncated or with a flipped bit; other formats; which checkpoints are skipped."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.conftest import tiny_experiment
from tests.train.runs import QUIET, final_bytes
from ziggurat.config import Experiment, dump, load_experiment
from ziggurat.config.lifecycle import CheckpointConfig
from ziggurat.config.load import change_section
from ziggurat.model.directory import open_model
from ziggurat.model.run_folder import checkpoint_folders, locked, read_meta, write_meta
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, MachineError
from ziggurat.system.files import write_atomically
from ziggurat.system.staging import building
from ziggurat.train import average
from ziggurat.train.average import CheckpointSelection, average_run, mean_weights
from ziggurat.train.checkpoint import Checkpoint, RunProgress, load_checkpoint, save_checkpoint
from ziggurat.train.loop import train
from ziggurat.train.saving import prune, set_aside

FILES = ("model.safetensors", "state/optimiser/shard-00000.safetensors", "meta.json")
PROGRESS = RunProgress(
    update=6, epoch=1, batch=3, seconds=1.5, best=2.25, best_update=4, scores={"step-00000004": 2.25}
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"w/step": torch.tensor(6.0), "w/exp_avg": torch.linspace(0, 1, 40)}
    return save_checkpoint(tmp_path, Checkpoint(PROGRESS, {"w": torch.linspace(-1, 1, 40)}, state, "store"), (2, 2))


@pytest.fixture(scope="module")
def experiment(tiny_folder: Path) -> Experiment:
    return tiny_experiment(tiny_folder, stop={"updates": 6}, checkpoint={"every_updates": 2, "keep_last": 3})


@pytest.fixture(scope="module")
def undamaged_run(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six updates with checkpoints at updates 2, 4 and 6."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(run, experiment, console=QUIET)
    return run


def flip(file: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


def test_the_files_of_a_checkpoint(checkpoint: Path) -> None:
    assert {str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()} == set(FILES)
    assert load_checkpoint(checkpoint).progress == PROGRESS


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_or_missing_is_named(name: str, checkpoint: Path) -> None:
    file = checkpoint / name
    content = file.read_bytes()
    for length in (0, 1, 8, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=f"{name}: damaged"):
            load_checkpoint(checkpoint)
    file.write_bytes(content + b" ")
    if name != "meta.json":  # a blank after the document has no effect
        with pytest.raises(CheckpointError, match=f"{name}: damaged"):
            load_checkpoint(checkpoint)
    file.unlink()
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(name: str, checkpoint: Path) -> None:
    """Flip one bit in every byte of `meta.json`, and in bytes throughout the tensor files."""
    file = checkpoint / name
    content = file.read_bytes()
    step = 1 if name == "meta.json" else max(1, len(content) // 60)
    for byte in (*range(0, len(content), step), len(content) - 1):
        flip(file, byte, byte % 8)
        with pytest.raises(CheckpointError, match=f"{name}: "):
            load_checkpoint(checkpoint)
        file.write_bytes(content)
    load_checkpoint(checkpoint)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["cut", "turned"])
def test_a_run_is_resumed_from_the_previous_checkpoint(
    name: str, how: str, experiment: Experiment, undamaged_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undamaged_run, run, symlinks=True)
    file = run / "checkpoints" / "step-00000006" / name
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        flip(file, len(file.read_bytes()) // 2)
    said = io.StringIO()
    train(run, experiment, resume=True, console=Console(file=said, width=500))
    assert f"CHECKPOINT DAMAGED: {file}" in said.getvalue()
    assert "the damaged checkpoint is" in said.getvalue()
    assert "resumed after update 4" in said.getvalue()
    assert final_bytes(run, 6) == final_bytes(undamaged_run, 6)
    assert [f.name[-1] for f in checkpoint_folders(run)] == ["2", "4", "6"]


def test_all_checkpoints_damaged_is_an_error(experiment: Experiment, undamaged_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(undamaged_run, tmp_path / "run", symlinks=True)
    for folder in checkpoint_folders(run):
        (folder / "meta.json").write_text("{")
    with pytest.raises(CheckpointError, match="all 3 checkpoints are damaged"):
        train(run, experiment, resume=True, console=QUIET)


def test_a_damaged_model_is_not_translated_with_or_averaged(undamaged_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(undamaged_run, run, symlinks=True)
    file = run / "checkpoints" / "step-00000006" / "model.safetensors"
    open_model(run, which="last")
    flip(file, -5)
    with pytest.raises(CheckpointError, match=r"step-00000006.*model\.safetensors: damaged"):
        open_model(run, which="6")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        mean_weights([run / "checkpoints" / "step-00000004" / "model.safetensors", file])


def test_a_checkpoint_of_another_run_is_not_averaged_with_ours(undamaged_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(undamaged_run, run, symlinks=True)
    newest = checkpoint_folders(run)[-1]
    meta = {key: value for key, value in read_meta(newest).items() if key != "checksum"}
    meta["configuration"]["training"]["seed"] += 1  # as in another run whose weights have these shapes
    write_meta(newest, meta)
    with pytest.raises(CheckpointError, match=r"not a checkpoint of this run.*seed"):
        average_run(run, CheckpointSelection("last", 2), out=tmp_path / "out")


def test_a_shard_of_another_checkpoint_is_refused(checkpoint: Path) -> None:
    shard = checkpoint / "state" / "optimiser" / "shard-00000.safetensors"
    shutil.copy(shard, shard.with_name("shard-00001.safetensors"))
    with pytest.raises(CheckpointError, match="does not belong to this checkpoint"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize("version", [2, 5, 99])
def test_another_format_is_refused_by_its_number(version: int, checkpoint: Path) -> None:
    meta = {**json.loads((checkpoint / "meta.json").read_text()), "format": version}
    write_meta(checkpoint, {key: value for key, value in meta.items() if key != "checksum"})
    with pytest.raises(CheckpointError, match=f"format {version}, but .* reads 1: written by a development version"):
        load_checkpoint(checkpoint)


def test_damaged_checkpoints_displace_no_intact_one(tmp_path: Path) -> None:
    """With the newest checkpoint damaged and one kept, training must not delete the one from which it resumed."""
    for update in (14, 16):
        save_checkpoint(tmp_path, Checkpoint(RunProgress(update=update), {"w": torch.ones(1)}, {}, "store"), (2, 2))
    assert set_aside(tmp_path, after=14) == [tmp_path / "checkpoints" / "damaged-step-00000016"]
    assert (tmp_path / "last").resolve().name == "step-00000014"
    assert set_aside(tmp_path, after=14) == []
    progress = RunProgress(update=15)
    save_checkpoint(tmp_path, Checkpoint(progress, {"w": torch.ones(1)}, {}, "store"), (2, 2))
    prune(tmp_path, progress, CheckpointConfig(keep_last=1, keep_best=0), smaller_is_better=True)
    assert [f.name for f in checkpoint_folders(tmp_path)] == ["step-00000015"]


def test_a_folder_in_the_place_of_a_link_is_named(experiment: Experiment, undamaged_run: Path, tmp_path: Path) -> None:
    """`cp -rL`, zip files and cloud storage follow links."""
    run = tmp_path / "run"
    shutil.copytree(undamaged_run, run)
    with pytest.raises(CheckpointError, match=r"last: is a folder in place of a link .*remove it \(`rm -r "):
        train(run, experiment, resume=True, console=QUIET)
    assert not list(run.glob(".last*"))
    shutil.rmtree(run / "last")
    shutil.rmtree(run / "best")
    train(run, experiment, resume=True, console=QUIET)
    assert (run / "last").readlink() == Path("checkpoints/step-00000006")


def test_an_average_computed_by_another_process_is_waited_for(
    experiment: Experiment, undamaged_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training has succeeded then, and must not report a failure."""
    run = tmp_path / "run"
    shutil.copytree(undamaged_run, run, symlinks=True)
    config = change_section(experiment.training, {"checkpoint": {"average_last": 3}}, "training")
    other = building(run / "averaged")
    other.__enter__()
    with monkeypatch.context() as patched:
        patched.setattr(average, "_PATIENCE_SECONDS", 0.0)
        with pytest.raises(
            ConfigError, match=r"another process .*; afterwards `ziggurat average .* --checkpoints last:3` does it"
        ):
            average.average_newest(run, config)
    threading.Timer(0.2, other.__exit__, (None, None, None)).start()
    assert average.average_newest(run, config) == [2, 4, 6]
    assert open_model(run).origin.endswith("averaged checkpoints")


@pytest.mark.parametrize("kind", ["damaged", "full"])
def test_a_failed_average_does_not_fail_the_run(
    kind: str, experiment: Experiment, undamaged_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = tmp_path / "run", io.StringIO()
    shutil.copytree(undamaged_run, run, symlinks=True)
    if kind == "damaged":
        (run / "checkpoints" / "step-00000004" / "model.safetensors").write_bytes(b"")
    else:
        full = OSError(errno.ENOSPC, "No space left on device", "model.safetensors")
        monkeypatch.setattr(average, "fill_model_directory", lambda *_, **__: (_ for _ in ()).throw(full))
    again = change_section(experiment, {"training": {"checkpoint": {"average_last": 3}}}, "")
    train(run, again, resume=True, console=Console(file=said, width=500))
    assert "\nNOT AVERAGED: " in said.getvalue()
    assert {"damaged": "step-00000004", "full": "No space left"}[kind] in said.getvalue()


def test_opening_a_run_repairs_links_after_a_kill(experiment: Experiment, undamaged_run: Path, tmp_path: Path) -> None:
    """The metric of the scores decides; that of the configuration may have none yet (`--resume` has changed it)."""
    run = tmp_path / "run"
    shutil.copytree(undamaged_run, run, symlinks=True)
    newest = run / "checkpoints" / "step-00000006"
    scores = {"step-00000002": 7.0, "step-00000004": 3.0, "step-00000006": 5.0}  # losses
    meta = read_meta(newest)
    write_meta(newest, {**meta, "progress": {**meta["progress"], "scores": scores, "best": 3.0, "best_update": 4}})

    def behind() -> None:
        for name in ("last", "best"):
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to("checkpoints/step-00000002")

    def lead() -> list[str]:
        return [(run / name).resolve().name for name in ("last", "best")]

    behind()
    assert open_model(run, which="best").origin.endswith("best, update 4")
    assert lead() == ["step-00000006", "step-00000004"]
    behind()
    average_run(run, CheckpointSelection("last", 2), out=tmp_path / "out")
    assert lead() == ["step-00000006", "step-00000004"]
    file = run / "config.yaml"
    write_atomically(file, dump(load_experiment(file, ["training.validation.metric=chrf"])).encode())
    behind()
    open_model(run, which="best")
    assert lead() == ["step-00000006", "step-00000004"]
    behind()
    with locked(run):  # training in that folder repairs the links itself
        assert open_model(run, which="best").origin.endswith("best, update 2")
    assert lead() == ["step-00000002", "step-00000002"]
    (newest / "meta.json").write_text("{")  # damaged, which is no reason to refuse another checkpoint
    open_model(run, which="4")
    assert lead()[0] == "step-00000004"


def test_surplus_checkpoints_are_deleted_on_resuming(undamaged_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(undamaged_run, run, symlinks=True)
    (run / "last").unlink()
    (run / "last").symlink_to("checkpoints/step-00000004")
    for name in (".environment.json.abcdefgh.tmp", "checkpoints/step-00000006/.meta.json.abcdefgh.tmp", ".shared"):
        (run / name).write_text("half")
    (run / ".last.linking_.tmp").symlink_to("nowhere")
    settings = load_experiment(run / "config.yaml", ["training.checkpoint.keep_last=2"])
    train(run, settings, resume=True, console=QUIET)
    assert [f.name for f in checkpoint_folders(run)] == ["step-00000004", "step-00000006"]
    assert (run / "last").resolve().name == "step-00000006"
    assert {p.name for p in run.rglob(".*")} == {".lock", ".job"}


def test_machine_errors_do_not_count_as_damage(
    experiment: Experiment, undamaged_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files must not cause the newest checkpoint to be set aside."""
    run = tmp_path / "run"
    shutil.copytree(undamaged_run, run, symlinks=True)
    original = Path.open

    def opened(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "model.safetensors":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return original(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        for work in (
            lambda: train(run, experiment, resume=True, console=QUIET),
            lambda: open_model(run, which="last"),
        ):
            with pytest.raises(MachineError, match=r"model\.safetensors: cannot be read: Too many open files;"):
                work()
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks available")))
        with pytest.raises(DataError, match="the file system there cannot lock files"):
            train(run, experiment, resume=True, console=QUIET)
    assert [f.name for f in checkpoint_folders(run)] == [f.name for f in checkpoint_folders(undamaged_run)]
