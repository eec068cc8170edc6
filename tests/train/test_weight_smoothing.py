"""Running means of weights: their arithmetic, and their use in checkpoints, validation and resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_experiment
from tests.train.batches import batches
from tests.train.runs import QUIET, final_bytes
from tests.train.test_r_drop import model
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.config.train import LossConfig, OptimiserConfig
from ziggurat.model.build import parameter_roles
from ziggurat.model.directory import open_model
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import weights
from ziggurat.train.checkpoint import load_checkpoint
from ziggurat.train.loop import train
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import train_update
from ziggurat.train.validate import Validator

SHARE = 0.3


def optimiser_of(built: Seq2Seq, share: float = SHARE, **options: Any) -> Optimiser:
    config = OptimiserConfig.model_validate({"weight_smoothing": share, **options})
    return Optimiser(built, parameter_roles(built), config)


def take_update(built: Seq2Seq, optimiser: Optimiser, update: int) -> None:
    optimiser.update = update
    train_update(Parallel(built, LossConfig()), batches([3]), optimiser, rate=1e-2, clip_norm=None)


@pytest.mark.parametrize("options", [{"kind": kind} for kind in ("adam", "adamw", "radam", "muon")], ids=str)
def test_means_follow_the_formula_and_change_no_step(options: dict[str, Any]) -> None:
    """Marian's updateAvgParams: m (1 - d) + p d with d = max(s, 1 - (t + 1) / (t + 10)); s is 0.3 from t = 20."""
    built, plain = model(0.0), model(0.0)
    optimiser, without = optimiser_of(built, **options), optimiser_of(plain, 0.0, **options)
    expected: dict[str, torch.Tensor] = {}
    for update in (1, 2, 3, 20, 21, 50):
        take_update(built, optimiser, update)
        take_update(plain, without, update)
        share = max(SHARE, 1 - (update + 1) / (update + 10))
        for name, parameter in weights(built).items():
            old = expected.get(name, parameter)
            expected[name] = (1 - share) * old.clone() + share * parameter
    assert share == SHARE
    means = optimiser.means()
    assert means.keys() == expected.keys()
    for name, mean in means.items():
        torch.testing.assert_close(mean, expected[name], rtol=1e-12, atol=1e-14)
    before = {name: parameter.clone() for name, parameter in weights(built).items()}
    with optimiser.smoothed():
        assert all(torch.equal(parameter, means[name]) for name, parameter in weights(built).items())
    for name, parameter in weights(built).items():
        assert torch.equal(parameter, before[name])
        assert torch.equal(parameter, weights(plain)[name])
    assert not without.means()


@pytest.mark.parametrize("later", [SHARE, 0.0])
def test_the_state_has_the_weights_and_the_model_their_means(later: float) -> None:
    built = model(0.0)
    optimiser = optimiser_of(built)
    for update in (1, 2):
        take_update(built, optimiser, update)
    saved = {key: value.clone() for key, value in optimiser.state().items()}
    means = {name: mean.clone() for name, mean in optimiser.means().items()}
    again = model(0.0)
    with torch.no_grad():
        for name, parameter in weights(again).items():
            parameter.copy_(means[name])
    resumed = optimiser_of(again, later)
    resumed.load_state(saved)
    assert all(torch.equal(parameter, weights(built)[name]) for name, parameter in weights(again).items())
    assert resumed.means().keys() == (means.keys() if later else set())
    take_update(built, optimiser, 3)
    take_update(again, resumed, 3)
    for name, parameter in weights(again).items():
        assert torch.equal(parameter, weights(built)[name])
        assert not later or torch.equal(resumed.means()[name], optimiser.means()[name])


def smoothed_run(folder: Path, updates: int, **training: Any) -> Experiment:
    chosen = {"optimiser": {"weight_smoothing": 0.1}, "loss": {"r_drop": 5.0}, "threads": 1, **training}
    return tiny_experiment(folder, stop={"updates": updates}, checkpoint={"every_updates": 2}, **chosen)


@pytest.mark.cpu("its means are made on one")
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_run_is_validated_and_saved_with_means_and_resumes_to_the_same_bits(
    moments: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    four, two = (
        change_section(smoothed_run(tiny_folder, n), {"training": {"optimiser": {"moments": moments}}}, "")
        for n in (4, 2)
    )
    seen: list[dict[str, torch.Tensor]] = []
    measure = Validator.measure

    def noted(self: Validator, built: Seq2Seq, *arguments: Any, **options: Any) -> Any:
        seen.append({name: parameter.clone() for name, parameter in weights(built).items()})
        return measure(self, built, *arguments, **options)

    monkeypatch.setattr(Validator, "measure", noted)
    train(tmp_path / "whole", four, console=QUIET)
    validated = seen[-1]
    saved = load_checkpoint(tmp_path / "whole" / "last")
    opened = weights(open_model(tmp_path / "whole", which="last").model)
    moved = 0
    for name, mean in saved.weights.items():
        assert torch.equal(validated[name], mean)
        assert torch.equal(opened[name], mean)
        moved += not torch.equal(saved.optimiser[f"{name}/trained"], mean)
    assert moved == len(saved.weights)
    train(tmp_path / "halves", two, console=QUIET)
    train(tmp_path / "halves", four, resume=True, console=QUIET)
    assert final_bytes(tmp_path / "halves", 4) == final_bytes(tmp_path / "whole", 4)


def test_a_grown_model_restarts_its_means(tiny_folder: Path, tmp_path: Path) -> None:
    growth = {"stages": [{"layers": 1, "updates": 2}], "copy_strategy": "top_only", "moments": "copy"}
    run = smoothed_run(tiny_folder, 3, growth=growth)
    deeper = change_section(run.model, {"encoder": {"layers": 2}}, "model")
    train(tmp_path / "run", run.model_copy(update={"model": deeper}), console=QUIET)
    saved = load_checkpoint(tmp_path / "run" / "last")
    assert saved.progress.stage == 1
    for name, mean in saved.weights.items():
        assert torch.equal(saved.optimiser[f"{name}/trained"], mean)
    shallow = load_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000002")
    kept = weights(open_model(tmp_path / "run" / "stages" / "001-layers").model)
    assert all(torch.equal(kept[name], mean) for name, mean in shallow.weights.items())
