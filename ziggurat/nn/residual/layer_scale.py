"""LayerScale: pre-norm whose branches start almost closed, one factor per channel (Touvron et al. 2021)."""

from __future__ import annotations

import torch
from torch import nn

from ziggurat.nn.residual.base import Material, Place, Residual

__all__ = ["layer_scale"]


def layer_scale(place: Place, material: Material) -> Residual:
    """y = x + lambda * dropout(f(LN(x))), lambda [d_model] trained: Touvron et al. 2021 (CaiT), section 2.

    It starts as `material.layer_scale`; where that is None, as 0.1 in a stack of up to 18 layers, 1e-5 up to 24
    and 1e-6 beyond.
    """
    start = material.layer_scale
    if start is None:
        start = 0.1 if place.layers <= 18 else 1e-5 if place.layers <= 24 else 1e-6
    factor = nn.Parameter(torch.full((material.d_model,), start))
    return Residual(material.dropout(), in_norm=material.norm(), branch=factor)
