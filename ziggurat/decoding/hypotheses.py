"""Hypotheses as tensors, H for each sentence of a batch, and one as the search returns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NEVER", "Hypotheses", "IdHypothesis", "best_tokens"]

NEVER = -torch.inf
"""Score of a hypothesis that does not exist."""

_BLOCK = 64  # tokens; 32 to 128 measured alike


@dataclass(frozen=True)
class IdHypothesis:
    """One result: ids without end-of-sentence, and its scores."""

    tokens: list[int]
    token_log_probabilities: list[float]
    """One per token; one more, for end-of-sentence, when `finished`."""
    log_probability: float
    """Their sum, as the search added it up."""
    score: float
    """Penalised score; results are ranked by it."""
    finished: bool
    """False: cut at the length limit, because no hypothesis of the sentence had ended."""


class Hypotheses(NamedTuple):
    """H hypotheses for each of B sentences."""

    score: Tensor  # [B, H] penalised score; -inf: no hypothesis
    log_probability: Tensor  # [B, H]
    length: Tensor  # [B, H] tokens, end-of-sentence counted
    tokens: Tensor  # [B, H, T]
    token_log_probabilities: Tensor  # [B, H, T]

    @classmethod
    def none(cls, sentences: int, size: int, steps: int, like: Tensor) -> Hypotheses:
        """Return `size` hypotheses per sentence that do not exist, with the type and device of `like`."""
        never = like.new_full((sentences, size), NEVER)
        ids = torch.zeros(sentences, size, steps, dtype=torch.int64, device=like.device)
        return cls(never, never.clone(), ids[..., 0], ids, like.new_zeros(sentences, size, steps))

    def sentences(self, index: Tensor) -> Hypotheses:
        """Keep the sentences `index` [B']."""
        return Hypotheses(*(t.index_select(0, index) for t in self))

    def pick(self, index: Tensor) -> Hypotheses:
        """Choose hypotheses `index` [B, H'] of each sentence."""
        deep = index[..., None].expand(-1, -1, self.tokens.shape[2])
        return Hypotheses(*(t.gather(1, index if t.dim() == 2 else deep) for t in self))

    def ranked(self, size: int) -> Hypotheses:
        """Keep the `size` best of each sentence by score, earlier ones first among equals."""
        return self.pick(self.score.sort(dim=1, descending=True, stable=True).indices[:, :size])

    def beside(self, other: Hypotheses) -> Hypotheses:
        """Return these hypotheses of each sentence, followed by those of `other`."""
        return Hypotheses(*(torch.cat(pair, dim=1) for pair in zip(self, other, strict=True)))


def best_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values and their ids [..., count], best first, among equals the smaller id.

    topk leaves open which of equal values it takes and in which order; bfloat16 scores are often equal.
    """
    if count == 1:
        best = scores.max(dim=-1, keepdim=True)  # of equal values, max takes the first
        return best.values, best.indices
    if count == scores.shape[-1]:
        every = scores.sort(dim=-1, descending=True, stable=True)
        return every.values, every.indices
    values, ids = _largest(scores, count + 1)
    tied = (values[..., -1] == values[..., -2]) & (values[..., -1] > NEVER)
    ids = ids[..., :count]
    if bool(tied.any()):
        rows, last = scores[tied], values[tied][:, -1:]
        above, equal = rows > last, rows == last
        room = count - above.sum(-1, keepdim=True)
        taken = above | (equal & (equal.cumsum(-1) <= room))
        ids[tied] = taken.nonzero()[:, 1].view(-1, count)
    ids = ids.sort(dim=-1).values
    values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values, best first, and ids that hold them.

    On CPU topk over a large vocabulary takes as long as the softmax. The largest values lie in the `count` blocks
    with the largest maxima, and block maxima are one fast pass: with 32,000 tokens this halves the search's time.
    """
    vocabulary = scores.shape[-1]
    blocks = vocabulary // _BLOCK
    if scores.device.type != "cpu" or blocks < 4 * count:
        largest = scores.topk(count, dim=-1)
        return largest.values, largest.indices
    whole = scores[..., : blocks * _BLOCK].unflatten(-1, (blocks, _BLOCK))
    best = whole.amax(-1).topk(count, dim=-1).indices
    inside = whole.gather(-2, best[..., None].expand(*best.shape, _BLOCK)).flatten(-2)
    rest = torch.arange(blocks * _BLOCK, vocabulary).expand(*best.shape[:-1], -1)
    ids = torch.cat([(best[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(-2), rest], -1)
    values, positions = torch.cat([inside, scores[..., blocks * _BLOCK :]], -1).topk(count, dim=-1)
    return values, ids.gather(-1, positions)
