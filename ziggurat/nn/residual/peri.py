"""Peri-LN: a sub-layer is normalised at its input and at its output (Kim et al. 2025)."""

from __future__ import annotations

from ziggurat.nn.residual.base import Material, Place, Residual

__all__ = ["peri"]


def peri(place: Place, material: Material) -> Residual:
    """y = x + dropout(LN_out(f(LN_in(x)))): Kim et al. 2025, with dropout on the normalised branch.

    The stack normalises its input, which the paper calls optional, and its output.
    """
    return Residual(material.dropout(), in_norm=material.norm(), branch_norm=material.norm())
