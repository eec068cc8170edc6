"""Decoder caches as tensors that enter and leave a graph, and an LSTM's loop as one scan.

The caches of ziggurat.model.attention write into buffers that stay between steps; a graph has no such buffers. The
classes here serve the same modules using only tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from ziggurat.model.attention.cache import CrossAttentionCache, KeyValueBlock, Mask
from ziggurat.model.attention.multihead import CrossAttention, FirstValues, OwnAttention, OwnCache
from ziggurat.model.lstm import LstmCell, LstmLayer, LstmState, StepOrder


class _Rows:
    """Hypotheses, one row each, at separate positions: the part of ziggurat.model.attention.LiveBeams that modules use.

    Args:
        positions: [rows].
        entries: number of positions that the keys cover, from 0.
        longest: an upper bound of the positions.
    """

    def __init__(self, positions: Tensor, entries: int, longest: int) -> None:
        self.positions = positions
        self.longest = longest
        self.away = torch.arange(entries, device=positions.device) - positions[:, None]

    def distances(self, entries: int) -> Tensor:
        """Return the position of every entry minus that of the row, [rows, entries]."""
        return self.away

    def seen(self, entries: int) -> Mask:
        """Hide entries beyond a row's position, which are empty or belong to longer rows."""
        bias = torch.zeros(self.away.shape, device=self.away.device)
        return Mask(bias.masked_fill(self.away > 0, -math.inf)[:, None, None])


class GrowingCache:
    """Keys and values of the positions so far; position p of a sentence is always at index p.

    Args:
        parts: keys and values, [N, K, heads, steps, d_head]; entries from a sentence's position on are not read.
        positions: [N], positions of the newest tokens; at most `steps`.
        longest: an upper bound of the positions.

    Attributes:
        parts: keys and values after `attend`, [N, K, heads, steps + 1, d_head].
    """

    PARTS = 2

    def __init__(self, parts: Sequence[Tensor], positions: Tensor, longest: int) -> None:
        self.parts = list(parts)
        beams, steps = parts[0].shape[1], parts[0].shape[3]
        self.live = _Rows(positions[:, None].expand(-1, beams).flatten(), steps + 1, longest)

    def attend(self, module: OwnAttention, x: Tensor, first: FirstValues) -> Tensor:
        """Let `module` attend from the newest position `x` [N, K, d_model], every hypothesis as a separate row."""
        rows = x.flatten(-3, -2).unsqueeze(-2)  # one row per hypothesis; a leading axis is for queries, keys, values
        return module.step(rows, cast(OwnCache, self), first).view(x.shape[-3:])

    def append(self, key: Tensor, value: Tensor) -> list[KeyValueBlock]:
        """Add one position, [rows, heads, 1, d_head] each; return one block [rows, heads, steps + 1, d_head]."""
        # Not at the end: a sentence that entered later has empty entries there, and continues at its own position.
        here = (self.live.away == 0)[:, None, :, None]
        rows = []
        for old, new in zip(self.parts, (key, value), strict=True):
            longer = torch.cat([old.flatten(0, 1), torch.zeros_like(new)], dim=2)
            rows.append(torch.where(here, new, longer))
        self.parts = [part.unflatten(0, self.parts[0].shape[:2]) for part in rows]
        return [KeyValueBlock(*rows)]


class RunningSum:
    """Sum of the inputs so far, for average attention.

    Args:
        parts: the sum, [N, K, d_model].
        positions: [N], positions of the newest tokens.
        longest: not used; present so that both caches are created in the same way.

    Attributes:
        parts: the sum after `attend`.
    """

    PARTS = 1

    def __init__(self, parts: Sequence[Tensor], positions: Tensor, longest: int) -> None:
        self.parts = list(parts)
        self.count = (positions + 1)[:, None, None]

    def attend(self, module: OwnAttention, x: Tensor, first: FirstValues) -> Tensor:
        """Let `module` attend from the newest position `x` [N, K, d_model]; it has no head values to share."""
        return module.step(x, cast(OwnCache, self))

    def append(self, x: Tensor) -> Tensor:
        """Add one position, [N, K, d_model]; return the mean of all so far."""
        self.parts = [self.parts[0] + x]
        return self.parts[0] / self.count


class RunningCell(RunningSum):
    """Cells of a simple recurrent unit, [N, K, d_model], in place of
    ziggurat.model.attention.variants.CellCache.
    """

    def append(self, x: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]
        """Let each cell become keep * cell + x, both [N, K, d_model]; return the cells."""
        self.parts = [self.parts[0] * keep + x]
        return self.parts[0]


class LayerCache:
    """Cache of one decoder layer in a step, in place of ziggurat.model.layers.DecoderLayerCache.

    Args:
        own: cache of the attention to the target.
        cross: cache of the attention to the memory.
        first: slot for the first layer's values of the newest position, if there is a value residual.
    """

    def __init__(self, own: GrowingCache | RunningSum, cross: CrossAttentionCache, first: FirstValues) -> None:
        self.own = own
        self.cross = cross
        self.first = first

    def attend(self, module: OwnAttention, x: Tensor) -> Tensor:
        """Let `module` attend from the newest position `x` [N, K, d_model]; the cache gains that position."""
        return self.own.attend(module, x, self.first)

    def remembered(self, module: CrossAttention) -> CrossAttentionCache:
        """Return the memory, which the encoder's graph has projected."""
        return self.cross


class RecurrentCache:
    """Cache of the RNMT+ decoder in a step, in place of ziggurat.model.rnmt.RnmtCache.

    Args:
        memory: the projected memory.
        context: result of the last attention, [N, K, width].
        states: LSTM states of all layers, each part [N, K, width].
    """

    def __init__(self, memory: CrossAttentionCache, context: Tensor, states: list[LstmState]) -> None:
        self.memory = memory
        self.context = context
        self.states = states

    @property
    def cross_attention(self) -> Tensor | None:
        """Attention to the memory, [N, K, source], if it is kept."""
        return self.memory.weights

    def update(self, context: Tensor, states: list[LstmState]) -> None:
        """Store the results of a step."""
        self.context, self.states = context, states


class ScannedLstm(nn.Module):
    """An LSTM layer over whole sequences, as one scan over the steps of a cell per direction.

    The hand-written recurrence that it replaces (ziggurat.model.lstm) writes into buffers, which a graph cannot.

    Args:
        layer: the layer whose cells are used.
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
        return [after.output, after.cell], after.output.clone()  # a scan refuses one tensor as two results

    zero = cell.start(steps.shape[1]).output
    _, outputs = scan(advance, [zero, zero.clone()], steps)
    return torch.cat([zero[None], outputs])
