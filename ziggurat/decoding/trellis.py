"""The steps of a search as they were taken, from which the tokens of a result are read backwards.

No step copies what came before: each leaves its candidates (a token, the beam it extends, scores) and says which of
them became beams. A result is a position and a candidate there; the candidate's beam names the candidate before it,
and so on to the first token.

Shapes: N live sentences at that step, C candidates of each, K beams, S source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Path", "Step", "Trellis", "Visit"]


class Step(NamedTuple):
    """What one step of the search leaves."""

    token: Tensor  # [N, C]
    origin: Tensor  # [N, C] beam that the candidate extends
    log_probability: Tensor  # [N, C] of the token
    total: Tensor  # [N, C] of the hypothesis, as the search ranks it
    chosen: Tensor  # [N, K] candidates that are beams from now on
    attention: Tensor | None = None  # [N, K, S] of the beams that were extended, where results need it


@dataclass
class Visit:
    """Where a sentence was during its search: from which step on, and in which rows of the batch."""

    start: int
    """The search's step at which it took its first one."""
    rows: list[tuple[int, int]] = field(default_factory=list)
    """(step, row): it was in that row from that step on."""


@dataclass(frozen=True)
class Path:
    """A hypothesis, read from its end to its beginning and turned round."""

    tokens: list[int]
    log_probabilities: list[float]
    total: float
    attention: list[npt.NDArray[Any]]
    """One row [S] per token; empty where steps hold none."""


class Trellis:
    """Steps, numbered from 0 over a whole search; those that nobody needs any more are dropped."""

    def __init__(self) -> None:
        self._read: deque[tuple[npt.NDArray[Any] | None, ...]] = deque()
        self._new: list[Step] = []
        self._first = 0  # number of the oldest step that is kept

    def __len__(self) -> int:
        """Number of steps that were taken, also of those that were dropped."""
        return self._first + len(self._read) + len(self._new)

    def append(self, step: Step) -> None:
        """Take the next step down; its tensors must not change afterwards."""
        self._new.append(step)

    def forget(self, visits: Sequence[Visit]) -> None:
        """Drop the steps before the first one of all `visits`."""
        oldest = min((visit.start for visit in visits), default=len(self))
        while self._first < oldest and self._read:
            self._read.popleft()
            self._first += 1

    def beam(self, visit: Visit, position: int, rank: int) -> int:
        """Return the candidate that became beam `rank` of the sentence at `position` (from 0)."""
        row = next(row for since, row in reversed(visit.rows) if since <= visit.start + position)
        return int(self._step(visit.start + position)[4][row, rank])

    def path(self, visit: Visit, position: int, candidate: int) -> Path:
        """Return the hypothesis of the sentence that ends with `candidate` at `position` (from 0)."""
        tokens: list[int] = []
        scores: list[float] = []
        attention: list[npt.NDArray[Any]] = []
        segments = list(visit.rows)
        last, beam, total = visit.start + position, 0, 0.0
        for number in range(last, visit.start - 1, -1):
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
        return Path(tokens[::-1], scores[::-1], total, attention[::-1])

    def _step(self, number: int) -> tuple[Any, ...]:
        """Return the arrays of a step."""
        if self._new:
            self._read.extend(tuple(None if t is None else _array(t) for t in step) for step in self._new)
            self._new.clear()
        return self._read[number - self._first]


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array; NumPy has no bfloat16."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
