"""Choice of the next beams: plain beam search, diverse beams and sampling.

A `Choice` says which one-token extensions of the beams are candidates, and which candidates are the next beams. The
beams of a sentence form G groups of equal size, each with candidates and finished hypotheses of its own: one group for
a plain beam search, one group per sample when sampling. (Constraints: ziggurat.translate.constrained.)

Equal scores rank by age, then by the parent's rank, then by token id, on every device.

Shapes: N live sentences, K beams, C candidates, G groups, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.translate.hypotheses import NEVER, best_tokens
from ziggurat.translate.request import SamplingOptions, Sentence


class Candidates(NamedTuple):
    """C extensions of each of N sentences, group by group; one that does not exist has a total of -inf."""

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
        """Return the candidates among the extensions of beams with `totals` [N, K] at `position` [N].

        log_probabilities: [N, K, V] of the next tokens, -inf where the rules forbid one; may be overwritten.
        """

    def beams(self, going: Tensor, candidates: Candidates) -> Tensor:
        """Return the K candidates [N, K] that go on: the best of each group by `going` [N, C], -inf where it ended.

        Among equals the earlier candidate is the better one.
        """
        size = self.beam_size // self.groups
        if self.groups == 1:
            # Sorted stably, not by topk, which promises no order among equal totals.
            return going.sort(dim=1, descending=True, stable=True).indices[:, :size]
        grouped = going.unflatten(1, (self.groups, -1))
        best = grouped.sort(dim=2, descending=True, stable=True).indices[..., :size]
        first = torch.arange(self.groups, device=going.device)[:, None] * grouped.shape[2]
        return (best + first).flatten(1)

    def admit(self, sentences: Sequence[Sentence]) -> None:  # noqa: B027 - most strategies know nothing of single sentences
        """Take in new sentences, behind the live ones."""

    def keep(self, rows: Tensor) -> None:  # noqa: B027
        """Let row i be the old row `rows`[i]."""


class BeamChoice(Choice):
    """Plain beam search: of all one-token extensions of a sentence's K beams, the 2K best by log-probability.

    At most K of the 2K end (each beam has one end-of-sentence), so at least K are left to be the next beams. A single
    beam has one candidate: greedy search.
    """

    def __init__(self, beam_size: int) -> None:
        super().__init__(beam_size, 2 * beam_size if beam_size > 1 else 1)

    def candidates(self, totals: Tensor, log_probabilities: Tensor, position: Tensor) -> Candidates:
        """Return the 2K best extensions, best first; one, if K is 1."""
        return best_extensions(totals, log_probabilities, self.width)


def best_extensions(totals: Tensor, log_probabilities: Tensor, count: int) -> Candidates:
    """Return the `count` best extensions, best first, of beams with `totals` [N, K] by next tokens [N, K, V]."""
    # Any of the best of a sentence is among the best of its beam: so K times `count` totals are sorted instead of K
    # times V.
    values, ids = best_tokens(log_probabilities, min(count, log_probabilities.shape[-1]))
    if count == 1 and totals.shape[1] == 1:
        return Candidates(ids[:, 0], torch.zeros_like(ids[:, 0]), values[:, 0], totals + values[:, 0])
    extended, order = (totals[..., None] + values).flatten(1).sort(dim=1, descending=True, stable=True)
    order = order[:, :count]
    origin = order.div(ids.shape[-1], rounding_mode="floor")
    return Candidates(ids.flatten(1).gather(1, order), origin, values.flatten(1).gather(1, order), extended[:, :count])


class DiverseChoice(Choice):
    """Diverse beam search (Vijayakumar et al. 2016): groups of beams that avoid each other's tokens.

    The `groups` groups, of beam_size / groups beams each, choose one after the other. A token costs `strength` for
    every beam of an earlier group that takes it at this step (Hamming diversity, their equation 4). The cost counts in
    the choice only: scores of hypotheses stay those of the model, as in the authors' code.
    """

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
            # The cost steers the choice alone; totals are of the model's own scores.
            own = scores[rows, extended.origin, extended.token]
            total = totals[:, beams].gather(1, extended.origin) + own
            found.append(Candidates(extended.token, extended.origin + group * size, own, total))
            # The beams that the group will take: the best that do not end. A stable sort keeps the rest of the order.
            ended = (extended.token == self.eos) | (total == NEVER)
            chosen = ended.to(torch.int8).sort(dim=1, stable=True).indices[:, :size]
            one = (~ended).gather(1, chosen).to(taken.dtype)
            taken[:, 0].scatter_add_(1, extended.token.gather(1, chosen), one)
        return Candidates(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))

    def beams(self, going: Tensor, candidates: Candidates) -> Tensor:
        """Return the first candidates of each group that do not end: unlike `going`, their order counts the cost."""
        ended = (going == NEVER).to(torch.int8).unflatten(1, (self.groups, -1))
        size = self.beam_size // self.groups
        order = ended.sort(dim=2, stable=True).indices[..., :size]
        first = torch.arange(self.groups, device=going.device)[:, None] * ended.shape[2]
        return (order + first).flatten(1)


# SplitMix64's increment and its finaliser's two factors. PyTorch has no arithmetic on unsigned 64-bit integers; signed
# products wrap around to the same bits.
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


class SampleChoice(Choice):
    """Sampling: `samples` independent samples of each sentence, each a group of one beam that draws its next token.

    A random number is a function of the sentence's key, the sample and the position alone (the finaliser of SplitMix64,
    Steele et al. 2014, over a counter), so results do not depend on which sentences share a batch or a process.
    """

    def __init__(self, samples: int, sampling: SamplingOptions, device: torch.device | str) -> None:
        super().__init__(samples, samples, samples)
        self.sampling = sampling
        self.keys = torch.zeros(0, samples, dtype=torch.int64, device=device)

    def candidates(self, totals: Tensor, log_probabilities: Tensor, position: Tensor) -> Candidates:
        """Draw one extension of every beam.

        The token is where the sum of probabilities, in the order of ids, passes the random number.
        """
        draws = uniform(_mixed(self.keys + position[:, None] * _GOLDEN))
        # float64: sums over a large vocabulary in fp32 would be coarser than the probabilities of rare tokens.
        sums = restricted(log_probabilities.double(), self.sampling).softmax(-1).cumsum(-1)
        # Times the last sum: rounding leaves it a little off 1, and a draw beyond it would find no token.
        token = torch.searchsorted(sums, draws[..., None] * sums[..., -1:], right=True)
        token = token.clamp(max=sums.shape[-1] - 1)  # for a beam without any token left, whose total is -inf
        own = log_probabilities.gather(-1, token)[..., 0]
        origin = torch.arange(self.beam_size, device=token.device).expand(len(totals), -1)
        return Candidates(token[..., 0], origin, own, totals + own)

    def beams(self, going: Tensor, candidates: Candidates) -> Tensor:
        """Every sample goes on as itself."""
        return candidates.origin

    def admit(self, sentences: Sequence[Sentence]) -> None:
        """Take the sentences' keys."""
        # Keys are 64 bits without sign; a tensor takes them as signed numbers of the same bits.
        signed = [(s.key & (1 << 64) - 1) - ((s.key >> 63 & 1) << 64) for s in sentences]
        keys = torch.tensor(signed, dtype=torch.int64, device=self.keys.device)[:, None]
        samples = torch.arange(1, self.beam_size + 1, device=keys.device)
        self.keys = torch.cat((self.keys, _mixed(keys + samples * _FIRST)))

    def keep(self, rows: Tensor) -> None:
        """Let row i be the old row `rows`[i]."""
        self.keys = self.keys.index_select(0, rows)


def restricted(scores: Tensor, sampling: SamplingOptions) -> Tensor:
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
    """Return numbers in [0, 1) of 40 bits each, float64.

    The largest is 1 - 2^-40, far enough below 1 that its product with a sum does not round up to the sum.
    """
    return (bits >> 24 & (1 << 40) - 1).double() * 2.0**-40


def _mixed(bits: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of `bits`: each input bit changes about half of the output bits."""
    # The shift of a signed number repeats its sign; the masks clear those bits.
    bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * _FIRST
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * _SECOND
    return bits ^ (bits >> 31 & (1 << 33) - 1)
