"""Table 1 of Zhang, Titov and Sennrich 2019 from the code of experiments/figures, on random tokens."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "experiments" / "figures" / "run.py"


@pytest.fixture(scope="module")
def experiment() -> ModuleType:
    specification = importlib.util.spec_from_file_location("experiments_figures_run", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["base", "DS-Init"])
def test_a_narrow_model_comes_near_the_table(experiment: ModuleType, name: str) -> None:
    data = experiment.at_random(1000, 1)
    values = experiment.measured(12, name, data, seed=1, sizes={"d_model": 64, "d_ff": 256, "heads": 1})
    found, published = experiment.means(values), experiment.PUBLISHED[name]
    assert found["variance"] == pytest.approx(published["variance"], abs=0.1)
    assert found["beta_ln"] == pytest.approx(published["beta_ln"], abs=0.04)
    for layer in range(12):  # beta is the product, layer by layer
        for place in experiment.PLACES:
            ln, rc, beta = (values[key][place][layer] for key in ("beta_ln", "beta_rc", "beta"))
            assert beta == pytest.approx(ln * rc, rel=1e-4)


def test_gradients_of_a_batch_in_parts_are_those_of_the_whole(experiment: ModuleType) -> None:
    data = experiment.at_random(200, 1)
    model = experiment.new_model(2, "base", data, seed=1, sizes={"d_model": 32, "d_ff": 64, "heads": 2}).eval()
    loss = experiment.probe_loss(experiment.LossConfig(), "fp32")
    whole = experiment.measure(model, data.batch, loss, ("gradient_norm",))["gradient_norm"]
    objective = experiment.Objective(model, experiment.LossConfig())
    for part in experiment.parts_of_batch(data.batch, sentences=3):
        tokens, sentences = data.batch.target_tokens, data.batch.sentences
        experiment.add_gradients(objective, part, torch.device("cpu"), "fp32", tokens=tokens, sentences=sentences)
    in_parts = experiment.norms_of(model)
    assert in_parts.keys() == whole.keys()
    for part in whole:
        assert in_parts[part] == pytest.approx(whole[part], rel=1e-5)


@pytest.mark.slow
def test_the_base_size_agrees_with_the_table(experiment: ModuleType) -> None:
    """This takes minutes and 9 GB. run.py does the same on real data, and exits with status 1 if it fails."""
    found = {
        name: experiment.over_seeds(
            [
                experiment.means(experiment.measured(12, name, experiment.at_random(3000, seed), seed=seed))
                for seed in (1, 2, 3)
            ]
        )
        for name in experiment.INITS
    }
    off = experiment.deviations(found)
    assert {key: off[key] for key in experiment.TESTED if off[key] > experiment.TOLERANCE} == {}
