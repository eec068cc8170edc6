"""Batches -> one update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ziggurat.data.collate import Batch
from ziggurat.models.tensors import whole
from ziggurat.training.capacity import Shortage
from ziggurat.training.clipping import AdaptiveClipper
from ziggurat.training.optim import Optimiser
from ziggurat.training.parallel import Parallel

__all__ = ["Guard", "UpdateResult", "train_update"]


@dataclass(frozen=True)
class UpdateResult:
    """What one update measured.

    Attributes:
        loss: the update's objective (normalised, smoothed, with its penalty), nats.
        nll: sum of -log p(gold) over target tokens, nats.
        grad_norm: global gradient norm before clipping.
        source_tokens: real source tokens, end-of-sentence included.
        target_tokens: real target tokens, end-of-sentence included.
        sentences: sentence pairs.
        finite: False when loss or gradient was not finite; the update was then skipped.
        admitted: False when adaptive clipping skipped the update.
        spike: True when the update was skipped for a loss far above its running median.
        shortage: what was short when there was not enough memory for the update, which was then skipped; loss, nll
            and norm are NaN then.
    """

    loss: float
    nll: float
    grad_norm: float
    source_tokens: int
    target_tokens: int
    sentences: int
    finite: bool
    admitted: bool = True
    spike: bool = False
    shortage: Shortage | None = None

    @property
    def taken(self) -> bool:
        """Whether the weights were changed."""
        return self.finite and self.admitted and not self.spike and self.shortage is None


@dataclass(frozen=True)
class Guard:
    """What may keep an update from being taken, besides numbers that are not finite.

    Attributes:
        clipper: of `training.adaptive_clip`, or None.
        highest_nll: nats per target token; a loss above is a spike.
    """

    clipper: AdaptiveClipper | None = None
    highest_nll: float = math.inf


def train_update(
    parallel: Parallel,
    batches: Sequence[Batch],
    optimiser: Optimiser,
    *,
    rate: float,
    clip_norm: float | None,
    guard: Guard | None = None,
) -> UpdateResult:
    """Accumulate the gradients of all processes' batches, clip, and take one optimiser step with learning rate `rate`.

    The loss is normalised by the token (or sentence) count of all batches of all processes together, so that cutting
    an update into batches differently, or sharing it out, changes nothing but rounding. The step is skipped, and
    nothing changed, when loss or gradient is not finite, when memory is short, or when `guard` has a reason.

    Args:
        parallel: model and loss.
        batches: this process's part of the update, one at least.
        optimiser: of the model's parameters.
        rate: learning rate.
        clip_norm: `training.clip_norm`.
        guard: reasons not to take the update.
    """
    guard = guard or Guard()
    parallel.model.train()
    share = parallel.share(batches)
    sums = parallel.accumulate(batches, share)
    counts = share.source_tokens, share.tokens, share.sentences
    if isinstance(sums, Shortage):
        parallel.drop_gradients()
        return UpdateResult(math.nan, math.nan, math.nan, *counts, finite=False, shortage=sums)
    gradients = [p.grad for p in parallel.model.parameters() if p.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm(gradients, foreach=True))
    *mine, norm_here = torch.stack([sums.objective, sums.nll, norm]).tolist()  # the only wait for a GPU
    # The first process's norm decides for all: unlike GPUs may round it differently.
    loss, nll, grad_norm = parallel.processes.sums([*mine, norm_here if parallel.processes.first else 0.0])
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    spike = finite and nll > guard.highest_nll * share.tokens
    admitted = not finite or spike or guard.clipper is None or guard.clipper.admits(grad_norm)
    if finite and admitted and not spike:
        if clip_norm is not None and grad_norm > clip_norm:
            torch._foreach_mul_(gradients, clip_norm / (grad_norm + 1e-6))
        optimiser.set_rate(rate)
        optimiser.step()
    parallel.drop_gradients()
    return UpdateResult(loss, nll, grad_norm, *counts, finite, admitted, spike)
