"""Verdicts on trials made by hand: at, inside and outside every band."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from ziggurat.inspect.check import CUT_OFF, DEAD, ENOUGH, READS, SHARE, STARVED, UNREAD, Reference, evenness, judge
from ziggurat.inspect.trial import TrialMeasures

UNIGRAM = 5.8
SHALLOW = Reference(10, 1.5)
LEARNING = SHARE * SHALLOW.learned
EVEN = [0.2, 0.1, 0.3]
HUNGRY = [1e-6, 1e-3, 0.3]


def trial(
    nll: float, encoder: Sequence[float] = EVEN, decoder: Sequence[float] = EVEN, cost: float = READS / 2, **others: Any
) -> TrialMeasures:
    """A trial of 10 updates that ended with these figures."""
    end = {"nll": nll, "source_dependence": cost, "gradient_norm": {"encoder": [*encoder], "decoder": [*decoder]}}
    start = {"nll": 9.0, "source_dependence": 0.0, "gradient_norm": {"encoder": EVEN, "decoder": EVEN}}
    values = {"points": {0: start, 10: end}, "failed": None, "updates": 10, **others}
    return TrialMeasures(width=8, peak=1e-3, unigram=UNIGRAM, losses=[nll], **values)


@pytest.mark.parametrize(
    ("nll", "encoder", "decoder", "label"),
    [
        (UNIGRAM - LEARNING - 0.01, EVEN, EVEN, "trains"),
        (UNIGRAM - LEARNING - 0.01, HUNGRY, HUNGRY, "trains"),
        (UNIGRAM - LEARNING + 0.01, EVEN, EVEN, "trains"),
        (UNIGRAM - LEARNING + 0.01, HUNGRY, HUNGRY, "will not train"),
        (UNIGRAM + 1, HUNGRY, HUNGRY, "will not train"),
        (UNIGRAM + 1, EVEN, HUNGRY, "risky"),
        (UNIGRAM + 1, HUNGRY, EVEN, "risky"),
        (UNIGRAM + 1, [DEAD * 0.99, 1.0], [DEAD, 1.0], "will not train"),
        (UNIGRAM + 1, [DEAD * 1.01, 1.0], [DEAD, 1.0], "risky"),
        (UNIGRAM + 1, [0.0, 0.0], EVEN, "will not train"),
        (UNIGRAM + 1, EVEN, [CUT_OFF * 0.99, 1.0], "will not train"),
        (UNIGRAM + 1, EVEN, [CUT_OFF * 1.01, 1.0], "risky"),
        (UNIGRAM + 1, [CUT_OFF * 0.99, 1.0], EVEN, "risky"),
        (UNIGRAM - LEARNING - 0.01, EVEN, [CUT_OFF * 0.99, 1.0], "trains"),
        (UNIGRAM + 1, [STARVED, 1.0], [STARVED, 1.0], "trains"),
        (UNIGRAM + 1, [STARVED * 0.99, 1.0], [STARVED, 1.0], "risky"),
        (9.0, EVEN, EVEN, "risky"),
        (7.8, EVEN, EVEN, "trains"),  # from 9.0 by 1.2 in half the trial; at that pace by 2.4 more, to 5.4
        (7.95, EVEN, EVEN, "risky"),
        (math.nan, EVEN, EVEN, "will not train"),
        (math.inf, EVEN, EVEN, "will not train"),
    ],
)
def test_label(nll: float, encoder: list[float], decoder: list[float], label: str) -> None:
    assert judge(trial(nll, encoder, decoder), SHALLOW).label == label


@pytest.mark.parametrize("sign", [1, -1])
def test_a_model_whose_source_has_no_effect_learns_a_language_model(sign: int) -> None:
    below = UNIGRAM - LEARNING - 0.01
    ignored = judge(trial(below, cost=sign * UNREAD), SHALLOW)
    assert (ignored.label, ignored.findings[-1].healthy) == ("ignores its source", False)
    noticed = judge(trial(below, cost=sign * UNREAD * 1.01), SHALLOW)
    assert (noticed.label, noticed.findings[-1].healthy) == ("trains", True)
    # A model that learns nothing does not learn a language model either.
    assert judge(trial(UNIGRAM + 1, HUNGRY, HUNGRY, cost=0.0), SHALLOW).label == "will not train"


@pytest.mark.parametrize(("middle", "label"), [(9.0, "trains"), (7.9, "risky")])
def test_the_pace_is_that_of_the_second_half(middle: float, label: str) -> None:
    """Both runs have the same start and end; most of the fall comes after the middle in one, before it in the other."""
    points = trial(7.8).points
    slowing = trial(7.8, points={0: points[0] | {"nll": 10.0}, 5: {"nll": middle}, 10: points[10]})
    assert judge(slowing, SHALLOW).label == label


@pytest.mark.parametrize(("nll", "told"), [(UNIGRAM - LEARNING - 0.01, False), (7.8, True), (7.95, False)])
def test_a_loss_that_is_not_low_yet_but_falls_fast_enough_is_explained(nll: float, told: bool) -> None:
    message = judge(trial(nll), SHALLOW).findings[0].said
    assert (f"below {UNIGRAM - SHALLOW.bar:.2f} after as many again" in message) == told


def test_the_pace_is_meaningless_if_the_reference_has_not_learnt() -> None:
    assert judge(trial(7.8), Reference(10, ENOUGH)).label == "trains"
    assert judge(trial(7.8), Reference(10, ENOUGH * 0.99)).label == "too early to tell"


def test_a_failed_update_decides_the_verdict() -> None:
    failed = trial(1.0, failed=7, updates=7, points={0: {}})
    verdict = judge(failed, SHALLOW)
    assert verdict.label == "will not train"
    assert verdict.learned == -math.inf
    assert "update 7" in verdict.findings[0].said


def test_findings_have_their_numbers_and_are_apart() -> None:
    verdict = judge(trial(UNIGRAM + 0.1, HUNGRY, EVEN, cost=0.0), SHALLOW)
    parts = {finding.part: finding for finding in verdict.findings}
    assert [*parts] == ["loss", "encoder", "decoder", "source"]
    assert [finding.healthy for finding in parts.values()] == [False, False, True, False]
    assert "5.90" in parts["loss"].said
    assert "5.80" in parts["loss"].said
    assert "1.0e-06 in layer 1, 3.0e-01 in layer 3" in parts["encoder"].said
    assert f"{1e-6 / 0.3:.1e}, {0.1 / 0.3:.1e} at initialisation" in parts["encoder"].said


@pytest.mark.parametrize(
    ("cost", "encoder", "healthy"),
    [(READS * 1.01, HUNGRY, True), (READS, HUNGRY, False), (READS, EVEN, True), (-1.0, EVEN, True)],
)
def test_a_source_that_is_not_read_is_unhealthy_next_to_a_starved_stack(
    cost: float, encoder: list[float], healthy: bool
) -> None:
    assert judge(trial(5.0, encoder, cost=cost), SHALLOW).findings[-1].healthy is healthy


def test_evenness() -> None:
    assert evenness([0.5, 0.25, 1.0]) == 0.25
    assert evenness([2.0]) == 1.0
    assert evenness([0.0, 0.0]) == 0.0
    assert evenness([0.0, 1.0]) == 0.0
    assert evenness([1.0, math.nan]) == 0.0
    assert evenness([1.0, math.inf]) == 0.0
    at = trial(9.0, [STARVED, 1.0], [STARVED * 0.99, 1.0])
    assert [finding.healthy for finding in judge(at, SHALLOW).findings[1:3]] == [True, False]


@pytest.mark.parametrize(
    ("learned", "encoder", "reference", "label"),
    [
        (0.11, HUNGRY, Reference(10, 0.4), "trains"),  # a fifth of very little: a stuck run achieves as much
        (0.09, HUNGRY, Reference(10, 0.4), "will not train"),
        (0.11, HUNGRY, Reference(10, 1.0), "will not train"),
        (-1.0, EVEN, Reference(10, ENOUGH * 0.99), "too early to tell"),
        (0.09, EVEN, Reference(10, ENOUGH * 0.99), "too early to tell"),
        (0.11, EVEN, Reference(10, ENOUGH * 0.99), "trains"),  # it has learned, however little the reference has
        (0.11, HUNGRY, Reference(10, 0.0), "trains"),
        (0.0, HUNGRY, Reference(10, ENOUGH * 0.99), "will not train"),  # vanishing gradients are noticed early
        (-1.0, [5e-4, 1.0], Reference(10, ENOUGH), "risky"),
    ],
)
def test_the_bar_is_how_much_a_shallow_model_learns(
    learned: float, encoder: list[float], reference: Reference, label: str
) -> None:
    at = trial(UNIGRAM - learned, encoder, encoder)
    at.points[0]["nll"] = UNIGRAM - learned  # no pace
    assert judge(at, reference).label == label
