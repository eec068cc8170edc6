"""Glorot uniform initialisation, the default of fairseq, tensor2tensor and zero (Glorot and Bengio 2010)."""

from __future__ import annotations

import math

from ziggurat.config.wiring import InitConfig
from ziggurat.init.depth import Depth
from ziggurat.init.draw import AsBuilt, Constant, Draw, Normal, Uniform
from ziggurat.init.roles import Role, Slot
from ziggurat.nn.roles import QUERY_KEY_VALUE

__all__ = ["xavier", "xavier_bound"]


def xavier_bound(slot: Slot, *, fused: bool) -> float:
    """Return sqrt(6 / (fan_in + fan_out)) of a matrix slot.

    With `fused`, query, key and value maps count as one d x 3d matrix, which halves their variance; a map that is
    not one of three (`fused_out` 0) keeps its own bound.
    """
    fan_out, fan_in = slot.values.shape
    if fused and slot.role in QUERY_KEY_VALUE:
        fan_out = slot.fused_out or fan_out
    return math.sqrt(6.0 / (fan_in + fan_out))


def xavier(slot: Slot, config: InitConfig, depth: Depth) -> Draw:
    """Matrices U(-bound, bound), embeddings N(0, 1/d_model), biases 0, norms 1 and 0.

    The vector added to all embeddings is U(-sqrt(3/d), sqrt(3/d)) (zero); the inner maps of additive attention are
    N(0, 1/fan_in) (lingvo). Residual wiring (skip and branch factors, combination weights) stays as built.
    """
    match slot.role:
        case Role.EMBEDDING | Role.POSITION | Role.OUTPUT | Role.ADDITIVE:
            return Normal(slot.values.shape[-1] ** -0.5)
        case Role.BIAS | Role.NORM_BIAS:
            return Constant(0.0)
        case Role.NORM_GAIN:
            return Constant(1.0)
        case Role.INPUT_BIAS:
            return Uniform(math.sqrt(3.0 / slot.values.shape[-1]))
        case Role.WIRING:
            return AsBuilt()
        case _:
            fused = config.qkv == "fused" or (config.qkv == "fused_self" and not slot.cross)
            return Uniform(xavier_bound(slot, fused=fused))
