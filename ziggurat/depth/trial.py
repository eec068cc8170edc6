"""A short trial training: what a configuration does in its first updates, in small.

Same depth, methods, initialisation, optimiser, dropout and peak rate as the configuration; narrower where that saves
time, with small batches and a warm-up squeezed into the trial. experiments/depth-check compares what it tells with
real runs. At initialisation alone plain post-norm hardly differs from its remedies; after a few dozen updates it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ziggurat.config import Experiment, ModelConfig
from ziggurat.config.load import change_section
from ziggurat.data.collate import Batch
from ziggurat.data.corpus import Store
from ziggurat.data.loader import LoaderState
from ziggurat.diagnosis.probe import measure
from ziggurat.models.device import usable_device
from ziggurat.threads import share_cores
from ziggurat.training.learner import Learner
from ziggurat.training.objective import probe_loss
from ziggurat.training.profile import profile_batch
from ziggurat.training.schedule import learning_rate, peak_update
from ziggurat.training.step import train_update
from ziggurat.training.trial import loader_of

__all__ = ["MEASURES", "Settings", "Trial", "peak_rate", "reduced", "run_trial"]

MEASURES = ("nll", "source_dependence", "gradient_norm", "beta", "variance")
"""What is measured at the points of a trial."""

_SMALLEST_HEAD = 16
_WARMUP_SHARE = 0.4


@dataclass(frozen=True)
class Settings:
    """How a configuration is tried.

    Attributes:
        updates: length of the training.
        tokens: per batch, padding included.
        measured_tokens: of the batch on which measures are taken.
        width: `d_model` is cut down to it; None: left as it is.
        seed: of data and weights.
    """

    updates: int = 80
    tokens: int = 512
    measured_tokens: int = 1024
    width: int | None = 128
    seed: int = 1


@dataclass(frozen=True)
class Trial:
    """What a trial measured.

    Attributes:
        updates: taken.
        width: `d_model` of the model that was tried.
        peak: highest learning rate.
        unigram: entropy of the target tokens' frequencies, nats per token: what a model that learns nothing else gets.
        points: update -> measures (docs/diagnosis.md) on one batch that is not trained on by itself, without dropout.
        losses: training cross-entropy of each update, nats per token.
        failed: first update whose loss or gradient was not finite, or None.
    """

    updates: int
    width: int
    peak: float
    unigram: float
    points: dict[int, dict[str, Any]]
    losses: list[float]
    failed: int | None


def peak_rate(experiment: Experiment) -> float:
    """Return the highest learning rate of a schedule."""
    schedule = experiment.training.schedule
    at = peak_update(schedule)
    return learning_rate(schedule, at, d_model=experiment.model.d_model, last_update=max(at + 1, 2))


def reduced(model: ModelConfig, width: int | None) -> ModelConfig:
    """Return `model` no wider than `width`; inner widths shrink alike, heads stay where they are 16 wide at least."""
    if width is None or max(model.d_model, model.encoder_width) <= width:
        return model
    factor = width / max(model.d_model, model.encoder_width)

    def sizes(d_model: int, d_ff: int, heads: int) -> dict[str, int]:
        narrow = max(_SMALLEST_HEAD, round(d_model * factor / _SMALLEST_HEAD) * _SMALLEST_HEAD)
        fitting = [h for h in range(1, heads + 1) if narrow % h == 0 and narrow // h >= _SMALLEST_HEAD]
        return {"d_model": narrow, "d_ff": max(1, round(d_ff * narrow / d_model)), "heads": max(fitting)}

    changes: dict[str, Any] = sizes(model.d_model, model.d_ff, model.heads)
    encoder = model.encoder
    if encoder.d_model is not None or encoder.d_ff is not None or encoder.heads is not None:
        changes["encoder"] = sizes(model.encoder_width, model.encoder_d_ff, model.encoder_heads)
    return change_section(model, changes, "model")


def tried(experiment: Experiment, settings: Settings) -> Experiment:
    """Return the configuration of the trial of `experiment`."""
    warmup = max(1, round(_WARMUP_SHARE * settings.updates))
    training = change_section(
        experiment.training,
        {
            "seed": settings.seed,
            "batch": {"max_tokens": settings.tokens, "accumulate": 1, "fit": False},
            "schedule": {"kind": "isqrt", "peak": peak_rate(experiment), "warmup_updates": warmup},
            "compile": "none",
            "cuda_graphs": 0,
            "precision": "fp32",
            "start_from": None,
            "growth": None,
        },
        "training",
    )
    model = reduced(experiment.model, settings.width)
    return experiment.model_copy(update={"model": model, "training": training})


def run_trial(
    experiment: Experiment, store: Store, unigram: float, settings: Settings, tick: Callable[[int], None] | None = None
) -> Trial:
    """Try `experiment` on the pairs of `store`; `tick` is called with the number of each update taken.

    Raises ConfigError where the device cannot be used, or a pair of the store does not fit into a batch.
    """
    share_cores(torch.get_num_threads())
    small = tried(experiment, settings)
    learner = Learner(small, store, usable_device(small.training.device, "training.device"))
    learner.profile()
    loader = loader_of(small, store)
    batch = profile_batch(store, settings.measured_tokens, seed=settings.seed + 1)
    points, losses, failed = {0: _measured(learner, batch)}, list[float](), None
    look = {math.ceil(settings.updates / 2), settings.updates}
    with _generators_kept(learner.device):
        for group in loader.groups(LoaderState()):
            update = len(losses) + 1
            rate = learning_rate(small.training.schedule, update, d_model=small.model.d_model)
            clip = small.training.clip_norm
            result = train_update(learner.parallel, group.batches, learner.optimiser, rate=rate, clip_norm=clip)
            losses.append(result.nll / max(1, result.target_tokens))
            if not result.finite:
                failed = update
                break
            if tick is not None:
                tick(update)
            if update in look:
                points[update] = _measured(learner, batch)
            if update == settings.updates:
                break
    return Trial(
        updates=len(losses),
        width=max(small.model.d_model, small.model.encoder_width),
        peak=small.training.schedule.peak,
        unigram=unigram,
        points=points,
        losses=losses,
        failed=failed,
    )


def _measured(learner: Learner, batch: Batch) -> dict[str, Any]:
    """Return measures of the model as it stands, without dropout."""
    training = learner.experiment.training
    learner.model.eval()
    return measure(learner.model, batch, probe_loss(training.loss, training.precision), MEASURES)


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Context after which torch's random numbers go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
