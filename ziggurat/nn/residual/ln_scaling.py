"""LayerNorm scaling: pre-norm whose branches read less the higher their layer stands (Sun et al. 2025)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ziggurat.nn.residual.base import Material, Place, Residual

__all__ = ["ScaledNorm", "ln_scaling"]


class ScaledNorm(nn.Module):
    """A norm times a fixed factor, which is a buffer: compiled layers share one graph whatever its value.

    Args:
        norm: normalises the stream.
        factor: of its output.
    """

    factor: Tensor

    def __init__(self, norm: nn.Module, factor: float) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("factor", torch.tensor(factor, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape and type of `x`."""
        y: Tensor = self.norm(x) * self.factor  # a 0-dimensional factor does not promote the type
        return y


def ln_scaling(place: Place, material: Material) -> Residual:
    """y = x + dropout(f(LN(x) / sqrt(l))) in layer l, from 1: Sun et al. 2025 (The Curse of Depth), LayerNorm Scaling.

    It keeps the variance of a deep pre-norm stream from growing with depth; the stack ends with one more LN, which
    is not scaled.
    """
    return Residual(material.dropout(), in_norm=ScaledNorm(material.norm(), 1 / math.sqrt(place.layer)))
