"""Fixup, as the toolkit zero has it: no normalisation, scalar shifts for biases, a multiplier for each branch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ziggurat.nn.linear import linear
from ziggurat.nn.residual.base import Material, Place, Residual
from ziggurat.nn.roles import Role, Slot

__all__ = ["ShiftScale", "ShiftedLinear", "fixup"]


class ShiftedLinear(nn.Module):
    """y = (x + shift) W^T, one scalar shift [1] from 0 for a bias; zero has none on attention's memory and output."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.shift = nn.Parameter(torch.zeros(1))
        self.bias: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., d_out] for `x` [..., d_in]."""
        return linear(x + self.shift, self.weight)

    def slots(self) -> Iterator[Slot]:
        """Yield the role of the shift; that of the matrix is for the owner to say."""
        yield Slot(self.shift, Role.WIRING, "shift")


class ShiftScale(nn.Module):
    """y = (x + shift) scale, scalars from 0 and 1, after the encoder; x + shift, unless `scaled`, after the decoder."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        shifted = x + self.shift
        return shifted if self.scale is None else shifted * self.scale

    def slots(self) -> Iterator[Slot]:
        """Yield the role of every parameter of its own."""
        return (Slot(values, Role.WIRING, name) for name, values in self.named_parameters(recurse=False))


def fixup(place: Place, material: Material) -> Residual:
    """y = x + m dropout(f(x)), m [1] from 1: Zhang, Dauphin and Ma 2019, section 3, rule 3."""
    return Residual(material.dropout(), branch=nn.Parameter(torch.ones(1)))
