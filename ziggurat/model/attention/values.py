"""Value residuals: attention above the first layer reads the first layer's values too (ResFormer, Zhou et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ziggurat.model.roles import Role, Slot

ValueResidualKind = Literal["half", "learned", "single"]


class FirstValues:
    """Where the first layer leaves its values for those above, once in each pass through a stack.

    Attributes:
        values: V_1 [batch, heads, length, d_head]; None before the first layer.
    """

    def __init__(self) -> None:
        self.values: Tensor | None = None


class ValueResidual(nn.Module):
    """The values V_n' that layer n attends to, from its projections V_n and those of the first layer.

    V_1' = V_1, and above it (Zhou et al. 2024 and the authors' code)

        half      V_n' = V_1 / 2 + V_n / 2
        learned   V_n' = a V_1 + b V_n, both numbers trained from 1/2
        single    V_n' = V_1: there is no value map above the first layer (SVFormer)

    Gradients flow into V_1 from every layer. Norms of values (`attention.value_norm`) come before, in each layer.

    Args:
        kind: one of these.
        first: the layer is the first of its stack.
    """

    shares: nn.Parameter | None

    def __init__(self, kind: ValueResidualKind, *, first: bool) -> None:
        super().__init__()
        self.kind = kind
        self.first = first
        learned = kind == "learned" and not first
        self.register_parameter("shares", nn.Parameter(torch.full((2,), 0.5)) if learned else None)

    @property
    def projects(self) -> bool:
        """True where the layer has values of its own."""
        return self.first or self.kind != "single"

    def forward(self, own: Sequence[Tensor], first: FirstValues) -> Tensor:
        """Return V_n' [batch, heads, length, d_head], `own` being V_n of that shape, or nothing where there is no V_n.

        The first layer leaves its values in `first`.
        """
        if self.first:
            (first.values,) = own
        assert first.values is not None, "no first layer has been called in this pass"
        if self.first or not own:
            return first.values
        if self.shares is None:
            return torch.lerp(first.values, own[0], 0.5)
        of_first, of_own = self.shares.unbind()
        return of_first * first.values + of_own * own[0]

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        if self.shares is not None:
            yield Slot(self.shares, Role.WIRING, "shares")


def attended_values(residual: ValueResidual | None, own: Sequence[Tensor], first: FirstValues | None) -> Tensor:
    """Return what a layer attends to: its `own` values, or what its value residual, if any, makes of them."""
    if residual is None:
        return own[0]
    assert first is not None, "attention with a value residual is called within a stack"
    joined: Tensor = residual(own, first)
    return joined
