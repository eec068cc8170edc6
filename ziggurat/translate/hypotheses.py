"""Hypotheses: penalties for ranking them, and the search steps that contain them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ziggurat.config import LengthPenaltyConfig

_COVERAGE_RANGE = (0.001, 0.5)
"""_COVERAGE_RANGE gives the bounds between which a source token's attention sum counts in the coverage term."""

_Number = TypeVar("_Number", float, Tensor)

_BASE: dict[str, Callable[[float | Tensor], float | Tensor]] = {
    "none": lambda length: length * 0 + 1,
    "power": lambda length: length,
    "gnmt": lambda length: (5 + length) / 6,
    "lingvo": lambda length: (5 + length) / 5,
}


@dataclass(frozen=True)
class LengthPenalty:
    """A length penalty; `coverage` is beta, `length_ratio` is rho, and `word` is subtracted for each token."""

    kind: Literal["none", "gnmt", "power", "lingvo"] = "none"
    alpha: float = 0.0
    coverage: float = 0.0
    length_ratio: float = 1.0
    word: float = 0.0

    @classmethod
    def of(cls, config: LengthPenaltyConfig) -> LengthPenalty:
        """Return the penalty that the configuration describes."""
        return cls(config.kind, config.alpha, config.coverage, config.length_ratio, config.word_penalty)

    def score(self, log_probability: _Number, length: _Number) -> _Number:
        """Return the score, without a coverage term, of a hypothesis of `length` tokens, including end-of-sentence."""
        penalised: _Number = log_probability - self.word * length if self.word else log_probability
        return penalised / self.divisor(length)

    def divisor(self, length: _Number) -> _Number:
        """Return the divisor for hypotheses of `length` tokens, including end-of-sentence; it never falls with length.

        A length of 0 (a hypothesis cut before its first token) counts as 1.
        """
        clipped = length.clamp(min=1) if isinstance(length, Tensor) else max(length, 1)
        base: _Number = _BASE[self.kind](clipped)  # type: ignore[assignment]
        return base**self.alpha

    def coverage_term(self, attention: Tensor, source_mask: Tensor) -> Tensor:
        """Return the coverage term [...] of attention sums [..., source]; the mask is True for real tokens."""
        # Clamped, since a source token without attention would make the score -inf.
        clipped = (attention / self.length_ratio).clamp(*_COVERAGE_RANGE).log()
        return self.coverage * self.length_ratio * clipped.masked_fill(~source_mask, 0.0).sum(-1)

    def best_reachable(
        self, log_probability: Tensor, length: Tensor, max_length: Tensor, source_length: Tensor
    ) -> Tensor:
        """Return an upper bound on the score of all continuations of an unfinished hypothesis of `length` tokens.

        More tokens can only lower `log_probability` (never above 0) and raise the divisor, up to `max_length` tokens
        with end-of-sentence; each of the `source_length` source tokens adds at most beta * rho * log 0.5. All arguments
        and the result have shape [batch], or [batch, groups] and [batch, 1].
        """
        longest, now = max_length.to(log_probability.dtype), length.to(log_probability.dtype)
        bound = log_probability / self.divisor(longest)
        if self.word:
            # A reward for tokens may make it positive, and then it is largest with the smallest divisor.
            sums = log_probability - self.word * (now if self.word > 0 else longest)
            bound = torch.where(sums > 0, sums / self.divisor(now), sums / self.divisor(longest))
        if self.coverage:
            most = self.coverage * self.length_ratio * math.log(_COVERAGE_RANGE[1])
            bound = bound + most * source_length.to(bound.dtype)
        return bound


NEVER = -torch.inf
"""NEVER is the score of a hypothesis that does not exist."""


@dataclass(frozen=True)
class IdHypothesis:
    """One result: ids without end-of-sentence, and its scores."""

    tokens: list[int]
    token_log_probabilities: list[float]
    """One per token, and one for end-of-sentence if `finished`."""
    log_probability: float
    """Their sum: the model's log-probability, whatever rules or temperature were used for the choice."""
    score: float
    """Penalised score; results are ranked by it."""
    finished: bool
    """False if cut at the length limit because no hypothesis of the sentence (or of its group) had ended."""
    forced: bool = False
    """True if, with `endings: fairseq`, it reached the length limit and was forced to end there."""
    attention: list[list[float]] = field(default_factory=list)
    """Per token, its attention to each source token, if requested."""


# The steps of a search


class TrellisStep(NamedTuple):
    """Candidates of one step, and the beams they became; arrays, because reading elements of tensors is slow."""

    token: npt.NDArray[Any]  # [N, C]
    origin: npt.NDArray[Any]  # [N, C] beam that the candidate extends
    log_probability: npt.NDArray[Any]  # [N, C] of the token
    total: npt.NDArray[Any]  # [N, C] of the hypothesis, as the search ranks it
    chosen: npt.NDArray[Any]  # [N, K] candidates that are beams after this step
    attention: npt.NDArray[Any] | None = None  # [N, K, S] of the beams that were extended, if results need it


@dataclass
class RowTrack:
    """The batch rows of one sentence over the steps of the search."""

    start: int
    """The search step at which the sentence took its first step."""
    rows: list[tuple[int, int]]
    """(step, row): the sentence's row from that step on."""


@dataclass(frozen=True)
class TrellisPath:
    """Tokens of a hypothesis, first to last, with their scores."""

    tokens: list[int]
    log_probabilities: list[float]
    total: float
    attention: list[npt.NDArray[Any]]
    """One row [S] per token; empty if steps have no attention."""

    def hypothesis(self, score: float, source_length: int, *, finished: bool, forced: bool = False) -> IdHypothesis:
        """Return the result; its tokens exclude end-of-sentence, but its log-probability includes it."""
        tokens = self.tokens[:-1] if finished else self.tokens
        attention = [row[:source_length].tolist() for row in self.attention[: len(tokens)]]
        # Exactly rounded, so that the sum does not depend on the order of the terms.
        total = math.fsum(self.log_probabilities)
        return IdHypothesis(tokens, self.log_probabilities, total, score, finished, forced, attention)


class Trellis:
    """Steps of a search, numbered from 0; those that no live sentence needs are dropped."""

    def __init__(self) -> None:
        self._steps: deque[TrellisStep] = deque()
        self._first = 0  # number of the oldest step that is kept

    def __len__(self) -> int:
        """Number of steps taken, including dropped ones."""
        return self._first + len(self._steps)

    def append(self, step: TrellisStep) -> None:
        """Add the next step; its arrays must not change afterwards."""
        self._steps.append(step)

    def forget(self, tracks: Sequence[RowTrack]) -> None:
        """Drop the steps before the first one of all `tracks`."""
        oldest = min((track.start for track in tracks), default=len(self))
        while self._first < oldest and self._steps:
            self._steps.popleft()
            self._first += 1

    def beam(self, track: RowTrack, position: int, rank: int) -> int:
        """Return the candidate that became beam `rank` of the sentence at `position` (from 0)."""
        row = next(row for since, row in reversed(track.rows) if since <= track.start + position)
        return int(self._step(track.start + position).chosen[row, rank])

    def path(self, track: RowTrack, position: int, candidate: int) -> TrellisPath:
        """Return the hypothesis of the sentence that ends with `candidate` at `position` (from 0)."""
        tokens: list[int] = []
        scores: list[float] = []
        attention: list[npt.NDArray[Any]] = []
        segments = list(track.rows)
        last, beam, total = track.start + position, 0, 0.0
        for number in range(last, track.start - 1, -1):
            while segments[-1][0] > number:
                segments.pop()
            row = segments[-1][1]
            token, origin, score, totals, chosen, weights = self._step(number)
            if number == last:
                total = float(totals[row, candidate])
            else:
                candidate = int(chosen[row, beam])
            beam = int(origin[row, candidate])
            tokens.append(int(token[row, candidate]))
            scores.append(float(score[row, candidate]))
            if weights is not None:
                attention.append(weights[row, beam])
        return TrellisPath(tokens[::-1], scores[::-1], total, attention[::-1])

    def _step(self, number: int) -> TrellisStep:
        return self._steps[number - self._first]


def to_host(*tensors: Tensor | None) -> list[Any]:
    """Return tensors of one device as arrays, with one copy from an accelerator; None stays None.

    Each copy waits for all queued work on the accelerator. bfloat16, which NumPy lacks, becomes float32.
    """
    known = [t.float() if t.dtype == torch.bfloat16 else t for t in tensors if t is not None]
    if known[0].device.type == "cpu":
        arrays = [t.numpy() for t in known]
    else:
        whole = torch.cat([t.flatten().contiguous().view(torch.uint8) for t in known]).cpu().numpy()
        parts = np.split(whole, np.cumsum([t.nbytes for t in known])[:-1])
        types = [str(t.dtype).removeprefix("torch.") for t in known]
        arrays = [part.view(kind).reshape(t.shape) for part, kind, t in zip(parts, types, known, strict=True)]
    found = iter(arrays)
    return [None if t is None else next(found) for t in tensors]


# The best tokens of a step

_BLOCK = 64  # tokens; 32 to 128 are equally fast
_SMALL = 1 << 16  # scores; below this, blocks are no faster


def best_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values and their ids [..., count], best first, ties by smaller id.

    topk does not specify which of several equal values it takes, or their order; bfloat16 scores are often equal.
    """
    if count == 1:
        return _best(scores)
    if count == scores.shape[-1]:
        every = scores.sort(dim=-1, descending=True, stable=True)
        return every.values, every.indices
    # One more than requested: if it equals the last one taken, topk's choice between them was arbitrary.
    largest, ids = _largest(scores, count + 1)
    values, ids = largest[..., :count], ids[..., :count]
    if scores.device.type != "cpu":
        # Checking for ties would wait for the device; another pass over the scores costs less.
        ids = _smallest_of_equals(scores, values, ids)
    elif bool((tied := (largest[..., -1] == largest[..., -2]) & (largest[..., -1] > NEVER)).any()):
        ids[tied] = _smallest_of_equals(scores[tied], values[tied], ids[tied])
    # Sort by id, then stably by value, so that equal values stay in the order of their ids.
    ids = ids.sort(dim=-1).values
    values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _smallest_of_equals(scores: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """Return the ids [..., count] of the largest `values`; ties with the last value get the smallest ids.

    `values` and `ids` [..., count] are one choice of the largest, best first.
    """
    vocabulary, count = scores.shape[-1], values.shape[-1]
    above = values > values[..., -1:]
    numbers = torch.arange(vocabulary, dtype=torch.int32, device=scores.device)
    equal = torch.where(scores == values[..., -1:], numbers, vocabulary - 1).topk(count, largest=False).values.long()
    place = torch.arange(count, device=scores.device) - above.sum(-1, keepdim=True)
    return torch.where(above, ids, equal.gather(-1, place.clamp(min=0)))


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value and its id [..., 1], ties by smaller id.

    argmax takes the first of several equal values, but on CPU it is ten times slower than amax. So it is applied only
    to block maxima, and to the first block with the largest value.
    """
    vocabulary = scores.shape[-1]
    blocks = vocabulary // _BLOCK
    if scores.device.type != "cpu" or blocks < 4 or scores.numel() < _SMALL:
        best = scores.max(dim=-1, keepdim=True)
        return best.values, best.indices
    whole = scores[..., : blocks * _BLOCK].unflatten(-1, (blocks, _BLOCK))
    block = whole.amax(-1).argmax(-1, keepdim=True)
    inside = whole.gather(-2, block[..., None].expand(*block.shape, _BLOCK)).squeeze(-2)
    ids = block * _BLOCK + inside.argmax(-1, keepdim=True)
    if blocks * _BLOCK < vocabulary:
        # Tokens after the last whole block win only with a larger value, so that ties keep the smaller id.
        rest = scores[..., blocks * _BLOCK :].max(dim=-1, keepdim=True)
        ids = torch.where(rest.values > scores.gather(-1, ids), rest.indices + blocks * _BLOCK, ids)
    return scores.gather(-1, ids), ids


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values, best first, and ids at which they occur.

    On CPU, topk over a large vocabulary takes as long as the softmax. The largest values lie in the `count` blocks with
    the largest maxima, and computing block maxima takes one fast pass. With 32,000 tokens this halves the search time.
    """
    vocabulary = scores.shape[-1]
    blocks = vocabulary // _BLOCK
    if scores.device.type != "cpu" or blocks < 4 * count:
        largest = scores.topk(count, dim=-1)
        return largest.values, largest.indices
    whole = scores[..., : blocks * _BLOCK].unflatten(-1, (blocks, _BLOCK))
    # The `count` largest values lie in at most `count` blocks, those with the largest maxima.
    best = whole.amax(-1).topk(count, dim=-1).indices
    inside = whole.gather(-2, best[..., None].expand(*best.shape, _BLOCK)).flatten(-2)
    rest = torch.arange(blocks * _BLOCK, vocabulary).expand(*best.shape[:-1], -1)
    ids = torch.cat([(best[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(-2), rest], -1)
    values, positions = torch.cat([inside, scores[..., blocks * _BLOCK :]], -1).topk(count, dim=-1)
    return values, ids.gather(-1, positions)
