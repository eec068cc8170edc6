"""The limits at which training ends, and how far away they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ziggurat.config import TrainingConfig
from ziggurat.config.lifecycle import StopConfig
from ziggurat.config.modifiers import StageConfig
from ziggurat.system.errors import ConfigError
from ziggurat.system.terminal import duration
from ziggurat.train.checkpoint import RunProgress


def refuse_endless(stop: StopConfig, stages: Sequence[StageConfig], *, validates: bool) -> None:
    """Raise ConfigError when nothing would ever end training or a stage of its data."""
    if not validates and any(stage.until.patience is not None for stage in stages):
        raise ConfigError(
            "a stage would never end: without a dev set there is no validation, so `patience` in `data.stages` stops "
            "nothing; set `epochs` there, or name `data.dev` corpora",
            key="data.stages",
            named=["data.dev"],
        )
    if not validates and stop.updates is stop.epochs is stop.minutes is None:
        raise ConfigError(
            "training would never end: without a dev set there is no validation, so `training.stop.patience` stops "
            "nothing; set `training.stop.updates`, `epochs` or `minutes`, or name `data.dev` corpora",
            key="training.stop.patience",
            named=["training.stop.updates", "data.dev"],
        )


def finished(p: RunProgress, config: TrainingConfig) -> str | None:
    """Return the reason why training is over, or None; depends only on the progress, so a resumed run agrees."""
    stop = config.stop
    if p.stages_to_come < 0:
        return "the last of `data.stages` is over"
    if stop.updates is not None and p.update >= stop.updates:
        return "`training.stop.updates` reached"
    if stop.epochs is not None and p.epoch >= stop.epochs:
        return "`training.stop.epochs` reached"
    if stop.minutes is not None and p.seconds >= 60 * stop.minutes:
        return "`training.stop.minutes` reached"
    grows = config.growth is not None and p.stage < len(config.growth.stages)
    last = not p.stages_to_come and not grows  # earlier stages end by their own limits
    if stop.patience is not None and last and p.validations_since_best >= stop.patience:
        return f"no better {config.validation.metric} in {stop.patience} validations"
    return None


def ends_after(p: RunProgress, config: TrainingConfig, nll: float, seconds: float) -> bool:
    """Return whether training is over after a validation that finds this `nll`, `seconds` into the run."""
    misses = p.validations_since_best
    if config.validation.metric == "loss":
        better = math.isfinite(nll) and (p.best is None or nll < p.best)
        misses = 0 if better else misses + 1
    return finished(replace(p, seconds=seconds, validations_since_best=misses), config) is not None


def how_to_continue(p: RunProgress, stop: StopConfig, run: Path) -> str:
    """Return a description of how to continue a finished run in the folder `run`."""
    if p.stages_to_come < 0:  # a resumed run cannot change its data
        return f"start a new run with other `data.stages`: `training.start_from={run}` takes the weights of this one"
    # All limits that are reached, because raising only one of several would not let training continue.
    limits = {"updates": p.update, "epochs": p.epoch, "minutes": p.seconds / 60, "patience": p.validations_since_best}
    reached = [key for key, value in limits.items() if (limit := getattr(stop, key)) is not None and value >= limit]
    overrides = " ".join(f"training.stop.{key}=..." for key in reached)
    return f"raise that limit: `ziggurat train --run {run} --resume {overrides}`"


def share_done(
    p: RunProgress, config: TrainingConfig, stages: Sequence[StageConfig] = (), epoch_batches: int | None = None
) -> float | None:
    """Return the share of the training that is done, from 0 to 1, by the nearest limit; None while that is unknown.

    `epoch_batches`: number of batches in the latest update's epoch; None: unknown, so only whole epochs count.
    """
    stop = config.stop
    shares = [p.update / stop.updates] if stop.updates else []
    shares += [p.seconds / (60 * stop.minutes)] if stop.minutes else []
    ends = [stop.epochs] if stop.epochs else []
    if stages and (epochs := stages[-1].until.epochs) is not None and p.stages_to_come >= 0:
        if p.stages_to_come > 0 or (p.epoch, p.batch) == (p.data_stages[-1], 0):
            return None  # the length of the last stage's epochs is unknown before it starts
        ends.append(p.data_stages[-1] + epochs)
    if ends and epoch_batches:
        epochs_left = min(ends) - p.epoch - p.batch / epoch_batches
        updates_left = max(0.0, epochs_left * math.ceil(epoch_batches / config.batch.accumulate))
        shares.append(p.update / (p.update + updates_left))
    elif ends:
        shares.append(p.epoch / min(ends))
    shares += [1.0] if p.stages_to_come < 0 else []
    return min(1.0, max(shares)) if shares else None


def time_left(p: RunProgress, share: float | None, since: tuple[float, float] = (0.0, 0.0)) -> str:
    """Return, as text, the remaining training time at the recent speed; `?` while that is unknown.

    Args:
        p: the progress.
        share: see share_done.
        since: seconds and share at an earlier moment, from which the speed is measured, since a shared machine may have
            been slow before.
    """
    seconds, before = since
    if not share or share <= before:
        return "?"
    return duration((p.seconds - seconds) * (1 - share) / (share - before))
