"""Roles of parameters: each module declares those of its own; initialisation and optimisers use roles, never names.

A class declares them in a table, `roles`, keyed by the names of its parameters and linear maps. If the rows of one
matrix have different roles, or only the object knows them, it has a method `slots` instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from torch import Tensor, nn


class Role(Enum):
    """The role of a parameter in its module."""

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
    STREAM_MAP = "stream_map"
    LOW_RANK = "low_rank"


Roles = Mapping[str, Role]
"""The type of a class's table `roles`: name of a parameter or of a linear map -> role."""

QUERY_KEY_VALUE = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
"""Roles of the rows of a fused attention matrix, in order."""

WRITTEN = frozenset({Role.ATTENTION_VALUE, Role.ATTENTION_OUT, Role.FFN_IN, Role.FFN_OUT})
"""Roles of the maps to which a branch's output is proportional: DeepNorm and T-Fixup make them small."""

MATRICES = WRITTEN | {Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.GATE}
"""Roles of the linear maps inside Transformer layers: depth-scaled initialisation scales them."""


@dataclass(frozen=True)
class Slot:
    """One parameter, or the rows of a fused one that share a role.

    Attributes:
        values: view of the parameter, [out, in] for matrices.
        name: used in messages and tables only.
        fused_out: output width of query, key and value maps taken as one matrix (3 d_model); 0: no such map.
        cross: whether it belongs to attention to the memory.
        layer: number of its layer, from 1, counted in each stack; 0 outside the layers.
        decoder: whether it belongs to the decoder stack, or is an embedding that only the decoder reads.
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
        """Where the values start in memory; it distinguishes parameters, even on the meta device."""
        return place_of(self.values)


def place_of(values: Tensor) -> tuple[int, int]:
    """Return the identity of a tensor's storage and the tensor's offset in it."""
    return values.untyped_storage()._cdata, int(values.storage_offset())


def linear_slots(
    module: nn.Module, name: str, role: Role, fused_out: int = 0, *, cross: bool = False
) -> Iterator[Slot]:
    """Yield the slots of the linear map `module.name`: its matrix, which has one role, and its bias if any."""
    linear = getattr(module, name)
    yield Slot(linear.weight, role, f"{name}.weight", fused_out, cross)
    if linear.bias is not None:
        yield Slot(linear.bias, Role.BIAS, f"{name}.bias", cross=cross)


def assign_roles(root: nn.Module) -> list[Slot]:
    """Return the slots of every parameter under `root`; a shared parameter appears once, at its first occurrence.

    Raises TypeError for a parameter to which no module assigns a role.
    """
    slots: list[Slot] = []
    seen: set[tuple[int, int]] = set()
    for prefix, module in root.named_modules():
        for slot in _slots_of(module):
            if slot.place not in seen:
                seen.add(slot.place)
                slots.append(dataclasses.replace(slot, name=f"{prefix}.{slot.name}" if prefix else slot.name))
    covered = sum(slot.values.numel() for slot in slots)
    total = sum(p.numel() for p in root.parameters())
    if covered != total:
        known = [slot.name for slot in slots]
        unknown = [n for n, _ in root.named_parameters() if not any(k.startswith(n) for k in known)]
        raise TypeError(f"no role for {', '.join(unknown)}: name it in `roles` of the class that owns it")
    return slots


_OF_TORCH: dict[type[nn.Module], Roles] = {
    nn.LayerNorm: {"weight": Role.NORM_GAIN, "bias": Role.NORM_BIAS},
    nn.RMSNorm: {"weight": Role.NORM_GAIN},
    nn.Embedding: {"weight": Role.EMBEDDING},
}


def _slots_of(module: nn.Module) -> Iterable[Slot]:
    if callable(own := getattr(module, "slots", None)):
        return own()
    return table_slots(module, getattr(module, "roles", _OF_TORCH.get(type(module), {})))


def table_slots(module: nn.Module, roles: Roles, *, cross: bool = False) -> Iterator[Slot]:
    """Yield the slots of the parameters and linear maps that `roles` names, if `module` has them."""
    for name, role in roles.items():
        held = getattr(module, name)
        if isinstance(held, nn.Parameter):
            yield Slot(held, role, name, cross=cross)
        elif isinstance(held, nn.Module):
            yield from linear_slots(module, name, role, cross=cross)
