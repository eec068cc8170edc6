"""Tests of differences between systems, and of what perturbations of the source cost."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

from ziggurat.evaluate.findings import FEWEST_CASES, OverSeeds, Scores, SystemDifference
from ziggurat.evaluate.metrics import TestSet
from ziggurat.evaluate.scores import SegmentMetric, Statistics, add_up

RESAMPLINGS = 1000
"""RESAMPLINGS is the number of resamplings of the paired bootstrap: sacreBLEU's default, and that of Liu et al. 2020
(P3)."""

TRIALS = 10_000
"""TRIALS is the number of trials of approximate randomisation: sacreBLEU's default."""


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

    The smallest of m is multiplied by m, the next by m - 1, and so on; none is below the previous one, or above 1.
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = highest
    return adjusted


def _pooled(statistics: Sequence[Sequence[Statistics]]) -> list[Statistics]:
    """Return one table per system: sums over its seeds, scaled so that each system has the same weight.

    The factors are whole numbers, so that counts stay counts, and 1 if all systems have the same number of seeds.
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
    # PairedTest compares the first of its systems with all others, so one call handles all pairs with `first`.
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
    """Return the probability of a difference this large if there is none, from its values on resamples.

    These are shifted so that their mean is 0. Both tails count; sacreBLEU's test, which shifts absolute values, counts
    about one.
    """
    beyond = int(np.sum(np.abs(resampled - resampled.mean()) >= abs(difference)))
    return (beyond + 1) / (len(resampled) + 1)


def _seed() -> int | None:
    """Return the seed of sacreBLEU's tests; None if resamples should differ every time."""
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    return (None if seed.lower() == "none" else int(seed)) or None  # 0 means no seed there


def _signature(resamplings: int, trials: int) -> str:
    """Return the signature of the tests, in sacreBLEU's form."""
    import sacrebleu

    seed = os.environ.get("SACREBLEU_SEED", "12345").lower()  # as sacreBLEU reads it
    return f"bs:{resamplings}|ar:{trials}|seed:{seed}|version:{sacrebleu.__version__}"


class _Tested:
    """A metric in the form that sacreBLEU's tests need, with statistics instead of hypotheses."""

    def __init__(self, metric: SegmentMetric) -> None:
        self._compute_score_from_stats = metric.from_sums
        self.get_signature = metric.signature

    def _extract_corpus_statistics(self, statistics: Statistics, references: None) -> Statistics:
        return statistics

    def _aggregate_and_compute(self, statistics: Statistics) -> Any:
        return self._compute_score_from_stats(add_up(statistics))


_EXAMPLES = 5
_EXAMPLE_METRIC = "chrf"


@dataclass(frozen=True)
class PerturbedScore:
    """One perturbation of a test set, with a description, translated by all systems.

    Attributes:
        inputs: translated texts, one per case.
        references: one list of texts per reference translation.
        found: the translations of each system.
        ideal: expected translations of each system, given its unperturbed ones.
    """

    name: str
    meaning: str
    inputs: Sequence[str]
    references: Sequence[Sequence[str]]
    found: Sequence[Sequence[str]]
    ideal: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Effect:
    """The effect of a perturbation on the score of one system under one metric."""

    system: str
    perturbation: str
    metric: str
    undisturbed: float
    disturbed: float
    difference: float
    """Score of the perturbed minus the unperturbed test set."""
    p: float | None
    """p-value of sacreBLEU's paired bootstrap; None: too few cases."""
    p_adjusted: float | None
    """p-value corrected for the perturbations of the system."""


@dataclass(frozen=True)
class PairwiseTest:
    """A difference of two systems under one perturbation and one metric: `left` minus `right`."""

    left: str
    right: str
    perturbation: str
    metric: str
    difference: float
    p: float | None
    """p-value; None: too few cases."""
    p_adjusted: float | None
    """p-value corrected for perturbations and pairs."""


_Result = TypeVar("_Result", Effect, PairwiseTest)


@dataclass(frozen=True)
class Degradation:
    """One of the cases that a perturbation harms most."""

    source: str
    found: str
    ideal: str
    reference: str
    chrf: float
    """Sentence chrF of `found`."""
    undisturbed: float
    """Sentence chrF of `ideal`."""


@dataclass(frozen=True)
class Perturbed:
    """One perturbation: its cases and, for each system, those that are harmed most."""

    name: str
    meaning: str
    cases: int
    harms: tuple[tuple[Degradation, ...], ...]
    """For each system, greatest harm first."""


@dataclass(frozen=True)
class Robustness:
    """All results; plain values that can be written as JSON."""

    systems: tuple[str, ...]
    origins: tuple[str, ...]
    sentences: int
    """Number of lines of the test set."""
    metrics: tuple[str, ...]
    """Names of the metrics, as in `effects`."""
    signatures: tuple[str, ...]
    higher_is_better: tuple[bool, ...]
    tests: str
    """Signature of the tests."""
    perturbations: tuple[Perturbed, ...]
    effects: tuple[Effect, ...]
    contests: tuple[PairwiseTest, ...]
    """Differences of scores on the perturbed test set; `p` is that of sacreBLEU's paired bootstrap."""
    effect_differences: tuple[PairwiseTest, ...]
    """Differences of `Effect.difference`, positive if `left` loses less (when higher scores are better). `p` is that of
    a two-sided paired bootstrap of this difference."""
    left_out: tuple[str, ...]
    """Names of perturbations that change no line."""

    def effect(self, system: str, perturbation: str, metric: str) -> Effect:
        """Return one of `effects`."""
        wanted = (system, perturbation, metric)
        return next(e for e in self.effects if (e.system, e.perturbation, e.metric) == wanted)

    def as_record(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


def judge(
    systems: Sequence[str],
    origins: Sequence[str],
    trials: Sequence[PerturbedScore],
    metrics: Sequence[str],
    scoring: TestSet,
    *,
    left_out: Sequence[str] = (),
    resamplings: int = RESAMPLINGS,
) -> Robustness:
    """Return the effects of perturbations on the scores of systems.

    Args:
        systems: names of the systems.
        origins: description of each system.
        trials: the perturbations.
        metrics: any of sacreBLEU's.
        scoring: the unperturbed test set, whose settings apply to all.
        left_out: perturbations that change no line.
        resamplings: number of resamplings of the paired bootstrap.

    Raises ConfigError for an unknown metric or a missing package.
    """
    effects: list[Effect] = []
    contests: list[PairwiseTest] = []
    costs: list[PairwiseTest] = []
    kinds = [scoring.metric(name) for name in metrics]
    names = [str(kind.from_sums(add_up(kind.statistics([scoring.references[0]])[0])).name) for kind in kinds]
    for name, shown in zip(metrics, names, strict=True):
        of_metric: list[Effect] = []
        between: list[PairwiseTest] = []
        of_costs: list[PairwiseTest] = []
        for trial in trials:
            metric = _metric(scoring, trial, name)
            tables = [metric.statistics(outputs) for outputs in zip(trial.found, trial.ideal, strict=True)]
            measured = _Measured(metric, shown, systems, trial, tables, resamplings)
            of_metric += _effects(measured)
            between += _contests(measured)
            of_costs += _effect_differences(measured)
        for system in systems:
            effects += _corrected([effect for effect in of_metric if effect.system == system])
        contests += _corrected(between)
        costs += _corrected(of_costs)
    return Robustness(
        tuple(systems),
        tuple(origins),
        len(scoring.references[0]),
        tuple(names),
        tuple(str(kind.signature()) for kind in kinds),
        tuple(kind.higher_is_better for kind in kinds),
        f"paired bootstrap, {resamplings:,} resamplings, Holm, at least {FEWEST_CASES} cases",
        tuple(_harmed(scoring, trial, len(systems)) for trial in trials),
        tuple(effects),
        tuple(contests),
        tuple(costs),
        tuple(left_out),
    )


def _metric(scoring: TestSet, trial: PerturbedScore, name: str) -> SegmentMetric:
    """Return a metric with the references of a trial, whose words are split like those of the unperturbed test set."""
    test_set = replace(scoring, references=trial.references, sources=trial.inputs, split=scoring.splitting)
    return test_set.metric(name)


@dataclass(frozen=True)
class _Measured:
    """A trial under one metric."""

    metric: SegmentMetric
    shown: str
    systems: Sequence[str]
    trial: PerturbedScore
    tables: Sequence[Sequence[Statistics]]
    """For each system, statistics of its perturbed and unperturbed translations."""
    resamplings: int

    def score(self, table: Statistics) -> float:
        return float(self.metric.from_sums(add_up(table)).score)

    @property
    def tells(self) -> bool:
        """True if it has enough cases for tests."""
        return len(self.trial.inputs) >= FEWEST_CASES


def _effects(of: _Measured) -> Iterator[Effect]:
    """Yield the effect of a trial on each system, not yet corrected."""
    for system, pair in zip(of.systems, of.tables, strict=True):
        disturbed, undisturbed = (of.score(table) for table in pair)
        p = p_values(of.metric, pair, "bs", of.resamplings)[0] if of.tells else None
        yield Effect(system, of.trial.name, of.shown, undisturbed, disturbed, disturbed - undisturbed, p, p)


def _contests(of: _Measured) -> Iterator[PairwiseTest]:
    """Yield the differences of all pairs of systems on a trial, not yet corrected."""
    tables = [disturbed for disturbed, _ in of.tables]
    scores = [of.score(table) for table in tables]
    tested = iter(p_values(of.metric, tables, "bs", of.resamplings) if of.tells else [])
    for left, right in combinations(range(len(tables)), 2):
        difference, p = scores[left] - scores[right], next(tested, None)
        yield PairwiseTest(of.systems[left], of.systems[right], of.trial.name, of.shown, difference, p, p)


def _effect_differences(of: _Measured) -> Iterator[PairwiseTest]:
    """Yield, for each pair, how much less a trial costs one system than the other, not yet corrected.

    A resample draws the same cases for both systems, perturbed and not.
    """
    changes = [of.score(disturbed) - of.score(undisturbed) for disturbed, undisturbed in of.tables]
    resampled = None
    if of.tells and len(changes) > 1:
        scores = resampled_scores(of.metric, [table for pair in of.tables for table in pair], of.resamplings)
        resampled = scores[::2] - scores[1::2]
    for left, right in combinations(range(len(changes)), 2):
        difference = changes[left] - changes[right]
        p = None if resampled is None else two_sided_p(difference, resampled[left] - resampled[right])
        yield PairwiseTest(of.systems[left], of.systems[right], of.trial.name, of.shown, difference, p, p)


def _corrected(found: Sequence[_Result]) -> list[_Result]:
    """Return results with their p-values corrected for the number of tested ones."""
    adjusted = iter(holm([one.p for one in found if one.p is not None]))
    return [one if one.p is None else replace(one, p_adjusted=next(adjusted)) for one in found]


def _harmed(scoring: TestSet, trial: PerturbedScore, systems: int) -> Perturbed:
    metric = _metric(scoring, trial, _EXAMPLE_METRIC)
    harms = []
    for system in range(systems):
        outputs = [trial.found[system], trial.ideal[system]]
        rows = [[float(metric.from_sums(row).score) for row in table] for table in metric.statistics(outputs)]
        order = sorted(range(len(trial.inputs)), key=lambda n: rows[0][n] - rows[1][n])
        harms.append(
            tuple(
                Degradation(
                    trial.inputs[n], outputs[0][n], outputs[1][n], trial.references[0][n], rows[0][n], rows[1][n]
                )
                for n in order[:_EXAMPLES]
                if rows[0][n] < rows[1][n]
            )
        )
    return Perturbed(trial.name, trial.meaning, len(trial.inputs), tuple(harms))
