"""The learning rate of every update (docs/training.md)."""

from __future__ import annotations

import math
from typing import assert_never

from ziggurat.config import TrainingConfig
from ziggurat.config.train import ScheduleConfig
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
