"""DeepNorm: post-norm with a constant factor of the skip that grows with depth (Wang et al. 2022)."""

from __future__ import annotations

from ziggurat.nn.residual.base import Material, Place, Residual

__all__ = ["deepnorm", "deepnorm_constants"]


def deepnorm_constants(encoder_layers: int, decoder_layers: int, decoder: bool) -> tuple[float, float]:
    """Return (alpha, beta) for one stack of an encoder-decoder: Wang et al. 2022, section 2, figure 2.

    With N encoder and M decoder layers, alpha is 0.81 (N^4 M)^(1/16) in the encoder and (3M)^(1/4) in the decoder;
    beta, the gain of value, output and feed-forward weights at the start, is 0.87 (N^4 M)^(-1/16) and (12M)^(-1/4).
    TorchScale has 1.15 for 0.87; this is the paper's figure. A decoder of merged attention has two branches to a layer
    and would do with 2M for 3M; it keeps the paper's count, because alpha is part of what trained models compute.
    """
    if decoder:
        return (3 * decoder_layers) ** 0.25, (12 * decoder_layers) ** -0.25
    both = (encoder_layers**4 * decoder_layers) ** 0.0625
    return 0.81 * both, 0.87 / both


def deepnorm(place: Place, material: Material) -> Residual:
    """y = LN(alpha x + dropout(f(x))): Wang et al. 2022, section 2; alpha by `deepnorm_constants`."""
    alpha, _ = deepnorm_constants(place.encoder_layers, place.decoder_layers, place.decoder)
    return Residual(material.dropout(), out_norm=material.norm(), skip=alpha)
