"""Tests of the difference between systems: sacreBLEU's paired tests, for every metric and for several seeds.

Paired bootstrap resampling: Koehn 2004; approximate randomisation: Riezler and Maxwell 2005; correction for the number
of pairs: Holm 1979.

With one output per system, the p-values are those of `sacrebleu --paired-bs` and `--paired-ar`, except for systems of
equal score: here they have p = 1, there the smallest p possible, since only resamples with a larger difference count.

With several seeds, the statistics of a sentence are summed over the seeds of a system, so a resample draws a sentence
with all its translations. Drawn one by one, the same sentence would count as several independent ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from ziggurat.evaluate.findings import OverSeeds, Scores, SystemDifference
from ziggurat.evaluate.scores import SegmentMetric, Statistics, add_up

RESAMPLINGS = 1000
"""Resamplings of the paired bootstrap: sacreBLEU's default, and the number in Liu et al. 2020 (P3)."""

TRIALS = 10_000
"""Trials of approximate randomisation: sacreBLEU's default."""


def compare_scores(
    metric: SegmentMetric,
    names: Sequence[str],
    statistics: Sequence[Sequence[Statistics]],
    *,
    resamplings: int = RESAMPLINGS,
    trials: int = TRIALS,
) -> Scores:
    """Return the scores of all systems under `metric`, and the tests of all pairs.

    Args:
        metric: a metric.
        names: names of the systems.
        statistics: the metric's statistics of each seed's output of each system.
        resamplings: number of resamplings of the paired bootstrap.
        trials: number of trials of approximate randomisation.
    """
    found = [[metric.from_sums(add_up(seed)) for seed in seeds] for seeds in statistics]
    systems = tuple(OverSeeds.of([score.score for score in seeds]) for seeds in found)
    pooled = _pooled(statistics)
    pairs = list(combinations(range(len(names)), 2))
    raw = [p_values(metric, pooled, kind, count) for kind, count in (("bs", resamplings), ("ar", trials))]
    adjusted = [holm(p) for p in raw]
    return Scores(
        metric=str(found[0][0].name),
        signature=str(metric.signature()),
        higher_is_better=metric.higher_is_better,
        systems=systems,
        pairs=tuple(
            SystemDifference(
                names[left],
                names[right],
                systems[left].mean - systems[right].mean,
                *(p for test in range(2) for p in (raw[test][number], adjusted[test][number])),
            )
            for number, (left, right) in enumerate(pairs)
        ),
        test_signature=_signature(resamplings, trials) if pairs else "",
        decimals=metric.decimals,
        sentences=len(pooled[0]),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, in the same order: Holm 1979.

    The smallest of m is multiplied by m, the next by m - 1, and so on; none is below the one before it, or above 1.
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = highest
    return adjusted


def _pooled(statistics: Sequence[Sequence[Statistics]]) -> list[Statistics]:
    """Return one table per system: sums over its seeds, scaled so that each system has the same weight.

    The factors are whole numbers, so that counts stay counts, and 1 where all systems have equally many seeds.
    """
    common = math.lcm(*(len(seeds) for seeds in statistics))
    pooled = []
    for seeds in statistics:
        if common == 1:
            pooled.append(seeds[0])
            continue
        factor = common // len(seeds)
        pooled.append(
            [[sum(column) * factor for column in zip(*rows, strict=True)] for rows in zip(*seeds, strict=True)]
        )
    return pooled


def p_values(metric: SegmentMetric, pooled: Sequence[Statistics], kind: str, count: int) -> list[float]:
    """Return the p-values of all pairs, in the order of `combinations`, by the test that sacreBLEU calls `kind`."""
    from sacrebleu import significance

    paired_test: Any = significance.PairedTest  # typed for sacreBLEU's metrics; uses only what _Tested has
    scores = [metric.from_sums(add_up(table)).score for table in pooled]
    found = []
    # PairedTest compares the first of its systems with all others, so one call serves all pairs with `first`.
    for first in range(len(pooled) - 1):
        named = [(str(index), table) for index, table in enumerate(pooled) if index >= first]
        _, results = paired_test(named, {"": _Tested(metric)}, None, kind, count)()
        (of_systems,) = (values for key, values in results.items() if key != "System")
        for other, result in enumerate(of_systems[1:], start=first + 1):
            found.append(1.0 if scores[other] == scores[first] else float(result.p_value))
    return found


def resampled_scores(metric: SegmentMetric, tables: Sequence[Statistics], count: int) -> np.ndarray:
    """Return the score of each table of statistics on `count` resamples of its cases: `[tables, count]`.

    A resample draws the same cases from all tables; they are the ones that sacreBLEU's paired bootstrap draws.
    """
    cases = len(tables[0])
    drawn = np.random.default_rng(_seed()).choice(cases, size=(count, cases), replace=True)
    arrays = [np.array(table, dtype=float) for table in tables]
    return np.array([[metric.from_sums(array[rows].sum(0)).score for rows in drawn] for array in arrays], dtype=float)


def two_sided_p(difference: float, resampled: np.ndarray) -> float:
    """Return how likely a difference so large is where there is none, by its values on resamples.

    These are shifted so that their mean is 0. Both tails count; sacreBLEU's test, which shifts absolute values, counts
    about one.
    """
    beyond = int(np.sum(np.abs(resampled - resampled.mean()) >= abs(difference)))
    return (beyond + 1) / (len(resampled) + 1)


def _seed() -> int | None:
    """Return the seed of sacreBLEU's tests; None where resamples are to differ every time."""
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    return (None if seed.lower() == "none" else int(seed)) or None  # 0 is no seed there


def _signature(resamplings: int, trials: int) -> str:
    """Return the signature of the tests, in sacreBLEU's form."""
    import sacrebleu

    seed = os.environ.get("SACREBLEU_SEED", "12345").lower()  # as sacreBLEU reads it
    return f"bs:{resamplings}|ar:{trials}|seed:{seed}|version:{sacrebleu.__version__}"


class _Tested:
    """A metric in the form that sacreBLEU's tests need, with statistics in the place of hypotheses."""

    def __init__(self, metric: SegmentMetric) -> None:
        self._compute_score_from_stats = metric.from_sums
        self.get_signature = metric.signature

    def _extract_corpus_statistics(self, statistics: Statistics, references: None) -> Statistics:
        return statistics

    def _aggregate_and_compute(self, statistics: Statistics) -> Any:
        return self._compute_score_from_stats(add_up(statistics))
