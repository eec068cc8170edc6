"""Caches of attention between decoding steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.model.attention.live import BLOCK, LiveBeams, RowMoves
from ziggurat.model.attention.mask import Mask

_DENSE_BLOCK = 8
"""Positions in a block that is always read whole: a larger one is read in vain, smaller ones take more products."""


class KeptWeights:
    """Where an attention to the memory leaves the weights of its latest use, before dropout.

    Args:
        head: number of the head, from 0, whose weights are kept; None: the mean over all heads.

    Attributes:
        weights: [batch, queries, source]; None before the first use.
    """

    def __init__(self, head: int | None = None) -> None:
        self.head = head
        self.weights: Tensor | None = None

    def take(self, weights: Tensor) -> None:
        """Keep what is wanted of `weights` [batch, heads, queries, source]."""
        self.weights = weights.mean(dim=1) if self.head is None else weights[:, self.head]


class CrossAttentionCache:
    """Keys and values of the memory, one row per sentence, shared by its beams.

    Args:
        key: [batch, heads, source, d_head].
        value: the same shape.
        mask: hides padding; its bias is [batch, 1, 1, source]. None when no sentence is padded.
        kept: where to leave the attention weights; None: nowhere.
    """

    def __init__(self, key: Tensor, value: Tensor, mask: Mask | None, kept: KeptWeights | None = None) -> None:
        self.key = key
        self.value = value
        self.mask = mask
        self.kept = kept

    @property
    def weights(self) -> Tensor | None:
        """[batch, queries, source], the attention weights of the latest use, if they are kept."""
        return None if self.kept is None else self.kept.weights


class LiveMemory(CrossAttentionCache):
    """Keys and values of the memory of the live sentences, which enter and leave the batch.

    Args:
        live: the hypotheses.
        kept: as in CrossAttentionCache.
    """

    def __init__(self, live: LiveBeams, kept: KeptWeights | None = None) -> None:
        super().__init__(torch.empty(0), torch.empty(0), None, kept)
        self.live = live
        self._buffers: list[Tensor] = []

    def admit(self, memory: CrossAttentionCache, rows: slice) -> None:
        """Copy in the projected memory of new sentences, which have `rows` among the live ones."""
        new = (memory.key, memory.value)
        size = self.live.room, self.live.source
        if not self._buffers or (len(self._buffers[0]), self._buffers[0].shape[2]) != size:
            self._buffers = self._resized(memory.key)
        for buffer, part in zip(self._buffers, new, strict=True):
            buffer[rows, :, : part.shape[2]] = part[:, :, : buffer.shape[2]]
        self._refresh()

    def keep(self, moves: RowMoves) -> None:
        """Move rows."""
        for buffer in self._buffers:
            moves.within(buffer)
        self._refresh()

    def _resized(self, like: Tensor) -> list[Tensor]:
        """Return buffers exactly as wide as the longest source: matrix products are fastest on dense factors."""
        shape = (self.live.room, like.shape[1], self.live.source, like.shape[3])
        larger = [like.new_zeros(shape), like.new_zeros(shape)]
        for new, old in zip(larger, self._buffers, strict=False):
            rows, width = min(self.live.count, len(old)), min(new.shape[2], old.shape[2])
            new[:rows, :, :width] = old[:rows, :, :width]
        return larger

    def _refresh(self) -> None:
        self.key, self.value = (buffer[: self.live.count] for buffer in self._buffers)
        self.mask = self.live.padding


class Block(NamedTuple):
    """Keys and values of some positions of the live hypotheses, [N, heads, entries, d_head] each."""

    key: Tensor
    value: Tensor


class SelfAttentionCache:
    """Keys and values of the tokens that the live hypotheses were fed, in the order of LiveBeams.

    They lie in blocks of a fixed number of positions; when one is full another is added, so nothing is copied but where
    there are more sentences than ever before.

    Args:
        live: the hypotheses.
    """

    def __init__(self, live: LiveBeams) -> None:
        self.live = live
        self._blocks: list[Block] = []  # for `live.room` sentences

    def append(self, key: Tensor, value: Tensor) -> list[Block]:
        """Add one position, [N, heads, K, d_head] each (K = 1 in a first step); return the blocks up to it.

        The last block may end with entries of later positions, which `LiveBeams.seen` hides.
        """
        live, beams = self.live, self.live.beam_size
        # oneDNN copies factors that are not dense before it multiplies them in bf16, so these are read as whole blocks.
        whole = key.dtype == torch.bfloat16 and key.device.type == "cpu"
        size = _DENSE_BLOCK if whole else BLOCK
        number, place = divmod(live.longest, size)
        if number == len(self._blocks):
            # Not empty memory: hidden entries have weight 0, but 0 times a NaN found there is NaN.
            shape = (live.room, key.shape[1], size * beams, key.shape[3])
            self._blocks.append(Block(key.new_zeros(shape), value.new_zeros(shape)))
        begin, end = place * beams, place * beams + key.shape[2]
        if live.aligned:
            for buffer, part in zip(self._blocks[number], (key, value), strict=True):
                buffer[: live.count, :, begin:end] = part
        else:
            self._scatter(key, value, size)
        blocks = [Block(*(part[: live.count] for part in block)) for block in self._blocks[: number + 1]]
        if not whole:
            blocks[-1] = Block(*(part[:, :, :end] for part in blocks[-1]))
        return blocks

    def _scatter(self, key: Tensor, value: Tensor, size: int) -> None:
        """Write one position of sentences that are at different positions."""
        for number, rows, places in self.live.newest(size):
            for buffer, part in zip(self._blocks[number], (key, value), strict=True):
                buffer.unflatten(2, (size, self.live.beam_size))[rows, :, places] = part[rows]

    def admit(self, rows: slice) -> None:
        """Make room for new sentences; the entries of those that had `rows` before are hidden from them."""
        if not self._blocks:
            return
        live = self.live
        needed = 1 + live.longest // (self._blocks[0].key.shape[2] // live.beam_size)
        # The others were those of sentences that were further. Twice as many stay, since the longest comes and goes.
        del self._blocks[2 * needed :]
        if (missing := live.room - len(self._blocks[0].key)) > 0:
            self._blocks = [
                Block(*(torch.cat((part, part.new_zeros(missing, *part.shape[1:]))) for part in block))
                for block in self._blocks
            ]

    def follow(self, parents: Tensor) -> None:
        """Do nothing: when beams change places, their masks change, not the entries."""

    def keep(self, moves: RowMoves) -> None:
        """Move rows."""
        for block in self._blocks:
            for buffer in block:
                moves.within(buffer)


class StateCache:
    """One state of every live hypothesis, [slots, K, d_model], in at least fp32; it does not grow with the positions.

    Args:
        live: the hypotheses.
    """

    def __init__(self, live: LiveBeams) -> None:
        self.live = live
        self.state: Tensor | None = None

    def current(self, x: Tensor) -> Tensor:
        """Return the states of the live hypotheses, [N, K, d_model], to be changed in place; 0 before any position.

        `x` [N, K or 1, d_model] is the new position.
        """
        if self.state is None:
            # In a half type a growing sum would stand still, and a cell would not decay.
            dtype = torch.promote_types(x.dtype, torch.float32)
            self.state = x.new_zeros(self.live.slots, self.live.beam_size, x.shape[2], dtype=dtype)
        return self.state[: self.live.count]

    def admit(self, rows: slice) -> None:
        """Start new sentences, which have `rows` among the live ones, from 0."""
        if self.state is not None:
            self.state[rows] = 0.0

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        if self.state is not None and self.live.beam_size > 1:
            state = self.state[: self.live.count]
            state.copy_(state.gather(1, parents[..., None].expand_as(state)))

    def keep(self, moves: RowMoves) -> None:
        """Move rows."""
        if self.state is not None:
            moves.within(self.state)
