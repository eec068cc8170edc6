"""Diverse beam search (Vijayakumar et al. 2016): groups of beams that avoid each other's tokens.

The groups choose one after the other. A token costs `strength` for every beam of an earlier group that takes it at
this step (Hamming diversity, their equation 4). The cost counts in the choice only: scores of hypotheses stay those
of the model, as in the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ziggurat.decoding.beam import best_extensions
from ziggurat.decoding.choice import Candidates, Choice
from ziggurat.decoding.hypotheses import NEVER

__all__ = ["DiverseChoice"]


class DiverseChoice(Choice):
    """`groups` groups of beam_size / groups beams each; every group is a beam search of its own otherwise."""

    def __init__(self, beam_size: int, groups: int, strength: float, eos: int) -> None:
        super().__init__(beam_size, 2 * beam_size, groups)
        self.strength = strength
        self.eos = eos

    def candidates(self, totals: Tensor, log_probabilities: Tensor, position: Tensor) -> Candidates:
        """Return the best extensions of each group by their scores less the cost, best first."""
        size = self.beam_size // self.groups
        taken = log_probabilities.new_zeros(len(totals), 1, log_probabilities.shape[2])
        found = []
        for group in range(self.groups):
            beams = slice(group * size, (group + 1) * size)
            scores = log_probabilities[:, beams]
            extended = best_extensions(totals[:, beams], scores - self.strength * taken, 2 * size)
            rows = torch.arange(len(totals), device=totals.device)[:, None]
            own = scores[rows, extended.origin, extended.token]
            total = totals[:, beams].gather(1, extended.origin) + own
            found.append(Candidates(extended.token, extended.origin + group * size, own, total))
            ended = (extended.token == self.eos) | (total == NEVER)
            chosen = ended.to(torch.int8).sort(dim=1, stable=True).indices[:, :size]
            one = (~ended).gather(1, chosen).to(taken.dtype)
            taken[:, 0].scatter_add_(1, extended.token.gather(1, chosen), one)
        return Candidates(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))

    def beams(self, going: Tensor, candidates: Candidates) -> Tensor:
        """Return those of each group that go on, in the order of the candidates: best first, the cost counted."""
        ended = (going == NEVER).to(torch.int8).unflatten(1, (self.groups, -1))
        size = self.beam_size // self.groups
        order = ended.sort(dim=2, stable=True).indices[..., :size]
        first = torch.arange(self.groups, device=going.device)[:, None] * ended.shape[2]
        return (order + first).flatten(1)
