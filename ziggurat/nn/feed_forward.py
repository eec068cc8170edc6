"""Position-wise feed-forward network (Vaswani et al. 2017, equation 2)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.nn.dropout import Dropout

__all__ = ["FeedForward"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class FeedForward(nn.Module):
    """dropout(activation(x W_1 + b_1)) W_2 + b_2.

    Args:
        d_model: width of input and output.
        d_ff: inner width.
        activation: "relu" or "gelu".
        dropout: after the activation.
    """

    def __init__(self, d_model: int, d_ff: int, activation: str, dropout: Dropout) -> None:
        super().__init__()
        self.in_proj = nn.Linear(d_model, d_ff)
        self.out_proj = nn.Linear(d_ff, d_model)
        self.activation = _ACTIVATIONS[activation]
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, d_model] for `x` of that shape."""
        return self.out_proj(self.dropout(self.activation(self.in_proj(x))))
