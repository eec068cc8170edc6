"""Post-norm and pre-norm: which of the two norm slots is filled."""

from __future__ import annotations

from torch import nn

from ziggurat.nn.dropout import Dropout
from ziggurat.nn.residual.base import Residual

__all__ = ["post_norm", "pre_norm"]


def post_norm(d_model: int, dropout: Dropout, epsilon: float) -> Residual:
    """y = LN(x + dropout(f(x))): Vaswani et al. 2017, section 3.1."""
    return Residual(dropout, out_norm=nn.LayerNorm(d_model, eps=epsilon))


def pre_norm(d_model: int, dropout: Dropout, epsilon: float) -> Residual:
    """y = x + dropout(f(LN(x))): Wang et al. 2019, equation 3; the stack ends with one more LN."""
    return Residual(dropout, in_norm=nn.LayerNorm(d_model, eps=epsilon))
