"""What a search keeps of its live sentences: tensors with one row for each, and where each is in the trellis.

Shapes: N live sentences, K beams, G groups, R finished hypotheses kept of each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.decoding.hypotheses import NEVER
from ziggurat.decoding.request import SearchSettings, Sentence
from ziggurat.decoding.trellis import Visit

__all__ = ["Live", "State", "holes_filled"]


class Live(NamedTuple):
    """A sentence in the search."""

    number: int
    """Its place in the input."""
    sentence: Sentence
    visit: Visit


class State(NamedTuple):
    """One row for each live sentence."""

    tokens: Tensor  # [N, K] last tokens
    total: Tensor  # [N, K] log-probabilities of the beams, float64
    score: Tensor  # [N, G, R] penalised scores of finished hypotheses, best first
    ticket: Tensor  # [N, G, R] where they ended: position * C + candidate
    best: Tensor  # [N] highest log-probability of a finished hypothesis
    ended: Tensor  # [N] hypotheses that have ended so far, also those that are not kept
    position: Tensor  # [N] tokens so far
    max_length: Tensor  # [N]
    min_length: Tensor  # [N]
    source_length: Tensor  # [N]

    @classmethod
    def entering(cls, sentences: Sequence[Sentence], settings: SearchSettings, groups: int) -> State:
        """Return the rows of sentences before their first step.

        All beams of a group start from one token: only the first is alive, or each hypothesis would appear K times.
        """
        count, beams = len(sentences), settings.beam_size
        total = torch.full((count, beams), NEVER, dtype=torch.float64)
        total[:, :: beams // groups] = 0.0
        kept = (count, groups, -(-settings.n_best // groups))
        limits = [(0, s.max_length, min(s.min_length, s.max_length), len(s.source)) for s in sentences]
        rows = (
            torch.full((count, beams), settings.bos),
            total,
            torch.full(kept, NEVER, dtype=torch.float64),
            torch.zeros(kept, dtype=torch.int64),
            torch.full((count,), NEVER, dtype=torch.float64),
            torch.zeros(count, dtype=torch.int64),
            *torch.tensor(limits, dtype=torch.int64).view(-1, 4).unbind(1),
        )
        return cls(*(t.to(settings.device) for t in rows))

    def joined(self, others: State) -> State:
        """Return these rows, followed by those of `others`."""
        return State(*(torch.cat(pair) for pair in zip(self, others, strict=True)))

    def rows(self, index: Tensor) -> State:
        """Keep the rows `index` [N']."""
        return State(*(t.index_select(0, index) for t in self))


def holes_filled(done: Sequence[bool]) -> list[int]:
    """Return the rows that stay when those that are `done` leave; rows from the end fill the holes."""
    stay = [row for row, is_done in enumerate(done) if not is_done]
    fill = (row for row in reversed(stay) if row >= len(stay))
    return [next(fill) if done[row] else row for row in range(len(stay))]
