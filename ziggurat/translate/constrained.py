"""Lexically constrained beam search: the choice of beams where sentences must contain given phrases.

Shapes: N live sentences, K beams, C candidates, P phrases, L longest phrase, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ziggurat.translate.choice import BeamChoice, Candidates, Choice, DiverseChoice, SampleChoice, best_extensions
from ziggurat.translate.hypotheses import NEVER
from ziggurat.translate.request import SearchSettings, Sentence

_FEW = 8
"""Phrases of a sentence that is searched together with all others."""
_CELLS = 1 << 22
"""Most numbers in a tensor [N, C, P] of sentences with more phrases."""


class ConstrainedChoice(Choice):
    """Lexically constrained beam search (Post and Vilar 2018; Hu et al. 2019).

    Beams are spread over banks: a hypothesis is in the bank of the number of constraint tokens that it has. Candidates
    are the best extensions as in a plain beam search, the best extension of each beam, every token with which a beam
    would continue a phrase that it lacks, and the end of each beam that has all phrases. The next K beams are taken
    from the banks in turn, the fullest first, so at every step some hypothesis gets one constraint token further. Only
    a hypothesis that has all phrases may end.

    A phrase that is broken off starts again from its first token. Of phrases that begin with the same token the first
    is tried first, so an output that contains both only in another reading is not recognised as complete.

    A sentence without constraints is searched as by BeamChoice.

    Args:
        beam_size: K, at least 2.
        phrases: P, the most of any sentence of the search.
        longest: L, the most tokens of any phrase.
        eos: ends a hypothesis.
    """

    def __init__(self, beam_size: int, phrases: int, longest: int, eos: int, device: torch.device | str) -> None:
        super().__init__(beam_size, _width(beam_size, phrases))
        self.eos = eos
        self.phrases = torch.full((0, phrases, longest + 1), -1, dtype=torch.int64, device=device)  # -1 at their ends
        self.held = torch.zeros(0, beam_size, phrases, dtype=torch.int64, device=device)  # tokens of each, of each beam

    def admit(self, sentences: Sequence[Sentence]) -> None:
        """Take in the sentences' phrases; sentences with fewer get empty ones, which count as complete."""
        _, phrases, width = self.phrases.shape
        rows = [[list(phrase) for phrase in s.constraints] for s in sentences]
        ids = [[p + [-1] * (width - len(p)) for p in [*row, *[[]] * (phrases - len(row))]] for row in rows]
        new = torch.tensor(ids, dtype=torch.int64, device=self.phrases.device).view(-1, phrases, width)
        self.phrases = torch.cat((self.phrases, new))
        self.held = torch.cat((self.held, self.held.new_zeros(len(new), *self.held.shape[1:])))

    def keep(self, rows: Tensor) -> None:
        """Let row i be the old row `rows`[i]."""
        self.phrases = self.phrases.index_select(0, rows)
        self.held = self.held.index_select(0, rows)

    def candidates(self, totals: Tensor, log_probabilities: Tensor, position: Tensor) -> Candidates:
        """Return the best extensions, best first, and behind them those that the constraints ask for."""
        # C is 4K + KP: 2K best extensions, and per beam P tokens that continue a phrase, its best token and its end.
        beams = self.beam_size
        constrained = (self.phrases[..., 0] >= 0).any(1)[:, None]  # [N, 1]
        following = self._following()  # [N, K, P]
        complete = (following < 0).all(-1)
        ends = log_probabilities[..., self.eos]
        # A view, changed in place before anything is chosen: no beam may end without all its phrases.
        ends.masked_fill_(~complete, NEVER)
        best = best_extensions(totals, log_probabilities, 2 * beams)
        asked = torch.cat(
            (following, log_probabilities.argmax(-1, keepdim=True), torch.full_like(following[..., :1], self.eos)), 2
        )
        own = log_probabilities.gather(2, asked.clamp(min=0)).masked_fill(asked < 0, NEVER)
        origin = torch.arange(beams, device=asked.device)[:, None].expand_as(asked).flatten(1)
        total = (totals[..., None] + own).flatten(1).masked_fill(~constrained, NEVER)
        more = Candidates(asked.clamp(min=0).flatten(1), origin, own.flatten(1), total)
        every = Candidates(*(torch.cat(pair, 1) for pair in zip(best, more, strict=True)))
        # The same extension may be asked for twice, or be among the best: only the first counts.
        code = every.origin * log_probabilities.shape[2] + every.token
        twice = ((code[:, :, None] == code[:, None]) & (every.total > NEVER)[:, None]).tril(-1).any(2)
        return every._replace(total=every.total.masked_fill(twice, NEVER))

    def beams(self, going: Tensor, candidates: Candidates) -> Tensor:
        """Return the K candidates that go on: the best of each bank in turn, the fullest bank first."""
        held = self._extended(candidates)  # [N, C, P]
        bank = held.sum(2)
        # Stable sorts, from the least important key to the most important: total, bank, rank within the bank.
        order = going.sort(dim=1, descending=True, stable=True).indices
        order = order.gather(1, bank.gather(1, order).sort(dim=1, descending=True, stable=True).indices)
        banks, dead = bank.gather(1, order), going.gather(1, order) == NEVER
        same = (banks[:, :, None] == banks[:, None]) & ~dead[:, None]
        rank = same.tril(-1).sum(2) + dead * going.shape[1]
        chosen = order.gather(1, rank.sort(dim=1, stable=True).indices)[:, : self.beam_size]
        self.held = held.gather(1, chosen[..., None].expand(-1, -1, held.shape[2]))
        return chosen

    def _following(self) -> Tensor:
        """Return the token [N, K, P] with which each beam would continue each phrase; -1 where it has all of it."""
        phrases = self.phrases[:, None].expand(-1, self.beam_size, -1, -1)
        return phrases.gather(3, self.held[..., None])[..., 0]

    def _extended(self, candidates: Candidates) -> Tensor:
        """Return how many tokens of each phrase each candidate has, [N, C, P].

        A phrase under way continues or is lost. Where none continues, the first phrase that begins with the token
        starts. So a hypothesis is in the middle of at most one phrase, and no token counts for two.
        """
        index = candidates.origin[..., None].expand(-1, -1, self.held.shape[2])
        held, following = self.held.gather(1, index), self._following().gather(1, index)
        token = candidates.token[..., None]
        length = (self.phrases >= 0).sum(2)[:, None]
        under_way = (held > 0) & (held < length)
        goes_on = under_way & (following == token)
        starts = (self.phrases[:, None, :, 0] == token) & (held < length) & ~goes_on.any(2, keepdim=True)
        starts = starts & (starts.cumsum(2) == 1)
        held = torch.where(under_way & ~goes_on, 0, held)
        return torch.where(goes_on, held + 1, torch.where(starts, 1, held))


def _width(beam_size: int, phrases: int) -> int:
    return 4 * beam_size + beam_size * phrases


def searched_together(sentences: Sequence[Sentence], beam_size: int) -> list[list[int]]:
    """Return the numbers of the sentences of each search, in their order: those with many phrases are apart.

    In a search each sentence has room for as many phrases as any of them, in tensors that grow with the square of it.
    """
    few = [number for number, each in enumerate(sentences) if len(each.constraints) <= _FEW]
    many = [number for number, each in enumerate(sentences) if len(each.constraints) > _FEW]
    many.sort(key=lambda number: -len(sentences[number].constraints))
    groups = [few] if few else []
    while many:
        phrases = len(sentences[many[0]].constraints)
        count = max(1, _CELLS // (_width(beam_size, phrases) * phrases))
        groups.append(sorted(many[:count]))
        many = many[count:]
    return groups


def choice_of(sentences: Sequence[Sentence], settings: SearchSettings) -> Choice:
    """Return the strategy that the settings ask for."""
    if settings.sampling is not None:
        return SampleChoice(settings.beam_size, settings.sampling, settings.device)
    if settings.groups > 1:
        return DiverseChoice(settings.beam_size, settings.groups, settings.strength, settings.eos)
    if phrases := max((len(s.constraints) for s in sentences), default=0):
        longest = max(len(phrase) for s in sentences for phrase in s.constraints)
        return ConstrainedChoice(settings.beam_size, phrases, longest, settings.eos, settings.device)
    return BeamChoice(settings.beam_size)
