"""Distributions that initial values are drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AsBuilt", "Constant", "Draw", "Normal", "Uniform"]


@dataclass(frozen=True)
class Uniform:
    """U(-bound, bound)."""

    bound: float

    def scaled(self, factor: float) -> Uniform:
        """Return the distribution of `factor` times a value."""
        return Uniform(self.bound * factor)

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Draw `values`, of any shape, in place."""
        values.uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True)
class Normal:
    """N(0, std^2)."""

    std: float

    def scaled(self, factor: float) -> Normal:
        """Return the distribution of `factor` times a value."""
        return Normal(self.std * factor)

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Draw `values`, of any shape, in place."""
        values.normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class Constant:
    """One number."""

    value: float

    def scaled(self, factor: float) -> Constant:
        """Return `factor` times the number."""
        return Constant(self.value * factor)

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Fill `values`, of any shape, in place; nothing is drawn."""
        values.fill_(self.value)


@dataclass(frozen=True)
class AsBuilt:
    """What the module that owns the parameter has put there."""

    def scaled(self, factor: float) -> AsBuilt:
        """Return itself: schemes do not touch such values."""
        return self

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Leave `values` as they are; nothing is drawn."""


Draw = Uniform | Normal | Constant | AsBuilt
"""What a scheme says of one parameter."""
