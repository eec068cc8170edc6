"""What attention keeps between decoding steps."""

from __future__ import annotations

import torch
from torch import Tensor

from ziggurat.nn.attention.mask import Mask

__all__ = ["CrossAttentionCache", "SelfAttentionCache"]


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

    def keep(self, sentences: Tensor) -> None:
        """Keep only the rows `sentences` [new batch], in that order."""
        self.key = self.key.index_select(0, sentences)
        self.value = self.value.index_select(0, sentences)
        if self.mask is not None:
            self.mask = Mask(self.mask.bias.index_select(0, sentences))


class SelfAttentionCache:
    """Keys and values of the positions decoded so far, one row per hypothesis.

    The tensors grow by blocks of `block` positions, so that no step allocates, and a re-ordering copies at
    most one block more than is in use.
    """

    def __init__(self, block: int = 16) -> None:
        self.block = block
        self.length = 0
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add one position, [rows, heads, 1, d_head] each; return all so far, [rows, heads, length, d_head]."""
        if self.key is None or self.value is None:
            self.key, self.value = self._room(key), self._room(value)
        elif self.length == self.key.shape[2]:
            self.key = torch.cat([self.key, self._room(key)], dim=2)
            self.value = torch.cat([self.value, self._room(value)], dim=2)
        self.key[:, :, self.length] = key[:, :, 0]
        self.value[:, :, self.length] = value[:, :, 0]
        self.length += 1
        return self.key[:, :, : self.length], self.value[:, :, : self.length]

    def keep(self, rows: Tensor) -> None:
        """Replace row i by the old row rows[i]; `rows` is [new rows]."""
        if self.key is not None and self.value is not None:
            self.key = self.key.index_select(0, rows)
            self.value = self.value.index_select(0, rows)

    def _room(self, like: Tensor) -> Tensor:
        rows, heads, _, d_head = like.shape
        return like.new_empty(rows, heads, self.block, d_head)
