"""The cost of disturbances of the source: scores with and without, their difference, and whether it is chance.

The undisturbed score is that of the translation that a system should give (ziggurat.evaluate.perturbations), against
the same references, so the difference belongs to the disturbance alone. It is tested by the paired bootstrap (Koehn
2004); p-values are corrected for the number of tests of a system under a metric (Holm 1979), and those between systems
for the number of perturbations and pairs. Fewer than FEWEST_CASES are not tested: p is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, TypeVar

from ziggurat.evaluate.findings import FEWEST_CASES
from ziggurat.evaluate.metrics import TestSet
from ziggurat.evaluate.scores import SegmentMetric, Statistics, add_up
from ziggurat.evaluate.significance import RESAMPLINGS, holm, p_values, resampled_scores, two_sided_p

_EXAMPLES = 5
_EXAMPLE_METRIC = "chrf"


@dataclass(frozen=True)
class PerturbedScore:
    """One perturbation of a test set, translated by all systems, and what it does in words.

    Attributes:
        inputs: what was translated, a text per case.
        references: one list of texts per reference translation.
        found: the translations of each system.
        ideal: those that each system should give, given its undisturbed ones.
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
    """Disturbed minus undisturbed."""
    p: float | None
    """Of sacreBLEU's paired bootstrap; None: too few cases to tell."""
    p_adjusted: float | None
    """Corrected for the perturbations of the system."""


@dataclass(frozen=True)
class PairwiseTest:
    """A difference of two systems under one perturbation and one metric: `left` minus `right`."""

    left: str
    right: str
    perturbation: str
    metric: str
    difference: float
    p: float | None
    """None: too few cases to tell."""
    p_adjusted: float | None
    """Corrected for perturbations and pairs."""


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
    """That of `ideal`."""


@dataclass(frozen=True)
class Disturbed:
    """One perturbation: its cases and, for each system, those that it harms most."""

    name: str
    meaning: str
    cases: int
    harms: tuple[tuple[Degradation, ...], ...]
    """Of each system, the greatest harm first."""


@dataclass(frozen=True)
class Robustness:
    """All results; plain values that can be written as JSON."""

    systems: tuple[str, ...]
    origins: tuple[str, ...]
    sentences: int
    """Lines of the test set."""
    metrics: tuple[str, ...]
    """As in `effects`."""
    signatures: tuple[str, ...]
    higher_is_better: tuple[bool, ...]
    tests: str
    """Signature of the tests."""
    perturbations: tuple[Disturbed, ...]
    effects: tuple[Effect, ...]
    contests: tuple[PairwiseTest, ...]
    """Differences of scores on the disturbed test set; `p` is of sacreBLEU's paired bootstrap."""
    effect_differences: tuple[PairwiseTest, ...]
    """Differences of `Effect.difference`: positive, where a higher score is better, if `left` loses less. `p` is of a
    paired bootstrap of this difference, two-sided."""
    left_out: tuple[str, ...]
    """Perturbations that change no line."""

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
    """Return what perturbations do to the scores of systems.

    Args:
        systems: their names.
        origins: what each is, in words.
        trials: the perturbations.
        metrics: any of sacreBLEU's.
        scoring: the undisturbed test set, whose settings hold for all.
        left_out: perturbations that change no line.
        resamplings: of the paired bootstrap.

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
        f"paired bootstrap, {resamplings:,} resamplings, Holm, from {FEWEST_CASES} cases on",
        tuple(_harmed(scoring, trial, len(systems)) for trial in trials),
        tuple(effects),
        tuple(contests),
        tuple(costs),
        tuple(left_out),
    )


def _metric(scoring: TestSet, trial: PerturbedScore, name: str) -> SegmentMetric:
    """Return a metric with the references of a trial, its words split as those of the undisturbed test set."""
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
    """Of each system, of its disturbed translations and of the undisturbed ones."""
    resamplings: int

    def score(self, table: Statistics) -> float:
        return float(self.metric.from_sums(add_up(table)).score)

    @property
    def tells(self) -> bool:
        """True where its cases are enough for tests."""
        return len(self.trial.inputs) >= FEWEST_CASES


def _effects(of: _Measured) -> Iterator[Effect]:
    """Yield the effect of a trial on each system; not corrected yet."""
    for system, pair in zip(of.systems, of.tables, strict=True):
        disturbed, undisturbed = (of.score(table) for table in pair)
        p = p_values(of.metric, pair, "bs", of.resamplings)[0] if of.tells else None
        yield Effect(system, of.trial.name, of.shown, undisturbed, disturbed, disturbed - undisturbed, p, p)


def _contests(of: _Measured) -> Iterator[PairwiseTest]:
    """Yield the differences of all pairs of systems on a trial; not corrected yet."""
    tables = [disturbed for disturbed, _ in of.tables]
    scores = [of.score(table) for table in tables]
    tested = iter(p_values(of.metric, tables, "bs", of.resamplings) if of.tells else [])
    for left, right in combinations(range(len(tables)), 2):
        difference, p = scores[left] - scores[right], next(tested, None)
        yield PairwiseTest(of.systems[left], of.systems[right], of.trial.name, of.shown, difference, p, p)


def _effect_differences(of: _Measured) -> Iterator[PairwiseTest]:
    """Yield by how much less a trial costs one system of each pair than the other; not corrected yet.

    A resample draws the same cases for both systems, disturbed and not.
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
    """Return results with their p-values corrected for the number of those that were tested."""
    adjusted = iter(holm([one.p for one in found if one.p is not None]))
    return [one if one.p is None else replace(one, p_adjusted=next(adjusted)) for one in found]


def _harmed(scoring: TestSet, trial: PerturbedScore, systems: int) -> Disturbed:
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
    return Disturbed(trial.name, trial.meaning, len(trial.inputs), tuple(harms))
