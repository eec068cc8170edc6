"""One update: gradients of all its batches, the reasons not to take it, clipping, and one step of the optimiser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ziggurat.data.loader import Batch
from ziggurat.model.tensors import is_cut_up, whole
from ziggurat.train.memory import Shortage
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel


@dataclass(frozen=True)
class UpdateResult:
    """The figures of one update, and whether it was taken.

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
        alignment: cross-entropy of guided alignment summed over target tokens with links, nats.
        aligned: number of these tokens.
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
    alignment: float = 0.0
    aligned: float = 0.0
    shortage: Shortage | None = None

    @property
    def taken(self) -> bool:
        """True when the weights were changed."""
        return self.finite and self.admitted and not self.spike and self.shortage is None


@dataclass(frozen=True)
class Guard:
    """Reasons to skip an update, besides numbers that are not finite.

    Attributes:
        clipper: that of `training.adaptive_clip`, or None.
        highest_nll: nats per target token; a loss above it is a spike.
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
    # (1) Gradients. The size comes first: every batch's loss is divided by that of the whole update, so that gradients
    # are right as they are added up and need no second pass.
    size = parallel.size(batches)
    counts = size.source_tokens, size.target_tokens, size.sentences
    sums = parallel.accumulate(batches, size)
    if isinstance(sums, Shortage):
        parallel.drop_gradients()
        return UpdateResult(math.nan, math.nan, math.nan, *counts, finite=False, shortage=sums)
    gradients = [p.grad for p in parallel.model.parameters() if p.grad is not None]
    # None: grouped kernels where the device has them. FSDP's parts have them, too, which PyTorch takes only when asked.
    norm = whole(torch.nn.utils.get_total_norm(gradients, foreach=is_cut_up(gradients[0]) or None))
    # (2) Figures, in one transfer: the only time that the CPU waits for a GPU.
    guided = sums.nll.new_zeros(2) if sums.alignment is None else sums.alignment.to(sums.nll.dtype)
    *mine, norm_here = torch.cat([torch.stack([sums.objective, sums.nll]), guided, norm[None]]).tolist()
    # The first process's norm decides for all. Each has the same gradient, but GPUs of different kinds round its norm
    # differently, and processes that disagree about one update would hold different weights from then on.
    loss, nll, alignment, aligned, grad_norm = parallel.processes.sums(
        [*mine, norm_here if parallel.processes.first else 0.0]
    )
    # (3) Reasons to skip it. The clipper comes last: it counts the norms that it is shown, and must see no spike.
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    spike = finite and nll > guard.highest_nll * size.target_tokens
    admitted = not finite or spike or guard.clipper is None or guard.clipper.admits(grad_norm)
    # (4) The step.
    if finite and admitted and not spike:
        if clip_norm is not None and grad_norm > clip_norm:
            torch._foreach_mul_(gradients, clip_norm / (grad_norm + 1e-6))  # 1e-6 as in torch's clip_grad_norm_
        optimiser.set_rate(rate)
        optimiser.step()
    parallel.drop_gradients()
    return UpdateResult(loss, nll, grad_norm, *counts, finite, admitted, spike, alignment, aligned)


# Adaptive gradient clipping (RNMT+, Chen et al. 2018); all constants are lingvo's.
_DECAY = 0.995
_DEVIATIONS = 4.0
_SMALLEST, _LARGEST = 1e-2, 1e5
_LEAST_VARIANCE = 1e-6
_TRUSTED = 0.75


class AdaptiveClipper:
    """Admits an update if log(1 + |g|) is at most 4 standard deviations above its running mean, and |g| below 1e5.

    Mean and deviation are exponential averages (decay 0.995) of all norms seen, those of skipped updates included,
    each capped at the threshold that it met; they decide once their weights sum to more than 0.75, which is after
    277 updates. All constants are lingvo's (GradNormTracker, and grad_norm_to_clip_to_zero of its RNMT+).

    Args:
        sums: [weight, mean, mean square], not yet divided by the weight; [0, 0, 0] at the beginning. Changed in
            place, so that they are saved with whoever owns them.
    """

    def __init__(self, sums: list[float]) -> None:
        self.sums = sums

    def admits(self, norm: float) -> bool:
        """Count `norm`, the finite gradient norm of an update, and return whether that update is to be taken."""
        trusted = self.sums[0] > _TRUSTED
        logarithm, limit = math.log1p(max(norm, _SMALLEST)), self.limit
        capped = min(logarithm, limit)
        self.sums[:] = (
            average + (1 - _DECAY) * (value - average)
            for average, value in zip(self.sums, (1.0, capped, capped * capped), strict=True)
        )
        return norm < _LARGEST and not (trusted and logarithm > limit)

    @property
    def limit(self) -> float:
        """Largest log(1 + |g|) within the threshold."""
        weight, mean, square = self.sums
        divisor = max(weight, 1e-6)
        mean /= divisor
        return mean + _DEVIATIONS * math.sqrt(max(square / divisor - mean * mean, _LEAST_VARIANCE))
