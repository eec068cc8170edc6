"""Rotary positions: queries and keys are rotated by angles that grow with their positions (Su et al. 2021, 3.2.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _turns(length: int, d_head: int) -> Tensor:
    """Return [2, length, d_head / 2] in fp64: cosine and sine of position * 10000^(-2i / d_head)."""
    rates = 10000.0 ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.cos(), angles.sin()])


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return `x` [..., d_head] rotated by the angles of these cosines and sines, [..., d_head / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)


class Rotary(nn.Module):
    """Rotation of pair i of a head's channels, as a point of the plane, by position * 10000^(-2i / d_head).

    The product of a rotated query and a rotated key depends on their distance alone. Pair i is made of the channels
    i and i + d_head / 2. The paper pairs neighbours: the same with the rows of the query and key maps permuted.
    The table grows for longer inputs; nothing is saved with the model.

    Args:
        d_head: width of a head; even.
        length: initial size of the table. Growing costs a compiled layer a new graph, so it should be rare.
    """

    table: Tensor

    def __init__(self, d_head: int, length: int = 1024) -> None:
        super().__init__()
        self.d_head = d_head
        self.register_buffer("table", _turns(length, d_head).float(), persistent=False)

    def forward(self, x: Tensor, start: int) -> Tensor:
        """Return `x` [batch, heads, length, d_head] rotated; its positions are start, start + 1, ..."""
        end = start + x.shape[2]
        self._reach(end)
        return _turned(x, self.table[0, start:end], self.table[1, start:end])

    def at(self, x: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Return `x` [N, heads, K, d_head] rotated; row i is at positions[i], [N], none of them beyond `longest`."""
        self._reach(longest + 1)
        return _turned(x, self.table[0, positions, None, None], self.table[1, positions, None, None])

    def _reach(self, end: int) -> None:
        """Make the table long enough for the positions before `end`."""
        if end > self.table.shape[1]:
            # Doubled, so that growth stays rare. Not an inference tensor, though decoding may make it: training reads
            # the same table, and autograd takes no inference tensors.
            with torch.inference_mode(False):
                self.table = _turns(max(end, 2 * self.table.shape[1]), self.d_head).to(self.table)

    def _apply(self, fn: object, recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # The angles of late positions need fp32 at least. Recomputed, since converting would keep what was rounded off.
        dtype = torch.promote_types(self.table.dtype, torch.float32)
        if self.table.dtype != torch.float32:
            self.table = _turns(self.table.shape[1], self.d_head).to(self.table.device, dtype)
        return self
