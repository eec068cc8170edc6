from __future__ import annotations

import math

import pytest
import torch

from ziggurat.config import LengthPenaltyConfig
from ziggurat.translate.hypotheses import LengthPenalty

CASES = [
    ("none", 0.6, 1.0),
    ("power", 0.6, 12**0.6),
    ("gnmt", 0.6, (17 / 6) ** 0.6),
    ("lingvo", 0.6, (17 / 5) ** 0.6),
]


@pytest.mark.parametrize(("kind", "alpha", "wanted"), CASES)
def test_divisors_match_the_papers(kind: str, alpha: float, wanted: float) -> None:
    penalty = LengthPenalty.of(LengthPenaltyConfig(kind=kind, alpha=alpha))
    assert penalty.divisor(12.0) == pytest.approx(wanted, rel=1e-14)
    assert penalty.divisor(torch.tensor([12.0, 12.0], dtype=torch.float64)).tolist() == pytest.approx([wanted] * 2)


@pytest.mark.parametrize("kind", ["none", "power", "gnmt", "lingvo"])
def test_no_length_means_no_division_by_zero(kind: str) -> None:
    assert LengthPenalty(kind, 1.0).divisor(torch.tensor(0.0)) >= 1  # type: ignore[arg-type]


def test_coverage_term_against_the_formula_and_without_padding() -> None:
    penalty = LengthPenalty("lingvo", 0.2, coverage=0.3, length_ratio=1.5)
    sums = [0.0, 0.4, 3.0]
    wanted = 0.3 * 1.5 * sum(math.log(min(max(s / 1.5, 0.001), 0.5)) for s in sums)
    attention = torch.tensor([*sums, 7.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    assert penalty.coverage_term(attention, mask).item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("kind", ["none", "power", "gnmt", "lingvo"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.7])
def test_the_bound_is_reached_but_never_exceeded(kind: str, alpha: float) -> None:
    coverage = 0.2 if kind == "lingvo" else 0.0
    penalty = LengthPenalty(kind, alpha, coverage)  # type: ignore[arg-type]
    sources, longest, now = torch.tensor([3]), torch.tensor([20]), torch.tensor([-4.0], dtype=torch.float64)
    bound = penalty.best_reachable(now, torch.tensor([6]), longest, sources).item()
    best_coverage = penalty.coverage_term(torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.bool)).item()
    scores = [-4.0 / penalty.divisor(float(n)) + best_coverage for n in range(6, 21)]
    assert max(scores) == pytest.approx(bound, rel=1e-12)


@pytest.mark.parametrize("word", [-1.0, -0.3, 0.5])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.7])
def test_a_penalty_of_words_is_bounded_too(alpha: float, word: float) -> None:
    penalty = LengthPenalty("power", alpha, word=word)
    lengths = torch.tensor([6]), torch.tensor([20]), torch.tensor([3])
    bound = penalty.best_reachable(torch.tensor([-4.0], dtype=torch.float64), *lengths).item()
    scores = [(-4.0 - word * n) / penalty.divisor(float(n)) for n in range(6, 21)]
    assert penalty.score(-4.0, 9.0) == pytest.approx(scores[3])
    assert max(scores) <= bound + 1e-12
