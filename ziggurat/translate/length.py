"""Length penalties: how hypotheses of different length are compared.

    score(y) = log p(y | x) / divisor(|y|) + coverage(x, y),        |y| counts the end-of-sentence token

    none     divisor 1
    power    |y|^alpha                             fairseq and its forks
    gnmt     ((5 + |y|) / 6)^alpha                 Wu et al. 2016, equation 14; tensor2tensor, zero
    lingvo   ((5 + |y|) / 5)^alpha, with coverage  lingvo

    coverage = beta * rho * sum_s log clip(sum_t a_ts / rho, 0.001, 0.5)

where a_ts is the attention weight of target step t on source token s and rho the expected target/source
ratio. The same alpha means different things in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

from ziggurat.config import LengthPenaltyConfig

_COVERAGE_RANGE = (0.001, 0.5)
"""Bounds between which a source token's attention sum counts in the coverage term."""

_Number = TypeVar("_Number", float, Tensor)

_BASE: dict[str, Callable[[float | Tensor], float | Tensor]] = {
    "none": lambda length: length * 0 + 1,
    "power": lambda length: length,
    "gnmt": lambda length: (5 + length) / 6,
    "lingvo": lambda length: (5 + length) / 5,
}


@dataclass(frozen=True)
class LengthPenalty:
    """One of the penalties above; `coverage` is beta, `length_ratio` is rho."""

    kind: Literal["none", "gnmt", "power", "lingvo"] = "none"
    alpha: float = 0.0
    coverage: float = 0.0
    length_ratio: float = 1.0

    @classmethod
    def of(cls, config: LengthPenaltyConfig) -> LengthPenalty:
        """Return the penalty that the configuration describes."""
        return cls(config.kind, config.alpha, config.coverage, config.length_ratio)

    def divisor(self, length: _Number) -> _Number:
        """Return the divisor for hypotheses of `length` tokens, end-of-sentence counted; it never falls with length.

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

    def best_reachable(self, log_probability: Tensor, max_length: Tensor, source_length: Tensor) -> Tensor:
        """Return a bound on the score of anything that an unfinished hypothesis can still become.

        More tokens can only lower `log_probability` (never above 0) and raise the divisor, up to `max_length` tokens
        with end-of-sentence; each of the `source_length` source tokens adds at most beta * rho * log 0.5. All arguments
        and the result have shape [batch].
        """
        bound = log_probability / self.divisor(max_length.to(log_probability.dtype))
        if self.coverage:
            most = self.coverage * self.length_ratio * math.log(_COVERAGE_RANGE[1])
            bound = bound + most * source_length.to(bound.dtype)
        return bound
