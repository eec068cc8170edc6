"""Transfer of learning rates over width and depth: CompleteP and depth-muP (Dey et al. 2025, table 1).

A rate tuned on a small model, the base, suits a wider and deeper one if the sizes of its values and of their changes
stay the same. With m_N the ratio of widths and m_L the ratio of depths, the paper scales

    branches            x + m_L^-a f(LN(x))
    weights in layers   variance 1/m_N, rate m_N^-1 m_L^(a-1), decay m_N
    vectors in layers   rate m_L^(a-1)
    logits              1/m_N
    Adam's epsilon      m_N^-1 m_L^-a in layers

with a = 1 for CompleteP and 1/2 for depth-muP. The paper leaves some points open, which are decided here: encoder and
decoder have separate m_L; the variance of weights follows from Glorot's bounds; embeddings are W = E / sqrt(d_model),
multiplied by sqrt(d_model) where they are read, so that E, the paper's matrix, keeps its size. For E to change by
the same amount, W has the rate and the epsilon m_N^-1/2, and logits, products with W, need m_N^-1/2 more. The
attention's scale 1/sqrt(d_head) is kept, so heads should be as wide as in the base.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ziggurat.config.model import ModelConfig
from ziggurat.model.roles import Role, Slot


class RateScale(NamedTuple):
    """Factors of a parameter's learning rate, of Adam's epsilon, and of its weight decay."""

    rate: float = 1.0
    epsilon: float = 1.0
    decay: float = 1.0


# Tables of relative positions are as wide as a head, which is as wide as in the base.
_VECTORS = frozenset({Role.BIAS, Role.NORM_GAIN, Role.NORM_BIAS, Role.WIRING, Role.RELATIVE})
_VOCABULARY = frozenset({Role.EMBEDDING, Role.OUTPUT})


def _depth(config: ModelConfig, decoder: bool) -> float:
    """Return m_L of a stack."""
    assert config.transfer is not None
    layers = config.planned_decoder_layers if decoder else config.planned_encoder_layers
    return layers / (config.transfer.decoder_layers if decoder else config.transfer.encoder_layers)


def branch_factor(config: ModelConfig, decoder: bool) -> float | None:
    """Return the factor of every branch of a stack, m_L^-a; None: the model has no base."""
    return None if config.transfer is None else _depth(config, decoder) ** -config.transfer.exponent


def output_factor(config: ModelConfig) -> float | None:
    """Return the factor of the output projection's input, m_N^-1/2; None: the model has no base."""
    return None if config.transfer is None else (config.d_model / config.transfer.width) ** -0.5


def scales(config: ModelConfig, slots: Iterable[Slot]) -> dict[tuple[int, int], RateScale]:
    """Return the RateScale of every parameter of a model with a base, by place (ziggurat.model.roles.place_of)."""
    assert config.transfer is not None
    base, a = config.transfer.width, config.transfer.exponent
    found: dict[tuple[int, int], RateScale] = {}
    for slot in slots:
        width = config.d_model / base
        if slot.role is Role.LOW_RANK:
            scale = RateScale()  # their rate is chosen directly, not transferred from a smaller model
        elif slot.layer:
            depth = _depth(config, slot.decoder)
            epsilon = depth**-a / width
            if slot.role in _VECTORS:
                scale = RateScale(depth ** (a - 1), epsilon)
            else:
                scale = RateScale(depth ** (a - 1) / width, epsilon, width)
        elif slot.role in _VOCABULARY:
            scale = RateScale(width**-0.5, width**-0.5)
        else:
            scale = RateScale()  # final norms, and the weights of `top_only` and of memory
        found.setdefault(slot.place, scale)
    return found
