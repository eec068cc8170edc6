"""Uniform initialisation of RNMT+ (Chen et al. 2018; lingvo)."""

from __future__ import annotations

from ziggurat.config.wiring import InitConfig
from ziggurat.init.depth import Depth
from ziggurat.init.draw import Draw, Uniform
from ziggurat.init.roles import Role, Slot
from ziggurat.init.xavier import xavier

__all__ = ["uniform"]

_UNIFORM = frozenset({Role.EMBEDDING, Role.OUTPUT, Role.LSTM, Role.PROJECTION})


def uniform(slot: Slot, config: InitConfig, depth: Depth) -> Draw:
    """LSTM matrices, embeddings, softmax and projection are U(-b, b), b being `init.uniform`.

    The rest is as in `xavier`: query and key maps of additive attention Glorot, its inner maps N(0, 1/fan_in),
    biases 0.
    """
    return Uniform(config.uniform) if slot.role in _UNIFORM else xavier(slot, config, depth)
