"""Hyper-connections: several residual streams, read, mixed and written by trained weights (Zhu et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ziggurat.nn.residual.base import Residual, ResidualOptions

__all__ = ["HyperConnection"]


class HyperConnection(Residual):
    """H' = A_r^T H + B^T dropout(f(LN(A_m^T H))) for n streams H [..., n, d_model]: equations 2 to 5.

    `alpha` [n, 1 + n] is (A_m, A_r), at first (e_(number mod n), I); `beta` [n] is B, at first 1. Dynamic connections
    add alpha_scale tanh(LN'(H) alpha_map) and beta_scale tanh(LN'(H) beta_map) to them (equations 10 to 13): LN' is a
    norm used for nothing else, the maps start at 0, the scales [1] at 0.01. The stack starts with n copies of its input
    and ends with their sum.

    Args:
        number: k of this connection, from 0, counted over the sub-layers of the stack.
        options: see ResidualOptions; n is `streams`.
    """

    def __init__(self, number: int, options: ResidualOptions) -> None:
        super().__init__(options.dropout(), in_norm=options.norm())
        n, d = options.streams, options.d_model
        self.alpha = nn.Parameter(torch.cat([torch.eye(n)[:, [number % n]], torch.eye(n)], dim=1))
        self.beta = nn.Parameter(torch.ones(n))
        self.stream_norm = options.norm() if options.dynamic else None
        if options.dynamic:
            self.alpha_map, self.beta_map = nn.Parameter(torch.zeros(d, 1 + n)), nn.Parameter(torch.zeros(d))
            self.alpha_scale, self.beta_scale = (nn.Parameter(torch.full((1,), 0.01)) for _ in range(2))

    def enter(self, x: Tensor) -> Tensor:
        """Return the sub-layer's input [..., d_model] for the streams `x` [..., n, d_model]."""
        return super().enter((self.weights(x)[0][..., :1] * x).sum(-2))

    def forward(self, x: Tensor, fx: Tensor, bottom: Tensor | None = None) -> Tensor:
        """Join the streams `x` [..., n, d_model] and the sub-layer's output `fx` [..., d_model]."""
        return self.join(x, fx, *self.weights(x))

    def join(self, x: Tensor, fx: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        """Join them by the given weights, as `weights` returns them."""
        # Autocast would compute the product in a half type, and so round the streams at every sub-layer.
        with torch.autocast(x.device.type, enabled=False):
            mixed = alpha[..., 1:].transpose(-1, -2) @ x
        return mixed + beta[..., None] * self.dropout(fx)[..., None, :]

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (A_m, A_r) and B for the streams `x` [..., n, d_model].

        Their shapes are [n, 1 + n] and [n]; dynamic ones differ by position: [..., n, 1 + n] and [..., n].
        """
        if self.stream_norm is None:
            return self.alpha, self.beta
        seen = self.stream_norm(x)
        alpha = self.alpha + self.alpha_scale * torch.tanh(seen @ self.alpha_map)
        return alpha, self.beta + self.beta_scale * torch.tanh(seen @ self.beta_map)
