"""The learning rate of every update (docs/training.md), and the limits at which training ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

from ziggurat.config import TrainingConfig
from ziggurat.config.lifecycle import CheckpointConfig, StopConfig, ValidationConfig
from ziggurat.config.modifiers import StageConfig
from ziggurat.config.train import ScheduleConfig
from ziggurat.data.loader import LoaderState
from ziggurat.system.errors import ConfigError
from ziggurat.system.terminal import duration
from ziggurat.train.checkpoint import RunProgress


def peak_update(config: ScheduleConfig) -> int:
    """Return the update at which the warm-up reaches its highest rate."""
    return max(1, config.warmup_end)


def initial_progress(config: ScheduleConfig) -> RunProgress:
    """Return the progress of a new run: all zero, except the schedule's counter if it starts at the peak."""
    return RunProgress(schedule_update=peak_update(config) - 1 if config.start == "peak" else 0)


def learning_rate(
    config: ScheduleConfig, update: int, *, d_model: int, last_update: int | None = None, behind: int = 0
) -> float:
    """Return the rate of update t = 1, 2, ...

    Args:
        config: kind and constants.
        update: t.
        d_model: width of the model, for noam.
        last_update: the update at which `linear`, `cosine` and `wsd` end if `decay_updates` is not set.
        behind: number of updates by which growth and roll-backs have set t back, negative if the run started ahead, at
            the peak; ends count updates of the run, so in t they come that much sooner.

    noam: factor * d_model^-0.5 * min(t^-0.5, t * warmup^-1.5) (Vaswani et al. 2017, equation 3).
    isqrt: initial + t/warmup * (peak - initial), then peak * sqrt(warmup/t) (fairseq's inverse_sqrt).
    wsd: the peak until the last `decay_share` of the updates up to the end, then floor + (peak - floor) (1 - sqrt(u))
    where a share u of these is done. Warm-up, stable and decay are MiniCPM's (Hu et al. 2024), who leave the form of
    the decay open; this one, over a fifth of the updates, follows Haegele et al. 2024, whose text was not available.
    gnmt+: base * min(1 + t (n-1)/(n warmup), n, n (2n)^((decay_start - n t)/(decay_end - decay_start))) for n replicas,
    at least base / 2 (Chen et al. 2018; lingvo's LinearRampupExponentialDecayScaledByNumSplitSchedule).
    """
    t, warmup = update, config.warmup_updates
    if config.kind == "noam":
        return config.factor * d_model**-0.5 * min(t**-0.5, t * warmup**-1.5)
    if config.kind == "gnmt+":
        n, length = config.replicas, config.decay_end - config.decay_start
        decayed = n * (2 * n) ** (min(0, config.decay_start - n * t) / length)
        return config.base * max(0.5, min(1 + t * (n - 1) / (n * warmup), decayed))
    if t < warmup:
        return config.initial + (config.peak - config.initial) * t / warmup
    if config.kind == "constant":
        return config.peak
    if config.kind == "isqrt":
        return max(config.floor, config.peak * math.sqrt(warmup / t))
    end = config.decay_updates or last_update
    if end is None:
        raise ValueError(f"{config.kind} needs an end")
    begin = max(warmup, end - behind - config.decay_share * end) if config.kind == "wsd" else warmup
    end -= behind
    done = 1.0 if t >= end else max(0.0, t - begin) / (end - begin)
    match config.kind:
        case "linear":
            share = 1.0 - done
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * done))
        case "wsd":
            share = 1.0 - math.sqrt(done)
        case _:
            assert_never(config.kind)
    return config.floor + (config.peak - config.floor) * share


def next_rate(p: RunProgress, config: TrainingConfig, d_model: int) -> float:
    """Return the learning rate of the next update: the schedule's, times the factors of all roll-backs so far."""
    t, behind = p.schedule_update + 1, p.update - p.schedule_update
    rate = learning_rate(config.schedule, t, d_model=d_model, last_update=config.stop.updates, behind=behind)
    return p.rate_factor * rate


@dataclass(frozen=True)
class TrainingResult:
    """The end of a run: why it stopped, total figures over all its resumed parts, and the signal that stopped it."""

    reason: str
    update: int
    seconds: float
    target_tokens: int
    best: float | None
    best_update: int | None
    signal: int | None


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


def due(when: ValidationConfig | CheckpointConfig, update: int, position: LoaderState) -> bool:
    """Return whether a validation or a checkpoint is due after this update by the count of updates or epochs.

    `position` is the position in the data after it: at an epoch's end, the start of the next one.
    """
    ends = position.batch == 0 and when.every_epochs is not None and position.epoch % when.every_epochs == 0
    return ends or (when.every_updates is not None and update % when.every_updates == 0)


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
