"""What attention keeps between decoding steps."""

from __future__ import annotations

import torch
from torch import Tensor

from ziggurat.nn.attention.live import Live, Moved, grown
from ziggurat.nn.attention.mask import Mask

__all__ = ["CrossAttentionCache", "LiveMemory", "SelfAttentionCache"]


class CrossAttentionCache:
    """Keys and values of the memory, one row per sentence, shared by its beams.

    Args:
        key: [batch, heads, source, d_head].
        value: the same shape.
        mask: hides padding; its bias is [batch, 1, 1, source]. None when no sentence is padded.
        keep_weights: leave the attention weights of each use in `weights` [batch, queries, source].
    """

    def __init__(self, key: Tensor, value: Tensor, mask: Mask | None, keep_weights: bool = False) -> None:
        self.key = key
        self.value = value
        self.mask = mask
        self.keep_weights = keep_weights
        self.weights: Tensor | None = None


class LiveMemory(CrossAttentionCache):
    """Keys and values of the memory of the live sentences, which come and go.

    Args:
        live: the hypotheses.
        keep_weights: as above.
    """

    def __init__(self, live: Live, keep_weights: bool = False) -> None:
        super().__init__(torch.empty(0), torch.empty(0), None, keep_weights)
        self.live = live
        self._buffers: list[Tensor] = []

    def admit(self, memory: CrossAttentionCache, rows: slice) -> None:
        """Take in the projected memory of new sentences, which have `rows` among the live ones."""
        new = (memory.key, memory.value)
        if not self._buffers:
            self._buffers = [part.new_zeros(self.live.slots, *part.shape[1:]) for part in new]
        length = memory.key.shape[2]
        if length > self._buffers[0].shape[2]:
            self._buffers = [grown(buffer, 2, length) for buffer in self._buffers]
        for buffer, part in zip(self._buffers, new, strict=True):
            buffer[rows, :, :length] = part
        self._refresh()

    def keep(self, moved: Moved) -> None:
        """Move rows."""
        for buffer in self._buffers:
            moved.within(buffer)
        if self.live.count:
            self._refresh()

    def _refresh(self) -> None:
        self.key, self.value = (buffer[: self.live.count, :, : self.live.source] for buffer in self._buffers)
        self.mask = self.live.padding


class SelfAttentionCache:
    """Keys and values of what the live hypotheses were fed; ziggurat.nn.attention.live.Live has the order of entries.

    Args:
        live: the hypotheses.
    """

    def __init__(self, live: Live) -> None:
        self.live = live
        self._buffers: list[Tensor] = []  # [slots, heads, T * K, d_head] each

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add one position, [N, heads, K, d_head] each; return all so far, [N, heads, (longest + 1) * K, d_head]."""
        live, beams, new = self.live, self.live.beam_size, (key, value)
        if not self._buffers:
            # Zeros, since what is hidden has weight 0, and 0 times NaN is NaN.
            shape = (live.slots, key.shape[1], live.room * beams, key.shape[3])
            self._buffers = [part.new_zeros(shape) for part in new]
        elif self._buffers[0].shape[2] < live.room * beams:
            self._buffers = [grown(buffer, 2, live.room * beams) for buffer in self._buffers]
        at, rows = live.longest, torch.arange(live.count, device=key.device)
        for buffer, part in zip(self._buffers, new, strict=True):
            if live.aligned:
                buffer[: live.count, :, at * beams : (at + 1) * beams] = part
            else:
                buffer.unflatten(2, (live.room, beams))[rows, :, live.positions] = part
        keys, values = (buffer[: live.count, :, : (at + 1) * beams] for buffer in self._buffers)
        return keys, values

    def admit(self, rows: slice) -> None:
        """New sentences have `rows` among the live ones; what stood there is hidden from them."""

    def follow(self, parents: Tensor) -> None:
        """Beams change places; entries do not."""

    def keep(self, moved: Moved) -> None:
        """Move rows."""
        for buffer in self._buffers:
            moved.within(buffer)
