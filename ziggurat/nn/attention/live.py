"""The hypotheses being extended, step by step, as all caches of a decoder see them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.nn.attention.mask import Mask

__all__ = ["Live", "Moved"]

_BLOCK = 32
"""Positions that caches hold at first; then twice as many, and so on."""


class Moved(NamedTuple):
    """Rows of a batch that take the places of others: row `source[i]` goes to `target[i]`, [rows] each."""

    target: Tensor
    source: Tensor

    def within(self, buffer: Tensor) -> None:
        """Move rows of `buffer` [slots, ...]."""
        if self.target.numel():
            buffer[self.target] = buffer[self.source]


class Live:
    """N sentences of K beams each, every sentence at a position of its own.

    Keys and values of a sentence's beams stand side by side, position by position (entry t * K + b is what beam b was
    fed at position t), and stay where they are. When beams change places only `bias` is re-ordered: it hides from a
    hypothesis the entries that are not of its past. So no cache is copied, whatever the search does.

    All tensors are made once, for `slots` sentences, and grow with the positions in powers of two. Sentences come
    behind the others (`admit`) and leave as the search says (`keep`).

    Args:
        beam_size: K.
        slots: the most sentences at a time.

    Attributes:
        count: N.
        room: positions T that caches must hold.
        longest: the largest of `positions`.
        aligned: whether all sentences are at the same position.
        source: source positions S of the longest live sentence.
    """

    def __init__(self, beam_size: int, slots: int) -> None:
        self.beam_size = beam_size
        self.slots = slots
        self.count = 0
        self.room = _BLOCK
        self.longest = 0
        self.aligned = True
        self.source = 0
        self._steps = 0
        self._born: list[int] = []  # the step at which each sentence came: what the device need not be asked
        self._lengths: list[int] = []  # source positions of each sentence
        self._positions = torch.empty(0)
        self._bias = torch.empty(0)
        self._own = torch.empty(0)
        self._padding = torch.empty(0)

    @property
    def positions(self) -> Tensor:
        """Number of tokens that each sentence has been fed before this step, int64 [N]."""
        return self._positions[: self.count]

    @property
    def mask(self) -> Mask | None:
        """Hides what is not of a hypothesis's past: a bias [N, 1, K, (longest + 1) * K]. None: nothing is hidden."""
        if self.beam_size == 1 and self.aligned:
            return None
        return Mask(self._bias[: self.count, None, :, : (self.longest + 1) * self.beam_size])

    @property
    def padding(self) -> Mask:
        """Hides padding of the memory; its bias is [N, 1, 1, S]."""
        return Mask(self._padding[: self.count, None, None, : self.source])

    @property
    def distances(self) -> Tensor:
        """Position of every entry of the caches less that of the sentence, [N, (longest + 1) * K]."""
        entries = torch.arange((self.longest + 1) * self.beam_size, device=self._positions.device)
        return entries // self.beam_size - self.positions[:, None]

    def admit(self, mask: Tensor, like: Tensor) -> slice:
        """Take in n sentences with source `mask` [n, source] (True: real token); return their rows.

        `like` has the type and device of the decoder's activations. Raises ValueError when there are too few slots.
        """
        new = slice(self.count, self.count + len(mask))
        if new.stop > self.slots:
            raise ValueError(f"{new.stop} sentences, but only {self.slots} slots")
        if not self._positions.numel():
            beams = self.beam_size
            self._positions = torch.zeros(self.slots, dtype=torch.int64, device=like.device)
            self._bias = like.new_full((self.slots, beams, self.room * beams), -math.inf)
            self._own = like.new_full((beams, beams), -math.inf).fill_diagonal_(0)
            self._padding = like.new_full((self.slots, 0), -math.inf)
        length = mask.shape[1]
        if (missing := length - self._padding.shape[1]) > 0:
            self._padding = torch.cat([self._padding, like.new_full((self.slots, missing), -math.inf)], dim=1)
        self._positions[new] = 0
        self._bias[new] = -math.inf
        self._padding[new] = -math.inf
        self._padding[new, :length].masked_fill_(mask, 0)
        self._born += [self._steps] * len(mask)
        self._lengths += mask.sum(1).tolist()
        self._survey()
        return new

    def begin(self) -> None:
        """Open a step: each beam sees what it is about to be fed."""
        if self.longest >= self.room:
            self.room *= 2
            self._bias = grown(self._bias, 2, self.room * self.beam_size, -math.inf)
        beams, at = self.beam_size, self.longest
        if self.aligned:
            self._bias[: self.count, :, at * beams : (at + 1) * beams] = self._own
        else:
            entries = self._bias.unflatten(2, (self.room, beams))
            entries[torch.arange(self.count, device=self._bias.device), :, self.positions] = self._own

    def end(self) -> None:
        """Close a step: every sentence is one position further."""
        self._positions[: self.count] += 1
        self._steps += 1
        self.longest += 1

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        if self.beam_size > 1:
            seen = self._bias[: self.count, :, : self.longest * self.beam_size]
            seen.copy_(seen.gather(1, parents[..., None].expand(-1, -1, seen.shape[2])))

    def keep(self, sentences: Tensor) -> Moved:
        """Let row i be old row `sentences`[i], [new N]; return which rows that moves, for the caches."""
        sentences = sentences.cpu()
        target = (sentences != torch.arange(len(sentences))).nonzero()[:, 0]
        device = self._positions.device
        moved = Moved(target.to(device), sentences[target].to(device))
        for buffer in (self._positions, self._bias, self._padding):
            moved.within(buffer)
        order = sentences.tolist()
        self._born = [self._born[row] for row in order]
        self._lengths = [self._lengths[row] for row in order]
        self._survey()
        return moved

    def _survey(self) -> None:
        """Set what follows from who is live."""
        self.count = len(self._born)
        first = min(self._born, default=self._steps)
        self.longest = self._steps - first
        self.aligned = first == max(self._born, default=self._steps)
        self.source = max(self._lengths, default=0)


def grown(buffer: Tensor, dim: int, size: int, value: float = 0.0) -> Tensor:
    """Return a copy of `buffer` with dimension `dim` enlarged to `size`, new entries set to `value`."""
    shape = list(buffer.shape)
    shape[dim] = size
    larger = buffer.new_full(shape, value)
    larger.narrow(dim, 0, buffer.shape[dim]).copy_(buffer)
    return larger
