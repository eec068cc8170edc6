"""Metrics as sums over sentences, so that sentences can be scored, grouped and drawn again at random.

A metric's statistics are one row of numbers per sentence. Their sum over a test set, or over any part or resampling of
it, gives the score of that part: n-gram counts for BLEU and chrF, edits and lengths for TER, the sentence's score and a
one for metrics that are means over sentences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ziggurat.evaluation.scores import BOOTSTRAP_SAMPLES, Metric, Score, sacrebleu_metric

__all__ = ["MeanMetric", "MeanSignature", "SacrebleuMetric", "SegmentMetric", "Statistics", "add_up", "scored"]

Statistics = list[list[float]]
"""[sentences, numbers]"""


class SegmentMetric(ABC):
    """A metric with its references."""

    higher_is_better = True
    decimals = 2
    """How many tell systems apart, in tables."""

    @abstractmethod
    def statistics(self, outputs: Sequence[Sequence[str]]) -> list[Statistics]:
        """Return the statistics of each of `outputs`, which are lists of lines of the test set."""

    @abstractmethod
    def from_sums(self, sums: Sequence[float]) -> Any:
        """Return sacreBLEU's Score (`name`, `score`) from statistics added up over sentences."""

    @abstractmethod
    def signature(self) -> Any:
        """Return a new sacreBLEU Signature, or what has its `update` and `str()`."""


class SacrebleuMetric(SegmentMetric):
    """BLEU, chrF or TER by sacreBLEU."""

    def __init__(self, name: Metric, references: Sequence[Sequence[str]], **options: Any) -> None:
        """`references` and `options` are as in `sacrebleu_metric`, and so are the errors."""
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
    """Signature in sacreBLEU's form for a metric that is not sacreBLEU's."""

    def __init__(self, entries: dict[str, object], version: str) -> None:
        """`version` is of what computed the scores, such as `nltk-3.9`, and stands last."""
        self._entries = entries
        self._version = version

    def update(self, key: str, value: object) -> None:
        """Add or change an entry."""
        self._entries[key] = value

    def __str__(self) -> str:
        return "|".join([*(f"{key}:{value}" for key, value in self._entries.items()), f"version:{self._version}"])


class MeanMetric(SegmentMetric):
    """A metric whose score of a test set is the mean over its sentences."""

    name: str

    @abstractmethod
    def sentence_scores(self, outputs: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return the score of each line of each of `outputs`."""

    def statistics(self, outputs: Sequence[Sequence[str]]) -> list[Statistics]:
        """Return each sentence's score with a one beside it, for the mean."""
        return [[[score, 1.0] for score in scores] for scores in self.sentence_scores(outputs)]

    def from_sums(self, sums: Sequence[float]) -> Any:
        """Return the mean."""
        from sacrebleu.metrics.base import Score as SacrebleuScore

        return SacrebleuScore(self.name, float(sums[0]) / float(sums[1]))


def add_up(statistics: Statistics) -> list[float]:
    """Return the sum of rows, as sacreBLEU adds them."""
    from sacrebleu import utils

    total: Any = utils.sum_of_lists  # has no types
    return cast(list[float], total(statistics))


def scored(metric: SegmentMetric, output: Sequence[str], *, confidence: bool) -> Score:
    """Return the score of one output, with a bootstrap interval as sacreBLEU makes it where `confidence` asks."""
    from sacrebleu import significance

    resample: Any = significance._bootstrap_resample  # asks for a Metric of its own; this is all it uses of one

    (statistics,) = metric.statistics([output])
    found, signature = metric.from_sums(add_up(statistics)), metric.signature()
    mean = interval = None
    if confidence:
        seed, resampled = resample(statistics, _Resampled(metric), BOOTSTRAP_SAMPLES)
        mean, interval = (float(x) for x in significance.estimate_ci(np.array([s.score for s in resampled])))
        signature.update("bs", BOOTSTRAP_SAMPLES)
        signature.update("seed", seed)
    value, decimals = float(found.score), metric.decimals
    return Score(found.name, value, str(signature), len(output), "", mean, interval, decimals=decimals)


class _Resampled:
    """A metric as sacreBLEU's resampling asks for it."""

    def __init__(self, metric: SegmentMetric) -> None:
        self._compute_score_from_stats = metric.from_sums
