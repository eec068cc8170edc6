"""Perplexity of a given text under a model: exp of the mean -log p of its tokens, end-of-sentence included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import xxhash

from ziggurat import __version__
from ziggurat.evaluate.scores import Score
from ziggurat.system.errors import DataError


@dataclass(frozen=True)
class Likelihood:
    """The probability that a model gives a text, line by line given the source."""

    log_probability: float
    """Of all lines: natural logarithm, summed in float64."""
    tokens: int
    """Pieces of all lines, with one end-of-sentence for each line."""
    sentences: int
    """Lines."""

    @classmethod
    def of(cls, tokens: Iterable[Sequence[float]]) -> Self:
        """Return that of lines, each given by the log-probabilities of its tokens, end-of-sentence included."""
        lines = list(tokens)
        return cls(math.fsum(value for line in lines for value in line), sum(map(len, lines)), len(lines))

    @property
    def perplexity(self) -> float:
        """exp(-log_probability / tokens); inf where that is too large for a float. Raises DataError without a line."""
        if not self.tokens:
            raise DataError("perplexity: there is no line")
        try:
            return math.exp(-self.log_probability / self.tokens)
        except OverflowError:
            return math.inf

    def line(self) -> str:
        """Return all figures in words."""
        return (
            f"{self.sentences:,} lines, {self.tokens:,} tokens (pieces and ends of sentences): log-probability "
            f"{self.log_probability:.4f}, perplexity {self.perplexity:.4f} per token"
        )

    def score(self, vocabulary: Iterable[str]) -> Score:
        """Return the perplexity as a score, whose signature has a mark of the `vocabulary`: pieces are its unit."""
        mark = xxhash.xxh3_64_hexdigest("\n".join(vocabulary).encode())[:8]
        return Score(
            name="perplexity",
            value=self.perplexity,
            signature=f"unit:piece|eos:yes|vocabulary:{mark}|version:{__version__}",
            sentences=self.sentences,
            details=f"(log-probability = {self.log_probability:.4f} tokens = {self.tokens})",
            comparable=False,
            decimals=4,
        )
