"""How deep a model is, as far as initialisation depends on it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Depth"]


class Depth(NamedTuple):
    """Layers of the two stacks.

    Attributes:
        encoder_layers: N; of the grown encoder, where growth is planned.
        decoder_layers: M.
        merged: the decoder has merged average attention (MAtt), two branches to a layer instead of three.
    """

    encoder_layers: int
    decoder_layers: int
    merged: bool = False
