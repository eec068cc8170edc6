"""An update of the real model, run on tensors without values: every kind counts itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ziggurat.config import Experiment
from ziggurat.cost.ledger import Ledger, Work
from ziggurat.data.collate import Batch
from ziggurat.models.build import assemble, parameter_roles, set_recompute
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.training.optim import Optimiser
from ziggurat.training.parallel import Parallel
from ziggurat.training.profile import every_branch_present

__all__ = ["PURPOSES", "BatchShape", "SimulatedUpdate", "full_batch", "simulate_update", "without_values"]

PURPOSES = ("weights", "copies", "gradients", "moments", "encoder", "decoder", "loss", "backward", "step", "batch")
"""What memory is for: the weights and their copies in bf16, gradients and the optimiser's moments, what encoder and
decoder keep for the backward pass, logits and gradients of the loss, what a backward pass makes in passing (layers that
are computed again among it), what the optimiser's step makes in passing, and the batch itself."""

_NARROW_STEP = 184
"""Bytes that a step of NarrowAdam reads and writes per value, random bits and fp32 copies counted."""


class BatchShape(NamedTuple):
    """Size of a padded batch.

    Attributes:
        sentences: pairs.
        source: padded source length, end-of-sentence counted.
        target: padded target length, likewise.
    """

    sentences: int
    source: int
    target: int

    @property
    def tokens(self) -> int:
        """Padded tokens of both sides."""
        return self.sentences * (self.source + self.target)


@dataclass(frozen=True)
class SimulatedUpdate:
    """What one update on one batch takes, after the first: moments are there.

    Attributes:
        peak: the most bytes alive at any time.
        at_peak: bytes alive then, by purpose (PURPOSES).
        work: by phase: `encoder`, `decoder` and `loss`, the same with ` backward` but for the loss, whose gradient is
            computed with it, and `step`.
    """

    peak: int
    at_peak: Mapping[str, int]
    work: Mapping[str, Work]


@contextmanager
def without_values(experiment: Experiment, sizes: tuple[int, int], device: torch.device) -> Iterator[Seq2Seq]:
    """Context in which tensors have no values, with the model in training mode and no branch left out.

    `sizes` are those of the source and target vocabularies. Raises ConfigError as build_model does.
    """
    with FakeTensorMode(), torch.random.fork_rng(devices=[]):
        with torch.device(device):
            model = assemble(experiment.model, *sizes, exact_dropout=experiment.training.exact_dropout)
        set_recompute(model, experiment.training.recompute)
        with every_branch_present(model):
            yield model


def simulate_update(
    experiment: Experiment, sizes: tuple[int, int], shape: BatchShape, device: torch.device
) -> SimulatedUpdate:
    """Return what an update of one process on one batch of `shape` takes on `device`.

    The modules, loss, precision, recomputation and optimiser of training run on tensors without values under a Ledger.
    With several batches to an update it is one of those behind the first, whose backward pass finds gradients there.
    Layers are not compiled and passes not recorded. Arguments and errors are those of without_values.
    """
    training = experiment.training
    with without_values(experiment, sizes, device) as model:
        optimiser = Optimiser(model, parameter_roles(model), training.optimiser, seed=training.seed)
        parallel = Parallel(model, training.loss, training.precision)
        narrow = training.optimiser.moments == "bf16"
        moments = optimiser.reserve() if narrow else _first_moments(optimiser)
        if training.batch.accumulate == 1 and not training.cuda_graphs:
            parallel.drop_gradients()
        ledger = Ledger()
        ledger.hold(model.parameters(), "weights")
        ledger.hold((p.grad for p in optimiser.parameters if p.grad is not None), "gradients")
        ledger.hold(moments, "moments")
        batch = full_batch(shape, device)
        ledger.hold((batch.source, batch.source_mask, batch.target_in, batch.target_out, batch.target_mask), "batch")
        _follow(model, ledger)
        with ledger:
            parallel.attempt(batch)
            ledger.purpose = ledger.phase = "step"
            torch.nn.utils.get_total_norm([p.grad for p in optimiser.parameters if p.grad is not None], foreach=True)
            if narrow:  # goes through every value in chunks, and allocates nothing larger
                ledger.work["step"].moved += _NARROW_STEP * sum(p.numel() for p in optimiser.parameters)
            else:
                optimiser.step()
    return SimulatedUpdate(ledger.peak, dict(+ledger.at_peak), ledger.work)


def _first_moments(optimiser: Optimiser) -> list[Tensor]:
    """Take a step, and return the moments that it made; every parameter has a gradient then."""
    for parameter in optimiser.parameters:
        parameter.grad = torch.empty_like(parameter)
    optimiser.step()
    return list(optimiser.state().values())


def full_batch(shape: BatchShape, device: torch.device) -> Batch:
    """Return a batch without padding."""
    source, target = (torch.zeros(shape.sentences, n, dtype=torch.int64, device=device) for n in shape[1:])
    return Batch(
        source=source,
        source_mask=torch.ones_like(source, dtype=torch.bool),
        target_in=target,
        target_out=torch.zeros_like(target),
        target_mask=torch.ones_like(target, dtype=torch.bool),
        indices=np.arange(shape.sentences),
        source_tokens=source.numel(),
        target_tokens=target.numel(),
    )


def _follow(model: Seq2Seq, ledger: Ledger) -> None:
    """Tell `ledger` where the pass is.

    The backward pass takes up what was made last first, so it is behind the loss when the decoder's output has its
    gradient, and behind the decoder when the memory has.
    """

    def enter(phase: str, purpose: str) -> None:
        ledger.phase, ledger.purpose = phase, purpose

    def encoded(module: nn.Module, args: object, memory: tuple[Tensor, ...]) -> None:
        enter("decoder", "decoder")
        for states in memory:
            states.register_hook(lambda gradient: enter("encoder backward", "backward"))

    def decoded(module: nn.Module, args: object, hidden: Tensor) -> None:
        enter("loss", "loss")
        hidden.register_hook(lambda gradient: enter("decoder backward", "backward"))

    enter("encoder", "encoder")
    model.encoder.register_forward_hook(encoded)
    model.decoder.register_forward_hook(decoded)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: ledger.hold([cast(Tensor, p.grad)], "gradients"))
