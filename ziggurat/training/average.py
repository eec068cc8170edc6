"""Checkpoint averaging (Vaswani et al. 2017, section 6.1): the mean of the weights of several checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ziggurat.config import TrainingConfig, load_experiment
from ziggurat.config.experiment import shown
from ziggurat.config.lora import without_lora
from ziggurat.data.checksums import made_by
from ziggurat.data.staging import BeingBuiltError
from ziggurat.data.workspace import building, sweep
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.models.averaged import AVERAGED, AverageScore, write_score
from ziggurat.models.directory import fill_model_directory, may_become_model_directory, read_weights, refuse_replacing
from ziggurat.models.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    MODEL_FILE,
    checkpoint_folders,
    checkpoint_update,
    mend_links,
    read_meta,
)
from ziggurat.training.checkpoint import read_progress
from ziggurat.training.growth import stage_experiment
from ziggurat.training.run import changes_since
from ziggurat.training.schedule import finished

__all__ = ["average_newest", "average_run", "mean_weights", "regular_checkpoints"]

_PATIENCE_SECONDS = 60.0


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

    These are the checkpoints that the count of updates asked for, not the clock, and, when training is over, the last
    one; where the model grew, those of its present depth. Raises CheckpointError when the `meta.json` of one cannot be
    read.
    """
    folders = checkpoint_folders(run)
    if not folders:
        return []
    known = {f: read_progress(f) for f in folders}
    progress = known[folders[-1]]
    over = finished(progress, config) is not None
    passing = {f for f, p in known.items() if f.name in progress.interim or p.by_clock}
    if over:
        passing.discard(folders[-1])
    return [f for f in folders if known[f].stage == progress.stage and f not in passing]


def average_run(
    run: Path, *, last: int, out: Path | None = None, force: bool = False, score: AverageScore | None = None
) -> tuple[Path, list[int]]:
    """Average the newest `last` checkpoints of a run into a model directory (default: `<run>/averaged`).

    Checkpoints that only an interruption or the clock asked for do not count, so that the average is a function of
    configuration, data and seed. `score` is written beside the model; None: the average is taken whatever its score.

    Returns the directory and the updates of the averaged checkpoints. Raises CheckpointError when fewer are kept or one
    is of another run, ConfigError when `out` holds anything but a model directory or, without `force`, a model. A model
    in `<run>/averaged` is always replaced.
    """
    if not (run / CHECKPOINTS).is_dir():
        raise CheckpointError(f"{run}: not a run (no {CHECKPOINTS}/)")
    sweep(run / CHECKPOINTS)  # as whoever opens a run does: it may have been killed
    mend_links(run)
    experiment = load_experiment(run / CONFIG_FILE)
    folders = regular_checkpoints(run, experiment.training)[-last:]
    if len(folders) < last:
        raise CheckpointError(
            f"{run}: {len(folders)} of the {last} checkpoints wanted are kept (those that an interruption left or the "
            "clock asked for, and those of another depth, do not count); average fewer, or raise "
            "`training.checkpoint.keep_last` and train on"
        )
    # A checkpoint copied here from another run may have the same shapes; the mean of two runs translates worse than
    # either.
    for folder in folders:
        if changes := changes_since(read_meta(folder), folder, experiment):
            raise CheckpointError(
                f"{folder}: not a checkpoint of this run, or {run / CONFIG_FILE} was edited: {shown(changes)}"
            )
    if out is not None:
        refuse_replacing(out, force=force)
    elif not may_become_model_directory(run / AVERAGED):
        raise ConfigError(
            f"{run / AVERAGED}: exists and holds something other than a model directory; move it away, or choose "
            "another folder with `--output`"
        )
    out = out or run / AVERAGED
    tensors = mean_weights([folder / MODEL_FILE for folder in folders])
    stage = without_lora(stage_experiment(experiment, read_progress(folders[-1]).stage))
    where = () if out == run / AVERAGED else ("--out", out, "--force")
    again = made_by("average", run, "--last", last, *where)
    with building(out) as folder:
        fill_model_directory(folder, tensors, stage, run, again=again)
        if score is not None:
            write_score(folder, score)
    return out, [checkpoint_update(folder) for folder in folders]


def average_newest(run: Path, config: TrainingConfig, score: AverageScore | None = None) -> list[int]:
    """Average the newest `training.checkpoint.average_last` checkpoints, or as many as are kept.

    Returns the updates whose checkpoints went into `<run>/averaged`, [] if none is asked for or kept. Raises as
    `average_run`, and ConfigError when another process holds `<run>/averaged` for a minute.
    """
    wanted = min(config.checkpoint.average_last, len(regular_checkpoints(run, config)))
    if not wanted:
        return []
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return average_run(run, last=wanted, score=score)[1]
        except BeingBuiltError as error:  # somebody averages older checkpoints of this run: wait, then replace theirs
            if time.monotonic() > end:
                again = f"afterwards `ziggurat average {run} --last {wanted}` does it"
                raise ConfigError(f"{error}; {again}") from None
            time.sleep(0.1)
