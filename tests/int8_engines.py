"""The int8 translation engines that this CPU supports, and their arithmetic in plain operators on any CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ziggurat.model.fast import compiled, packed

ENGINES = [
    "arithmetic",
    *(["oneDNN"] if packed.available("int8") else []),
    *(["compiled"] if compiled.multiplies("int8") else []),
]


@contextmanager
def engine(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context in which the int8 engine uses this product of bytes; `arithmetic` stands in where the CPU lacks VNNI."""
    with monkeypatch.context() as patch:
        if name != "compiled":
            patch.setattr(compiled, "_library", None)
        if name == "arithmetic":
            there = packed.available
            patch.setattr(packed, "available", lambda precision: precision == "int8" or there(precision))
            patch.setattr(torch.ops.onednn, "qlinear_prepack", lambda weight, _: weight)
            patch.setattr(torch.ops.onednn, "qlinear_pointwise", _exact)
        yield


def _exact(x: Tensor, scale: float, centre: int, weight: Tensor, weight_scale: Tensor, *rest: Any) -> Tensor:
    """The product of bytes as oneDNN computes it on a CPU with VNNI."""
    return ((x.to(torch.int64) - centre) @ weight.to(torch.int64).t()).float() * weight_scale
