"""Res-post-norm: the branch is normalised, the stream is not (Liu et al. 2022)."""

from __future__ import annotations

from ziggurat.nn.residual.base import Material, Place, Residual

__all__ = ["res_post"]


def res_post(place: Place, material: Material) -> Residual:
    """y = x + dropout(LN(f(x))): Liu et al. 2022 (Swin v2), section 3.2; the stack ends with one more LN."""
    return Residual(material.dropout(), branch_norm=material.norm())
