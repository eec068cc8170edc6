"""Residual kinds: how a sub-layer joins the stream."""

from ziggurat.nn.residual.base import Residual
from ziggurat.nn.residual.plain import post_norm, pre_norm

__all__ = ["Residual", "post_norm", "pre_norm"]
