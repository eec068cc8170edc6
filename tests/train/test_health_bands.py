"""The bands applied to recorded runs (experiments/health-bands): early warnings for stuck ones, none for those that
learn.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ziggurat.train.diagnosis.health import Watch
from ziggurat.train.records import read_records

RESULTS = Path(__file__).resolve().parents[2] / "experiments/health-bands/results"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="experiments/ is not next to the tests")
WARMUP = 120
STUCK = {"18-18-post": ("gradient_ratio.decoder", 30), "3-12-post": ("gradient_ratio.decoder", 60)}
"""STUCK maps runs whose loss stays at the level of word frequencies to the first warning and the latest update for it.
"""


def warnings(name: str) -> list[tuple[str, int]]:
    watch = Watch(WARMUP)
    found = [warned for record in read_records(RESULTS / name) for warned in watch.see(record)]
    return [(warned.measure, warned.update) for warned in found if warned.kind == "warning"]


@pytest.mark.parametrize("name", sorted(run.name for run in RESULTS.glob("*")))
def test_recorded_runs(name: str) -> None:
    found = warnings(name)
    if name in STUCK:
        measure, update = STUCK[name]
        assert found[0][0] == measure
        assert found[0][1] <= update
    else:
        assert found == []


def test_a_stuck_run_ignores_its_source() -> None:
    assert "source_dependence" in dict(warnings("18-18-post"))
