"""Layer-normalised LSTM layers of one or two directions (RNMT+, Chen et al. 2018, section 3; Ba et al. 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.linear import linear
from ziggurat.model.recurrence import CELL_CLIP, EPSILON, recur
from ziggurat.model.roles import Role, Slot


class LstmState(NamedTuple):
    """The state of a cell between steps.

    Attributes:
        output: m [..., width].
        cell: c [..., width].
    """

    output: Tensor
    cell: Tensor


class StepOrder(NamedTuple):
    """The order in which each direction of a layer reads the tokens; the same for all layers over a batch.

    Attributes:
        reads: [directions, steps * batch], rows of x.flatten(0, 1).
        states: [batch * length * directions], rows of the states [steps + 1, batch, directions, width] flattened up
            to the last axis; state 0 is the zero state, state n the one after n real tokens.
    """

    reads: Tensor
    states: Tensor


def step_order(mask: Tensor, directions: int) -> StepOrder:
    """Return the order of steps for `mask` [batch, length], True at real tokens.

    The first direction reads the real tokens of each sentence from left to right, the second from right to left;
    padding comes last, where nothing depends on it. The output at a padded position is the state carried over to it, as
    in a recurrence that leaves its state alone at padded steps.
    """
    batch, length = mask.shape
    sentences, positions = (torch.arange(size, device=mask.device) for size in (batch, length))
    reads, states = [], []
    for direction in range(directions):
        seen = mask if direction == 0 else mask.flip(1)
        count = seen.cumsum(1)
        # Real tokens first, in order, then padding. By counting, not by a stable sort, which ONNX does not have.
        rank = torch.where(seen, count, count[:, -1:] + (~seen).cumsum(1)) - 1
        order = torch.empty_like(rank).scatter(1, rank, positions.expand_as(rank))
        if direction:
            order, count = length - 1 - order, count.flip(1)
        reads.append((order + sentences[:, None] * length).t().flatten())
        states.append((count * batch + sentences[:, None]) * directions + direction)
    return StepOrder(torch.stack(reads), torch.stack(states, dim=-1).flatten())


class LstmCell(nn.Module):
    """One direction of a layer: matrix and normalisation of its four gates.

    [g; i; f; o] = [x; m] W, each of the four slices normalised on its own: LN(slice) * gain + bias. Then
    c' = clip(sigmoid(f) c + sigmoid(i) tanh(g), -10, 10) and m' = sigmoid(o) c', without a tanh on the output and
    without an offset of the forget gate.

    Args:
        inputs: width of x.
        width: width of m and c.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4 * width, inputs + width))
        self.gain = nn.Parameter(torch.ones(4, width))
        self.bias = nn.Parameter(torch.zeros(4, width))

    def start(self, rows: int) -> LstmState:
        """Return the zero state of `rows` sequences."""
        zero = self.gain.new_zeros(rows, self.gain.shape[1])
        return LstmState(zero, zero)

    def step(self, x: Tensor, state: LstmState) -> LstmState:
        """Return the state after one more input `x` [..., inputs], given that before, [..., width]."""
        return self.advance(linear(torch.cat([x, state.output], dim=-1), self.weight), state)

    def advance(self, sums: Tensor, state: LstmState) -> LstmState:
        """Return the state after one more input, given [x; m] W, `sums` [..., 4 * width]."""
        gates = sums.to(self.gain.dtype).unflatten(-1, self.gain.shape)
        normed = F.layer_norm(gates, self.gain.shape[1:], eps=EPSILON)
        g, i, f, o = torch.addcmul(self.bias, normed, self.gain).unbind(-2)
        cell = (f.sigmoid() * state.cell + i.sigmoid() * g.tanh()).clamp(-CELL_CLIP, CELL_CLIP)
        return LstmState(o.sigmoid() * cell, cell)

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        yield Slot(self.weight, Role.LSTM, "weight")
        yield Slot(self.gain, Role.NORM_GAIN, "gain")
        yield Slot(self.bias, Role.NORM_BIAS, "bias")


class LstmLayer(nn.Module):
    """Cells that read the same sequence: one from left to right and, in a bidirectional layer, one from right to left.

    Args:
        inputs: width of the input.
        width: of each direction's output.
        directions: 1 or 2.
    """

    def __init__(self, inputs: int, width: int, directions: int = 1) -> None:
        super().__init__()
        self.cells = nn.ModuleList(LstmCell(inputs, width) for _ in range(directions))

    def forward(self, x: Tensor, order: StepOrder) -> Tensor:
        """Return [batch, length, directions * width] for `x` [batch, length, inputs]."""
        batch, length, _ = x.shape
        read = x.flatten(0, 1).index_select(0, order.reads.flatten()).unflatten(0, order.reads.shape)
        cells = [cast(LstmCell, cell) for cell in self.cells]
        outputs = recur(
            read,
            [cell.weight for cell in cells],
            torch.stack([cell.gain for cell in cells]),
            torch.stack([cell.bias for cell in cells]),
            batch,
        )
        return outputs.flatten(0, 2).index_select(0, order.states).view(batch, length, -1)

    def step(self, x: Tensor, state: LstmState) -> LstmState:
        """Return the first direction's state after one more input `x` [..., inputs]."""
        return self.first.step(x, state)

    @property
    def first(self) -> LstmCell:
        """The cell that reads from left to right."""
        return cast(LstmCell, self.cells[0])
