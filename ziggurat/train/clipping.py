"""Gradient clipping: to a norm (`training.clip_norm`), and RNMT+'s adaptive clipping, which skips updates instead.

Both use the norm of all gradients together, over all processes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clip_to(gradients: list[Tensor], norm: float, most: float) -> None:
    """Scale gradients, whose norm is `norm`, so that it is at most `most`."""
    if norm > most:
        torch._foreach_mul_(gradients, most / (norm + 1e-6))  # 1e-6 as in torch's clip_grad_norm_


_DECAY = 0.995
_DEVIATIONS = 4.0
_SMALLEST, _LARGEST = 1e-2, 1e5
_LEAST_VARIANCE = 1e-6
_TRUSTED = 0.75


class AdaptiveClipper:
    """RNMT+'s adaptive clipping (Chen et al. 2018).

    It admits an update if log(1 + |g|) is at most 4 standard deviations above its running mean and |g| is below 1e5.

    Mean and deviation are exponential averages (decay 0.995) of all norms seen, including those of skipped updates,
    each capped at the threshold at the time. They take effect once their weights sum to more than 0.75, which is after
    277 updates. All constants are lingvo's (GradNormTracker, and grad_norm_to_clip_to_zero of its RNMT+).

    Args:
        sums: [weight, mean, mean square], not yet divided by the weight; initially [0, 0, 0]. They are changed in
            place, so that they are saved with their owner.
    """

    def __init__(self, sums: list[float]) -> None:
        self.sums = sums

    def admits(self, norm: float) -> bool:
        """Count `norm`, the finite gradient norm of an update, and return whether the update should be taken."""
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
