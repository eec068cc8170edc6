"""What each parameter does: modules say it of their own, initialisation and optimisers go by it, never by names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from torch import Tensor, nn

__all__ = ["MATRICES", "QUERY_KEY_VALUE", "WRITTEN", "Role", "Slot", "linear_slots", "place_of"]


class Role(Enum):
    """What a parameter does; schemes decide by this."""

    EMBEDDING = "embedding"
    POSITION = "position"
    OUTPUT = "output"
    ATTENTION_QUERY = "attention_query"
    ATTENTION_KEY = "attention_key"
    ATTENTION_VALUE = "attention_value"
    ATTENTION_OUT = "attention_out"
    RELATIVE = "relative"
    GATE = "gate"
    FFN_IN = "ffn_in"
    FFN_OUT = "ffn_out"
    LSTM = "lstm"
    ADDITIVE = "additive"
    PROJECTION = "projection"
    BIAS = "bias"
    INPUT_BIAS = "input_bias"
    NORM_GAIN = "norm_gain"
    NORM_BIAS = "norm_bias"
    WIRING = "wiring"


QUERY_KEY_VALUE = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
"""Roles of the rows of a fused attention matrix, in their order."""

WRITTEN = frozenset({Role.ATTENTION_VALUE, Role.ATTENTION_OUT, Role.FFN_IN, Role.FFN_OUT})
"""Roles of the maps that a branch's output is proportional to: what DeepNorm and T-Fixup make small."""

MATRICES = WRITTEN | {Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.GATE}
"""Roles of the linear maps inside Transformer layers: what depth-scaled initialisation scales."""


@dataclass(frozen=True)
class Slot:
    """One parameter, or the rows of a fused one that share a role.

    Attributes:
        values: view of the parameter, [out, in] for matrices.
        role: what it does.
        name: for messages and tables only.
        fused_out: output width of query, key and value maps taken as one matrix (3 d_model); 0: no such map.
        cross: it belongs to attention to the memory.
        layer: number of its layer, from 1, counted in each stack; 0 outside the layers.
        decoder: it belongs to the decoder stack, or is an embedding that only the decoder reads.
    """

    values: Tensor
    role: Role
    name: str
    fused_out: int = 0
    cross: bool = False
    layer: int = 0
    decoder: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Where the values begin: the same for views of one matrix only; also of tensors without values."""
        return place_of(self.values)


def place_of(values: Tensor) -> tuple[int, int]:
    """Return the identity of a tensor's storage and where in it the tensor begins."""
    return values.untyped_storage()._cdata, int(values.storage_offset())


def linear_slots(module: nn.Module, name: str, role: Role, fused_out: int = 0) -> Iterator[Slot]:
    """Yield the slots of the linear map `module.name`: its matrix, which has one role, and its bias if any."""
    linear = getattr(module, name)
    yield Slot(linear.weight, role, f"{name}.weight", fused_out)
    if linear.bias is not None:
        yield Slot(linear.bias, Role.BIAS, f"{name}.bias")
