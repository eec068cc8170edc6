"""Post-norm and pre-norm: which of the norm slots is filled."""

from __future__ import annotations

from ziggurat.nn.residual.base import Material, Place, Residual

__all__ = ["no_norm", "post_norm", "pre_norm"]


def post_norm(place: Place, material: Material) -> Residual:
    """y = LN(x + dropout(f(x))): Vaswani et al. 2017, section 3.1."""
    return Residual(material.dropout(), out_norm=material.norm())


def pre_norm(place: Place, material: Material) -> Residual:
    """y = x + dropout(f(LN(x))): Wang et al. 2019, equation 3; the stack ends with one more LN."""
    return Residual(material.dropout(), in_norm=material.norm())


def no_norm(place: Place, material: Material) -> Residual:
    """y = x + dropout(f(x)), nothing normalised: what T-Fixup initialises (Huang et al. 2020)."""
    return Residual(material.dropout())
