"""Layers as steps of Runge-Kutta methods: the ODE Transformer (Li et al. 2022, arXiv 2203.09176)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ziggurat.config.kinds import Solver
from ziggurat.model.linear import Linear
from ziggurat.model.roles import Role, Roles

View = TypeVar("View")


class RungeKutta(nn.Module):
    """One step y' of a Runge-Kutta method from y by the function F of a layer, which is computed two or four times.

    With F1 = F(y):

        rk2        F2 = F(y + F1);  y' = y + (F1 + F2) / 2
        rk2_gated  F2 = F(y + F1);  y' = y + g F1 + (1 - g) F2,  g = sigmoid(w [F1; F2] + b), one number per position
        rk4        F2 = F(y + F1 / 2), F3 = F(y + F2 / 2), F4 = F(y + F3);  y' = y + (F1 + 2 F2 + 2 F3 + F4) / 6

    As in the authors' code, F is the whole layer including its residual connections, so y enters y' twice (the norms
    around the layers absorb its scale), and all layers share w and b. If F were the layer minus its input, Euler's
    method would be the plain stack; the paper's definition of F was not available. Their decoder uses first-order
    layers, as it does here. They train it with `history: dlcl`.

    Attributes:
        gate: makes w [F1; F2] + b; None except for `rk2_gated`.
    """

    roles: ClassVar[Roles] = {"gate": Role.GATE}

    def __init__(self, kind: Solver, d_model: int) -> None:
        super().__init__()
        self.fourth = kind == "rk4"
        self.gate = Linear(2 * d_model, 1) if kind == "rk2_gated" else None

    def forward(self, layer: Callable[[Tensor, View, None], Tensor], y: Tensor, view: View) -> Tensor:
        """Return the stream after `layer`, in the shape of `y` [..., d_model], the stream before it.

        `view` is everything the layer sees besides the stream.
        """
        first = layer(y, view, None)
        if self.fourth:
            second = layer(y + first / 2, view, None)
            third = layer(y + second / 2, view, None)
            fourth = layer(y + third, view, None)
            return y + (first + 2 * second + 2 * third + fourth) / 6
        second = layer(y + first, view, None)
        if self.gate is None:
            return y + (first + second) / 2
        share = torch.sigmoid(self.gate(torch.cat([first, second], dim=-1)))
        return y + share * first + (1 - share) * second


def solver(kind: Solver, d_model: int) -> RungeKutta | None:
    """Return the solver of a stack; None: each layer is computed once, and its output is the stream."""
    return None if kind == "euler" else RungeKutta(kind, d_model)
