"""The simulation of an update: the real model, loss and optimiser, run on tensors without values.

No formula knows an architecture. A ledger counts the operators that run, so new kinds of layers are covered as well.
"""

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
from ziggurat.data.collate import Batch
from ziggurat.inspect.cost.ledger import Ledger, Work
from ziggurat.model.build import assemble, parameter_roles, set_recompute
from ziggurat.model.device import random_state_kept
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.objective import as_trained, every_branch_present
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel

PURPOSES = ("weights", "copies", "gradients", "moments", "encoder", "decoder", "loss", "backward", "step", "batch")
"""Purposes of memory: the weights and their copies in bf16, gradients and the optimiser's moments, the activations that
encoder and decoder keep for the backward pass, logits and gradients of the loss, temporary memory of the backward pass
(recomputed layers included) and of the optimiser's step, and the batch itself."""

_NARROW_STEP = 184
"""Bytes that a step of NarrowAdam reads and writes per value, including random bits and fp32 copies."""


class BatchShape(NamedTuple):
    """Size of a padded batch.

    Attributes:
        sentences: number of pairs.
        source: padded source length, end-of-sentence included.
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
    """Memory and work of one update on one batch, after the first update: moments exist.

    Attributes:
        peak: largest number of bytes alive at any time.
        at_peak: bytes alive at that time, by purpose (PURPOSES).
        work: work by phase: `encoder`, `decoder`, `loss`, `decoder backward`, `encoder backward` and `step`. The
            gradient of the loss is computed with the loss.
        trained: bytes of the parameters that are trained: with low-rank updates, of these alone.
    """

    peak: int
    at_peak: Mapping[str, int]
    work: Mapping[str, Work]
    trained: int


@contextmanager
def without_values(experiment: Experiment, sizes: tuple[int, int], device: torch.device) -> Iterator[Seq2Seq]:
    """Context in which tensors have no values, with the model in training mode and all its branches present.

    `sizes` are those of the source and target vocabularies. Raises the ConfigError of build_model.
    """
    with FakeTensorMode(), random_state_kept(torch.device("cpu")):
        with torch.device(device):
            model = assemble(experiment.model, *sizes)
            as_trained(model, experiment.training)
        set_recompute(model, experiment.training.recompute)
        with every_branch_present(model):
            yield model


def simulate_update(
    experiment: Experiment, sizes: tuple[int, int], shape: BatchShape, device: torch.device
) -> SimulatedUpdate:
    """Return memory and work of an update of one process on one batch of `shape`, on `device`.

    The modules, loss, precision, recomputation and optimiser of training run on tensors without values under a Ledger.
    With several batches per update, it is one after the first, whose backward pass finds gradients. Compiling and CUDA
    graphs are left out. Other arguments and errors are those of without_values.
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
            if narrow:  # goes through the values in small chunks, whose memory can be neglected
                ledger.work["step"].moved += _NARROW_STEP * sum(p.numel() for p in optimiser.parameters)
            else:
                optimiser.step()
    trained = sum(parameter.nbytes for parameter in optimiser.parameters)
    return SimulatedUpdate(ledger.peak, dict(+ledger.at_peak), ledger.work, trained)


def _first_moments(optimiser: Optimiser) -> list[Tensor]:
    """Take a step, and return the moments that it created; every parameter has a gradient afterwards."""
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
    """Set the ledger's phase as the pass proceeds.

    The backward pass runs in reverse order: it has left the loss once the decoder's output has its gradient, and the
    decoder once the memory has.
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
