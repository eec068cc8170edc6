"""The live hypotheses of a search: the positions and masks that all caches of a decoder share."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.model.attention.mask import Mask

BLOCK = 32
"""Positions by which caches and masks grow."""


class RowMoves(NamedTuple):
    """Rows of a batch that move because others have left: row `source[i]` goes to `target[i]`, [rows] each."""

    target: Tensor
    source: Tensor

    def within(self, buffer: Tensor) -> None:
        """Move rows of `buffer` [slots, ...]."""
        if self.target.numel():
            buffer[self.target] = buffer[self.source]


class LiveBeams:
    """N sentences of K beams each; sentences may be at different positions.

    In the caches, keys and values of a sentence's beams stand side by side, position by position (entry t * K + b is
    of the token that beam b was fed at position t), and never move. When beams change places only the bias of `seen` is
    re-ordered: it hides from each hypothesis the entries of others. So no cache is copied, whatever the search does.

    New sentences enter behind the others (`admit`); the search says which stay (`keep`). Caches have memory for `room`
    of them, not for all slots: these are as many as the shortest sentences need, and few long ones are live at a time.

    Args:
        beam_size: K.
        slots: the largest number of sentences at a time.

    Attributes:
        count: N.
        room: the number of sentences that the caches have memory for.
        longest: the largest of `positions`.
        aligned: whether all sentences are at the same position.
        source: source positions S of the longest sentence at the latest `admit`.
        first: all sentences take their first step. All beams of a sentence start from the same token, so that step
            runs one beam, and its result holds for the others.
    """

    def __init__(self, beam_size: int, slots: int) -> None:
        self.beam_size = beam_size
        self.slots = slots
        self.count = 0
        self.room = 0
        self.longest = 0
        self.aligned = True
        self.source = 0
        self.first = True
        self._steps = 0
        # For each sentence the step at which it came and its source positions: kept on the host, where asking the
        # device would wait for it.
        self._born: list[int] = []
        self._lengths: list[int] = []
        self._newest: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        self._positions = torch.empty(0)
        self._bias = torch.empty(0)
        self._own = torch.empty(0)
        self._padding = torch.empty(0)

    @property
    def positions(self) -> Tensor:
        """Number of tokens that each sentence has been fed before this step, int64 [N]."""
        return self._positions[: self.count]

    def seen(self, entries: int) -> Mask | None:
        """Return the mask that hides from each hypothesis the entries of others, for the first `entries` of the caches.

        The bias is [N, 1, K, entries], with K = 1 in a first step. None: nothing is hidden.
        """
        if self.first:
            return None if entries == 1 else Mask(self._bias[: self.count, None, :1, :entries])
        if self.beam_size == 1 and self.aligned and entries == self.longest + 1:
            return None
        return Mask(self._bias[: self.count, None, :, :entries])

    @property
    def padding(self) -> Mask:
        """Mask that hides padding of the memory; its bias is [N, 1, 1, S]."""
        return Mask(self._padding[: self.count, None, None, : self.source])

    def distances(self, entries: int) -> Tensor:
        """Return the positions of the first `entries` of the caches less that of each sentence, [N, entries]."""
        positions = torch.arange(entries, device=self._positions.device) // self.beam_size
        return positions - self.positions[:, None]

    def newest(self, size: int) -> list[tuple[int, Tensor, Tensor]]:
        """Return where this step's positions are in blocks of `size`: (number of a block, rows, their places in it).

        Made once for all layers, of what the host knows: each layer would wait for the device to tell it.
        """
        if size not in self._newest:
            of_blocks: dict[int, list[tuple[int, int]]] = {}
            for row, born in enumerate(self._born):
                number, place = divmod(self._steps - born, size)
                of_blocks.setdefault(number, []).append((row, place))
            self._newest[size] = []
            for number, pairs in of_blocks.items():
                both = torch.tensor([*zip(*pairs, strict=True)]).to(self._positions.device, non_blocking=True)
                rows, places = both.unbind()
                self._newest[size].append((number, rows, places))
        return self._newest[size]

    def admit(self, mask: Tensor, like: Tensor) -> slice:
        """Add n sentences with source `mask` [n, source] (True: real token); return their rows.

        `like` has the type and device of the decoder's activations. Raises ValueError when there are too few slots.
        """
        new = slice(self.count, self.count + len(mask))
        if new.stop > self.slots:
            raise ValueError(f"{new.stop} sentences, but only {self.slots} slots")
        if new.stop > self.room:
            self.room = min(self.slots, max(new.stop, 2 * self.room))  # doubled, so that growth stays rare
        if not self._positions.numel():
            beams = self.beam_size
            self._positions = torch.zeros(self.slots, dtype=torch.int64, device=like.device)
            self._bias = like.new_full((self.slots, beams, BLOCK * beams), -math.inf)
            self._own = like.new_full((beams, beams), -math.inf).fill_diagonal_(0)
            self._padding = like.new_full((self.slots, 0), -math.inf)
        length = mask.shape[1]
        # Rows of eights: a fused kernel on a GPU takes no others, and each layer would copy them in each step.
        if (missing := length + -length % 8 - self._padding.shape[1]) > 0:
            self._padding = torch.cat([self._padding, like.new_full((self.slots, missing), -math.inf)], dim=1)
        self._positions[new] = 0
        self._bias[new] = -math.inf
        self._padding[new] = -math.inf
        self._padding[new, :length].masked_fill_(mask, 0)
        self._born += [self._steps] * len(mask)
        self._lengths += mask.sum(1).tolist()
        self.source = max(self._lengths)
        self._recount()
        return new

    def begin(self) -> None:
        """Begin a step: let each beam see the token that it is about to be fed."""
        self._newest.clear()
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
        """End a step: every sentence is one position further."""
        self._positions[: self.count] += 1
        self._steps += 1
        self.longest += 1
        self.first = False

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        if self.beam_size > 1:
            seen = self._bias[: self.count, :, : self.longest * self.beam_size]
            seen.copy_(seen.gather(1, parents[..., None].expand(-1, -1, seen.shape[2])))

    def keep(self, sentences: Tensor) -> RowMoves:
        """Let row i be the old row sentences[i], [new N] of them; return the moves that the caches must follow.

        `sentences` is on the CPU: to fetch it would wait for the device.
        """
        target = (sentences != torch.arange(len(sentences))).nonzero()[:, 0]
        device = self._positions.device
        moves = RowMoves(target.to(device), sentences[target].to(device))
        for buffer in (self._positions, self._bias, self._padding):
            moves.within(buffer)
        order = sentences.tolist()
        self._born = [self._born[row] for row in order]
        self._lengths = [self._lengths[row] for row in order]
        self._recount()
        return moves

    def _recount(self) -> None:
        """Set the attributes that follow from the sentences now in the batch."""
        self.count = len(self._born)
        first = min(self._born, default=self._steps)
        self.longest = self._steps - first
        self.aligned = first == max(self._born, default=self._steps)
        self.first = self.longest == 0
