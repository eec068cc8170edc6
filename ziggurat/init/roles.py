"""Gives each parameter, or each part of a fused one, the role it plays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from torch import Tensor, nn

from ziggurat.nn.attention import CrossAttention, SelfAttention
from ziggurat.nn.embedding import LearnedPositions, OutputProjection
from ziggurat.nn.feed_forward import FeedForward
from ziggurat.nn.residual import Residual

__all__ = ["Role", "Slot", "assign_roles"]


class Role(Enum):
    """What a parameter does; schemes decide by this."""

    EMBEDDING = "embedding"
    POSITION = "position"
    OUTPUT = "output"
    ATTENTION_QUERY = "attention_query"
    ATTENTION_KEY = "attention_key"
    ATTENTION_VALUE = "attention_value"
    ATTENTION_OUT = "attention_out"
    FFN_IN = "ffn_in"
    FFN_OUT = "ffn_out"
    BIAS = "bias"
    NORM_GAIN = "norm_gain"
    NORM_BIAS = "norm_bias"
    WIRING = "wiring"


@dataclass(frozen=True)
class Slot:
    """One parameter, or the rows of a fused one that share a role.

    Attributes:
        values: view of the parameter, [out, in] for matrices.
        role: what it does.
        name: for messages and tables only.
        fused_out: output width of the attention's query, key and value maps taken as one matrix (3 d_model).
        layer: number of its layer, from 1, counted in each stack; 0 outside the layers.
    """

    values: Tensor
    role: Role
    name: str
    fused_out: int = 0
    layer: int = 0


def assign_roles(root: nn.Module, layer: int = 0) -> list[Slot]:
    """Return the slots of every parameter under `root`; a shared parameter appears once, where it is first met.

    Raises TypeError for a parameter that no rule knows: a new module must say what its parameters are.
    """
    slots: list[Slot] = []
    seen: set[int] = set()
    for prefix, module in root.named_modules():
        for slot in _slots_of(module, prefix, layer):
            if slot.values.data_ptr() not in seen:
                seen.add(slot.values.data_ptr())
                slots.append(slot)
    covered = sum(slot.values.numel() for slot in slots)
    total = sum(p.numel() for p in root.parameters())
    if covered != total:
        known = {slot.name for slot in slots}
        unknown = [n for n, _ in root.named_parameters() if not any(k.startswith(n) for k in known)]
        raise TypeError(f"no role for {', '.join(unknown)}: add a rule to ziggurat/init/roles.py")
    return slots


def _slots_of(module: nn.Module, prefix: str, layer: int) -> Iterator[Slot]:
    def slot(values: Tensor, role: Role, name: str, fused_out: int = 0) -> Slot:
        return Slot(values, role, f"{prefix}.{name}" if prefix else name, fused_out, layer)

    def biases(*names: str) -> Iterator[Slot]:
        for name in names:
            yield slot(module.get_parameter(f"{name}.bias"), Role.BIAS, f"{name}.bias")

    if isinstance(module, SelfAttention):
        d = module.out_proj.weight.shape[0]
        for role, part in zip(_QKV, module.qkv_proj.weight.split(d), strict=True):
            yield slot(part, role, f"qkv_proj.weight[{role.value}]", 3 * d)
        yield slot(module.out_proj.weight, Role.ATTENTION_OUT, "out_proj.weight")
        yield from biases("qkv_proj", "out_proj")
    elif isinstance(module, CrossAttention):
        d = module.out_proj.weight.shape[0]
        yield slot(module.q_proj.weight, Role.ATTENTION_QUERY, "q_proj.weight", 3 * d)
        for role, part in zip(_QKV[1:], module.kv_proj.weight.split(d), strict=True):
            yield slot(part, role, f"kv_proj.weight[{role.value}]", 3 * d)
        yield slot(module.out_proj.weight, Role.ATTENTION_OUT, "out_proj.weight")
        yield from biases("q_proj", "kv_proj", "out_proj")
    elif isinstance(module, FeedForward):
        yield slot(module.in_proj.weight, Role.FFN_IN, "in_proj.weight")
        yield slot(module.out_proj.weight, Role.FFN_OUT, "out_proj.weight")
        yield from biases("in_proj", "out_proj")
    elif isinstance(module, nn.LayerNorm):
        yield slot(module.weight, Role.NORM_GAIN, "weight")
        yield slot(module.bias, Role.NORM_BIAS, "bias")
    elif isinstance(module, nn.Embedding):
        yield slot(module.weight, Role.EMBEDDING, "weight")
    elif isinstance(module, LearnedPositions):
        yield slot(module.weight, Role.POSITION, "weight")
    elif isinstance(module, OutputProjection):
        yield slot(module.weight, Role.OUTPUT, "weight")
    elif isinstance(module, Residual):
        for name in ("skip", "branch"):
            if (values := getattr(module, name)) is not None:
                yield slot(values, Role.WIRING, name)


_QKV = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
