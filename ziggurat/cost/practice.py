"""How far theory is from practice: passes of a shallow copy of the model, timed and compared with their estimate."""

from __future__ import annotations

import torch

from ziggurat.config import Experiment
from ziggurat.cost.ledger import Work
from ziggurat.cost.machine import Speed, seconds_of, with_threads
from ziggurat.cost.simulation import BatchShape, full_batch, simulate_update
from ziggurat.models.build import build_model, set_recompute
from ziggurat.training.parallel import Parallel
from ziggurat.training.profile import every_branch_present

__all__ = ["shallow", "slowness"]

_VOCABULARY = 500
"""So few that layers are nearly all there is to do."""
_LAYERS = 2
_LENGTH = 32


def shallow(experiment: Experiment) -> Experiment:
    """Return the same with at most two layers in each stack."""
    model = experiment.model
    stacks = {
        side: stack.model_copy(update={"layers": min(_LAYERS, stack.layers)})
        for side, stack in (("encoder", model.encoder), ("decoder", model.decoder))
    }
    return experiment.model_copy(update={"model": model.model_copy(update=stacks)})


def slowness(experiment: Experiment, speed: Speed, device: torch.device) -> float:
    """Return how many times what `speed` says a pass through layers takes, forward and backward.

    Products of other shapes, copies inside kernels and memory that is not in a cache are slower than what `speed` was
    measured on. The layers are real, with values; the batch has few tokens and the vocabulary few types.
    """
    training = experiment.training
    shape = BatchShape(16 if device.type == "cpu" else 128, _LENGTH, _LENGTH)
    small = shallow(experiment)
    work = Work()
    for phase, its_work in simulate_update(small, (_VOCABULARY, _VOCABULARY), shape, device).work.items():
        if phase != "step":
            work.add(its_work)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), with_threads(training.threads):
        model = build_model(small.model, _VOCABULARY, _VOCABULARY, exact_dropout=training.exact_dropout).to(device)
        set_recompute(model, training.recompute)
        parallel = Parallel(model, training.loss, training.precision)
        batch = full_batch(shape, device)
        with every_branch_present(model):
            return seconds_of(lambda: parallel.attempt(batch), device) / speed.seconds(work)
