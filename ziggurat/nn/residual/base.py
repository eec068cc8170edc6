"""How a sub-layer joins the residual stream: one equation with four optional slots."""

from __future__ import annotations

from torch import Tensor, nn

from ziggurat.nn.dropout import Dropout

__all__ = ["Residual"]


class Residual(nn.Module):
    """y = out_norm(skip * x + branch * dropout(f(in_norm(x)))), f being the sub-layer.

    A kind is a choice of slots; an empty slot is the identity. The stack calls `enter` for the input of f and
    `forward` to join its output, so hooks on a Residual see x, f(x) and y of every sub-layer of every model.

    Args:
        dropout: on the sub-layer's output.
        in_norm: normalisation of the sub-layer's input.
        out_norm: normalisation of the sum.
        skip: factor of x, shape [1] or [d_model].
        branch: factor of the sub-layer's output, shape [1] or [d_model].
    """

    in_norm: nn.Module | None
    out_norm: nn.Module | None
    skip: nn.Parameter | None
    branch: nn.Parameter | None

    def __init__(
        self,
        dropout: Dropout,
        *,
        in_norm: nn.Module | None = None,
        out_norm: nn.Module | None = None,
        skip: nn.Parameter | None = None,
        branch: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.in_norm = in_norm
        self.out_norm = out_norm
        self.register_parameter("skip", skip)
        self.register_parameter("branch", branch)

    def enter(self, x: Tensor) -> Tensor:
        """Return the sub-layer's input for the stream `x` [batch, length, d_model]."""
        return x if self.in_norm is None else self.in_norm(x)

    def forward(self, x: Tensor, fx: Tensor) -> Tensor:
        """Join the stream `x` and the sub-layer's output `fx`, both [batch, length, d_model]."""
        skipped = x if self.skip is None else x * self.skip
        if self.branch is None:
            y = self.dropout(fx, residual=skipped)
        else:
            y = skipped + self.branch * self.dropout(fx)
        return y if self.out_norm is None else self.out_norm(y)
