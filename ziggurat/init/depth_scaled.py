"""DS-Init: the deeper a layer, the smaller its initial weights (Zhang, Titov and Sennrich 2019, section 4)."""

from __future__ import annotations

from ziggurat.config.wiring import InitConfig
from ziggurat.init.depth import Depth
from ziggurat.init.draw import Draw
from ziggurat.init.roles import Slot
from ziggurat.init.xavier import xavier
from ziggurat.nn.roles import MATRICES

__all__ = ["depth_scaled"]


def depth_scaled(slot: Slot, config: InitConfig, depth: Depth) -> Draw:
    """Glorot bounds gamma become gamma * alpha * l^-exponent for every linear map of layer l.

    Layers are counted from 1 in each stack. The paper's equation 15 has exponent 1/2. The released code passes
    l^-1/2 as the scale of a variance, so its bounds have exponent 1/4, and only that gives the Var(r) of the
    paper's table 1. Embeddings, relative positions, biases, norms and output projection stay as in `xavier`.
    """
    draw = xavier(slot, config, depth)
    if slot.layer and slot.role in MATRICES:
        return draw.scaled(config.alpha * slot.layer**-config.exponent)
    return draw
