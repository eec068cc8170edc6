"""Collects the role of every parameter of a model from the modules that own them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from torch import nn

from ziggurat.nn.roles import Role, Slot

__all__ = ["Role", "Slot", "assign_roles"]


def assign_roles(root: nn.Module) -> list[Slot]:
    """Return the slots of every parameter under `root`; a shared parameter appears once, where it is first met.

    A module with parameters of its own says what they are by a method `slots`. Raises TypeError for a parameter
    that no module speaks for.
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
        raise TypeError(f"no role for {', '.join(unknown)}: give the module that owns it a method `slots`")
    return slots


def _slots_of(module: nn.Module) -> Iterable[Slot]:
    if callable(own := getattr(module, "slots", None)):
        return own()
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return _norm_slots(module)
    if isinstance(module, nn.Embedding):
        return [Slot(module.weight, Role.EMBEDDING, "weight")]
    return []


def _norm_slots(norm: nn.LayerNorm | nn.RMSNorm) -> Iterator[Slot]:
    yield Slot(norm.weight, Role.NORM_GAIN, "weight")
    if isinstance(bias := getattr(norm, "bias", None), nn.Parameter):
        yield Slot(bias, Role.NORM_BIAS, "bias")
