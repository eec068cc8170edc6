"""What the training of a pipeline's model is expected to take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import tiny_experiment
from ziggurat.config.load import change_section
from ziggurat.pipeline.costs import Costs

GROWTH = {"stages": [{"layers": 1, "updates": 1000}, {"layers": 2, "updates": 6000}]}


@pytest.mark.parametrize(
    ("changes", "seconds", "said"),
    [
        ({"stop": {"updates": 8000}}, 100 + 1000 + 1000, "8,000 updates"),
        ({"stop": {"updates": 2000}}, 100 + 200, "2,000 updates"),  # it ends before the second stage does
        ({"stop": {"updates": 500}}, 50, "500 updates"),
        ({"stop": {"updates": 2000, "epochs": 1}}, 300, "at most 2,000 updates"),
        ({"stop": {"updates": 2000, "patience": 3}}, 300, "at most 2,000 updates"),
        ({"stop": {"updates": 2000, "minutes": 4}}, 240, "at most 2,000 updates"),
        ({"stop": {"updates": 2000, "minutes": 6}}, 300, "2,000 updates"),
    ],
)
def test_training_takes_no_more_updates_than_it_has(
    changes: dict[str, Any], seconds: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = SimpleNamespace(
        length=(10, 10),
        batches=SimpleNamespace(origin="assumed"),
        memory=SimpleNamespace(peak=1, checkpoint=0),
        time=SimpleNamespace(seconds=0.5),
        shallower=((1, 1, 0.1), (2, 2, 0.2)),
    )
    monkeypatch.setattr(Costs, "of", lambda self, name: cost)
    experiment = tiny_experiment(tmp_path)
    model = change_section(experiment.model, {"encoder": {"layers": 4}}, "model")
    training = change_section(experiment.training, {"growth": GROWTH, **changes}, "training")
    found = Costs({"student": experiment.model_copy(update={"model": model, "training": training})}).training("student")
    assert found.seconds == pytest.approx(seconds)
    assert found.said == f"{said}, sentences of 10 target tokens (assumed)"
