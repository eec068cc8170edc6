"""ReZero: every layer starts as the identity, behind one trained gate (Bachlechner et al. 2020)."""

from __future__ import annotations

import torch
from torch import nn

from ziggurat.nn.residual.base import Material, Place, Residual

__all__ = ["rezero"]


def rezero(place: Place, material: Material) -> Residual:
    """y = x + a dropout(f(x)), a [1] from 0 shared by the sub-layers of a layer: Bachlechner et al. 2020, section 3.

    Nothing is normalised. The decoder, which the paper does not have, is built alike.
    """
    gate = material.shared.setdefault("rezero", nn.Parameter(torch.zeros(1)))
    return Residual(material.dropout(), branch=gate)
