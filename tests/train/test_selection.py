"""Checkpoints and validations by epochs; the window around the best one; choices of several checkpoints."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import tiny_experiment
from tests.train.launch import run_together
from tests.train.runs import QUIET, final_bytes, records
from ziggurat.config import TrainingConfig
from ziggurat.config.lifecycle import CheckpointConfig, StopConfig, ValidationConfig
from ziggurat.config.load import change_section
from ziggurat.data.loader import LoaderState
from ziggurat.model.run_folder import checkpoint_folders, checkpoint_name, checkpoint_update
from ziggurat.system.errors import CheckpointError, ConfigError
from ziggurat.train.average import CheckpointSelection, average_run, regular_checkpoints, selected_checkpoints
from ziggurat.train.checkpoint import Checkpoint, RunProgress, read_progress, save_checkpoint
from ziggurat.train.loop import due, train
from ziggurat.train.saving import prune

LAST = 17
BY_EPOCHS = {
    "batch": {"max_tokens": 800, "accumulate": 3},
    "validation": {"every_updates": None, "every_epochs": 1, "decode": False},
    "checkpoint": {"every_updates": None, "every_epochs": 1, "keep_last": 9, "average_last": 2},
    "stop": {"updates": LAST},
}


def updates_of(folders: list[Path]) -> list[int]:
    return [checkpoint_update(folder) for folder in folders]


def epoch_ends(run: Path) -> list[int]:
    """Return the updates of a run's checkpoints at the beginning of an epoch."""
    return [checkpoint_update(f) for f in checkpoint_folders(run) if read_progress(f).batch == 0]


def test_checkpoints_and_validations_come_at_the_ends_of_epochs(tiny_folder: Path, tmp_path: Path) -> None:
    """Batches are accumulated, which epochs are no multiple of; the run is stopped and resumed; epochs are averaged."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    found = tiny_experiment(tiny_folder, **BY_EPOCHS)
    train(whole, found, console=QUIET)
    ends = epoch_ends(whole)
    assert [read_progress(whole / "checkpoints" / checkpoint_name(u)).epoch for u in ends] == [*range(1, len(ends) + 1)]
    assert len(ends) >= 3
    assert ends[-1] < LAST
    assert len({b - a for a, b in pairwise([0, *ends])}) == 1
    assert updates_of(checkpoint_folders(whole)) == [*ends, LAST]
    assert [r["update"] for r in records(whole, "validation")] == [*ends, LAST]
    assert updates_of(regular_checkpoints(whole, found.training)) == ends
    assert f"averaged checkpoints {ends[-2]}, {ends[-1]} into" in (whole / "log.txt").read_text()
    assert average_run(whole, CheckpointSelection("last-epochs", 2))[1] == ends[-2:]
    for last in (ends[0] - 1, ends[0], ends[1] + 1, LAST):
        part = tiny_experiment(tiny_folder, **{**BY_EPOCHS, "stop": {"updates": last}})
        train(parts, part, resume=parts.exists(), console=QUIET)
    assert final_bytes(parts, LAST) == final_bytes(whole, LAST)
    assert set(updates_of(checkpoint_folders(whole))) <= set(updates_of(checkpoint_folders(parts)))


@pytest.mark.slow
def test_epochs_and_updates_both_count_while_a_model_grows(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {**BY_EPOCHS, "stop": {"epochs": 4, "updates": None}}
    settings["validation"] = {"every_epochs": 2, "every_updates": 5, "decode": False}
    settings["checkpoint"] = {"every_epochs": 1, "every_updates": 1000, "keep_last": 99}
    found = tiny_experiment(tiny_folder, **settings)
    growth = {"growth": {"stages": [{"layers": 1, "epochs": 2}], "keep_stages": False}}
    grown = change_section(found, {"training": growth}, "")
    train(tmp_path / "run", grown, console=QUIET)
    ends, last = epoch_ends(tmp_path / "run"), checkpoint_update(checkpoint_folders(tmp_path / "run")[-1])
    validated = sorted({*ends[1::2], *range(5, last + 1, 5)})
    assert len(ends) == 4
    assert ends[-1] == last
    assert [r["update"] for r in records(tmp_path / "run", "validation")] == validated
    assert updates_of(checkpoint_folders(tmp_path / "run")) == sorted({*ends, *validated})
    depths = [read_progress(tmp_path / "run" / "checkpoints" / checkpoint_name(end)).stage for end in ends]
    assert depths == [0, 0, 1, 1]
    assert (
        updates_of(selected_checkpoints(tmp_path / "run", grown.training, CheckpointSelection("last-epochs", 2)))
        == ends[-2:]
    )
    with pytest.raises(CheckpointError, match="2 of the 3 requested checkpoints that end an epoch"):
        selected_checkpoints(tmp_path / "run", grown.training, CheckpointSelection("last-epochs", 3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_epochs_end_alike_in_several_processes(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    found = tiny_experiment(tiny_folder, **BY_EPOCHS, distributed={"kind": kind})
    train(alone, found, console=QUIET)
    run_together("tests.train.runs", "train_part", 2, str(together), found.model_dump_json(), "")
    assert updates_of(checkpoint_folders(together)) == updates_of(checkpoint_folders(alone))
    assert epoch_ends(together) == epoch_ends(alone) != []
    updates = [[r["update"] for r in records(run, "validation")] for run in (alone, together)]
    assert updates[0] == updates[1]


@given(st.integers(1, 40), st.integers(0, 6), st.integers(0, 3), st.integers(0, 4), st.integers(0, 4))
def test_what_is_due_depends_only_on_update_and_position(
    update: int, epoch: int, batch: int, updates: int, epochs: int
) -> None:
    when = CheckpointConfig.model_construct(every_updates=updates or None, every_epochs=epochs or None)
    by_updates = updates > 0 and update % updates == 0
    by_epochs = epochs > 0 and batch == 0 and epoch % epochs == 0
    assert due(when, update, LoaderState(epoch, batch)) == (by_updates or by_epochs)


def test_checkpoints_must_be_due_at_some_point() -> None:
    for key, section in (("validation", ValidationConfig), ("checkpoint", CheckpointConfig)):
        with pytest.raises(ValueError, match="set `every_updates`"):
            section.model_validate({"every_updates": None})
        section.model_validate({"every_updates": None, "every_epochs": 1}), key
    with pytest.raises(ValueError, match="must be a multiple"):
        CheckpointConfig.model_validate({"every_updates": None, "every_epochs": 1, "keep_every": 100})
    with pytest.raises(ValueError, match="must be odd"):
        CheckpointConfig(keep_around_best=4)


def scored(run: Path, scores: list[float | None], kept: CheckpointConfig, spacing: int = 10) -> RunProgress:
    """Write checkpoints with these losses (None: not validated) and delete as training does; return the progress."""
    progress = RunProgress()
    for number, score in enumerate(scores, start=1):
        progress.update = number * spacing
        if score is not None:
            progress.scores[checkpoint_name(progress.update)] = score
        if score is not None and (progress.best is None or score < progress.best):
            progress.best, progress.best_update = score, progress.update
        save_checkpoint(run, Checkpoint(progress, {"w": torch.tensor(1.0)}, {}, "store"), (2, 2))
        prune(run, progress, kept, smaller_is_better=True)
    return progress


@pytest.mark.parametrize("losses", ["543123456", "987654567", "123456789", "625678919", "987654321"])
def test_neighbours_of_the_best_are_kept(losses: str, tmp_path: Path) -> None:
    scores = [float(loss) for loss in losses]
    progress = scored(tmp_path, [*scores], CheckpointConfig(keep_last=1, keep_around_best=5))
    place = scores.index(min(scores))
    window = [10 * (n + 1) for n in range(max(0, place - 2), min(len(scores), place + 3))]
    newest = [80, 90]  # before the next best one
    assert updates_of(checkpoint_folders(tmp_path)) == sorted({*window, *newest})
    assert (tmp_path / "best").resolve().name == checkpoint_name(progress.best_update or 0)
    config = TrainingConfig(checkpoint=CheckpointConfig(every_updates=10), stop=StopConfig(updates=1000))
    if len(window) == 5:
        assert updates_of(selected_checkpoints(tmp_path, config, CheckpointSelection("around-best", 5))) == window
    else:
        after = len(scores) - 1 - place
        with pytest.raises(CheckpointError, match=f"{min(place, 2)} .* before the best one .* of 2 each: ") as refused:
            selected_checkpoints(tmp_path, config, CheckpointSelection("around-best", 5))
        message = str(refused.value)
        assert ("`around-best:3`" in message) == (min(place, after) == 1)
        assert ("train on" in message) == (after < 2)
        assert "keep_around_best=5" in message
        keeping = config.model_copy(update={"checkpoint": CheckpointConfig(every_updates=10, keep_around_best=5)})
        with pytest.raises(CheckpointError) as refused:  # its option is already given
            selected_checkpoints(tmp_path, keeping, CheckpointSelection("around-best", 5))
        assert "keep_around_best" not in str(refused.value)


def test_neighbours_are_kept_before_anything_is_validated(tmp_path: Path) -> None:
    kept = CheckpointConfig(keep_last=1, keep_around_best=5)
    for scores, updates in (
        ([None] * 4, [30, 40]),
        ([None, None, None, 1, None, None, None], [20, 30, 40, 50, 60, 70]),
    ):
        scored(tmp_path / str(len(scores)), [*scores], kept)
        assert updates_of(checkpoint_folders(tmp_path / str(len(scores)))) == updates


def test_a_gap_next_to_the_best_is_refused(tmp_path: Path) -> None:
    scored(tmp_path, [3, 2, 1, 2, 3, 4], CheckpointConfig(keep_last=2, keep_every=20, every_updates=10))
    assert updates_of(checkpoint_folders(tmp_path)) == [20, 30, 40, 50, 60]
    config = TrainingConfig(checkpoint=CheckpointConfig(every_updates=10), stop=StopConfig(updates=1000))
    assert updates_of(selected_checkpoints(tmp_path, config, CheckpointSelection("around-best", 3))) == [20, 30, 40]
    finer = TrainingConfig(checkpoint=CheckpointConfig(every_updates=5), stop=StopConfig(updates=1000))
    with pytest.raises(CheckpointError, match="between step-00000020 and step-00000030"):
        selected_checkpoints(tmp_path, finer, CheckpointSelection("around-best", 3))


def test_without_a_validation_there_is_no_best(tmp_path: Path) -> None:
    config = TrainingConfig()
    with pytest.raises(CheckpointError, match="none was validated"):
        selected_checkpoints(tmp_path, config, CheckpointSelection("around-best", 3))


@pytest.mark.parametrize(
    "text", ["5", "last", "last:0", "last:-1", "first:3", "around-best:4", "last-epochs:x", "last:5 "]
)
def test_invalid_choices_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--checkpoints"):
        CheckpointSelection.parse(text)


@given(st.sampled_from(["last", "last-epochs", "around-best"]), st.integers(1, 10_000))
def test_choices_are_read_as_they_are_written(kind: str, count: int) -> None:
    choice = CheckpointSelection(kind, 2 * count + 1)
    assert CheckpointSelection.parse(str(choice)) == choice
