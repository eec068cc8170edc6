"""Figures by parts of the test set: words by frequency, sentences by length and by score, as compare-mt makes them.

compare-mt: Neubig et al. 2019; the first two tables are Figure 3 of Liu et al. 2020 (P3). Words are those of the first
reference and the outputs; lengths are counted in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ziggurat.evaluation.findings import Bucket, BucketTable, OverSeeds
from ziggurat.evaluation.segments import SegmentMetric, Statistics, add_up
from ziggurat.evaluation.words import bucket_index, bucket_labels

__all__ = [
    "FREQUENCIES",
    "LENGTHS",
    "LENGTH_DIFFERENCES",
    "SCORES",
    "SentenceWords",
    "by_length",
    "length_differences",
    "sentence_scores",
    "word_accuracy",
]

SentenceWords = Sequence[Sequence[str]]
"""[sentences][words]"""

FREQUENCIES = (1, 2, 3, 4, 5, 10, 100, 1000)
LENGTHS = (10, 20, 30, 40, 50, 60)
LENGTH_DIFFERENCES = (-20, -10, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 11, 21)
SCORES = (10, 20, 30, 40, 50, 60, 70, 80, 90)


def word_accuracy(
    reference: SentenceWords, systems: Sequence[Sequence[SentenceWords]], counts: Mapping[str, int]
) -> BucketTable:
    """Return how well words are translated, by how often they stand in the training text.

    The k-th occurrence of a word in an output matches its k-th in the reference, within a sentence; F is the harmonic
    mean of precision and recall, 0 where nothing matches.

    Args:
        reference: words of each sentence.
        systems: of each system, of each seed, the same.
        counts: of words in the training text's target side; a word that is not there has 0.
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
    """Return how many words the output has in each bucket, and how many of them match."""
    total: Counter[int] = Counter()
    matched: Counter[int] = Counter()
    for wanted, found in zip(reference, output, strict=True):
        available = Counter(wanted)
        for word, count in Counter(found).items():
            # A matched word has its reference word's bucket, which is its own: they are equal.
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
        metric: which the statistics are of.
        systems: of each system, of each seed, its statistics.
        name: of the metric.
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
    """Return how many outputs are shorter or longer than the reference by how many words."""
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
    """Return how many sentences have which sentence score.

    systems: of each system, of each seed, the score of each sentence, from 0 to 100; name: of the score.
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
    """Return how many of each output's values fall into each bucket, without buckets that are empty everywhere."""
    counted = [[Counter(bucket_index(value, cutoffs) for value in seed) for seed in seeds] for seeds in systems]
    return tuple(
        Bucket(label, None, tuple(OverSeeds.of([seed[index] for seed in seeds]) for seeds in counted))
        for index, label in enumerate(bucket_labels(cutoffs, whole=whole))
        if any(seed[index] for seeds in counted for seed in seeds)
    )
