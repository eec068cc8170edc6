"""Tables by parts of the test set, like those of compare-mt: words by frequency, sentences by length and by score.

compare-mt: Neubig et al. 2019. The first two tables are Figure 3 of Liu et al. 2020 (P3). Words are those of the first
reference and of the outputs; lengths are counted in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ziggurat.evaluate.findings import Bucket, BucketTable, OverSeeds
from ziggurat.evaluate.segments import SegmentMetric, Statistics, add_up

SentenceWords = Sequence[Sequence[str]]
"""[sentences][words]"""

# Bounds between buckets, as in compare-mt
FREQUENCIES = (1, 2, 3, 4, 5, 10, 100, 1000)
LENGTHS = (10, 20, 30, 40, 50, 60)
LENGTH_DIFFERENCES = (-20, -10, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 11, 21)
SCORES = (10, 20, 30, 40, 50, 60, 70, 80, 90)


def bucket_index(value: float, cutoffs: Sequence[int]) -> int:
    """Return the number of the bucket of `value`: 0 below the first of `cutoffs`, their number from the last on."""
    return next((index for index, cutoff in enumerate(cutoffs) if value < cutoff), len(cutoffs))


def bucket_labels(cutoffs: Sequence[int], *, whole: bool = True) -> list[str]:
    """Return the names of the buckets, as compare-mt writes them; `whole`: values are whole numbers."""
    between = [str(low) if whole and high == low + 1 else f"[{low},{high})" for low, high in pairwise(cutoffs)]
    return [f"<{cutoffs[0]}", *between, f">={cutoffs[-1]}"]


def word_accuracy(
    reference: SentenceWords, systems: Sequence[Sequence[SentenceWords]], counts: Mapping[str, int]
) -> BucketTable:
    """Return the accuracy of words by their frequency in the training text.

    The k-th occurrence of a word in an output matches its k-th in the reference, within a sentence; F is the harmonic
    mean of precision and recall, 0 where nothing matches.

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
    """Return for each bucket the number of words of the output, and the number of those that match."""
    total: Counter[int] = Counter()
    matched: Counter[int] = Counter()
    for wanted, found in zip(reference, output, strict=True):
        available = Counter(wanted)
        for word, count in Counter(found).items():
            # One bucket serves output and reference, since matching words are equal.
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
    """Return the number of values in each bucket, by system and seed; buckets empty everywhere are left out."""
    counted = [[Counter(bucket_index(value, cutoffs) for value in seed) for seed in seeds] for seeds in systems]
    return tuple(
        Bucket(label, None, tuple(OverSeeds.of([seed[index] for seed in seeds]) for seeds in counted))
        for index, label in enumerate(bucket_labels(cutoffs, whole=whole))
        if any(seed[index] for seeds in counted for seed in seeds)
    )
