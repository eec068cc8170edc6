"""Fixup as zero has it: branches start at zero, nothing is normalised (Zhang, Dauphin and Ma 2019)."""

from __future__ import annotations

from ziggurat.config.wiring import InitConfig
from ziggurat.init.depth import Depth
from ziggurat.init.draw import Constant, Draw
from ziggurat.init.roles import Role, Slot
from ziggurat.init.xavier import xavier
from ziggurat.nn.roles import QUERY_KEY_VALUE

__all__ = ["fixup"]


def fixup(slot: Slot, config: InitConfig, depth: Depth) -> Draw:
    """Glorot times powers of the number B = 2N + 3M of residual branches, as zero counts them.

    Query, key and value maps: B^-1/6; those of merged average attention: B^-1/8. First feed-forward matrix: B^-1/2.
    Attention output, second feed-forward matrix and a softmax matrix of its own: 0. The rest as in `xavier`: also
    the gates of average attention, so that its branch alone does not start at zero. Shifts and multipliers belong
    to `residual: fixup` and start at 0 and 1 there.
    """
    branches = 2.0 * depth.encoder_layers + 3.0 * depth.decoder_layers
    draw = xavier(slot, config, depth)
    if slot.role in (Role.ATTENTION_OUT, Role.FFN_OUT, Role.OUTPUT):
        return Constant(0.0)
    if slot.role in QUERY_KEY_VALUE:
        return draw.scaled(branches ** (-1 / 8 if slot.decoder and depth.merged else -1 / 6))
    if slot.role is Role.FFN_IN:
        return draw.scaled(branches**-0.5)
    return draw
