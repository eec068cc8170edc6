"""Checkpoint averaging (Vaswani et al. 2017, section 6.1): the mean of the weights of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ziggurat.config import TrainingConfig, load_experiment
from ziggurat.errors import CheckpointError
from ziggurat.models.directory import (
    CHECKPOINTS,
    CONFIG_FILE,
    MODEL_FILE,
    read_weights,
    refuse_replacing,
    write_model_directory,
)
from ziggurat.training.checkpoint import checkpoint_folders, read_progress
from ziggurat.training.growth import stage_experiment
from ziggurat.training.stopping import finished

__all__ = ["average_run", "mean_weights", "regular_checkpoints"]


def mean_weights(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the arithmetic mean of every floating-point tensor, summed in fp64 and rounded to its own type once.

    Raises CheckpointError when there is no file or the files' tensors differ in name or shape.
    """
    if not files:
        raise CheckpointError("nothing to average")
    first = read_weights(files[0])
    total = {name: tensor.to(torch.float64) for name, tensor in first.items()}
    for path in files[1:]:
        tensors = read_weights(path)
        if {k: v.shape for k, v in tensors.items()} != {k: v.shape for k, v in first.items()}:
            raise CheckpointError(f"{path} and {files[0]} are not checkpoints of one architecture")
        for name, tensor in tensors.items():
            total[name] += tensor
    return {name: (total[name] / len(files)).to(first[name].dtype) for name in first}


def regular_checkpoints(run: Path, config: TrainingConfig) -> list[Path]:
    """Return the checkpoints of the current stage that a run has however often it was stopped, oldest first.

    Those that a schedule asked for and, when training is over, the last; where the model grew, those of its present
    depth. Raises CheckpointError when the newest
    one's `meta.json` cannot be read.
    """
    folders = checkpoint_folders(run)
    if not folders:
        return []
    progress = read_progress(folders[-1])
    over = finished(progress, config) is not None
    folders = [f for f in folders if read_progress(f).stage == progress.stage]
    return [f for f in folders if f.name not in progress.interim or (over and f == folders[-1])]


def average_run(run: Path, *, last: int, out: Path | None = None, force: bool = False) -> tuple[Path, list[int]]:
    """Average the newest `last` checkpoints of a run into a model directory (default: `<run>/averaged`).

    Checkpoints that only an interruption left behind do not count, so an interrupted run gives the same average.

    Returns the directory and the updates that went in. Raises CheckpointError when fewer are kept, ConfigError when
    `out` holds anything but a model directory or, without `force`, a model; `<run>/averaged` is always replaced.
    """
    if not (run / CHECKPOINTS).is_dir():
        raise CheckpointError(f"{run}: not a run (no {CHECKPOINTS}/)")
    experiment = load_experiment(run / CONFIG_FILE)
    folders = regular_checkpoints(run, experiment.training)[-last:]
    if len(folders) < last:
        raise CheckpointError(
            f"{run}: {len(folders)} of the {last} checkpoints wanted are kept (those that an interruption left, or of "
            "another depth, do not count); average fewer, or raise `training.checkpoint.keep_last` and train on"
        )
    if out is not None:
        refuse_replacing(out, force=force)
    out = out or run / "averaged"
    tensors = mean_weights([folder / MODEL_FILE for folder in folders])
    write_model_directory(out, tensors, stage_experiment(experiment, read_progress(folders[-1]).stage), run)
    return out, [int(folder.name.removeprefix("step-")) for folder in folders]
