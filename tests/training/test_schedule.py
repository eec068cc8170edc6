from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.config.train import ScheduleConfig
from ziggurat.training.schedule import learning_rate


def config(**values: object) -> ScheduleConfig:
    return ScheduleConfig.model_validate(values)


@pytest.mark.parametrize(
    ("factor", "warmup", "d_model", "peak"),
    # Published peaks: base and big of Zhang et al. 2019, T2T v2, transparent attention.
    [(1.0, 4000, 512, 6.99e-4), (1.0, 16000, 1024, 2.47e-4), (2.0, 8000, 512, 9.88e-4), (3.0, 40000, 512, 6.63e-4)],
)
def test_noam_reaches_the_published_peaks(factor: float, warmup: int, d_model: int, peak: float) -> None:
    schedule = config(kind="noam", factor=factor, warmup_updates=warmup)
    assert learning_rate(schedule, warmup, d_model=d_model) == pytest.approx(peak, rel=2e-3)
    rates = [learning_rate(schedule, t, d_model=d_model) for t in (warmup // 2, warmup, 2 * warmup)]
    assert rates[0] == pytest.approx(rates[1] / 2)
    assert rates[2] == pytest.approx(rates[1] / math.sqrt(2))


def test_isqrt_is_fairseqs() -> None:
    schedule = config(kind="isqrt", peak=2e-3, warmup_updates=8000, initial=1e-7)
    assert learning_rate(schedule, 8000, d_model=1) == pytest.approx(2e-3)
    assert learning_rate(schedule, 4000, d_model=1) == pytest.approx((2e-3 + 1e-7) / 2)
    assert learning_rate(schedule, 32000, d_model=1) == pytest.approx(1e-3)
    assert learning_rate(schedule, 10**18, d_model=1) == 1e-9


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_ends_at_the_floor(kind: str) -> None:
    schedule = config(kind=kind, peak=1.0, warmup_updates=10, floor=0.1, initial=0.0)
    rates = [learning_rate(schedule, t, d_model=1, last_update=110) for t in (5, 10, 60, 110, 500)]
    assert rates == pytest.approx([0.5, 1.0, 0.55, 0.1, 0.1])


def test_constant_without_warmup() -> None:
    assert learning_rate(config(kind="constant", peak=0.5, warmup_updates=0), 1, d_model=1) == 0.5


@given(
    kind=st.sampled_from(["isqrt", "linear", "cosine", "constant"]),
    t=st.integers(1, 10**6),
    warmup=st.integers(1, 10**4),
)
def test_never_above_the_peak_and_never_negative(kind: str, t: int, warmup: int) -> None:
    rate = learning_rate(config(kind=kind, warmup_updates=warmup), t, d_model=512, last_update=10**5)
    assert 0 < rate <= 1e-3 * (1 + 1e-12)
