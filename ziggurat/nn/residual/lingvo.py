"""Lingvo's Transformer: attention is added to its normalised input (Bapna et al. 2018)."""

from __future__ import annotations

from torch import Tensor

from ziggurat.nn.residual.base import Material, Place, Residual
from ziggurat.nn.residual.plain import pre_norm

__all__ = ["NormalisedSkip", "lingvo"]


class NormalisedSkip(Residual):
    """y = u + dropout(f(u)) with u = in_norm(x); u is computed again when the branch joins."""

    def forward(self, x: Tensor, fx: Tensor, below: Tensor) -> Tensor:
        """Join the normalised stream and the sub-layer's output `fx`; all [..., d_model]."""
        return super().forward(self.enter(x), fx, below)


def lingvo(place: Place, material: Material) -> Residual:
    """LN(x) + dropout(f(LN(x))) for attention, x + dropout(f(LN(x))) for feed-forward networks.

    The Transformer of Bapna et al. 2018 as lingvo has it; the paper does not print it. So the identity path is cut
    once per encoder layer and twice per decoder layer.
    """
    if not place.attention:
        return pre_norm(place, material)
    return NormalisedSkip(material.dropout(), in_norm=material.norm())
