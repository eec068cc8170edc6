"""Distributions that initial values are drawn from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

__all__ = ["AsBuilt", "Constant", "Draw", "Normal", "Uniform"]


@dataclass(frozen=True)
class Draw(ABC):
    """What a scheme says of one parameter; `size` is what a factor of its values multiplies."""

    size: float

    def scaled(self, factor: float) -> Self:
        """Return the distribution of `factor` times a value."""
        return replace(self, size=self.size * factor)

    @abstractmethod
    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Draw `values`, of any shape, in place."""


class Uniform(Draw):
    """U(-size, size)."""

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Draw `values`, of any shape, in place."""
        values.uniform_(-self.size, self.size, generator=generator)


class Normal(Draw):
    """N(0, size^2)."""

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Draw `values`, of any shape, in place."""
        values.normal_(0.0, self.size, generator=generator)


class Constant(Draw):
    """The number `size`."""

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Fill `values`, of any shape, in place; nothing is drawn."""
        values.fill_(self.size)


class AsBuilt(Draw):
    """What the module that owns the parameter has put there; schemes do not scale it."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def scaled(self, factor: float) -> Self:
        """Return itself."""
        return self

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Leave `values` as they are; nothing is drawn."""
