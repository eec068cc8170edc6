"""The cost of perturbations: scores and p-values equal sacreBLEU's, with Holm's correction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import sacrebleu
from sacrebleu.significance import PairedTest

from ziggurat.evaluate.findings import FEWEST_CASES
from ziggurat.evaluate.metrics import TestSet
from ziggurat.evaluate.significance import PerturbedScore, Robustness, holm, judge
from ziggurat.inspect.report.page import robustness_page

WORDS = [
    "the",
    "a",
    "dog",
    "house",
    "river",
    "runs",
    "stands",
    "by",
    "over",
    "old",
    "small",
    "green",
    "two",
    "children",
    "book",
]


def text(lines: int, seed: int) -> list[str]:
    rng = Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 9))) for _ in range(lines)]


def damaged_lines(lines: list[str], share: float, seed: int) -> list[str]:
    """Lines with some words replaced."""
    rng = Random(seed)
    return [" ".join(rng.choice(WORDS) if rng.random() < share else w for w in line.split()) for line in lines]


REFERENCES = text(40, 1)
GOOD, POOR = damaged_lines(REFERENCES, 0.2, 2), damaged_lines(REFERENCES, 0.3, 3)


def trial(name: str, shares: tuple[float, float]) -> PerturbedScore:
    found = [damaged_lines(GOOD, shares[0], 4), damaged_lines(POOR, shares[1], 5)]
    return PerturbedScore(name, f"what {name} is", REFERENCES, [REFERENCES], found, [GOOD, POOR])


TRIALS = [trial("none", (0.0, 0.0)), trial("weak", (0.02, 0.1)), trial("strong", (0.6, 0.6))]


@pytest.fixture(scope="module")
def results() -> Robustness:
    return judge(["a", "b"], ["runs/a", "runs/b"], TRIALS, ["bleu", "ter"], TestSet([REFERENCES]), left_out=["caps"])


def test_a_trial_is_split_as_the_whole_test_set() -> None:
    """The trial's own references, all Chinese, would be split differently."""
    chinese = ["今天天气很好我们去公园玩", "这是一个测试句子没有空格"]
    found = [chinese[0], chinese[1].replace("测试", "例")]
    trials = [PerturbedScore("mixed", "", chinese, [chinese], [found], [chinese])]
    results = judge(["a"], ["a"], trials, ["bleu", "ter"], TestSet([REFERENCES + chinese]))
    for effect, metric in zip(results.effects, (sacrebleu.BLEU(), sacrebleu.TER()), strict=True):
        assert effect.disturbed == pytest.approx(metric.corpus_score(found, [chinese]).score)


def test_scores_and_tests_are_those_of_sacrebleu(results: Robustness) -> None:
    assert results.metrics == ("BLEU", "TER")
    metrics: dict[str, Any] = {"BLEU": sacrebleu.BLEU(), "TER": sacrebleu.TER()}
    for effect in results.effects:
        system = results.systems.index(effect.system)
        (found, ideal), metric = next(
            ((t.found[system], t.ideal[system]), metrics[effect.metric])
            for t in TRIALS
            if t.name == effect.perturbation
        )
        scores = [metric.corpus_score(list(lines), [REFERENCES]).score for lines in (ideal, found)]
        assert [effect.undisturbed, effect.disturbed] == pytest.approx(scores)
        assert effect.difference == pytest.approx(scores[1] - scores[0])
        named: list[tuple[str, Any]] = [("ideal", list(found)), ("found", list(ideal))]
        _, tested = PairedTest(named, {"m": metric}, [REFERENCES], "bs", 1000)()
        wanted = 1.0 if scores[0] == scores[1] else next(v for k, v in tested.items() if k != "System")[1].p_value
        assert effect.p == pytest.approx(wanted)


def test_only_harmed_cases_are_significant(results: Robustness) -> None:
    assert results.effect("a", "none", "BLEU").difference == 0
    assert results.effect("a", "none", "BLEU").p_adjusted == 1
    strong = results.effect("a", "strong", "BLEU")
    assert strong.difference < -20
    assert strong.p_adjusted is not None
    assert strong.p_adjusted < 0.05
    assert results.effect("a", "strong", "TER").difference > 20
    for system in results.systems:
        for metric in results.metrics:
            own = [e for e in results.effects if (e.system, e.metric) == (system, metric)]
            assert [e.p_adjusted for e in own] == holm([e.p for e in own if e.p is not None])
    between = [c for c in results.contests if c.metric == "BLEU"]
    assert [c.perturbation for c in between] == ["none", "weak", "strong"]
    assert [c.p_adjusted for c in between] == holm([c.p for c in between if c.p is not None])
    undisturbed = results.effect("a", "none", "BLEU").disturbed - results.effect("b", "none", "BLEU").disturbed
    assert between[0].difference == pytest.approx(undisturbed)


def test_examples_are_those_that_lose_most(results: Robustness) -> None:
    none, weak, strong = results.perturbations
    assert none.harms == ((), ())
    assert weak.cases == 40
    for harms in strong.harms:
        assert len(harms) == 5
        lost = [harm.undisturbed - harm.chrf for harm in harms]
        assert lost == sorted(lost, reverse=True)
        assert lost[-1] > 0
    harm = strong.harms[0][0]
    assert harm.chrf == pytest.approx(sacrebleu.CHRF().corpus_score([harm.found], [[harm.reference]]).score)
    assert json.loads(json.dumps(results.as_record()))["left_out"] == ["caps"]


def test_one_system_has_no_contests() -> None:
    found = judge(
        ["a"],
        [""],
        [PerturbedScore("x", "", ["s"], [["the dog"]], [["a dog"]], [["the dog"]])],
        ["chrf"],
        TestSet([["the dog"]]),
    )
    assert (found.contests, found.effect_differences) == ((), ())
    assert found.effects[0].undisturbed == pytest.approx(100)


def test_costs_of_two_systems_are_compared_on_the_same_resamples() -> None:
    """Compare with a plain loop over lines, with sacreBLEU's random numbers."""
    mild, metric = trial("mild", (0.06, 0.1)), sacrebleu.BLEU()
    results = judge(["a", "b"], ["", ""], [mild, TRIALS[1]], ["bleu"], TestSet([REFERENCES]), resamplings=100)

    def difference(rows: Sequence[int]) -> float:
        wanted, lost = [REFERENCES[row] for row in rows], []
        for ideal, disturbed in zip(mild.ideal, mild.found, strict=True):
            scores = [metric.corpus_score([lines[row] for row in rows], [wanted]).score for lines in (ideal, disturbed)]
            lost.append(scores[0] - scores[1])
        return lost[1] - lost[0]

    resampled = [difference(rows) for rows in np.random.default_rng(12345).choice(40, size=(100, 40)).tolist()]
    observed, mean = difference(range(40)), sum(resampled) / 100
    first, second = results.effect_differences
    assert (first.left, first.right, first.perturbation, first.metric) == ("a", "b", "mild", "BLEU")
    assert first.difference == pytest.approx(observed)
    assert first.p == pytest.approx((sum(abs(value - mean) >= abs(observed) for value in resampled) + 1) / 101)
    assert second.difference > 0  # a loses less
    assert [first.p_adjusted, second.p_adjusted] == holm([p for p in (first.p, second.p) if p is not None])
    page = robustness_page(results)
    assert "what is lost" in page
    assert f"{observed:+.2f}" in page


def test_few_cases_are_not_tested() -> None:
    """All resamples of a single case are equal, so p would be 1/1001 whatever the difference."""

    def cut(trial: PerturbedScore, cases: int) -> PerturbedScore:
        found, ideal = ([lines[:cases] for lines in texts] for texts in (trial.found, trial.ideal))
        return PerturbedScore(str(cases), "", trial.inputs[:cases], [REFERENCES[:cases]], found, ideal)

    trials = [cut(TRIALS[2], cases) for cases in (1, FEWEST_CASES - 1, FEWEST_CASES, 40)]
    found = judge(["a", "b"], ["", ""], trials, ["chrf"], TestSet([REFERENCES]), resamplings=50)
    for group in (found.effects[:4], found.effects[4:], found.contests, found.effect_differences):
        assert [one.p is None for one in group] == [True, True, False, False]
        assert [one.p_adjusted for one in group[2:]] == holm([one.p for one in group[2:] if one.p is not None])
    assert found.effects[0].difference < 0
    record = json.loads(json.dumps(found.as_record()))
    assert record["effects"][0]["p_adjusted"] is None
    page = robustness_page(found)
    assert page.count("too few to tell") == 4 * 2
    assert "Too few cases to tell: 1, 29." in page
    one = [PerturbedScore("1", "", ["s"], [["the dog"]], [["a dog"]], [["the dog"]])]
    alone = robustness_page(judge(["a"], [""], one, ["chrf"], TestSet([["the dog"]])))
    assert "a: too few cases to tell: 1" in alone
    assert "significantly worse" not in alone
