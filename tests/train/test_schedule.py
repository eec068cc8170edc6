from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.config.train import ScheduleConfig
from ziggurat.train.schedule import learning_rate


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


def test_isqrt_equals_fairseqs() -> None:
    schedule = config(kind="isqrt", peak=2e-3, warmup_updates=8000, initial=1e-7)
    assert learning_rate(schedule, 8000, d_model=1) == pytest.approx(2e-3)
    assert learning_rate(schedule, 4000, d_model=1) == pytest.approx((2e-3 + 1e-7) / 2)
    assert learning_rate(schedule, 32000, d_model=1) == pytest.approx(1e-3)
    assert learning_rate(schedule, 10**18, d_model=1) == 1e-9


@pytest.mark.parametrize(("kind", "quarter"), [("linear", 0.75), ("cosine", (2 + math.sqrt(2)) / 4)])
def test_decay_ends_at_the_floor(kind: str, quarter: float) -> None:
    schedule = config(kind=kind, peak=1.0, warmup_updates=10, floor=0.1, initial=0.0)
    rates = [learning_rate(schedule, t, d_model=1, last_update=110) for t in (5, 10, 35, 60, 110, 500)]
    assert rates == pytest.approx([0.5, 1.0, 0.1 + 0.9 * quarter, 0.55, 0.1, 0.1])


@pytest.mark.parametrize("behind", [0, 7, -9])
def test_wsd_stays_at_the_peak_and_falls_in_the_last_share(behind: int) -> None:
    """MiniCPM's phases; 1 - sqrt(u) of Haegele et al. 2024: a half at a quarter of the decay."""
    schedule = config(kind="wsd", peak=1.0, warmup_updates=10, floor=0.1, initial=0.0, decay_share=0.2)
    at = {5: 0.5, 10: 1.0, 50: 1.0, 80: 1.0, 85: 0.55, 90: 0.1 + 0.9 * (1 - math.sqrt(0.5)), 100: 0.1, 500: 0.1}
    for t, rate in at.items():
        update = t if t <= 10 else t - behind  # ends count the run's updates, the warm-up those of the schedule
        found = learning_rate(schedule, update, d_model=1, last_update=100, behind=behind)
        assert found == pytest.approx(rate), t


def test_a_decay_of_everything_begins_after_the_warm_up() -> None:
    schedule = config(kind="wsd", peak=1.0, warmup_updates=10, floor=0.0, decay_share=1.0)
    rates = [learning_rate(schedule, t, d_model=1, last_update=110) for t in (10, 35, 110)]
    assert rates == pytest.approx([1.0, 0.5, 0.0])


def test_constant_without_warmup() -> None:
    assert learning_rate(config(kind="constant", peak=0.5, warmup_updates=0), 1, d_model=1) == 0.5


@given(
    kind=st.sampled_from(["isqrt", "linear", "cosine", "wsd", "constant"]),
    t=st.integers(1, 10**6),
    warmup=st.integers(1, 10**4),
)
def test_never_above_the_peak_and_never_negative(kind: str, t: int, warmup: int) -> None:
    rate = learning_rate(config(kind=kind, warmup_updates=warmup), t, d_model=512, last_update=10**5)
    assert 0 < rate <= 1e-3 * (1 + 1e-12)


def test_gnmt_plus_equals_lingvos() -> None:
    """Compare with lingvo's schedule, the minimum of two lines and an exponential between given points (n = 8
    replicas).
    """
    n, p, start, end = 8, 500, 400_000, 1_200_000
    schedule = config(kind="gnmt+", replicas=n, warmup_updates=p, decay_start=start, decay_end=end)

    def line(t: float, x0: float, y0: float, x1: float, y1: float) -> float:
        return y0 if t < x0 else y1 if t >= x1 else y0 + (t - x0) / (x1 - x0) * (y1 - y0)

    for t in (1, 17, 2000, 3999, 4000, 4001, 20_000, 50_000, 50_001, 90_000, 149_999, 150_000, 10**6):
        warming = line(t, 0, 1, n * p, n)
        decaying = math.exp(line(t, start / n, math.log(n), end / n, math.log(0.5)))
        assert learning_rate(schedule, t, d_model=1) == pytest.approx(1e-4 * min(warming, n, decaying), rel=1e-12)
    assert learning_rate(schedule, 4000, d_model=1) == pytest.approx(8e-4)
    assert learning_rate(schedule, 100_000, d_model=1) == pytest.approx(2e-4)  # halfway: the root of 8 and 1/2
    assert learning_rate(schedule, 10**9, d_model=1) == pytest.approx(5e-5)


def test_gnmt_plus_for_one_replica_is_constant_until_it_decays() -> None:
    schedule = config(kind="gnmt+", base=1.0, warmup_updates=5, decay_start=10, decay_end=20)
    rates = [learning_rate(schedule, t, d_model=1) for t in (1, 5, 10, 15, 20, 30)]
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.5**0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 4, "warmup_updates": 10, "decay_start": 159}, "lasts until update 40: raise it to at least 160"),
        ({"warmup_updates": 10, "decay_start": 50, "decay_end": 50}, "must be larger than `decay_start`"),
        ({"warmup_updates": 0}, "needs `warmup_updates` of at least 1"),
    ],
)
def test_gnmt_plus_needs_its_phases_in_order(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(kind="gnmt+", **values)
