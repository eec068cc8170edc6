"""Residual connections: how a sub-layer joins the stream. The kinds are in ziggurat.nn.residual.kinds."""

from ziggurat.nn.residual.base import NoSkip, Residual, ResidualOptions, ScaledNorm, SublayerPosition
from ziggurat.nn.residual.fixup import ShiftedLinear, ShiftScale
from ziggurat.nn.residual.streams import HyperConnection, ManifoldConnection, SiameseConnection, SiameseEnd

__all__ = [
    "HyperConnection",
    "ManifoldConnection",
    "NoSkip",
    "Residual",
    "ResidualOptions",
    "ScaledNorm",
    "ShiftScale",
    "ShiftedLinear",
    "SiameseConnection",
    "SiameseEnd",
    "SublayerPosition",
]
