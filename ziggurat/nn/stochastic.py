"""Residual branches that are dropped as a whole in training: stochastic sub-layers and DropPath."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["StochasticBranch"]


class StochasticBranch(nn.Module):
    """b / (1 - p) dropout(fx) in training, b ~ Bernoulli(1 - p); fx itself in evaluation.

    With `unit` "batch" one b is drawn for the whole batch: stochastic sub-layers, Pham et al. 2019, who let p grow with
    the number of the layer (here every sub-layer draws its own b). With "sample" each element of dimension 0 has its
    own: DropPath, Larsson et al. 2017, as TorchScale has it. The branch is computed in any case.

    Args:
        dropout: on the elements of the branch; called as dropout(fx, residual=...) it also adds.
        p: probability that a branch is dropped, less than 1.
        unit: what it is dropped for.
    """

    p: Tensor

    def __init__(self, dropout: nn.Module, p: float, unit: Literal["batch", "sample"]) -> None:
        super().__init__()
        self.dropout = dropout
        self.unit = unit
        # A tensor, since p differs from layer to layer and one compiled graph must serve all of them.
        self.register_buffer("p", torch.tensor([p]), persistent=False)

    def forward(self, fx: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `fx` [batch, ..., d_model] kept or dropped; with `residual`, of that shape too, their sum."""
        if self.training:
            draws = fx.shape[0] if self.unit == "sample" else 1
            kept = torch.rand(draws, device=fx.device) >= self.p
            factor = (kept / (1 - self.p)).to(fx.dtype)
            fx = fx * factor.view(draws, *[1] * (fx.dim() - 1))
        y: Tensor = self.dropout(fx, residual=residual)
        return y

    def extra_repr(self) -> str:
        """Return the unit for printing."""
        return f"unit={self.unit}"
