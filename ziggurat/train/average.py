"""Checkpoint averaging (Vaswani et al. 2017, section 6.1): the mean of the weights of several checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ziggurat.config import TrainingConfig, load_experiment
from ziggurat.config.lora import without_lora
from ziggurat.model.averaged import AVERAGED, AverageScore, write_score
from ziggurat.model.directory import fill_model_directory, may_become_model_directory, read_weights, refuse_replacing
from ziggurat.model.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    MODEL_FILE,
    checkpoint_update,
    mend_links,
    read_meta,
)
from ziggurat.system.checksums import made_by
from ziggurat.system.errors import CheckpointError, ConfigError
from ziggurat.system.staging import BeingBuiltError
from ziggurat.system.workspace import building, sweep
from ziggurat.system.yaml_text import shown
from ziggurat.train.checkpoint import read_progress
from ziggurat.train.growth import stage_experiment
from ziggurat.train.run import changes_since
from ziggurat.train.selection import CheckpointSelection, regular_checkpoints, selected_checkpoints

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


def average_run(
    run: Path,
    selection: CheckpointSelection,
    *,
    out: Path | None = None,
    force: bool = False,
    score: AverageScore | None = None,
) -> tuple[Path, list[int]]:
    """Average the checkpoints `selection` of a run into a model directory (default: `<run>/averaged`).

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
    folders = selected_checkpoints(run, experiment.training, selection)
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
    again = made_by("average", run, "--checkpoints", selection, *where)
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
            return average_run(run, CheckpointSelection("last", wanted), score=score)[1]
        except BeingBuiltError as error:  # somebody averages older checkpoints of this run: wait, then replace theirs
            if time.monotonic() > end:
                again = f"afterwards `ziggurat average {run} --checkpoints last:{wanted}` does it"
                raise ConfigError(f"{error}; {again}") from None
            time.sleep(0.1)
