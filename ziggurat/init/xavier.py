"""Glorot uniform initialisation, the default of fairseq, tensor2tensor and zero (Glorot and Bengio 2010)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ziggurat.init.roles import Role, Slot

__all__ = ["xavier", "xavier_bound"]

_QKV = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE)


def xavier_bound(slot: Slot, *, fused: bool) -> float:
    """Return sqrt(6 / (fan_in + fan_out)) of a matrix slot.

    With `fused`, query, key and value maps count as one d x 3d matrix, which halves their variance.
    """
    fan_out, fan_in = slot.values.shape
    if fused and slot.role in _QKV:
        fan_out = slot.fused_out
    return math.sqrt(6.0 / (fan_in + fan_out))


@torch.no_grad()
def xavier(slots: Iterable[Slot], generator: torch.Generator, *, fused: bool) -> None:
    """Fill every slot in place: matrices U(-bound, bound), embeddings N(0, 1/d_model), biases 0, norms 1 and 0.

    Residual wiring (skip and branch factors) keeps the values its kind was built with.
    """
    for slot in slots:
        match slot.role:
            case Role.EMBEDDING | Role.POSITION | Role.OUTPUT:
                slot.values.normal_(0.0, slot.values.shape[-1] ** -0.5, generator=generator)
            case Role.BIAS | Role.NORM_BIAS:
                slot.values.zero_()
            case Role.NORM_GAIN:
                slot.values.fill_(1.0)
            case Role.WIRING:
                pass
            case _:
                bound = xavier_bound(slot, fused=fused)
                slot.values.uniform_(-bound, bound, generator=generator)
