"""Sampling: every beam draws its next token, independently of the others.

A random number is a function of the sentence's key, the sample and the position alone (the finaliser of SplitMix64,
Steele et al. 2014, over a counter), so results do not depend on which sentences share a batch or a process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ziggurat.decoding.choice import Candidates, Choice
from ziggurat.decoding.hypotheses import NEVER, best_tokens
from ziggurat.decoding.request import Sampling, Sentence

__all__ = ["SampleChoice", "restricted", "uniform"]

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


class SampleChoice(Choice):
    """`samples` independent samples of each sentence, each a group of one beam."""

    def __init__(self, samples: int, sampling: Sampling, device: torch.device | str) -> None:
        super().__init__(samples, samples, samples)
        self.sampling = sampling
        self.keys = torch.zeros(0, samples, dtype=torch.int64, device=device)

    def candidates(self, totals: Tensor, log_probabilities: Tensor, position: Tensor) -> Candidates:
        """Draw one extension of every beam.

        The token is where the sum of probabilities, in the order of ids, passes the random number.
        """
        draws = uniform(_mixed(self.keys + position[:, None] * _GOLDEN))
        sums = restricted(log_probabilities.double(), self.sampling).softmax(-1).cumsum(-1)
        token = torch.searchsorted(sums, draws[..., None] * sums[..., -1:], right=True)
        token = token.clamp(max=sums.shape[-1] - 1)  # of a beam that has no token left, whose total is -inf
        own = log_probabilities.gather(-1, token)[..., 0]
        origin = torch.arange(self.beam_size, device=token.device).expand(len(totals), -1)
        return Candidates(token[..., 0], origin, own, totals + own)

    def beams(self, going: Tensor, candidates: Candidates) -> Tensor:
        """Every sample goes on as itself."""
        return candidates.origin

    def admit(self, sentences: Sequence[Sentence]) -> None:
        """Take the sentences' keys."""
        signed = [(s.key & (1 << 64) - 1) - ((s.key >> 63 & 1) << 64) for s in sentences]
        keys = torch.tensor(signed, dtype=torch.int64, device=self.keys.device)[:, None]
        samples = torch.arange(1, self.beam_size + 1, device=keys.device)
        self.keys = torch.cat((self.keys, _mixed(keys + samples * _FIRST)))

    def keep(self, rows: Tensor) -> None:
        """Row i is now old row `rows`[i]."""
        self.keys = self.keys.index_select(0, rows)


def restricted(scores: Tensor, sampling: Sampling) -> Tensor:
    """Return scores [..., V], divided by the temperature, with -inf for the tokens that may not be drawn."""
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        values, ids = best_tokens(scores, sampling.top_k)
        scores = torch.full_like(scores, NEVER).scatter(-1, ids, values)
    if sampling.top_p < 1:
        ranked, ids = scores.sort(dim=-1, descending=True, stable=True)
        shares = ranked.softmax(-1)
        beyond = shares.cumsum(-1) - shares >= sampling.top_p  # those before it have reached the sum
        beyond[..., 0] = False
        scores = torch.full_like(scores, NEVER).scatter(-1, ids, ranked.masked_fill(beyond, NEVER))
    if sampling.epsilon:
        shares = scores.softmax(-1)
        likeliest = scores == scores.amax(-1, keepdim=True)
        scores = scores.masked_fill((shares < sampling.epsilon) & ~likeliest, NEVER)
    return scores


def uniform(bits: Tensor) -> Tensor:
    """Return numbers in [0, 1) of 40 bits each, float64; so few that a product with a sum stays below the sum."""
    return (bits >> 24 & (1 << 40) - 1).double() * 2.0**-40


def _mixed(bits: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of `bits`, all of them changed by each; int64 arithmetic wraps around."""
    bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * _FIRST
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * _SECOND
    return bits ^ (bits >> 31 & (1 << 33) - 1)
