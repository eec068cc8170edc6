"""The hypotheses being extended, step by step, as all caches of a decoder see them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.nn.attention.mask import Mask

__all__ = ["BLOCK", "Live", "Moved"]

BLOCK = 32
"""Caches hold a multiple of so many positions."""


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

    Sentences come behind the others (`admit`) and leave as the search says (`keep`); there are `slots` rows for them
    from the start.

    Args:
        beam_size: K.
        slots: the most sentences at a time.

    Attributes:
        count: N.
        longest: the largest of `positions`.
        aligned: whether all sentences are at the same position.
        source: source positions S of the longest sentence when the last one came.
        first: all sentences take their first step, in which their beams are fed one and the same token: caches and
            decoder then work on one beam, and what they make of it holds for all.
    """

    def __init__(self, beam_size: int, slots: int) -> None:
        self.beam_size = beam_size
        self.slots = slots
        self.count = 0
        self.longest = 0
        self.aligned = True
        self.source = 0
        self.first = True
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

    def seen(self, entries: int) -> Mask | None:
        """Hide what is not of a hypothesis's past among the first `entries` of the caches.

        The bias is [N, 1, K, entries], for one beam in the first step of all. None: nothing is hidden.
        """
        if self.first:
            return None if entries == 1 else Mask(self._bias[: self.count, None, :1, :entries])
        if self.beam_size == 1 and self.aligned and entries == self.longest + 1:
            return None
        return Mask(self._bias[: self.count, None, :, :entries])

    @property
    def padding(self) -> Mask:
        """Hides padding of the memory; its bias is [N, 1, 1, S]."""
        return Mask(self._padding[: self.count, None, None, : self.source])

    def distances(self, entries: int) -> Tensor:
        """Return the position of each of the first `entries` of the caches less that of the sentence, [N, entries]."""
        positions = torch.arange(entries, device=self._positions.device) // self.beam_size
        return positions - self.positions[:, None]

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
            self._bias = like.new_full((self.slots, beams, BLOCK * beams), -math.inf)
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
        self.source = max(self._lengths)
        self._survey()
        return new

    def begin(self) -> None:
        """Open a step: each beam sees what it is about to be fed."""
        beams, at = self.beam_size, self.longest
        if (at + 1) * beams > self._bias.shape[2]:
            more = self._bias.new_full((self.slots, beams, BLOCK * beams), -math.inf)
            self._bias = torch.cat([self._bias, more], dim=2)
        if self.first:
            self._bias[: self.count, :, 0] = 0
        elif self.aligned:
            self._bias[: self.count, :, at * beams : (at + 1) * beams] = self._own
        else:
            entries = self._bias.unflatten(2, (-1, beams))
            entries[torch.arange(self.count, device=self._bias.device), :, self.positions] = self._own

    def end(self) -> None:
        """Close a step: every sentence is one position further."""
        self._positions[: self.count] += 1
        self._steps += 1
        self.longest += 1
        self.first = False

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
        self.first = self.longest == 0
