"""What a comparison of systems finds, as tables of plain values that become JSON and come back from it.

Every figure of a system is kept for each of its seeds (trainings that differ in nothing but the random seed), with
the mean and the standard deviation over them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "Bucket",
    "BucketTable",
    "Example",
    "NgramDifference",
    "NgramTable",
    "OutputCount",
    "OverSeeds",
    "Pair",
    "Scores",
    "SentenceTable",
    "SystemNotes",
]


@dataclass(frozen=True)
class OverSeeds:
    """One figure of one system."""

    values: tuple[float, ...]
    """One per seed."""
    mean: float
    """Mean of `values`."""
    deviation: float | None
    """Standard deviation of `values` (n - 1 below the line); None with one seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> OverSeeds:
        """Return the figure with these values, at least one."""
        plain = tuple(float(value) for value in values)
        deviation = statistics.stdev(plain) if len(plain) > 1 else None
        return cls(plain, statistics.fmean(plain), deviation)


@dataclass(frozen=True)
class SystemNotes:
    """One of the systems compared."""

    name: str
    """Unique among the systems."""
    seeds: int
    """How many outputs it has."""
    origins: tuple[str, ...]
    """Where each output comes from: a file, or a model with its weights; may be empty."""


@dataclass(frozen=True)
class Pair:
    """Two systems under one metric, and whether chance explains their difference.

    p-values: the probability, if the two were equally good, of a difference at least as large on other sentences of
    this kind. The adjusted ones allow for many pairs (Holm 1979).
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
    """How the scores were made; scores with different signatures must not be compared."""
    higher_is_better: bool
    systems: tuple[OverSeeds, ...]
    """One per system, in their order."""
    pairs: tuple[Pair, ...]
    """Every two systems, the earlier one as `left`; empty with one system."""
    test_signature: str
    """How the tests were made; empty with one system."""
    decimals: int = 2
    """How many of the scores to show."""

    def verdict(self, row: str, column: str, level: float = 0.05) -> str:
        """Return `+` where `row` is significantly better than `column`, `-` where worse, else `=`.

        By the adjusted p-value of the paired bootstrap, as in Table 3 of Liu et al. 2020 (P3). KeyError: no such pair.
        """
        for pair in self.pairs:
            if {pair.left, pair.right} == {row, column}:
                if pair.bootstrap_adjusted >= level or pair.difference == 0:
                    return "="
                left_is_better = (pair.difference > 0) == self.higher_is_better
                return "+" if left_is_better == (pair.left == row) else "-"
        raise KeyError((row, column))


@dataclass(frozen=True)
class Bucket:
    """The part of the test set that has something in common."""

    label: str
    """Such as `<10`, `[10,20)`, `>=60`."""
    size: int | None
    """How many words or sentences of the reference fall into it; None where each output has its own number."""
    systems: tuple[OverSeeds, ...]
    """The measure in this bucket; one per system."""


@dataclass(frozen=True)
class BucketTable:
    """A measure by buckets."""

    key: str
    """Name for machines, such as `accuracy-by-frequency`."""
    title: str
    by: str
    """What the buckets are made of, such as `count in the training text`."""
    measure: str
    """What the figures are, with unit."""
    size_of: str
    """What `size` of a bucket counts."""
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Example:
    """One sentence as two systems translate it."""

    line: int
    """Number in the test set, from 1."""
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
    """How often one of two systems translates a sentence better, and where they differ most."""

    left: str
    right: str
    measure: str
    """The sentence score, mean over seeds, with its signature."""
    wins: int
    """Sentences that `left` translates better."""
    losses: int
    ties: int
    left_best: tuple[Example, ...]
    """Sentences where `left` is better by most, the largest difference first."""
    right_best: tuple[Example, ...]


@dataclass(frozen=True)
class NgramDifference:
    """An n-gram that one of two systems gets right more often."""

    ngram: str
    """Its words, blanks between them."""
    left: float
    """How often `left` has it where the reference has it, mean over seeds."""
    right: float
    score: float
    """(left + 1) / (left + right + 2): above 0.5 for the left system's."""


@dataclass(frozen=True)
class NgramTable:
    """The n-grams of the reference that best tell two systems apart."""

    left: str
    right: str
    more_in_left: tuple[NgramDifference, ...]
    more_in_right: tuple[NgramDifference, ...]


@dataclass(frozen=True)
class OutputCount:
    """How many outputs of each system have a certain fault, or none at all."""

    key: str
    """`empty`, `copied`, `untranslated`, `repeated` or `exact`."""
    title: str
    """What is counted, in words."""
    systems: tuple[OverSeeds, ...]
    """Number of sentences; one per system."""
    lines: tuple[tuple[int, ...], ...]
    """Per system the first few line numbers, from 1, in its first seed's output."""
