"""Tiny stacks for tests of histories, and the formulas written out (Wang et al. 2019, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ziggurat.model.history.base import History, HistoryOptions

Layer = Callable[[Tensor], Tensor]
D = 6


class Tripled(nn.Module):
    """A stand-in for dropout that shows where it acts."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


def combining(units: int = 4, **options: Any) -> HistoryOptions:
    return HistoryOptions(units, D, **{"norm": partial(nn.LayerNorm, D), "dropout": nn.Identity, **options})


def stirred(history: nn.Module, seed: int = 0) -> Any:
    """Return the history in fp64 with every parameter and buffer moved away from its initial value."""
    generator = torch.Generator().manual_seed(seed)
    history.double()
    with torch.no_grad():
        for values in history.state_dict().values():
            values.add_(0.5 * torch.randn(values.shape, generator=generator, dtype=torch.float64))
    return history


def stream(seed: int = 1) -> Tensor:
    return torch.randn(2, 3, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layers(count: int) -> list[Layer]:
    """Return layers with their own residual connections: x + tanh(x A)."""
    generator = torch.Generator().manual_seed(2)
    matrices = [torch.randn(D, D, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [partial(lambda matrix, x: x + torch.tanh(x @ matrix), matrix) for matrix in matrices]


def run(history: History, stack: Sequence[Layer], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return what each layer reads, and the stack's output."""
    past, read = history.start(x), []
    for layer in stack:
        read.append(history(past))
        past = history.push(past, layer(read[-1]))
    return read, history.output(past)


def plain(stack: Sequence[Layer], x: Tensor) -> Tensor:
    for layer in stack:
        x = layer(x)
    return x


def normed(x: Tensor, gain: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    """LN(x) = g (x - mean) / sqrt(variance + epsilon) + b, position by position."""
    positions = []
    for vector in x.reshape(-1, D):
        mean = sum(vector) / D
        variance = sum((value - mean) ** 2 for value in vector) / D
        positions.append(gain * (vector - mean) / (variance + epsilon) ** 0.5 + bias)
    return torch.stack(positions).reshape(x.shape)


def weighted(weights: Sequence[Tensor], terms: Sequence[Tensor], *, softmax: bool = False) -> Tensor:
    """sum_k w_k y_k channel by channel; each w_k is one number, or one for each group of neighbouring channels."""
    rows = torch.stack([w.reshape(-1) for w in weights])
    if softmax:
        rows = rows.exp() / sum(row.exp() for row in rows)
    groups = rows.shape[1]
    channels = []
    for c in range(D):
        channels.append(sum(row[c * groups // D] * term[..., c] for row, term in zip(rows, terms, strict=True)))
    return torch.stack(channels, -1)


def norm_of(history: Any, k: int, x: Tensor) -> Tensor:
    """LN_k(x), or x if there is no LN_k, from the parameters alone."""
    parameters = dict(history.named_parameters())
    if f"norms.{k}.weight" not in parameters:
        return x
    return normed(x, parameters[f"norms.{k}.weight"], parameters[f"norms.{k}.bias"])
