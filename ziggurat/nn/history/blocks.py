"""Sparse connections: combinations across blocks of layers (Li et al. 2020)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ziggurat.nn.history.base import Combining, Past
from ziggurat.nn.history.dlcl import Dlcl

__all__ = ["Blocks"]


class Blocks(Dlcl):
    """Dlcl over y_0 and the outputs of blocks of `period` layers; inside a block each layer reads the one below.

    Layers left over at the top make a last, shorter block. W is [blocks+1, blocks+1], and there is one norm per block.
    With `period` 1 it is Dlcl. With one block, `start: last` and no norms it is the plain stack.
    """

    def __init__(self, combining: Combining) -> None:
        super().__init__(dataclasses.replace(combining, units=_blocks(combining.units, combining.period)))
        self.layers = combining.units

    def push(self, past: Past, y: Tensor) -> Past:
        """Return the state after one more layer, whose output is `y`."""
        depth = past.depth + 1
        kept = self._joined(past.kept, self._rows(depth) - 1, y) if self._ends_block(depth) else past.kept
        return Past(kept, y, depth)

    def forward(self, past: Past) -> Tensor:
        """Return the combination at the end of a block, or else the latest output, [batch, length, d_model]."""
        if not self._ends_block(past.depth):
            return past.latest
        return self._combined(self._rows(past.depth) - 1, past.kept)

    def table(self) -> Tensor:
        """See History; inside a block each layer reads the one below."""
        blocks, table = super().table(), self._plain_table(self.layers)
        ends = [depth for depth in range(self.layers + 1) if self._ends_block(depth)]
        table[ends] = torch.nan
        for row, end in enumerate(ends):
            table[end, ends] = blocks[row]
        return table

    def _ends_block(self, depth: int) -> bool:
        """Whether y_depth is the output of a block; y_0 counts as one."""
        return depth % self.options.period == 0 or depth == self.layers

    def _rows(self, units: int) -> int:
        """Return the number of combinations in a stack of `units` layers: that of y_0, and one per block."""
        return _blocks(units, self.options.period) + 1


def _blocks(units: int, period: int) -> int:
    """Return the number of blocks of `units` layers, a shorter one included."""
    return -(-units // period)
