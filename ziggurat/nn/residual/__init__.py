"""Residual connections: how a sub-layer joins the stream. The kinds are in ziggurat.nn.residual.kinds."""

from ziggurat.nn.residual.base import Residual, ResidualOptions, SublayerPosition
from ziggurat.nn.residual.fixup import ShiftedLinear, ShiftScale
from ziggurat.nn.residual.hyper import HyperConnection

__all__ = ["HyperConnection", "Residual", "ResidualOptions", "ShiftScale", "ShiftedLinear", "SublayerPosition"]
