"""Checkpoint averaging (Vaswani et al. 2017, section 6.1): the mean of the weights of several checkpoints of a run.

The average that a run makes at its end is scored on the dev set, which decides whether it is used by default.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ziggurat.config import TrainingConfig, load_experiment
from ziggurat.config.experiment import without_lora
from ziggurat.config.lifecycle import CheckpointConfig
from ziggurat.model.directory import (
    AVERAGED,
    AverageScore,
    fill_model_directory,
    may_become_model_directory,
    read_weights,
    refuse_replacing,
    write_score,
)
from ziggurat.model.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    MODEL_FILE,
    checkpoint_folders,
    checkpoint_name,
    checkpoint_update,
    mend_links,
    ranked,
    read_meta,
)
from ziggurat.system.errors import CheckpointError, ConfigError, ZigguratError, printable
from ziggurat.system.files import made_by
from ziggurat.system.staging import BeingBuiltError, building, discard, sweep
from ziggurat.system.terminal import duration
from ziggurat.system.yaml_text import shown
from ziggurat.train.checkpoint import RunProgress, read_progress
from ziggurat.train.growth import stage_experiment
from ziggurat.train.limits import finished
from ziggurat.train.run import changes_since
from ziggurat.train.run_log import MetricsWriter, RunLog
from ziggurat.train.setup import Setup


@dataclass(frozen=True)
class CheckpointSelection:
    """A user's choice of checkpoints: `last:5`, `last-epochs:5` or `around-best:21`.

    Attributes:
        kind: `last`: the newest; `last-epochs`: the newest of those that end an epoch; `around-best`: the best by
            `training.validation.metric`, with as many before it as after it.
        count: number of checkpoints; odd for `around-best`.
    """

    kind: str
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the selection that the option `--checkpoints` names. Raises ConfigError."""
        found = re.fullmatch(r"(last|last-epochs|around-best):([1-9][0-9]{0,5})", text)
        if found is None:
            raise ConfigError(
                f"`--checkpoints {printable(text)}`: write `last:5` (the newest), `last-epochs:5` (the newest that end "
                "an epoch) or `around-best:21` (the best and its neighbours)"
            )
        selection = cls(found[1], int(found[2]))
        if selection.kind == "around-best" and selection.count % 2 == 0:
            raise ConfigError(
                f"`--checkpoints {selection}`: give an odd number, since as many are before the best as after it"
            )
        return selection

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}"


def regular_checkpoints(run: Path, config: TrainingConfig) -> list[Path]:
    """Return the checkpoints of the current stage that an uninterrupted run would also have, oldest first.

    These are the checkpoints due by the count of updates or epochs, not by the clock, and, when training is over, the
    last one, unless only epochs count; if the model grew, those of its present depth. Raises CheckpointError when one
    `meta.json` cannot be read.
    """
    return _regular({folder: read_progress(folder) for folder in checkpoint_folders(run)}, config)


def selected_checkpoints(run: Path, config: TrainingConfig, selection: CheckpointSelection) -> list[Path]:
    """Return the checkpoints of a run that `selection` names, oldest first.

    Raises CheckpointError when fewer are kept, or when those around the best are not consecutive.
    """
    known = {folder: read_progress(folder) for folder in checkpoint_folders(run)}
    folders = _regular(known, config)
    if selection.kind == "around-best":
        return _around_best(run, known, folders, selection.count, config.checkpoint)
    if selection.kind == "last-epochs":
        folders = [folder for folder in folders if known[folder].batch == 0]
    if len(folders) < selection.count:
        ends = ""
        if selection.kind == "last-epochs":
            ends = " that end an epoch (`training.checkpoint.every_epochs`)"
        raise CheckpointError(
            f"{run}: {len(folders)} of the {selection.count} requested checkpoints{ends} are kept (those that an "
            "interruption or the clock caused, and those of another depth, do not count); ask for fewer, or "
            "raise `training.checkpoint.keep_last` and train on"
        )
    return folders[-selection.count :]


def _regular(known: Mapping[Path, RunProgress], config: TrainingConfig) -> list[Path]:
    if not known:
        return []
    newest, progress = list(known.items())[-1]
    passing = {folder for folder, p in known.items() if folder.name in progress.interim or p.by_clock}
    by_epochs = config.checkpoint.every_updates is None and config.checkpoint.every_epochs is not None
    if finished(progress, config) is not None and not by_epochs:
        passing.discard(newest)
    return [folder for folder, p in known.items() if p.stage == progress.stage and folder not in passing]


def _around_best(
    run: Path, known: Mapping[Path, RunProgress], folders: list[Path], count: int, config: CheckpointConfig
) -> list[Path]:
    update = list(known.values())[-1].best_update if known else None
    if update is None:
        raise CheckpointError(f"{run}: no checkpoint is the best: none was validated")
    place = next((n for n, folder in enumerate(folders) if folder.name == checkpoint_name(update)), None)
    if place is None:
        raise CheckpointError(
            f"{run}: the best checkpoint, of update {update}, is not kept, or not one of those that count (of the "
            "present depth, at a multiple of the updates or epochs between checkpoints)"
        )
    half, before, after = count // 2, place, len(folders) - 1 - place
    fewer = min(before, after)
    if fewer < half:
        ways = [f"ask for `around-best:{2 * fewer + 1}`"] if fewer else []
        ways += ["train on"] if after < half else []
        if (config.keep_around_best or 0) < count:
            ways.append(f"have a run keep them by `training.checkpoint.keep_around_best={count}`")
        raise CheckpointError(
            f"{run}: {before} checkpoints before the best one (update {update}) and {after} after it are kept, of "
            f"{half} each: {', or '.join(ways or ['ask for others'])}"
        )
    window = folders[place - half : place + half + 1]
    for first, second in pairwise(window):
        if _apart(known[first], known[second], config):
            raise CheckpointError(
                f"{run}: checkpoints between {first.name} and {second.name}, near the best one, are not kept; ask for "
                f"fewer, or have a run keep them by `training.checkpoint.keep_around_best={count}`"
            )
    return window


def _apart(first: RunProgress, second: RunProgress, config: CheckpointConfig) -> bool:
    """True when two checkpoints are more updates or epochs apart than consecutive ones."""
    updates, epochs = config.every_updates, config.every_epochs
    return (updates is not None and second.update - first.update > updates) or (
        epochs is not None and second.epoch - first.epoch > epochs
    )


_PATIENCE_SECONDS = 60.0


def mean_weights(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the arithmetic mean of every floating-point tensor, summed in fp64 and rounded once to its type.

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

    Checkpoints due only to an interruption or the clock do not count, so that the average is a function of
    configuration, data and seed. `score` is written next to the model; None: the average is used whatever its score.

    Returns the directory and the updates of the averaged checkpoints. Raises CheckpointError when fewer are kept or one
    belongs to another run, ConfigError when `out` holds anything but a model directory or, without `force`, a model. A
    model in `<run>/averaged` is always replaced.
    """
    if not (run / CHECKPOINTS).is_dir():
        raise CheckpointError(f"{run}: not a run (no {CHECKPOINTS}/)")
    sweep(run / CHECKPOINTS)  # like every command that opens a run, since it may have been killed
    mend_links(run)
    experiment = load_experiment(run / CONFIG_FILE)
    folders = selected_checkpoints(run, experiment.training, selection)
    # A checkpoint copied from another run may have the same shapes, but the mean of two runs translates worse than
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
    where: dict[str, object] = {} if out == run / AVERAGED else {"out": out, "force": True}
    again = made_by("average", run, checkpoints=selection, **where)
    with building(out) as folder:
        fill_model_directory(folder, tensors, stage, run, again=again)
        if score is not None:
            write_score(folder, score)
    return out, [checkpoint_update(folder) for folder in folders]


def average_newest(run: Path, config: TrainingConfig, score: AverageScore | None = None) -> list[int]:
    """Average the newest `training.checkpoint.average_last` checkpoints, or as many as are kept.

    Returns the updates whose checkpoints went into `<run>/averaged`, [] if none is requested or kept. Raises as
    `average_run`, and ConfigError when another process holds `<run>/averaged` for a minute.
    """
    wanted = min(config.checkpoint.average_last, len(regular_checkpoints(run, config)))
    if not wanted:
        return []
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return average_run(run, CheckpointSelection("last", wanted), score=score)[1]
        except BeingBuiltError as error:  # older checkpoints are being averaged: wait, then replace the result
            if time.monotonic() > end:
                again = f"afterwards `ziggurat average {run} --checkpoints last:{wanted}` does it"
                raise ConfigError(f"{error}; {again}") from None
            time.sleep(0.1)


def remove_average(run: Path, log: RunLog) -> None:
    """Remove the average of a run that continues."""
    if (run / AVERAGED).exists():
        log.say("removing averaged/: its checkpoints are older than those to come")
        discard(run / AVERAGED)


def average_ended(setup: Setup, p: RunProgress, log: RunLog, metrics: MetricsWriter) -> None:
    """Average the newest `training.checkpoint.average_last` checkpoints of a run that has ended, and score the result.

    All processes call this. Until it is scored, the average is not used by default: if the process is killed, no worse
    model is used, and resuming repeats the work. An obstacle is logged but does not fail the run, whose checkpoints are
    complete. The learner has the averaged weights afterwards.
    """
    run, training, made = setup.run, setup.experiment.training, list[int]()
    score = _not_measured(p, training) if setup.validator is not None else None
    try:
        # The others wait here, not in NCCL, whose watchdog would soon end them.
        setup.processes.first_does(lambda: made.extend(average_newest(run, training, score)))
    except (ZigguratError, OSError) as error:  # for example a user's file in the way, or a full disk
        log.say(f"NOT AVERAGED: {error}", "bold red")
        return
    if not setup.processes.of_first(len(made)):
        return
    said = f"averaged checkpoints {', '.join(map(str, made))} into {run / AVERAGED}"
    if score is None:
        log.say(said)
        return
    try:
        log.say(f"{said}{_measured(setup, p, score, metrics)}")
    except (ZigguratError, OSError) as error:
        log.say(f"{said}, NOT SCORED: {error}", "bold red")


def _not_measured(p: RunProgress, config: TrainingConfig) -> AverageScore | None:
    """Return a score without its value, compared with the default checkpoint; None: that has no score."""
    metric = config.validation.metric
    if config.checkpoint.keep_best:
        names = ranked(p.scores, smaller_is_better=metric == "loss")[:1]
    else:
        names = [name for name in (checkpoint_name(p.update),) if name in p.scores]
    rival = "best" if config.checkpoint.keep_best else "last"
    return AverageScore(metric, None, rival, p.scores[names[0]]) if names else None


def _measured(setup: Setup, p: RunProgress, score: AverageScore, metrics: MetricsWriter) -> str:
    """Score the averaged model by the metric of `best`, keep the score next to it, and return a description.

    Errors that prevent scoring are raised in all processes.
    """
    assert setup.validator is not None
    began, folder, metric = time.perf_counter(), setup.run / AVERAGED, score.metric
    setup.learner.take_weights(_read_by_all(setup, folder), str(folder))
    with setup.learner.parallel.whole() as model:
        result = setup.validator.measure(model, decode=metric != "loss")
    assert result is not None  # never interrupted
    seconds = time.perf_counter() - began
    metrics.write("average", p.update, {**result.record(), "seconds": seconds})
    found = AverageScore(metric, result.metric(metric), score.rival, score.rival_value)
    setup.processes.first_does(lambda: write_score(folder, found))
    said = f": {result.line()}  [{duration(seconds)}]"
    if found.worse:
        said += f"; WORSE than {found.rival} ({found.said()}), which is used unless `--which {AVERAGED}` says otherwise"
    return said


def _read_by_all(setup: Setup, folder: Path) -> Mapping[str, Tensor]:
    """Return the weights of the averaged model in every process; an error in one is raised in all."""
    found: Mapping[str, Tensor] = {}
    failed = ""
    try:
        found = read_weights(folder / MODEL_FILE)
    except (ZigguratError, OSError) as error:
        failed = str(error)
    reasons = [reason for (reason,) in setup.processes.texts([failed]) if reason]
    if reasons:
        raise CheckpointError(reasons[0])
    return found
