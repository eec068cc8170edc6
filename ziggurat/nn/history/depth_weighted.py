"""Depth-weighted averages of layer outputs: DenseFormer (Pagliardini et al. 2024)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ziggurat.nn.history.base import Combining, Past, inherited
from ziggurat.nn.history.combination import Combination, start_row

__all__ = ["DepthWeighted"]


class DepthWeighted(Combination):
    """After every `period`-th layer i, Y_i = sum_j alpha_{i,j} y_j over the j <= i with j = i modulo `dilation`.

    Y_i is what layer i+1 reads, or the stack's output; after other layers Y_i = y_i. Nothing is normalised. At the
    start alpha_{i,i} = 1 and the rest is 0: the plain stack. Of the options, `learnable`, `dropout`, `groups`,
    `period` and `dilation` count.

    `weight` holds only what is read: the rows of layers `period`, 2 `period`, ... one after the other, each with its
    floor(i / dilation) + 1 sources, oldest first. Its shape is [sum of these], and [sum of these, groups] for several
    groups. It is None in a stack of fewer than `period` layers.
    """

    def __init__(self, combining: Combining) -> None:
        options = dataclasses.replace(combining, start="last", softmax=False, window=None, norm_at="none")
        sizes = _row_sizes(options, options.units)
        super().__init__(options, _start(options, sizes) if sizes else None, (), options.units)
        self.sizes = sizes
        self.units = options.units
        self.kept_every = math.gcd(options.period, options.dilation)  # no combination reads any other output

    def start(self, x: Tensor) -> Past:
        """Return the state before the first layer; `x` is y_0 [batch, length, d_model]."""
        return Past((x,), x, 0)

    def push(self, past: Past, y: Tensor) -> Past:
        """Return the state after one more layer, whose output is `y`."""
        depth = past.depth + 1
        return Past(past.kept if depth % self.kept_every else (*past.kept, y), y, depth)

    def forward(self, past: Past) -> Tensor:
        """Return Y_i for i = `past.depth`, [batch, length, d_model]."""
        i, period, dilation = past.depth, self.options.period, self.options.dilation
        if i == 0 or i % period:
            return past.latest
        terms = past.kept[i % dilation // self.kept_every :: dilation // self.kept_every]
        return self._mixed(self.weight.split(self.sizes)[i // period - 1], terms, i)

    def table(self) -> Tensor | None:
        """See History; None where the stack is too shallow to combine anything."""
        if not self.sizes:
            return None
        period, dilation = self.options.period, self.options.dilation
        table = self._plain_table(self.units)
        for number, parameters in enumerate(self.weight.split(self.sizes), start=1):
            table[number * period] = torch.nan
            table[number * period, number * period % dilation : number * period + 1 : dilation] = self._weights(
                parameters
            )
        return table

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Return what its parameters start as after growth: rows that were trained stay, new ones change nothing."""
        if not isinstance(self.weight, nn.Parameter):
            return {}
        grown = _start(self.options, self.sizes).to(self.weight)
        if before := sum(_row_sizes(self.options, old_units)):
            grown[:before] = inherited(old, "weight", (before, *grown.shape[1:]))
        return {"weight": grown}


def _row_sizes(combining: Combining, units: int) -> list[int]:
    """Return how many outputs each combination of a stack of `units` layers reads."""
    return [i // combining.dilation + 1 for i in range(combining.period, units + 1, combining.period)]


def _start(combining: Combining, sizes: list[int]) -> Tensor:
    """Return the initial weights of rows of these sizes."""
    return torch.cat([start_row(combining, size) for size in sizes])
