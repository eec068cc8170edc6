"""Metrics as sums over sentences, so that sentences can be scored, grouped and resampled; and the words BLEU counts.

A metric's statistics are one row of numbers per sentence. Their sum over a test set, or over any part or resampling of
it, gives the score of that part. The numbers are n-gram counts for BLEU and chrF, edits and lengths for TER, and for
metrics that are means over sentences the sentence's score and a one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from ziggurat.evaluate.scores import BOOTSTRAP_SAMPLES, Metric, Score, sacrebleu_metric

Statistics = list[list[float]]
"""[sentences, numbers]"""


class SegmentMetric(ABC):
    """A metric together with its references."""

    higher_is_better = True
    decimals = 2
    """Decimals to show in tables."""

    @abstractmethod
    def statistics(self, outputs: Sequence[Sequence[str]]) -> list[Statistics]:
        """Return the statistics of each of `outputs`, each a list with one line per sentence of the test set."""

    @abstractmethod
    def from_sums(self, sums: Sequence[float]) -> Any:
        """Return sacreBLEU's Score (`name`, `score`) from statistics summed over sentences."""

    @abstractmethod
    def signature(self) -> Any:
        """Return a new sacreBLEU Signature, or an object with its `update` and `str()`."""


class SacrebleuMetric(SegmentMetric):
    """BLEU, chrF or TER by sacreBLEU."""

    def __init__(self, name: Metric, references: Sequence[Sequence[str]], **options: Any) -> None:
        """`references`, `options` and errors are those of `sacrebleu_metric`."""
        self.higher_is_better = name != "ter"
        self.metric = sacrebleu_metric(name, references=references, **options)

    def statistics(self, outputs: Sequence[Sequence[str]]) -> list[Statistics]:
        """Return the statistics of each of `outputs`."""
        return [self.metric._extract_corpus_statistics(list(lines), None) for lines in outputs]

    def from_sums(self, sums: Sequence[float]) -> Any:
        """Return sacreBLEU's score."""
        return self.metric._compute_score_from_stats(sums)

    def signature(self) -> Any:
        """Return sacreBLEU's signature."""
        return self.metric.get_signature()


class MeanSignature:
    """Signature in the form of sacreBLEU's, for other metrics."""

    def __init__(self, entries: dict[str, object], version: str) -> None:
        """`version` is that of the program, such as `nltk-3.9`; it comes last."""
        self._entries = entries
        self._version = version

    def update(self, key: str, value: object) -> None:
        """Add or change an entry."""
        self._entries[key] = value

    def __str__(self) -> str:
        return "|".join([*(f"{key}:{value}" for key, value in self._entries.items()), f"version:{self._version}"])


class MeanMetric(SegmentMetric):
    """A metric whose score of a test set is the mean over sentences."""

    name: str

    @abstractmethod
    def sentence_scores(self, outputs: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return the score of each line of each of `outputs`."""

    def statistics(self, outputs: Sequence[Sequence[str]]) -> list[Statistics]:
        """Return [score, 1] for each sentence: the sums give the mean."""
        return [[[score, 1.0] for score in scores] for scores in self.sentence_scores(outputs)]

    def from_sums(self, sums: Sequence[float]) -> Any:
        """Return the mean."""
        from sacrebleu.metrics.base import Score as SacrebleuScore

        return SacrebleuScore(self.name, float(sums[0]) / float(sums[1]))


def add_up(statistics: Statistics) -> list[float]:
    """Return the sum of the rows, in sacreBLEU's order: floats must round as they do there."""
    from sacrebleu import utils

    total: Any = utils.sum_of_lists  # without type annotations
    return cast(list[float], total(statistics))


def scored(metric: SegmentMetric, output: Sequence[str], *, confidence: bool) -> Score:
    """Return the score of one output, with sacreBLEU's bootstrap interval if `confidence`."""
    from sacrebleu import significance

    resample: Any = significance._bootstrap_resample  # typed for sacreBLEU's metrics; uses only what _Resampled has
    (statistics,) = metric.statistics([output])
    score, signature = metric.from_sums(add_up(statistics)), metric.signature()
    mean = interval = None
    if confidence:
        seed, resampled = resample(statistics, _Resampled(metric), BOOTSTRAP_SAMPLES)
        mean, interval = (
            float(value) for value in significance.estimate_ci(np.array([found.score for found in resampled]))
        )
        signature.update("bs", BOOTSTRAP_SAMPLES)
        signature.update("seed", seed)
    value, decimals = float(score.score), metric.decimals
    return Score(score.name, value, str(signature), len(output), "", mean, interval, decimals=decimals)


class _Resampled:
    """A metric in the form that sacreBLEU's resampling needs."""

    def __init__(self, metric: SegmentMetric) -> None:
        self._compute_score_from_stats = metric.from_sums


# Words


class Words:
    """Splitter of lines into the words that BLEU counts, by sacreBLEU's tokenizers."""

    def __init__(
        self, *, target_language: str | None = None, tokenize: str | None = None, lowercase: bool = False
    ) -> None:
        """Arguments and errors are those of ziggurat.evaluate.scores.evaluate."""
        metric = sacrebleu_metric("bleu", target_language=target_language, tokenize=tokenize, lowercase=lowercase)
        self._tokenizer = metric.tokenizer
        self._lowercase = lowercase
        self.name = str(metric.tokenizer_signature)
        """sacreBLEU's name of the tokenizer."""

    def __call__(self, line: str) -> list[str]:
        """Return the words of a line."""
        line = line.rstrip()
        return str(self._tokenizer(line.lower() if self._lowercase else line)).split()

    def counts(self, lines: Iterable[str]) -> Counter[str]:
        """Return the number of occurrences of each word in `lines`, which are read one by one."""
        found: Counter[str] = Counter()
        for line in lines:
            found.update(self(line))
        return found
