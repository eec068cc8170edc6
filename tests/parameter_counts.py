"""Parameter counts by formula: `d` is the width, `f` that of the feed-forward network."""

from __future__ import annotations


def encoder(d: int, f: int) -> int:
    """A layer: four maps with biases, a feed-forward network, two norms."""
    return 4 * d * d + 2 * d * f + 9 * d + f


def decoder(d: int, f: int) -> int:
    """A layer: eight maps with biases, a feed-forward network, three norms."""
    return 8 * d * d + 2 * d * f + 15 * d + f


def rnmt(c: int, heads: int, encoder_layers: int, decoder_layers: int, vocabulary: int) -> int:
    """The whole of RNMT+ without a transparent memory, with embeddings as wide as the cells."""

    def cell(inputs: int) -> int:
        return 4 * c * (inputs + c) + 8 * c

    a = c // heads
    below = 2 * cell(c) + 2 * (encoder_layers - 1) * cell(2 * c) + (2 * c * c + c)
    above = decoder_layers * cell(2 * c)
    attention = 2 * (c * c + c) + 2 * a * a + a
    softmax = 2 * c * vocabulary + vocabulary
    return 2 * vocabulary * c + below + above + attention + softmax
