"""How alike the states of layers, and of the positions of a sentence, are (Li et al. 2020, figures 2, 7 and 8).

y_i(l) is the state at source position l of a sentence: i = 0 the encoder's input (embedding and position), i = 1..N the
raw output of encoder layer i, before any final normalisation. `Seq2Seq.source_embedding` gives the first,
`Seq2Seq.encode(..., outputs)` the others. Only real positions count. Each result is of single sentences; the figure of
a data set is the mean over its sentences. A similarity is in [-1, 1] up to rounding; a state of length 0 resembles
nothing (cosine 0). Half-precision states are measured in fp32.

Shapes: `states` is a list of [batch, source, d_model], `mask` is [batch, source], True at real positions; a sentence
has at least one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "adjacent_similarities",
    "embedding_similarities",
    "inter_similarities",
    "inter_similarity",
    "similarities",
    "similarity",
]


def similarity(one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Return sim(i, j) = mean_l cos(y_i(l), y_j(l)) of each sentence, [batch].

    Raises ValueError for states of different widths, whose angle means nothing.
    """
    _refuse_unlike(one, other)
    cosines = (_directions(_real(one, mask)) * _directions(_real(other, mask))).sum(-1)
    return cosines.sum(1) / mask.sum(1)


def inter_similarity(states: Tensor, mask: Tensor) -> Tensor:
    """Return sim_in(i) = mean_l cos(y_i(l), mean_l y_i(l)) of each sentence, [batch]: 1 where all positions agree."""
    real, count = _real(states, mask), mask.sum(1)
    # sum_l cos(y(l), m) = (sum_l y(l)/|y(l)|) . m/|m|: nothing of the size of the states besides the directions.
    mean = real.sum(1) / count[:, None]
    return (_directions(real).sum(1) * _directions(mean)).sum(-1) / count


def similarities(states: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return sim(i, j) for all pairs of states, [states, states, batch]. Raises ValueError as `similarity` does."""
    for state in states[1:]:
        _refuse_unlike(states[0], state)
    directions = torch.stack([_directions(_real(state, mask)) for state in states], dim=1).flatten(2)
    # Positions and channels in one product: the sum over positions of all cosines of a pair of states.
    return (directions @ directions.transpose(1, 2)).movedim(0, 2) / mask.sum(1)


def embedding_similarities(states: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return sim(i, 0) for i = 1, ..., N, [N, batch]; `states` begins with y_0."""
    return torch.stack([similarity(states[0], state, mask) for state in states[1:]])


def adjacent_similarities(states: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return sim(i, i - 1) for i = 1, ..., N, [N, batch]; `states` begins with y_0."""
    pairs = zip(states[1:], states[:-1], strict=True)
    return torch.stack([similarity(state, below, mask) for state, below in pairs])


def inter_similarities(states: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return sim_in of each of the states, [states, batch]."""
    return torch.stack([inter_similarity(state, mask) for state in states])


def _refuse_unlike(one: Tensor, other: Tensor) -> None:
    if one.shape != other.shape:
        raise ValueError(f"states of shapes {list(one.shape)} and {list(other.shape)} cannot be compared")


def _real(states: Tensor, mask: Tensor) -> Tensor:
    """Return the states in fp32 or wider, 0 at padding, whatever stands there."""
    wide = states.float() if states.dtype in (torch.bfloat16, torch.float16) else states
    return wide.masked_fill(~mask[..., None], 0.0)


def _directions(states: Tensor) -> Tensor:
    """Return the states at unit length."""
    return F.normalize(states, dim=-1)
