"""A hypothesis as the search returns it, and the best tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["NEVER", "IdHypothesis", "best_tokens"]

NEVER = -torch.inf
"""Score of a hypothesis that does not exist."""

_BLOCK = 64  # tokens; 32 to 128 measured alike
_SMALL = 1 << 16  # scores; below this, blocks are no faster


@dataclass(frozen=True)
class IdHypothesis:
    """One result: ids without end-of-sentence, and its scores."""

    tokens: list[int]
    token_log_probabilities: list[float]
    """One per token; one more, for end-of-sentence, when `finished`."""
    log_probability: float
    """Their sum: what the model gives, whatever rules or temperature did to the choice."""
    score: float
    """Penalised score; results are ranked by it."""
    finished: bool
    """False: cut at the length limit, because no hypothesis of the sentence (or of its group) had ended."""
    forced: bool = False
    """With `endings: fairseq`: it reached the length limit and was made to end there."""
    attention: list[list[float]] = field(default_factory=list)
    """Per token, its attention to each source token, if it was asked for."""


def best_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values and their ids [..., count], best first, among equals the smaller id.

    topk leaves open which of equal values it takes and in which order; bfloat16 scores are often equal.
    """
    if count == 1:
        return _best(scores)
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


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value and its id [..., 1], among equals the smaller id.

    argmax takes the first of equals, but on CPU it is ten times slower than amax: it looks only into the first
    block that holds the largest value.
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
        rest = scores[..., blocks * _BLOCK :].max(dim=-1, keepdim=True)
        ids = torch.where(rest.values > scores.gather(-1, ids), rest.indices + blocks * _BLOCK, ids)
    return scores.gather(-1, ids), ids


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
