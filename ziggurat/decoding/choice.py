"""How a search goes on from scores: which extensions are candidates, and which of these are the next beams.

Each strategy (ziggurat.decoding.beam, diverse, constrained, sample) is a `Choice`. The beams of a sentence form G
groups of equal size, each with candidates and finished hypotheses of its own: one group for an ordinary beam search,
one per sample when sampling.

Shapes: N live sentences, K beams, C candidates, G groups, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.decoding.request import Sentence

__all__ = ["Candidates", "Choice"]


class Candidates(NamedTuple):
    """C extensions of each of N sentences, group by group; the total of one that does not exist is -inf."""

    token: Tensor  # [N, C]
    origin: Tensor  # [N, C] the beam that it extends
    log_probability: Tensor  # [N, C] of the token
    total: Tensor  # [N, C] of the whole hypothesis, float64


class Choice(ABC):
    """A strategy of search.

    Args:
        beam_size: K.
        width: C, the most candidates that `candidates` returns.
        groups: G; divides both.
    """

    def __init__(self, beam_size: int, width: int, groups: int = 1) -> None:
        self.beam_size = beam_size
        self.width = width
        self.groups = groups

    @abstractmethod
    def candidates(self, totals: Tensor, log_probabilities: Tensor, position: Tensor) -> Candidates:
        """Return the extensions worth looking at, of beams with `totals` [N, K] at `position` [N].

        log_probabilities: [N, K, V] of the next tokens, -inf where the rules forbid one; may be overwritten.
        """

    def beams(self, going: Tensor, candidates: Candidates) -> Tensor:
        """Return the K candidates [N, K] that go on: the best of each group by `going` [N, C], -inf where it ended.

        Among equals the earlier candidate is the better one.
        """
        size = self.beam_size // self.groups
        if self.groups == 1:
            return going.sort(dim=1, descending=True, stable=True).indices[:, :size]
        grouped = going.unflatten(1, (self.groups, -1))
        best = grouped.sort(dim=2, descending=True, stable=True).indices[..., :size]
        first = torch.arange(self.groups, device=going.device)[:, None] * grouped.shape[2]
        return (best + first).flatten(1)

    def admit(self, sentences: Sequence[Sentence]) -> None:  # noqa: B027 - most strategies know nothing of single sentences
        """Sentences come, behind the live ones."""

    def keep(self, rows: Tensor) -> None:  # noqa: B027
        """Row i is now old row `rows`[i]."""
