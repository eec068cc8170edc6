"""What a decoder keeps between steps, as tensors that go in and out of a graph; an LSTM's loop as one scan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from ziggurat.nn.attention import Mask
from ziggurat.nn.lstm import LstmCell, LstmLayer, LstmState, StepOrder

__all__ = ["GrowingCache", "RunningSum", "ScannedLstm"]


class GrowingCache:
    """Keys and values of the positions so far; position p of a sentence is at index p, whatever the other ones have.

    Args:
        parts: keys and values, [sentences, beams, heads, steps, d_head]; what lies at and behind a sentence's position
            is not read.
        positions: [sentences], of the newest token; at most `steps`.

    Attributes:
        parts: what it has now, rows for sentences and beams: [rows, heads, steps, d_head].
    """

    PARTS = 2

    def __init__(self, parts: Sequence[Tensor], positions: Tensor) -> None:
        self.parts = [part.flatten(0, 1) for part in parts]
        self.positions = _of_rows(positions, parts[0])

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Mask]:
        """Add one position, [rows, heads, 1, d_head] each; return all, [rows, heads, steps + 1, d_head], and a mask."""
        index = torch.arange(self.parts[0].shape[2] + 1, device=key.device)
        here = self.positions[:, None, None, None]
        self.parts = [
            torch.where(index[:, None] == here, new, torch.cat([old, torch.zeros_like(new)], dim=2))
            for old, new in zip(self.parts, (key, value), strict=True)
        ]
        bias = torch.zeros_like(index, dtype=key.dtype).masked_fill(index > here, -math.inf)
        return self.parts[0], self.parts[1], Mask(bias)


class RunningSum:
    """Sum of the positions so far.

    Args:
        parts: the sum, [sentences, beams, d_model].
        positions: [sentences], of the newest token.

    Attributes:
        parts: the sum now, [rows, d_model].
    """

    PARTS = 1

    def __init__(self, parts: Sequence[Tensor], positions: Tensor) -> None:
        self.parts = [parts[0].flatten(0, 1)]
        self.positions = _of_rows(positions, parts[0])

    def append(self, x: Tensor) -> Tensor:
        """Add one position, [rows, d_model]; return the mean of all so far."""
        self.parts = [self.parts[0] + x]
        return self.parts[0] / (self.positions + 1)[:, None]


def _of_rows(positions: Tensor, state: Tensor) -> Tensor:
    """Return the positions of hypotheses, [sentences * beams], for those of sentences."""
    return positions[:, None].expand(-1, state.shape[1]).flatten()


class ScannedLstm(nn.Module):
    """An LSTM layer over whole sequences, one scan over the steps of its own cells per direction.

    The hand-written recurrence that it stands for (ziggurat.nn.recurrence) writes into buffers, which no graph can.

    Args:
        layer: whose cells it has.
    """

    def __init__(self, layer: LstmLayer) -> None:
        super().__init__()
        self.cells = layer.cells

    def forward(self, x: Tensor, order: StepOrder) -> Tensor:
        """Return [batch, length, directions * width] for `x` [batch, length, inputs]."""
        batch, length, inputs = x.shape
        read = x.flatten(0, 1).index_select(0, order.reads.flatten()).view(len(self.cells), length, batch, inputs)
        outputs = [_over(cast(LstmCell, cell), steps) for cell, steps in zip(self.cells, read, strict=True)]
        states = torch.stack(outputs, dim=2).flatten(0, 2)
        return states.index_select(0, order.states).view(batch, length, -1)


def _over(cell: LstmCell, steps: Tensor) -> Tensor:
    """Return the outputs of a cell that reads `steps` [length, batch, inputs]: [length + 1, batch, width], 0 first."""

    def advance(state: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
        after = cell.step(x, LstmState(*state))
        return [after.output, after.cell], after.output.clone()  # a scan takes no tensor for two results

    zero = cell.start(steps.shape[1]).output
    _, outputs = scan(advance, [zero, zero.clone()], steps)
    return torch.cat([zero[None], outputs])
