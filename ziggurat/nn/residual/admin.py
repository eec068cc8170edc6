"""ADMIN: post-norm with a scaled skip, so that no branch dominates at the start (Liu et al. 2020)."""

from __future__ import annotations

import torch
from torch import nn

from ziggurat.nn.residual.base import Material, Place, Residual

__all__ = ["admin"]


def admin(place: Place, material: Material) -> Residual:
    """y = LN(omega * x + dropout(f(x))), one vector omega [d_model] per sub-layer: Liu et al. 2020.

    omega is 1 until it is profiled (ziggurat.training.profile) or set to a constant (ziggurat.init.admin). The
    released code trains it, the paper does not: `material.omega_trainable`.
    """
    omega = nn.Parameter(torch.ones(material.d_model), requires_grad=material.omega_trainable)
    return Residual(material.dropout(), out_norm=material.norm(), skip=omega)
