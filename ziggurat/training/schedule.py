"""Learning rate as a function of the update (docs/training.md)."""

from __future__ import annotations

import math

from ziggurat.config.train import ScheduleConfig

__all__ = ["learning_rate", "peak_update"]


def peak_update(config: ScheduleConfig) -> int:
    """Return the update at which the warm-up has reached its highest rate."""
    return max(1, config.warmup_updates * (config.replicas if config.kind == "gnmt+" else 1))


def learning_rate(config: ScheduleConfig, update: int, *, d_model: int, last_update: int | None = None) -> float:
    """Return the rate of update t = 1, 2, ...

    Args:
        config: kind and constants.
        update: t.
        d_model: width of the model, for noam.
        last_update: where `linear` and `cosine` end unless `decay_updates` says so.

    noam: factor * d_model^-0.5 * min(t^-0.5, t * warmup^-1.5) (Vaswani et al. 2017, equation 3).
    isqrt: initial + t/warmup * (peak - initial), then peak * sqrt(warmup/t) (fairseq's inverse_sqrt).
    gnmt+: base * min(1 + t (n-1)/(n warmup), n, n (2n)^((decay_start - n t)/(decay_end - decay_start))) for n
    replicas, at least base / 2 (Chen et al. 2018; lingvo's LinearRampupExponentialDecayScaledByNumSplitSchedule).
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
    done = min(1.0, (t - warmup) / max(1, end - warmup))
    share = 1.0 - done if config.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.floor + (config.peak - config.floor) * share
