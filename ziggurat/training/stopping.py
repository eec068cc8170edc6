"""When training is over: its limits, and how far away they are."""

from __future__ import annotations

from dataclasses import dataclass

from ziggurat.config import TrainingConfig
from ziggurat.config.train import StopConfig
from ziggurat.duration import duration
from ziggurat.errors import ConfigError
from ziggurat.training.checkpoint import Progress

__all__ = ["TrainingResult", "finished", "how_to_go_on", "refuse_endless", "share_done", "time_left"]


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        reason: why it stopped, for people.
        update: updates done.
        seconds: wall time of training, all resumed parts together.
        target_tokens: target tokens trained on.
        best: best value of the validation metric, or None.
        best_update: its update.
        signal: number of the signal that stopped it, or None.
    """

    reason: str
    update: int
    seconds: float
    target_tokens: int
    best: float | None
    best_update: int | None
    signal: int | None


def refuse_endless(stop: StopConfig, *, validates: bool) -> None:
    """Raise ConfigError when nothing would ever end the training."""
    if not validates and stop.updates is stop.epochs is stop.minutes is None:
        raise ConfigError(
            "training would never end: without a dev set there is no validation, so `training.stop.patience` stops "
            "nothing; set `training.stop.updates`, `epochs` or `minutes`, or name `data.dev` corpora"
        )


def finished(p: Progress, config: TrainingConfig) -> str | None:
    """Return why training is over, or None; a function of the progress alone, so a resumed run agrees."""
    stop = config.stop
    if stop.updates is not None and p.update >= stop.updates:
        return "`training.stop.updates` reached"
    if stop.epochs is not None and p.epoch >= stop.epochs:
        return "`training.stop.epochs` reached"
    if stop.minutes is not None and p.seconds >= 60 * stop.minutes:
        return "`training.stop.minutes` reached"
    if stop.patience is not None and p.validations_since_best >= stop.patience:
        return f"no better {config.validation.metric} in {stop.patience} validations"
    return None


def how_to_go_on(p: Progress, stop: StopConfig) -> str:
    """Return the overrides that raise every limit that is reached: with one of several alone nothing would go on."""
    limits = {"updates": p.update, "epochs": p.epoch, "minutes": p.seconds / 60, "patience": p.validations_since_best}
    reached = [key for key, value in limits.items() if (limit := getattr(stop, key)) is not None and value >= limit]
    return " ".join(f"training.stop.{key}=..." for key in reached)


def share_done(p: Progress, stop: StopConfig) -> float:
    """Return how much of the training is done, from 0 to 1, by the limit that comes first; without one, 0."""
    shares = [p.update / stop.updates] if stop.updates else []
    shares += [p.seconds / (60 * stop.minutes)] if stop.minutes else []
    shares += [p.epoch / stop.epochs] if stop.epochs else []
    return min(1.0, max(shares, default=0.0))


def time_left(p: Progress, stop: StopConfig) -> str:
    """Return for people how long training still takes at its mean speed so far; `?` while that is unknown."""
    share = share_done(p, stop)
    return duration(p.seconds * (1 - share) / share) if share > 0 else "?"
