"""The tables of a comparison of systems: plain values that can be written as JSON and read back.

Each figure of a system is kept for each of its seeds (trainings that differ only in the random seed), with the mean
and the standard deviation over seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_CASES = 30
"""Cases that a test of significance needs at least. Resamples of few cases are near copies of one another (of a single
one, all are equal), so p-values come out far too small: docs/evaluate.md has figures."""


@dataclass(frozen=True)
class OverSeeds:
    """One figure of one system, over its seeds."""

    values: tuple[float, ...]
    """One per seed."""
    mean: float
    """Mean of `values`."""
    deviation: float | None
    """Standard deviation of `values` (divided by n - 1); None with one seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> OverSeeds:
        """Return the figure from its values, at least one."""
        plain = tuple(float(value) for value in values)
        deviation = statistics.stdev(plain) if len(plain) > 1 else None
        return cls(plain, statistics.fmean(plain), deviation)


@dataclass(frozen=True)
class SystemNotes:
    """The name and origin of one of the systems."""

    name: str
    """Unique among the systems."""
    seeds: int
    """Number of its outputs."""
    origins: tuple[str, ...]
    """The origin of each output: a file, or a model with its weights; may be empty."""


@dataclass(frozen=True)
class Pair:
    """The difference of two systems under one metric, with p-values.

    A p-value is the probability of a difference at least as large on other sentences of this kind, if both systems
    were equally good. The adjusted ones are corrected for the number of pairs (Holm 1979).
    """

    left: str
    right: str
    difference: float
    """Mean score of `left` minus that of `right`."""
    bootstrap: float
    """p by paired bootstrap resampling (Koehn 2004), two-sided."""
    bootstrap_adjusted: float
    randomisation: float
    """p by approximate randomisation (Riezler and Maxwell 2005), two-sided."""
    randomisation_adjusted: float


@dataclass(frozen=True)
class Scores:
    """All systems under one metric."""

    metric: str
    """Such as `BLEU`, `chrF2`, `METEOR`."""
    signature: str
    """The settings behind the scores; scores with different signatures must not be compared."""
    higher_is_better: bool
    systems: tuple[OverSeeds, ...]
    """One per system, in order."""
    pairs: tuple[Pair, ...]
    """All pairs of systems, the earlier one as `left`; empty with one system."""
    test_signature: str
    """The settings of the tests; empty with one system."""
    decimals: int = 2
    """Decimals of the scores to show."""
    sentences: int = 0
    """Lines of the test set."""

    @property
    def too_few(self) -> bool:
        """True where the sentences are too few to tell a difference from chance, whatever the p-values."""
        return self.sentences < FEWEST_CASES

    def verdict(self, row: str, column: str) -> str:
        """Return `+` where `row` is significantly better than `column`, `-` where worse, else `=`.

        With too few sentences to tell: `?`.
        By the adjusted p-value of the paired bootstrap, 0.05 at most; Table 3 of Liu et al. 2020 (P3) uses the plain
        one. Raises KeyError where there is no such pair.
        """
        for pair in self.pairs:
            if {pair.left, pair.right} == {row, column}:
                if self.too_few:
                    return "?"
                if pair.bootstrap_adjusted >= 0.05 or pair.difference == 0:
                    return "="
                left_is_better = (pair.difference > 0) == self.higher_is_better
                return "+" if left_is_better == (pair.left == row) else "-"
        raise KeyError((row, column))


@dataclass(frozen=True)
class Bucket:
    """A part of the test set: words or sentences with something in common."""

    label: str
    """Such as `<10`, `[10,20)`, `>=60`."""
    size: int | None
    """Number of words or sentences of the reference in it; None where the number depends on the output."""
    systems: tuple[OverSeeds, ...]
    """The measure in this bucket; one per system."""


@dataclass(frozen=True)
class BucketTable:
    """A measure by buckets."""

    key: str
    """Name for machines, such as `accuracy-by-frequency`."""
    title: str
    by: str
    """The quantity that makes the buckets, such as `count in the training text`."""
    measure: str
    """The name of the figures, with unit."""
    size_of: str
    """The name of what `size` of a bucket counts."""
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Example:
    """One sentence, translated by two systems."""

    line: int
    """Its number in the test set, from 1."""
    left_score: float
    """Sentence score of the left system, mean over its seeds."""
    right_score: float
    source: str | None
    reference: str
    left: tuple[str, ...]
    """Outputs of the left system, one per seed."""
    right: tuple[str, ...]


@dataclass(frozen=True)
class SentenceTable:
    """The numbers of sentences that either of two systems translates better, and the largest differences."""

    left: str
    right: str
    measure: str
    """The sentence score, mean over seeds, with its signature."""
    wins: int
    """Sentences that `left` translates better."""
    losses: int
    ties: int
    left_best: tuple[Example, ...]
    """Sentences where `left` is ahead most, the largest difference first."""
    right_best: tuple[Example, ...]


@dataclass(frozen=True)
class NgramDifference:
    """An n-gram that one of two systems gets right more often."""

    ngram: str
    """Its words, blanks between them."""
    left: float
    """Number of its matches with the reference in `left`, mean over seeds."""
    right: float
    score: float
    """(left + 1) / (left + right + 2): above 0.5 where `left` has more matches."""


@dataclass(frozen=True)
class NgramTable:
    """The n-grams of the reference that best tell two systems apart."""

    left: str
    right: str
    more_in_left: tuple[NgramDifference, ...]
    more_in_right: tuple[NgramDifference, ...]


@dataclass(frozen=True)
class OutputCount:
    """The number of outputs of each system with a certain fault, or of perfect ones."""

    key: str
    """`empty`, `copied`, `untranslated`, `repeated` or `exact`."""
    title: str
    """A description of the outputs counted."""
    systems: tuple[OverSeeds, ...]
    """Number of sentences; one per system."""
    lines: tuple[tuple[int, ...], ...]
    """Per system the numbers, from 1, of the first few such lines in the output of its first seed."""
