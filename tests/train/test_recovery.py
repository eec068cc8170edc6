"""A run whose updates fail: they are skipped and explained, or it rolls back, or ends; interruptions change nothing."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from tests.conftest import tiny_experiment
from tests.train.faulty_batches import planned, poison
from tests.train.runs import QUIET, final_bytes, records
from ziggurat.config import Experiment, dump, parse_experiment
from ziggurat.config.notices import notices
from ziggurat.data.corpus import Store
from ziggurat.data.loader import LoaderState
from ziggurat.model.run_folder import CHECKPOINT_FORMAT, checkpoint_folders, read_meta, write_meta
from ziggurat.model.tensors import read_tensors, write_tensors
from ziggurat.system.errors import CheckpointError, ConfigError, TrainingError
from ziggurat.system.files import fingerprint
from ziggurat.train.checkpoint import Checkpoint, RunProgress, load_checkpoint, read_progress
from ziggurat.train.depth_records import DepthProbe
from ziggurat.train.device import loader_of
from ziggurat.train.learner import Learner
from ziggurat.train.loop import TrainingResult, train
from ziggurat.train.recovery import Fault, Recovery
from ziggurat.train.schedule import learning_rate
from ziggurat.train.update import UpdateResult, train_update

LAYER = "decoder.layers.1.ffn.in_proj"
UPDATES = 14
SETTINGS: dict[str, Any] = {
    "threads": 1,
    "stop": {"updates": UPDATES},
    "checkpoint": {"every_updates": 4, "keep_last": 9},
    "validation": {"every_updates": 100, "decode": False},
    "batch": {"max_tokens": 150},
    "log_every_updates": 5,
    "patience": {"non_finite": 3},
    "divergence": {"action": "roll_back", "rate_factor": 0.5},
}


def nan(output: Tensor) -> Tensor:
    return output * math.nan


def settings(**changes: Any) -> dict[str, Any]:
    return {**SETTINGS, **changes}


def train_run(run: Path, experiment: Experiment, **options: Any) -> tuple[TrainingResult, str]:
    said = io.StringIO()
    result = train(run, experiment, console=Console(file=said, width=1000), **options)
    return result, said.getvalue()


def weights_of(run: Path, update: int) -> dict[str, Tensor]:
    return read_tensors(run / "checkpoints" / f"step-{update:08d}" / "model.safetensors")


@pytest.mark.slow
def test_a_poisoned_update_changes_nothing_and_names_the_layer(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tiny_experiment(tiny_folder, **settings(stop={"updates": 6}, checkpoint={"every_updates": 1}))
    poison(monkeypatch, planned(experiment, 5, 5), LAYER, nan)
    _, messages = train_run(tmp_path / "run", experiment)
    assert f"update 5: loss nan and gradient norm nan are not both finite: {LAYER}: output is NaN in the " in messages
    assert "forward pass; update skipped (1 in all, 1 in a row)" in messages
    before, after, later = (weights_of(tmp_path / "run", update) for update in (4, 5, 6))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(before[name], later[name]) for name in before)
    assert records(tmp_path / "run", "train")[0]["skipped"] == 1


def test_healthy_updates_are_not_searched(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ziggurat.train.recovery.find_fault", lambda *_, **__: pytest.fail("run a second time"))
    train_run(tmp_path / "run", tiny_experiment(tiny_folder, **settings(stop={"updates": 3})))


@pytest.mark.slow
def test_searching_for_the_fault_does_not_change_training(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run with and without the search: equal weights, so equal random numbers afterwards."""
    experiment = tiny_experiment(tiny_folder, **settings(stop={"updates": 7}))
    poison(monkeypatch, planned(experiment, 3, 4), LAYER, nan)
    train_run(tmp_path / "with", experiment)
    monkeypatch.setattr("ziggurat.train.recovery.find_fault", lambda *_, **__: Fault("somewhere", True))
    train_run(tmp_path / "without", experiment)
    assert final_bytes(tmp_path / "with", 7) == final_bytes(tmp_path / "without", 7)


@pytest.fixture
def diverging(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """Updates 7, 8 and 9 fail, so that update 9 rolls back to the weights after update 4."""
    experiment = tiny_experiment(tiny_folder, **SETTINGS)
    poison(monkeypatch, planned(experiment, 7, 9), LAYER, nan)
    return experiment


@pytest.mark.cpu("compares with updates on one, bit by bit")
def test_rolling_back_uses_the_old_weights_the_next_data_and_a_lower_rate(
    diverging: Experiment, tmp_path: Path
) -> None:
    """Compare with updates made by hand from the checkpoint at update 4."""
    run = tmp_path / "run"
    _, said = train_run(run, diverging)
    assert (
        f"update 9: 3 bad updates in a row, first {LAYER}: output is NaN in the forward pass; rolled back to the "
        "weights after update 4, continuing with the data that comes next, at 0.5 times the rate (1 of 3 roll backs)"
    ) in said
    progress = read_progress(run / "last")
    assert (progress.update, progress.schedule_update, progress.roll_backs) == (14, 9, 1)
    assert (progress.skipped, progress.skipped_in_a_row, progress.rate_factor) == (3, 0, 0.5)

    store, training = Store.open(diverging.data.store), diverging.training
    learner = Learner(diverging, store, torch.device("cpu"))
    good = load_checkpoint(run / "checkpoints" / "step-00000004")
    learner.restore(good, run)
    groups = loader_of(diverging, store).groups(LoaderState(0, 9))
    for t in range(5, 10):
        rate = 0.5 * learning_rate(training.schedule, t, d_model=16)
        batches = next(groups).batches
        train_update(learner.parallel, batches, learner.optimiser, rate=rate, clip_norm=None)
    found = weights_of(run, UPDATES)
    assert all(torch.equal(found[name], p) for name, p in learner.model.state_dict().items() if name in found)


@pytest.mark.slow
def test_depth_is_measured_after_a_roll_back(
    diverging: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measures are those of the weights with which training continues."""
    done: list[str] = []
    for owner, name in ((Recovery, "roll_back"), (DepthProbe, "after")):
        original = getattr(owner, name)

        def noted(self: Any, progress: RunProgress, *rest: Any, name: str = name, original: Any = original) -> None:
            done.append(f"{name} {progress.update}")
            original(self, progress, *rest)

        monkeypatch.setattr(owner, name, noted)
    train_run(tmp_path / "run", diverging)
    assert done.index("after 9") == done.index("roll_back 9") + 1


def killed_at(monkeypatch: pytest.MonkeyPatch, update: int, run: Path, experiment: Experiment) -> None:
    """Train, and die during the update with this number, so that nothing more is saved."""
    count = 0

    def killed(*args: Any, **options: Any) -> UpdateResult:
        nonlocal count
        count += 1
        if count == update:
            raise KeyboardInterrupt
        return train_update(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("ziggurat.train.loop.train_update", killed)
        with pytest.raises(KeyboardInterrupt):
            train_run(run, experiment)


@pytest.mark.slow
def test_kills_and_stops_around_a_roll_back_change_nothing(
    diverging: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_run(tmp_path / "whole", diverging)
    expected = final_bytes(tmp_path / "whole", UPDATES)
    for moment in (2, 8, 10):
        run = tmp_path / f"killed-{moment}"
        killed_at(monkeypatch, moment, run, diverging)
        train_run(run, diverging, resume=True)
        assert final_bytes(run, UPDATES) == expected, f"killed at update {moment}"
    run = tmp_path / "stopped"
    for stop in (6, 8, UPDATES):  # before, during and after the bad updates
        train_run(
            run, tiny_experiment(Path(diverging.data.store).parent, **settings(stop={"updates": stop})), resume=stop > 6
        )
    assert final_bytes(run, UPDATES) == expected


def test_before_the_first_checkpoint_it_rolls_back_to_the_start(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the starting weights, and an optimiser without moments."""
    changes = {"stop": {"updates": 6}, "checkpoint": {"every_updates": 5}, "patience": {"non_finite": 2}}
    experiment = tiny_experiment(tiny_folder, **settings(**changes))
    poison(monkeypatch, planned(experiment, 2, 3), LAYER, nan)
    _, messages = train_run(tmp_path / "run", experiment)
    assert "rolled back to the weights after update 0" in messages
    folders = [folder.name for folder in checkpoint_folders(tmp_path / "run")]
    assert folders == ["step-00000005", "step-00000006"]  # the first good checkpoint replaced the start
    steps = load_checkpoint(tmp_path / "run" / "last").optimiser
    assert {float(value) for name, value in steps.items() if name.endswith("/step")} == {3.0}


def test_without_a_written_checkpoint_there_is_no_roll_back(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise CheckpointError("no room")

    changes = {"stop": {"updates": 6}, "patience": {"non_finite": 2}}
    experiment = tiny_experiment(tiny_folder, **settings(**changes, checkpoint={"on_error": "continue"}))
    poison(monkeypatch, planned(experiment, 2, 3), LAYER, nan)
    monkeypatch.setattr("ziggurat.train.saving.save_checkpoint", full)
    with pytest.raises(TrainingError, match="holds no whole checkpoint from before them"):
        train_run(tmp_path / "run", experiment)


@pytest.mark.slow
def test_checkpoints_written_while_updates_fail_are_not_rolled_back_to(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The good one stays, although newer ones would displace it."""
    changes = {"stop": {"updates": 9}, "checkpoint": {"every_updates": 2, "keep_last": 1}}
    experiment = tiny_experiment(tiny_folder, **settings(**changes, patience={"non_finite": 5}))
    poison(monkeypatch, planned(experiment, 3, 7), LAYER, nan)
    _, messages = train_run(tmp_path / "run", experiment)
    assert "update 7: 5 bad updates in a row" in messages
    assert "rolled back to the weights after update 2," in messages


@pytest.fixture
def about_to_roll_back(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Experiment]:
    """A run of 8 updates, the last two of them bad, and its longer form, whose update 9 rolls back to update 6."""
    experiment = tiny_experiment(tiny_folder, **settings(checkpoint={"every_updates": 2}, stop={"updates": 8}))
    poison(monkeypatch, planned(experiment, 7, 9), LAYER, nan)
    train_run(tmp_path / "run", experiment)
    longer = settings(checkpoint={"every_updates": 2}, stop={"updates": 12})
    return tmp_path / "run", tiny_experiment(tiny_folder, **longer)


@pytest.mark.slow
def test_a_damaged_good_checkpoint_ends_the_run_until_it_is_readable_or_gone(
    about_to_roll_back: tuple[Path, Experiment], tmp_path: Path
) -> None:
    run, longer = about_to_roll_back
    shutil.copytree(run, tmp_path / "whole", symlinks=True)
    _, messages = train_run(tmp_path / "whole", longer, resume=True)
    assert "rolled back to the weights after update 6," in messages
    good = run / "checkpoints" / "step-00000006"
    content = bytearray((good / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (good / "model.safetensors").write_bytes(content)
    there = checkpoint_folders(run)
    for _ in range(2):  # the second time with what the first attempt left
        with pytest.raises(CheckpointError) as error:
            train_run(run, longer, resume=True)
        assert f"{good / 'model.safetensors'}: damaged" in str(error.value)
        assert f"to {good}. If the disk failed only briefly, `--resume` again; if the folder is " in str(error.value)
        assert "damaged, remove it, and `--resume` goes back to the checkpoint before it" in str(error.value)
    assert checkpoint_folders(run) == there

    shutil.copytree(run, tmp_path / "without", symlinks=True)
    shutil.rmtree(tmp_path / "without" / "checkpoints" / good.name)
    _, messages = train_run(tmp_path / "without", longer, resume=True)
    assert "step-00000006 is gone; rolling back to the checkpoint before it" in messages
    assert "rolled back to the weights after update 4," in messages

    content[-3] ^= 1
    (good / "model.safetensors").write_bytes(content)
    train_run(run, longer, resume=True)
    assert final_bytes(run, 12) == final_bytes(tmp_path / "whole", 12)


@pytest.mark.slow
@pytest.mark.parametrize("removed", [False, True])
def test_a_newest_checkpoint_unfit_for_roll_back_is_recreated(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """The run continues from the previous one, and ends the same."""
    changes = {"checkpoint": {"every_updates": 2}, "patience": {"non_finite": 2}, "stop": {"updates": 10}}
    experiment = tiny_experiment(tiny_folder, **settings(**changes))
    poison(monkeypatch, planned(experiment, 7, 8), LAYER, nan)
    train_run(tmp_path / "whole", experiment)

    def damaged(folder: Path) -> Checkpoint:
        (folder / "model.safetensors").write_bytes(b"")
        return load_checkpoint(folder)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("ziggurat.train.recovery.load_checkpoint", damaged)
        with pytest.raises(CheckpointError, match="goes back to the checkpoint before it"):
            train_run(run, experiment)
    assert checkpoint_folders(run)[-1].name == "step-00000006"
    if removed:
        shutil.rmtree(run / "checkpoints" / "step-00000006")
    _, messages = train_run(run, experiment, resume=True)
    assert "resumed after update 4" in messages
    assert "rolled back to the weights after update 6," in messages
    assert final_bytes(run, 10) == final_bytes(tmp_path / "whole", 10)


def test_the_only_checkpoint_for_a_roll_back_is_not_removed(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"stop": {"updates": 6}, "checkpoint": {"every_updates": 5}, "patience": {"non_finite": 2}}
    experiment = tiny_experiment(tiny_folder, **settings(**changes))
    poison(monkeypatch, planned(experiment, 2, 3), LAYER, nan)

    def unreadable(folder: Path) -> Checkpoint:
        raise CheckpointError(f"{folder}/meta.json: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("ziggurat.train.recovery.load_checkpoint", unreadable)
        with pytest.raises(CheckpointError, match=r"`--resume` again; if the folder is damaged, start a new run$"):
            train_run(tmp_path / "run", experiment)
    _, messages = train_run(tmp_path / "run", experiment, resume=True)
    assert "rolled back to the weights after update 0" in messages


@pytest.mark.slow
@pytest.mark.parametrize(("reason", "update"), [({}, 4), ({"by_clock": True}, 2), ({"interim": ["step-00000004"]}, 2)])
def test_a_good_checkpoint_with_infinite_weights_is_skipped(
    reason: dict[str, Any], update: int, about_to_roll_back: tuple[Path, Experiment]
) -> None:
    """This includes older checkpoints that only the clock or a stop required."""
    run, longer = about_to_roll_back
    older = run / "checkpoints" / "step-00000004"
    before = read_meta(older)
    write_meta(older, {**before, "progress": {**before["progress"], **reason}})
    good = run / "checkpoints" / "step-00000006"
    file, meta = good / "model.safetensors", read_meta(good)
    weights = read_tensors(file)
    next(iter(weights.values())).view(-1)[0] = math.inf
    checksum = write_tensors(file, weights)
    write_meta(good, {**meta, "checksums": {**meta["checksums"], file.name: checksum}})
    _, messages = train_run(run, longer, resume=True)
    assert f"rolled back to the weights after update {update}," in messages


def test_after_too_many_roll_backs_the_run_ends_with_the_diagnosis(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divergence = {"action": "roll_back", "max_roll_backs": 2, "rate_factor": 0.1}
    experiment = tiny_experiment(tiny_folder, **settings(divergence=divergence, patience={"non_finite": 2}))
    poison(monkeypatch, planned(experiment, 6, 14), LAYER, nan)
    said = io.StringIO()
    with pytest.raises(TrainingError) as error:
        train(tmp_path / "run", experiment, console=Console(file=said, width=1000))
    assert "2 updates in a row had a non-finite loss or gradient, or a loss spike" in str(error.value)
    assert f"the first of them update 10; first {LAYER}: output is NaN in the forward pass" in str(error.value)
    assert "Earlier roll backs: 2." in str(error.value)
    assert "Lower `training.schedule.peak`, lengthen `warmup_updates`" in str(error.value)
    assert "fp32" not in str(error.value)  # the run already trains in fp32
    assert ("training.clip_norm" in str(error.value)) is (experiment.training.clip_norm is None)
    assert "at 0.01 times the rate (2 of 2 roll backs)" in said.getvalue()


@pytest.mark.slow
def test_nan_in_one_layer_ends_the_run_with_its_name_and_a_resumed_run_continues(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the default. Checkpoints are intact and their weights finite, so a run without the fault can continue."""
    experiment = tiny_experiment(tiny_folder, **settings(divergence={"action": "stop"}))
    with monkeypatch.context() as patch:
        poison(patch, planned(experiment, 6, 14), LAYER, nan)
        message = rf"3 updates in a row.*the first of them update 6; first {LAYER}: output is NaN in the forward pass"
        with pytest.raises(TrainingError, match=message):
            train_run(tmp_path / "run", experiment)
    newest = load_checkpoint(checkpoint_folders(tmp_path / "run")[-1])
    assert (newest.progress.update, newest.progress.skipped_in_a_row) == (8, 3)
    assert all(torch.isfinite(t).all() for t in (*newest.weights.values(), *newest.optimiser.values()))
    result, _ = train_run(tmp_path / "run", experiment, resume=True)
    progress = read_progress(tmp_path / "run" / "last")
    assert (result.update, progress.skipped, progress.skipped_in_a_row, progress.fault) == (UPDATES, 3, 0, None)


@pytest.mark.slow
def test_a_grown_encoder_rolls_back_to_the_depth_of_the_checkpoint_and_grows_again(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = {"stages": [{"layers": 1, "updates": 5}], "keep_stages": False}
    experiment = tiny_experiment(tiny_folder, **settings(growth=growth))
    poison(monkeypatch, planned(experiment, 6, 8), "decoder.layers.0.ffn.in_proj", nan)
    _, messages = train_run(tmp_path / "run", experiment)
    assert messages.count("the model grows, the encoder from 1 to 2 layers") == 2
    assert "rolled back to the weights after update 4," in messages
    assert read_progress(tmp_path / "run" / "last").stage == 1
    killed_at(monkeypatch, 9, tmp_path / "parts", experiment)
    train_run(tmp_path / "parts", experiment, resume=True)
    assert final_bytes(tmp_path / "parts", UPDATES) == final_bytes(tmp_path / "run", UPDATES)


def test_a_loss_spike_is_skipped_and_counted_apart(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divergence = {"loss_spike": 1.5, "window": 3}
    experiment = tiny_experiment(
        tiny_folder,
        **settings(divergence=divergence, stop={"updates": 6}, checkpoint={"every_updates": 1}, log_every_updates=6),
    )
    bad = planned(experiment, 2, 2) + planned(experiment, 5, 5)  # update 2 comes before there is a median
    poison(monkeypatch, bad, "decoder.final_norm", lambda output: output * -20)
    run = tmp_path / "run"
    _, messages = train_run(run, experiment)
    assert "update 5: loss of" in messages
    assert "nats per target token is far above its running median: run again, every state and gradient is" in messages
    assert messages.count("update skipped") == 1
    before, after = weights_of(run, 4), weights_of(run, 5)
    assert all(torch.equal(before[name], after[name]) for name in before)
    (record,) = records(run, "train")
    assert (record["skipped"], record["spikes"], record["rejected"]) == (1, 1, 0)
    losses = read_progress(run / "last").losses
    assert len(losses) == 3
    assert max(losses) < 7  # without the spike's loss


@pytest.mark.slow
def test_the_median_survives_a_resume(tiny_folder: Path, tmp_path: Path) -> None:
    """Half of all losses are above their median, so with a factor of just over 1 many updates are spikes."""
    changes = {"divergence": {"loss_spike": 1.001, "window": 4}, "patience": {"non_finite": 50}}
    schedule = {"kind": "constant", "peak": 1e-30, "warmup_updates": 0, "initial": 0.0}
    for name, stops in (("whole", [12]), ("parts", [5, 12])):
        for stop in stops:
            experiment = tiny_experiment(tiny_folder, **settings(**changes, stop={"updates": stop}, schedule=schedule))
            train(tmp_path / name, experiment, resume=(tmp_path / name).exists(), console=QUIET)
    whole, parts = (read_progress(tmp_path / name / "last") for name in ("whole", "parts"))
    assert 2 <= whole.spikes <= 7
    assert (whole.losses, whole.spikes, whole.skipped) == (parts.losses, parts.spikes, parts.skipped)


def no_memory(_output: Tensor) -> Tensor:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")


@pytest.mark.slow
def test_updates_without_memory_are_skipped_and_counted_until_there_are_too_many(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"checkpoint": {"every_updates": 1}, "patience": {"out_of_memory": 3}, "log_every_updates": 4}
    experiment = tiny_experiment(tiny_folder, **settings(**changes, stop={"updates": 4}))
    monkeypatch.setattr("ziggurat.train.setup.refuse_too_large", lambda *_, **__: None)
    with monkeypatch.context() as patch:
        poison(patch, planned(experiment, 2, 3), LAYER, no_memory)
        _, messages = train_run(tmp_path / "run", experiment)
    assert "update 3: out of memory on " in messages
    assert "4.0 KiB more needed, with " in messages
    assert "update skipped (2 in all, 2 in a row)" in messages
    before, after, later = (weights_of(tmp_path / "run", update) for update in (1, 3, 4))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(before[name], later[name]) for name in before)
    progress = read_progress(tmp_path / "run" / "last")
    assert (progress.out_of_memory, progress.out_of_memory_in_a_row, progress.skipped) == (2, 0, 0)
    assert records(tmp_path / "run", "train")[0]["out_of_memory"] == 2
    poison(monkeypatch, planned(experiment, 2, 9), LAYER, no_memory)
    with pytest.raises(TrainingError, match=r"3 updates in a row did not fit into memory.* `training\.batch\.max_tok"):
        train_run(tmp_path / "ended", experiment)


@pytest.mark.slow
def test_checkpoints_of_format_2_still_open(tiny_folder: Path, tmp_path: Path) -> None:
    experiment = tiny_experiment(tiny_folder, **settings(stop={"updates": 4}, divergence={}))
    train_run(tmp_path / "run", experiment)
    folder = tmp_path / "run" / "last"
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    assert meta["format"] == CHECKPOINT_FORMAT == 5
    new = ["fault", "spikes", "losses", "roll_backs", "rate_factor", "good", "out_of_memory", "out_of_memory_in_a_row"]
    meta["progress"] = {key: value for key, value in meta["progress"].items() if key not in new}
    before = load_checkpoint(folder).optimiser
    shutil.rmtree(folder / "state" / "optimiser")
    write_tensors(folder / "state" / "optimiser.safetensors", before)
    files = ("model.safetensors", "state/optimiser.safetensors")
    del meta["checksum"]
    meta["checksums"] = {name: fingerprint(folder / name) for name in files}
    path.write_text(json.dumps({**meta, "format": 2}))
    longer = tiny_experiment(tiny_folder, **settings(stop={"updates": 6}))  # it rolls back from now on
    train_run(tmp_path / "run", longer, resume=True)
    progress = read_progress(tmp_path / "run" / "last")
    assert (progress.update, progress.rate_factor, progress.good) == (6, 1.0, "step-00000004")


def test_the_key_of_older_runs_is_read(tiny_folder: Path) -> None:
    text = (
        dump(tiny_experiment(tiny_folder))
        .replace("    non_finite: 20\n", "")
        .replace("  patience:\n", "  patience: {}\n")
    )
    old = text.replace("  stop:\n", "  stop:\n    non_finite: 7\n")
    without = old.replace("  patience: {}\n    out_of_memory: 5\n", "")
    assert parse_experiment(without, "old.yaml").training.patience.non_finite == 7
    with pytest.raises(ConfigError, match=r"`stop\.non_finite` is now called `patience\.non_finite`"):
        parse_experiment(without, "old.yaml", ["training.patience.non_finite=8"])


def test_keys_without_effect_are_noticed(tiny_folder: Path) -> None:
    experiment = tiny_experiment(tiny_folder, divergence={"rate_factor": 0.1, "window": 7})
    keys = ["training.divergence.rate_factor", "training.divergence.window"]
    assert sorted(problem.key for problem in notices(experiment)) == keys
    experiment = tiny_experiment(tiny_folder, divergence={"action": "roll_back", "rate_factor": 0.1})
    assert not notices(experiment)
