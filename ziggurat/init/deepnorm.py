"""Xavier normal with DeepNorm's gain beta (Wang et al. 2022, figure 2 and section 4)."""

from __future__ import annotations

import math

from ziggurat.config.wiring import InitConfig
from ziggurat.init.depth import Depth
from ziggurat.init.draw import Draw, Normal
from ziggurat.init.roles import Slot
from ziggurat.init.xavier import xavier
from ziggurat.nn.residual.deepnorm import deepnorm_constants
from ziggurat.nn.roles import MATRICES, WRITTEN

__all__ = ["deepnorm"]


def deepnorm(slot: Slot, config: InitConfig, depth: Depth) -> Draw:
    """Linear maps of the layers are N(0, gain^2 * 2 / (fan_in + fan_out)); everything else is as in `xavier`.

    The gain is beta for value and output maps and both feed-forward matrices, cross-attention included, and 1 for
    queries, keys and gates. Each of query, key and value maps is a matrix of its own here, as in the paper;
    `init.qkv` has no effect on them.
    """
    if not slot.layer or slot.role not in MATRICES:
        return xavier(slot, config, depth)
    gain = 1.0
    if slot.role in WRITTEN:
        _, gain = deepnorm_constants(depth.encoder_layers, depth.decoder_layers, slot.decoder)
    fan_out, fan_in = slot.values.shape
    return Normal(gain * math.sqrt(2.0 / (fan_in + fan_out)))
