"""B2T connection: post-norm, and a bypass from the bottom of each layer to its top (Takase et al. 2022)."""

from __future__ import annotations

from ziggurat.nn.residual.base import Material, Place, Residual

__all__ = ["b2t"]


def b2t(place: Place, material: Material) -> Residual:
    """y = LN(x + dropout(f(x))); the layer's last sub-layer LN(x + dropout(f(x)) + below), `below` its input.

    So the input of a layer passes all of its norms but the last; in the decoder alike. The released code also
    multiplies initial weights by 1/sqrt(layers of the stack); here initialisation is a choice of its own.
    """
    return Residual(material.dropout(), out_norm=material.norm(), bypass=place.last)
