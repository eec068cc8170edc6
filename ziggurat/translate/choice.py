"""The choice of a search's next beams: plain, diverse or constrained beam search, and sampling.

A `Choice` decides which one-token extensions of the beams are candidates, and which candidates are the next beams. The
beams of a sentence form G groups of equal size, each with separate candidates and finished hypotheses: one group for
a plain beam search, one group per sample when sampling. Equal scores rank by age, then by the parent's rank, then by
token id, on every device.

Shapes: N live sentences, K beams, C candidates, G groups, P phrases, L longest phrase, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.config import DecodingConfig
from ziggurat.translate.hypotheses import NEVER, best_tokens
from ziggurat.translate.settings import SearchSettings, Sentence


class Candidates(NamedTuple):
    """C extensions of each of N sentences, by group; a missing one has a total of -inf."""

    token: Tensor  # [N, C]
    origin: Tensor  # [N, C] the beam that it extends
    log_probability: Tensor  # [N, C] of the token
    total: Tensor  # [N, C] of the whole hypothesis, float64


class Choice(ABC):
    """A search strategy.

    Args:
        beam_size: K.
        width: C, the maximum number of candidates that `candidates` returns.
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
        """Return the K candidates [N, K] that continue: the best of each group by `going` [N, C], -inf if it ended.

        Ties go to the earlier candidate.
        """
        size = self.beam_size // self.groups
        if self.groups == 1:
            # A stable sort instead of topk, which guarantees no order among equal totals.
            return going.sort(dim=1, descending=True, stable=True).indices[:, :size]
        grouped = going.unflatten(1, (self.groups, -1))
        best = grouped.sort(dim=2, descending=True, stable=True).indices[..., :size]
        first = torch.arange(self.groups, device=going.device)[:, None] * grouped.shape[2]
        return (best + first).flatten(1)

    def admit(self, sentences: Sequence[Sentence]) -> None:  # noqa: B027 - most strategies ignore single sentences
        """Append new sentences to the live ones."""

    def keep(self, rows: Tensor) -> None:  # noqa: B027
        """Make row i the old row `rows`[i]."""


class BeamChoice(Choice):
    """Plain beam search: the 2K best one-token extensions of a sentence's K beams by log-probability.

    At most K of the 2K end (each beam has one end-of-sentence), so at least K remain as the next beams. A single
    beam has one candidate: greedy search.
    """

    def __init__(self, beam_size: int) -> None:
        super().__init__(beam_size, 2 * beam_size if beam_size > 1 else 1)

    def candidates(self, totals: Tensor, log_probabilities: Tensor, position: Tensor) -> Candidates:
        """Return the 2K best extensions, best first; a single one if K is 1."""
        return best_extensions(totals, log_probabilities, self.width)


def best_extensions(totals: Tensor, log_probabilities: Tensor, count: int) -> Candidates:
    """Return the `count` best extensions, best first, of beams with `totals` [N, K] by next tokens [N, K, V]."""
    # Each of a sentence's best is among the best of its beam, so K times `count` totals are sorted instead of K times
    # V.
    values, ids = best_tokens(log_probabilities, min(count, log_probabilities.shape[-1]))
    if count == 1 and totals.shape[1] == 1:
        return Candidates(ids[:, 0], torch.zeros_like(ids[:, 0]), values[:, 0], totals + values[:, 0])
    extended, order = (totals[..., None] + values).flatten(1).sort(dim=1, descending=True, stable=True)
    order = order[:, :count]
    origin = order.div(ids.shape[-1], rounding_mode="floor")
    return Candidates(ids.flatten(1).gather(1, order), origin, values.flatten(1).gather(1, order), extended[:, :count])


class DiverseChoice(Choice):
    """Diverse beam search (Vijayakumar et al. 2016): groups of beams that avoid each other's tokens.

    The `groups` groups, of beam_size / groups beams each, choose in turn. A token costs `strength` for
    every beam of an earlier group that takes it at this step (Hamming diversity, their equation 4). The cost only
    affects the choice: scores of hypotheses stay those of the model, as in the authors' code.
    """

    def __init__(self, beam_size: int, groups: int, strength: float, eos: int) -> None:
        super().__init__(beam_size, 2 * beam_size, groups)
        self.strength = strength
        self.eos = eos

    def candidates(self, totals: Tensor, log_probabilities: Tensor, position: Tensor) -> Candidates:
        """Return the best extensions of each group by score minus cost, best first."""
        size = self.beam_size // self.groups
        taken = log_probabilities.new_zeros(len(totals), 1, log_probabilities.shape[2])
        found = []
        for group in range(self.groups):
            beams = slice(group * size, (group + 1) * size)
            scores = log_probabilities[:, beams]
            extended = best_extensions(totals[:, beams], scores - self.strength * taken, 2 * size)
            rows = torch.arange(len(totals), device=totals.device)[:, None]
            # The cost only affects the choice; totals use the model's scores.
            own = scores[rows, extended.origin, extended.token]
            total = totals[:, beams].gather(1, extended.origin) + own
            found.append(Candidates(extended.token, extended.origin + group * size, own, total))
            # The beams that the group will take are the best that do not end. A stable sort keeps the remaining order.
            ended = (extended.token == self.eos) | (total == NEVER)
            chosen = ended.to(torch.int8).sort(dim=1, stable=True).indices[:, :size]
            one = (~ended).gather(1, chosen).to(taken.dtype)
            taken[:, 0].scatter_add_(1, extended.token.gather(1, chosen), one)
        return Candidates(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))

    def beams(self, going: Tensor, candidates: Candidates) -> Tensor:
        """Return the first candidates of each group that do not end; unlike `going`, their order includes the cost."""
        ended = (going == NEVER).to(torch.int8).unflatten(1, (self.groups, -1))
        size = self.beam_size // self.groups
        order = ended.sort(dim=2, stable=True).indices[..., :size]
        first = torch.arange(self.groups, device=going.device)[:, None] * ended.shape[2]
        return (order + first).flatten(1)


# SplitMix64's increment and its finaliser's two factors. PyTorch lacks arithmetic on unsigned 64-bit integers, but
# signed products wrap around to the same bits.
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


class SampleChoice(Choice):
    """Sampling: `samples` independent samples of each sentence, each a group of one beam that draws its next token.

    A random number is a function of only the sentence's key, the sample and the position (the finaliser of SplitMix64,
    Steele et al. 2014, over a counter), so results do not depend on which sentences share a batch or a process.
    """

    def __init__(self, samples: int, sampling: DecodingConfig, device: torch.device | str) -> None:
        super().__init__(samples, samples, samples)
        self.sampling = sampling
        self.keys = torch.zeros(0, samples, dtype=torch.int64, device=device)

    def candidates(self, totals: Tensor, log_probabilities: Tensor, position: Tensor) -> Candidates:
        """Draw one extension of every beam.

        The token is the first, in the order of ids, at which the cumulative probability exceeds the random number.
        """
        draws = uniform(_mixed(self.keys + position[:, None] * _GOLDEN))
        # float64, because sums over a large vocabulary in fp32 would be coarser than the probabilities of rare tokens.
        sums = restricted(log_probabilities.double(), self.sampling).softmax(-1).cumsum(-1)
        # Multiplied by the last sum, which rounding leaves slightly off 1; a draw beyond it would find no token.
        token = torch.searchsorted(sums, draws[..., None] * sums[..., -1:], right=True)
        token = token.clamp(max=sums.shape[-1] - 1)  # for a beam without any token left, whose total is -inf
        own = log_probabilities.gather(-1, token)[..., 0]
        origin = torch.arange(self.beam_size, device=token.device).expand(len(totals), -1)
        return Candidates(token[..., 0], origin, own, totals + own)

    def beams(self, going: Tensor, candidates: Candidates) -> Tensor:
        """Every sample continues itself."""
        return candidates.origin

    def admit(self, sentences: Sequence[Sentence]) -> None:
        """Store the sentences' keys."""
        # Keys are unsigned 64-bit numbers; a tensor holds signed numbers with the same bits.
        signed = [(s.key & (1 << 64) - 1) - ((s.key >> 63 & 1) << 64) for s in sentences]
        keys = torch.tensor(signed, dtype=torch.int64, device=self.keys.device)[:, None]
        samples = torch.arange(1, self.beam_size + 1, device=keys.device)
        self.keys = torch.cat((self.keys, _mixed(keys + samples * _FIRST)))

    def keep(self, rows: Tensor) -> None:
        """Make row i the old row `rows`[i]."""
        self.keys = self.keys.index_select(0, rows)


def restricted(scores: Tensor, sampling: DecodingConfig) -> Tensor:
    """Return scores [..., V], divided by the temperature, with -inf for tokens that may not be drawn."""
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        values, ids = best_tokens(scores, sampling.top_k)
        scores = torch.full_like(scores, NEVER).scatter(-1, ids, values)
    if sampling.top_p < 1:
        ranked, ids = scores.sort(dim=-1, descending=True, stable=True)
        shares = ranked.softmax(-1)
        beyond = shares.cumsum(-1) - shares >= sampling.top_p  # tokens before it have reached the sum
        beyond[..., 0] = False
        scores = torch.full_like(scores, NEVER).scatter(-1, ids, ranked.masked_fill(beyond, NEVER))
    if sampling.epsilon:
        shares = scores.softmax(-1)
        likeliest = scores == scores.amax(-1, keepdim=True)
        scores = scores.masked_fill((shares < sampling.epsilon) & ~likeliest, NEVER)
    return scores


def uniform(bits: Tensor) -> Tensor:
    """Return 40-bit numbers in [0, 1), float64.

    The largest is 1 - 2^-40, far enough below 1 that its product with a sum does not round up to the sum.
    """
    return (bits >> 24 & (1 << 40) - 1).double() * 2.0**-40


def _mixed(bits: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of `bits`: each input bit changes about half of the output bits."""
    # Shifting a signed number repeats its sign; the masks clear those bits.
    bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * _FIRST
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * _SECOND
    return bits ^ (bits >> 31 & (1 << 33) - 1)


_FEW = 8
"""_FEW is the maximum number of phrases of a sentence that is searched together with all others."""
_CELLS = 1 << 22
"""_CELLS is the maximum number of elements in a tensor [N, C, P] of sentences with more phrases."""


class ConstrainedChoice(Choice):
    """Lexically constrained beam search (Post and Vilar 2018; Hu et al. 2019).

    Beams are divided into banks by the number of constraint tokens that a hypothesis has. Candidates
    are the best extensions as in a plain beam search, the best extension of each beam, every token with which a beam
    would continue a phrase that it lacks, and the end of each beam that has all phrases. The next K beams are taken
    from the banks in turn, fullest first, so that at every step some hypothesis advances by a constraint token. Only a
    hypothesis that has all phrases may end.

    Phrases with a common prefix are tracked together, as in the trie of Hu et al.: a hypothesis progresses in all of
    them until a token distinguishes them. If it leaves them, the longest completed phrase counts, and the tokens after
    it are read again from the first. So no token counts for two phrases, a phrase that is given twice must occur twice,
    and a phrase that is a prefix of another must occur in addition to it. If phrases overlap in another way (`a b` and
    `b c`), an output that contains both only in a different reading is not recognised as complete.

    Args:
        beam_size: K, at least 2.
        phrases: P, the largest number of phrases of any sentence in the search.
        longest: L, the length of the longest phrase in tokens.
        eos: id that ends a hypothesis.
    """

    def __init__(self, beam_size: int, phrases: int, longest: int, eos: int, device: torch.device | str) -> None:
        super().__init__(beam_size, _width(beam_size, phrases))
        self.eos = eos
        self.phrases = torch.full((0, phrases, longest + 1), -1, dtype=torch.int64, device=device)  # -1 at their ends
        # Per beam: the phrases that it has and, for each other phrase, how many of its first tokens it has; this number
        # is the same for all phrases in progress and 0 for the rest.
        self.done = torch.zeros(0, beam_size, phrases, dtype=torch.bool, device=device)
        self.held = torch.zeros(0, beam_size, phrases, dtype=torch.int64, device=device)

    def admit(self, sentences: Sequence[Sentence]) -> None:
        """Store the sentences' phrases; sentences with fewer get empty ones, which count as met from the start."""
        _, phrases, width = self.phrases.shape
        rows = [[list(phrase) for phrase in s.constraints] for s in sentences]
        ids = [[p + [-1] * (width - len(p)) for p in [*row, *[[]] * (phrases - len(row))]] for row in rows]
        new = torch.tensor(ids, dtype=torch.int64, device=self.phrases.device).view(-1, phrases, width)
        self.phrases = torch.cat((self.phrases, new))
        self.held = torch.cat((self.held, self.held.new_zeros(len(new), *self.held.shape[1:])))
        self.done = torch.cat((self.done, (new[:, None, :, 0] < 0).expand(-1, self.beam_size, -1)))

    def keep(self, rows: Tensor) -> None:
        """Make row i the old row `rows`[i]."""
        self.phrases = self.phrases.index_select(0, rows)
        self.held, self.done = self.held.index_select(0, rows), self.done.index_select(0, rows)

    def candidates(self, totals: Tensor, log_probabilities: Tensor, position: Tensor) -> Candidates:
        """Return the best extensions, best first, followed by those that the constraints require."""
        # C is 4K + KP: 2K best extensions, and per beam P tokens that continue a phrase, its best token and its end.
        beams = self.beam_size
        constrained = (self.phrases[..., 0] >= 0).any(1)[:, None]  # [N, 1]
        following = self._following()  # [N, K, P]
        complete = (following < 0).all(-1)
        ends = log_probabilities[..., self.eos]
        # A view, changed in place before anything is chosen, because no beam may end without all its phrases.
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
        # The same extension may be required twice, or be among the best; only the first counts.
        code = every.origin * log_probabilities.shape[2] + every.token
        twice = ((code[:, :, None] == code[:, None]) & (every.total > NEVER)[:, None]).tril(-1).any(2)
        return every._replace(total=every.total.masked_fill(twice, NEVER))

    def beams(self, going: Tensor, candidates: Candidates) -> Tensor:
        """Return the K candidates that continue: the best of each bank in turn, fullest bank first."""
        held, done = self._extended(candidates)  # [N, C, P]
        bank = (done * self._lengths()).sum(2) + held.amax(2)
        # Stable sorts, from the least important key to the most important: total, bank, rank within the bank.
        order = going.sort(dim=1, descending=True, stable=True).indices
        order = order.gather(1, bank.gather(1, order).sort(dim=1, descending=True, stable=True).indices)
        banks, dead = bank.gather(1, order), going.gather(1, order) == NEVER
        same = (banks[:, :, None] == banks[:, None]) & ~dead[:, None]
        rank = same.tril(-1).sum(2) + dead * going.shape[1]
        chosen = order.gather(1, rank.sort(dim=1, stable=True).indices)[:, : self.beam_size]
        index = chosen[..., None].expand(-1, -1, held.shape[2])
        self.held, self.done = held.gather(1, index), done.gather(1, index)
        return chosen

    def _lengths(self) -> Tensor:
        return (self.phrases >= 0).sum(2)[:, None]  # [N, 1, P]

    def _next(self, held: Tensor) -> Tensor:
        """Return the token [N, K, P] after the first `held` tokens of each phrase; -1 at its end."""
        return self.phrases[:, None].expand(-1, self.beam_size, -1, -1).gather(3, held[..., None])[..., 0]

    def _following(self) -> Tensor:
        """Return the token [N, K, P] with which each beam would continue each phrase; -1 if the phrase is complete."""
        whole = (self.held == self._lengths()) & ~self.done
        counts = whole & (whole.cumsum(2) == 1)  # one occurrence of a phrase that is given twice
        return self._next(self.held.masked_fill(whole, 0)).masked_fill(self.done | counts, -1)

    def _extended(self, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Return how much of each phrase each candidate holds, and which it has, [N, C, P]."""
        index = candidates.origin[..., None].expand(-1, -1, self.held.shape[2])
        held, done, following = (each.gather(1, index) for each in (self.held, self.done, self._next(self.held)))
        token, on_the_way = candidates.token[..., None], held.amax(2, keepdim=True)
        goes_on = (held == on_the_way) & ~done & (following == token)
        extended = torch.where(goes_on, held + 1, 0)
        left = (~goes_on.any(2) & (on_the_way[..., 0] > 0)).flatten()
        # Counting the remaining rows would mean waiting for an accelerator, so there all rows are read.
        rows = left.nonzero()[:, 0] if left.device.type == "cpu" else torch.arange(len(left), device=left.device)
        if len(rows):
            phrases = self.phrases.index_select(0, rows // candidates.token.shape[1])
            flat, on_the_way, token = (
                done.view(-1, done.shape[2]),
                on_the_way.flatten(0, 1)[rows],
                token.flatten(0, 1)[rows],
            )
            which = held.flatten(0, 1)[rows].argmax(1)[:, None, None].expand(-1, 1, phrases.shape[2])
            way, place = phrases.gather(1, which)[:, 0], torch.arange(phrases.shape[2], device=rows.device)
            tokens = way.masked_fill(place >= on_the_way, -1).scatter(1, on_the_way, token)
            again, now_done = _read_again(tokens.masked_fill(~left[rows, None], -1), phrases, flat[rows])
            extended.view(-1, done.shape[2]).index_add_(0, rows, again)  # to 0
            flat.index_copy_(0, rows, now_done)
        return extended, done


def _read_again(tokens: Tensor, phrases: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much of each phrase R hypotheses hold [R, P], and which they have, after rereading `tokens`.

    tokens: [R, L + 1], -1 after their ends; phrases: [R, P, L + 1]; done: [R, P] the phrases that they had.
    """
    length, place = (phrases >= 0).sum(2), torch.arange(tokens.shape[1], device=tokens.device)
    tokens = torch.nn.functional.pad(tokens, (0, tokens.shape[1]), value=-1)
    for _ in range(len(place) + 1):  # each round consumes at least one token
        now = tokens[:, None, : len(place)]
        held = ((phrases == now) | (now < 0)).all(2) & ~done
        lost = (now[:, 0, 0] >= 0) & ~held.any(1)
        if lost.device.type == "cpu" and not lost.any():  # on an accelerator, each round would wait for this
            break
        # The longest completed phrase counts; if there is none, a token is skipped.
        passed = ((phrases == now) | (phrases < 0)).all(2) & ~done & lost[:, None]
        most, which = (length * passed).max(1)
        done = done | ((torch.arange(done.shape[1], device=done.device) == which[:, None]) & (most > 0)[:, None])
        shift = most.clamp(min=1).masked_fill(~lost, 0)[:, None]
        tokens = torch.cat((tokens.gather(1, place + shift), tokens[:, len(place) :]), 1)
    return held * (now >= 0).sum(2), done


def _width(beam_size: int, phrases: int) -> int:
    return 4 * beam_size + beam_size * phrases


def searched_together(sentences: Sequence[Sentence], beam_size: int) -> list[list[int]]:
    """Return the indices of the sentences to search together, group by group.

    Sentences with many phrases are grouped separately.
    In a search, each sentence has room for the largest number of phrases, in tensors that grow with its square.
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
    """Return the strategy that the settings select."""
    if settings.sampling is not None:
        return SampleChoice(settings.beam_size, settings.sampling, settings.device)
    if settings.groups > 1:
        return DiverseChoice(settings.beam_size, settings.groups, settings.strength, settings.eos)
    if phrases := max((len(s.constraints) for s in sentences), default=0):
        longest = max(len(phrase) for s in sentences for phrase in s.constraints)
        return ConstrainedChoice(settings.beam_size, phrases, longest, settings.eos, settings.device)
    return BeamChoice(settings.beam_size)
