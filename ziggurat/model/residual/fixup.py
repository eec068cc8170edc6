"""Modules of Fixup (Zhang, Dauphin and Ma 2019): scalar shifts in place of biases, as the toolkit zero has them.

The multiplier of each branch is the residual kind `fixup` (ziggurat.model.residual.kinds).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ziggurat.model.linear import linear
from ziggurat.model.roles import Role, Slot

if TYPE_CHECKING:
    from ziggurat.model.low_rank import LowRank


class ShiftedLinear(nn.Module):
    """y = (x + shift) W^T, with one scalar [1], from 0, in place of a bias vector.

    Every linear map of the layers has one; zero leaves it out on attention's memory and output.

    Attributes:
        low_rank: as in ziggurat.model.linear.Linear.
    """

    low_rank: LowRank | None

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.shift = nn.Parameter(torch.zeros(1))
        self.bias: nn.Parameter | None = None
        self.register_module("low_rank", None)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., d_out] for `x` [..., d_in]."""
        shifted = x + self.shift
        y = linear(shifted, self.weight)
        return y if self.low_rank is None else self.low_rank(shifted, y)

    def part(self, x: Tensor, number: int, parts: int) -> Tensor:
        """Return part `number` of the `parts` equal ones of x W^T, [..., d_out / parts], without the shift."""
        y = linear(x, self.weight.chunk(parts)[number])
        return y if self.low_rank is None else self.low_rank.of_part(x, y, number)

    def slots(self) -> Iterator[Slot]:
        """Yield the role of the shift; the module that owns this map says that of the matrix."""
        yield Slot(self.shift, Role.WIRING, "shift")


class ShiftScale(nn.Module):
    """y = (x + shift) scale, two scalars from 0 and 1, at the end of a stack, where other kinds have a final norm.

    Args:
        scaled: whether there is a scale: after the encoder, not after the decoder.
    """

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        shifted = x + self.shift
        return shifted if self.scale is None else shifted * self.scale

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        return (Slot(values, Role.WIRING, name) for name, values in self.named_parameters(recurse=False))
