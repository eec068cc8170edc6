"""The tables of a comparison of systems: plain values that can be written as JSON and read back.

Each figure of a system is kept for each of its seeds (runs that differ only in the random seed), with the mean and the
standard deviation over seeds.

Tables on parts of the test set follow compare-mt (Neubig et al. 2019): words by frequency, sentences by length and by
score; the first two are Figure 3 of Liu et al. 2020 (P3). Words are those of the first reference and of the outputs;
lengths are counted in words.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ziggurat.evaluate.scores import SegmentMetric, Statistics, add_up

SIGNIFICANT = 0.05
"""SIGNIFICANT is the p-value below which a difference counts as more than chance."""
FEWEST_CASES = 30
"""FEWEST_CASES is the smallest number of cases for a significance test. Resamples of few cases are nearly identical
(for a single case, all are equal), so p-values would be far too small: experiments/compare-mt has figures."""

USELESS_BLEU = 5.0
"""USELESS_BLEU is the BLEU below which a system does not translate. Of two systems below it, neither is better, because
both outputs are useless."""


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
class SystemDifference:
    """The difference of two systems under one metric, with p-values.

    A p-value is the probability of a difference at least as large on other sentences of this kind, if both systems were
    equally good. Adjusted p-values are corrected for the number of pairs (Holm 1979).
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
    """Scores of all systems under one metric."""

    metric: str
    """Name of the metric, such as `BLEU`, `chrF2`, `METEOR`."""
    signature: str
    """The settings behind the scores; scores with different signatures must not be compared."""
    higher_is_better: bool
    systems: tuple[OverSeeds, ...]
    """One per system, in order."""
    pairs: tuple[SystemDifference, ...]
    """All pairs of systems, the earlier one as `left`; empty with one system."""
    test_signature: str
    """The settings of the tests; empty with one system."""
    decimals: int = 2
    """Number of decimals of the scores to show."""
    sentences: int = 0
    """Lines of the test set."""
    useless: tuple[str, ...] = ()
    """Systems with a BLEU below USELESS_BLEU."""

    @property
    def too_few(self) -> bool:
        """True if there are too few sentences to distinguish a difference from chance, whatever the p-values."""
        return self.sentences < FEWEST_CASES

    def verdict(self, row: str, column: str) -> str:
        """Return `+` if `row` is significantly better than `column`, `-` if worse, otherwise `=`.

        `?`: too few sentences to decide; `0`: neither translates. Significant means an adjusted p-value of the paired
        bootstrap of at most 0.05; Table 3 of Liu et al. 2020 (P3) uses the unadjusted one. Raises KeyError if there is
        no such pair.
        """
        for pair in self.pairs:
            if {pair.left, pair.right} == {row, column}:
                if self.too_few:
                    return "?"
                if self.both_useless(pair):
                    return "0"
                if pair.bootstrap_adjusted >= SIGNIFICANT or pair.difference == 0:
                    return "="
                left_is_better = (pair.difference > 0) == self.higher_is_better
                return "+" if left_is_better == (pair.left == row) else "-"
        raise KeyError((row, column))

    def both_useless(self, pair: SystemDifference) -> bool:
        """Return True if neither of two systems translates, so that a difference between them is meaningless."""
        return {pair.left, pair.right} <= set(self.useless)


@dataclass(frozen=True)
class Bucket:
    """A part of the test set: words or sentences with a common property."""

    label: str
    """Label such as `<10`, `[10,20)`, `>=60`."""
    size: int | None
    """Number of words or sentences of the reference in it; None if the number depends on the output."""
    systems: tuple[OverSeeds, ...]
    """The measure in this bucket; one per system."""


@dataclass(frozen=True)
class BucketTable:
    """A measure by buckets."""

    key: str
    """Machine-readable name, such as `accuracy-by-frequency`."""
    title: str
    by: str
    """The quantity that defines the buckets, such as `count in the training text`."""
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
    """The number of sentences that each of two systems translates better, and the largest differences."""

    left: str
    right: str
    measure: str
    """The sentence score, mean over seeds, with its signature."""
    wins: int
    """Number of sentences that `left` translates better."""
    losses: int
    ties: int
    left_best: tuple[Example, ...]
    """Sentences where `left` is furthest ahead, largest difference first."""
    right_best: tuple[Example, ...]


@dataclass(frozen=True)
class NgramDifference:
    """An n-gram that one of two systems gets right more often."""

    ngram: str
    """Its words, separated by spaces."""
    left: float
    """Number of its matches with the reference in `left`, mean over seeds."""
    right: float
    score: float
    """(left + 1) / (left + right + 2), which is above 0.5 if `left` has more matches."""


@dataclass(frozen=True)
class NgramTable:
    """The n-grams of the reference that best distinguish two systems."""

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


SentenceWords = Sequence[Sequence[str]]
"""[sentences][words]"""

# Bounds between buckets, as in compare-mt
FREQUENCIES = (1, 2, 3, 4, 5, 10, 100, 1000)
LENGTHS = (10, 20, 30, 40, 50, 60)
LENGTH_DIFFERENCES = (-20, -10, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 11, 21)
SCORES = (10, 20, 30, 40, 50, 60, 70, 80, 90)


def bucket_index(value: float, cutoffs: Sequence[int]) -> int:
    """Return the index of the bucket of `value`: 0 below the first of `cutoffs`, len(cutoffs) at or above the last."""
    return next((index for index, cutoff in enumerate(cutoffs) if value < cutoff), len(cutoffs))


def bucket_labels(cutoffs: Sequence[int], *, whole: bool = True) -> list[str]:
    """Return the names of the buckets in compare-mt's notation; `whole`: values are whole numbers."""
    between = [str(low) if whole and high == low + 1 else f"[{low},{high})" for low, high in pairwise(cutoffs)]
    return [f"<{cutoffs[0]}", *between, f">={cutoffs[-1]}"]


def word_accuracy(
    reference: SentenceWords, systems: Sequence[Sequence[SentenceWords]], counts: Mapping[str, int]
) -> BucketTable:
    """Return the accuracy of words by their frequency in the training text.

    Within a sentence, the k-th occurrence of a word in an output matches its k-th occurrence in the reference. F is the
    harmonic mean of precision and recall, 0 if nothing matches.

    Args:
        reference: words of each sentence.
        systems: words of each sentence in each seed's output of each system.
        counts: numbers of occurrences in the training text's target side; 0 for words that are missing.
    """
    in_reference = Counter(bucket_index(counts.get(word, 0), FREQUENCIES) for words in reference for word in words)
    outputs = [[_matches(reference, output, counts) for output in seeds] for seeds in systems]
    buckets = []
    for index, label in enumerate(bucket_labels(FREQUENCIES)):
        size = in_reference[index]
        if size or any(total[index] for seeds in outputs for total, _ in seeds):
            values = [[_f_measure(match[index], size, total[index]) for total, match in seeds] for seeds in outputs]
            buckets.append(Bucket(label, size, tuple(OverSeeds.of(of_seeds) for of_seeds in values)))
    return BucketTable(
        key="accuracy-by-frequency",
        title="Word accuracy by frequency in the training text",
        by="count in the training text",
        measure="F-measure, %",
        size_of="words of the reference",
        buckets=tuple(buckets),
    )


def _matches(
    reference: SentenceWords, output: SentenceWords, counts: Mapping[str, int]
) -> tuple[Counter[int], Counter[int]]:
    """Return, for each bucket, the number of words of the output and how many of them match."""
    total: Counter[int] = Counter()
    matched: Counter[int] = Counter()
    for wanted, found in zip(reference, output, strict=True):
        available = Counter(wanted)
        for word, count in Counter(found).items():
            # Output and reference have the same bucket, since matching words are equal.
            index = bucket_index(counts.get(word, 0), FREQUENCIES)
            total[index] += count
            matched[index] += min(count, available[word])
    return total, matched


def _f_measure(matched: int, in_reference: int, in_output: int) -> float:
    """Return 100 times the harmonic mean of matched / in_output and matched / in_reference."""
    return 200.0 * matched / (in_reference + in_output) if matched else 0.0


def by_length(
    reference: SentenceWords, metric: SegmentMetric, systems: Sequence[Sequence[Statistics]], name: str
) -> BucketTable:
    """Return the corpus score of the sentences of each length.

    Args:
        reference: words of each sentence.
        metric: a metric.
        systems: its statistics of each seed's output of each system.
        name: name of the metric.
    """
    labels = bucket_labels(LENGTHS)
    members: list[list[int]] = [[] for _ in labels]
    for number, words in enumerate(reference):
        members[bucket_index(len(words), LENGTHS)].append(number)
    buckets = []
    for label, numbers in zip(labels, members, strict=True):
        if numbers:
            parts = [[[seed[number] for number in numbers] for seed in seeds] for seeds in systems]
            values = [[metric.from_sums(add_up(part)).score for part in seeds] for seeds in parts]
            buckets.append(Bucket(label, len(numbers), tuple(OverSeeds.of(of_seeds) for of_seeds in values)))
    return BucketTable(
        key=f"{name.lower()}-by-length",
        title=f"{name} by length of the reference",
        by="words of the reference",
        measure=f"{name} of the bucket's sentences",
        size_of="sentences",
        buckets=tuple(buckets),
    )


def length_differences(reference: SentenceWords, systems: Sequence[Sequence[SentenceWords]]) -> BucketTable:
    """Return a histogram of the differences in length between outputs and reference, in words."""
    lengths = [len(words) for words in reference]
    values = [
        [[len(words) - length for words, length in zip(output, lengths, strict=True)] for output in seeds]
        for seeds in systems
    ]
    return BucketTable(
        key="length-difference",
        title="Length of outputs",
        by="words of the output minus words of the reference",
        measure="sentences",
        size_of="",
        buckets=_histogram(values, LENGTH_DIFFERENCES, whole=True),
    )


def sentence_scores(systems: Sequence[Sequence[Sequence[float]]], name: str) -> BucketTable:
    """Return a histogram of sentence scores.

    Args:
        systems: scores of the sentences, 0 to 100, in each seed's output of each system.
        name: name of the score.
    """
    return BucketTable(
        key=f"sentence-{name.lower()}",
        title=f"Sentences by {name}",
        by=f"sentence {name}",
        measure="sentences",
        size_of="",
        buckets=_histogram(systems, SCORES, whole=False),
    )


def _histogram(
    systems: Sequence[Sequence[Sequence[float]]], cutoffs: Sequence[int], *, whole: bool
) -> tuple[Bucket, ...]:
    """Return the number of values in each bucket, by system and seed; buckets that are always empty are left out."""
    counted = [[Counter(bucket_index(value, cutoffs) for value in seed) for seed in seeds] for seeds in systems]
    return tuple(
        Bucket(label, None, tuple(OverSeeds.of([seed[index] for seed in seeds]) for seeds in counted))
        for index, label in enumerate(bucket_labels(cutoffs, whole=whole))
        if any(seed[index] for seeds in counted for seed in seeds)
    )
