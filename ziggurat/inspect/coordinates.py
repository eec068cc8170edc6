"""The coordinate check: whether the first updates change models of several sizes alike, so that a rate carries over.

They do with `model.transfer` (ziggurat.model.init.transfer).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ziggurat.config import Experiment
from ziggurat.data.corpus import Store
from ziggurat.inspect.trial import TrialOptions, trial_experiment
from ziggurat.inspect.tuning import Size, resized
from ziggurat.model.device import random_state_kept, usable_device
from ziggurat.model.init.transfer import output_factor
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.threads import share_cores
from ziggurat.train.diagnosis.hooks import STACKS
from ziggurat.train.feeding import loader_of
from ziggurat.train.learner import Learner
from ziggurat.train.profile import profile_batch
from ziggurat.train.update import train_update

COORDINATES = ("memory", "decoder", "logits")
"""States whose changes say whether a learning rate carries over."""
COORDINATE_RATE = 5e-5
"""Low enough that ten updates change normalised states by a small part of their size: larger changes look alike."""


@dataclass(frozen=True)
class Coordinates:
    """Root mean squares of a model's states in its first updates: entry t is after t updates.

    Attributes:
        size: of the model.
        states: `memory`, `decoder`, `logits` -> the states themselves; where a stack ends with a norm, the first two
            are normalised, and `encoder_stream` and `decoder_stream` -> what that norm reads.
        changes: `memory`, `decoder`, `logits` -> their change since the start.
    """

    size: Size
    states: dict[str, list[float]]
    changes: dict[str, list[float]]


def coordinates(
    experiment: Experiment, store: Store, size: Size, *, updates: int = 10, tokens: int = 512, seed: int = 1
) -> Coordinates:
    """Return the coordinates of `experiment` at another size, at the constant learning rate COORDINATE_RATE.

    `memory` is what the decoder attends to, `decoder` what the output projection reads (without the factor that
    `model.transfer` has there), `logits` what it gives: over real tokens of one batch, without dropout.
    """
    share_cores(torch.get_num_threads())
    sized = experiment.model_copy(update={"model": resized(experiment.model, size)})
    small = trial_experiment(sized, store, TrialOptions(updates, tokens, tokens, None, seed))
    learner = Learner(small, store, usable_device(small.training.device, "training.device"))
    learner.profile()  # as before any training: ADMIN's omegas
    batch = profile_batch(store, tokens, seed=seed + 1).to(learner.device)

    factor = output_factor(small.model) or 1.0

    @torch.no_grad()
    def states() -> dict[str, Tensor]:
        model = learner.model.eval()
        with _streams(model) as streams:
            memory = model.encode(batch.source, batch.source_mask)
            hidden = model.decode(batch.target_in, memory)[batch.target_mask]
        logits = model.logits(hidden)
        found = {
            "memory": memory.of(0)[batch.source_mask],
            "decoder": hidden / factor,
            "logits": logits[logits.isfinite()],  # those of ruled-out tokens are -inf
        }
        masks = {"encoder": batch.source_mask, "decoder": batch.target_mask}
        return found | {f"{stack}_stream": stream[masks[stack]] for stack, stream in streams.items()}

    start = states()
    sizes: dict[str, list[float]] = {name: [_rms(state)] for name, state in start.items()}
    changes: dict[str, list[float]] = {name: [0.0] for name in COORDINATES}
    groups = loader_of(small, store).groups()
    with random_state_kept(learner.device):
        for _ in range(updates):
            group = next(groups)
            train_update(learner.parallel, group.batches, learner.optimiser, rate=COORDINATE_RATE, clip_norm=None)
            now = states()
            for name, state in now.items():
                sizes[name].append(_rms(state))
            for name in COORDINATES:
                changes[name].append(_rms(now[name] - start[name]))
    return Coordinates(size, sizes, changes)


@contextlib.contextmanager
def _streams(model: Seq2Seq) -> Iterator[dict[str, Tensor]]:
    """Context that fills a dictionary with what the final norm of each stack reads, where there is one."""
    found: dict[str, Tensor] = {}

    def kept(stack: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _norm, read: found.update({stack: read[0]})

    with contextlib.ExitStack() as hooks:
        for stack in STACKS:
            norm = getattr(getattr(model, stack), "final_norm", None)
            if norm is not None:
                hooks.callback(norm.register_forward_pre_hook(kept(stack)).remove)
        yield found


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def spread(found: Sequence[Coordinates], name: str) -> float:
    """Return by how much the largest of a coordinate after the last update exceeds the smallest over all sizes.

    It is the change of `memory`, `decoder` and `logits`, and the size of the streams.
    """
    values = [(one.changes if name in COORDINATES else one.states)[name][-1] for one in found]
    return max(values) / min(values) if min(values) > 0 else math.inf
