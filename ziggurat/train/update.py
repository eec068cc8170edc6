"""One update: gradients of all its batches, the reasons not to take it, clipping, and one step of the optimiser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ziggurat.data.loader import Batch
from ziggurat.model.tensors import is_cut_up, whole
from ziggurat.train.clipping import AdaptiveClipper, clip_to
from ziggurat.train.device import Shortage
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel


@dataclass(frozen=True)
class UpdateResult:
    """The figures of one update, and whether it was taken.

    Attributes:
        loss: the update's objective (normalised, smoothed, with its penalty), nats.
        nll: sum of -log p(gold) over target tokens, nats.
        grad_norm: global gradient norm before clipping.
        source_tokens, target_tokens: real tokens, end-of-sentence included.
        finite: False when loss or gradient was not finite, and the update was skipped.
        admitted: False when adaptive clipping skipped the update.
        spike: True when the update was skipped for a loss far above its running median.
        alignment: cross-entropy of guided alignment summed over target tokens with links, nats.
        aligned: number of these tokens.
        shortage: the memory shortage for which the update was skipped, or None; loss, nll and norm are then NaN.
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
    alignment: float = 0.0
    aligned: float = 0.0
    shortage: Shortage | None = None

    @property
    def taken(self) -> bool:
        """True when the weights were changed."""
        return self.finite and self.admitted and not self.spike and self.shortage is None


def train_update(
    parallel: Parallel,
    batches: Sequence[Batch],
    optimiser: Optimiser,
    *,
    rate: float,
    clip_norm: float | None,
    clipper: AdaptiveClipper | None = None,
    highest_nll: float = math.inf,
) -> UpdateResult:
    """Accumulate the gradients of all processes' batches, clip, and take one optimiser step with learning rate `rate`.

    The loss is normalised by the token (or sentence) count of all batches in all processes, so that the division of an
    update into batches or processes affects only rounding. The step is skipped, and nothing changed, when loss or
    gradient is not finite, when memory is short, at a spike, or when the clipper rejects it.

    Args:
        parallel: model and loss.
        batches: this process's part of the update, at least one.
        optimiser: optimiser of the model's parameters.
        rate: learning rate.
        clip_norm: `training.clip_norm`.
        clipper: clipper of `training.adaptive_clip`, or None.
        highest_nll: nats per target token; a loss above it is a spike.
    """
    parallel.model.train()
    # (1) Gradients. The size comes first: every batch's loss is divided by that of the whole update, so that summed
    # gradients are correct without a second pass.
    size = parallel.size(batches)
    counts = size.source_tokens, size.target_tokens, size.sentences
    sums = parallel.accumulate(batches, size)
    if isinstance(sums, Shortage):
        parallel.drop_gradients()
        return UpdateResult(math.nan, math.nan, math.nan, *counts, finite=False, shortage=sums)
    gradients = [p.grad for p in parallel.model.parameters() if p.grad is not None]
    # None: grouped kernels if the device has them. They also work for FSDP's shards, but PyTorch uses them only on
    # request.
    norm = whole(torch.nn.utils.get_total_norm(gradients, foreach=is_cut_up(gradients[0]) or None))
    # (2) Figures, in one transfer, which is the only time that the CPU waits for a GPU.
    guided = sums.nll.new_zeros(2) if sums.alignment is None else sums.alignment.to(sums.nll.dtype)
    *mine, norm_here = torch.cat([torch.stack([sums.objective, sums.nll]), guided, norm[None]]).tolist()
    # The first process's norm decides for all. Each has the same gradient, but different kinds of GPU round its norm
    # differently, and processes that disagree about one update would have different weights from then on.
    loss, nll, alignment, aligned, grad_norm = parallel.processes.sums(
        [*mine, norm_here if parallel.processes.first else 0.0]
    )
    # (3) Reasons to skip it. The clipper comes last, because it counts the norms that it is given and must not see a
    # spike.
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    spike = finite and nll > highest_nll * size.target_tokens
    admitted = not finite or spike or clipper is None or clipper.admits(grad_norm)
    # (4) The step.
    if finite and admitted and not spike:
        if clip_norm is not None:
            clip_to(gradients, grad_norm, clip_norm)
        optimiser.set_rate(rate)
        optimiser.step()
    parallel.drop_gradients()
    return UpdateResult(loss, nll, grad_norm, *counts, finite, admitted, spike, alignment, aligned)
