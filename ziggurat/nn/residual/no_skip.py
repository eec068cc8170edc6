"""No residual connection: an ablation (Bapna et al. 2018)."""

from __future__ import annotations

from torch import Tensor

from ziggurat.nn.residual.base import Material, Place, Residual

__all__ = ["NoSkip", "no_skip"]


class NoSkip(Residual):
    """y = dropout(f(in_norm(x)))."""

    def forward(self, x: Tensor, fx: Tensor, below: Tensor) -> Tensor:
        """Return the sub-layer's output `fx` [..., d_model] with dropout; the stream `x` ends here."""
        y: Tensor = self.dropout(fx)
        return y


def no_skip(place: Place, material: Material) -> Residual:
    """y = dropout(f(LN(x))): "- residuals" in tables 1 and 2 of Bapna et al. 2018."""
    return NoSkip(material.dropout(), in_norm=material.norm())
