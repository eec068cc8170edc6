"""Hyper-connections: several residual streams, read, mixed and written by trained weights (Zhu et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ziggurat.nn.residual.base import Material, Place, Residual

__all__ = ["HyperConnection", "hyper"]


class HyperConnection(Residual):
    """H' = A_r^T H + B^T dropout(f(LN(A_m^T H))) for n streams H [..., n, d_model]: equations 2 to 5.

    `alpha` [n, 1 + n] is (A_m, A_r), at first (e_(number mod n), I); `beta` [n] is B, at first 1. With dynamic ones,
    alpha_scale tanh(LN'(H) alpha_map) and beta_scale tanh(LN'(H) beta_map) are added (equations 10 to 13): a norm of
    its own, maps from 0, scales [1] from 0.01. The stack starts with n copies of its input and ends with their sum.
    """

    def __init__(self, number: int, material: Material) -> None:
        super().__init__(material.dropout(), in_norm=material.norm())
        n, d = material.streams, material.d_model
        self.alpha = nn.Parameter(torch.cat([torch.eye(n)[:, [number % n]], torch.eye(n)], dim=1))
        self.beta = nn.Parameter(torch.ones(n))
        self.stream_norm = material.norm() if material.dynamic else None
        if material.dynamic:
            self.alpha_map, self.beta_map = nn.Parameter(torch.zeros(d, 1 + n)), nn.Parameter(torch.zeros(d))
            self.alpha_scale, self.beta_scale = (nn.Parameter(torch.full((1,), 0.01)) for _ in range(2))

    def enter(self, x: Tensor) -> Tensor:
        """Return the sub-layer's input [..., d_model] for the streams `x` [..., n, d_model]."""
        return super().enter((self.weights(x)[0][..., :1] * x).sum(-2))

    def forward(self, x: Tensor, fx: Tensor, below: Tensor) -> Tensor:
        """Join the streams `x` [..., n, d_model] and the sub-layer's output `fx` [..., d_model]."""
        return self.join(x, fx, *self.weights(x))

    def join(self, x: Tensor, fx: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        """Do so with given weights, as `weights` returns them."""
        with torch.autocast(x.device.type, enabled=False):  # it would round the streams
            mixed = alpha[..., 1:].transpose(-1, -2) @ x
        return mixed + beta[..., None] * self.dropout(fx)[..., None, :]

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (A_m, A_r) and B for the streams `x` [..., n, d_model]: [n, 1 + n] and [n]; dynamic ones [..., *]."""
        if self.stream_norm is None:
            return self.alpha, self.beta
        seen = self.stream_norm(x)
        alpha = self.alpha + self.alpha_scale * torch.tanh(seen @ self.alpha_map)
        return alpha, self.beta + self.beta_scale * torch.tanh(seen @ self.beta_map)


def hyper(place: Place, material: Material) -> Residual:
    """Connection k = 0, 1, ... of its stack, counted over sub-layers (section 2.3).

    The paper leaves open if k begins at 0 or 1, which only orders the streams, and if the initial factor sqrt(n) of
    output matrices (section 4) enlarges or shrinks them: there is none here.
    """
    return HyperConnection((place.layer - 1) * place.sublayers + place.sublayer, material)
