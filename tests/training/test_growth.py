"""Shallow-to-deep runs: stages, rates, moments, resume within and across them, stage models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ziggurat
from tests.conftest import tiny_experiment
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.config.train import ScheduleConfig, TrainingConfig
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.models.directory import open_model, read_tensors
from ziggurat.training.average import regular_checkpoints
from ziggurat.training.checkpoint import Progress, checkpoint_folders, load_checkpoint, read_progress
from ziggurat.training.growth import after_growth, grow_model, stage_ended
from ziggurat.training.loop import train
from ziggurat.training.schedule import learning_rate

STAGES = {"stages": [{"layers": 1, "updates": 3}, {"layers": 2, "updates": 6}]}


def growing(folder: Path, growth: dict[str, Any] | None = None, **training: Any) -> Experiment:
    """The tiny experiment: 1, 2, then 4 encoder layers, 9 updates."""
    values: dict[str, Any] = {
        "growth": {**STAGES, **(growth or {})},
        "stop": {"updates": 9},
        "checkpoint": {"every_updates": 2, "keep_last": 9},
        "validation": {"every_updates": 100, "decode": False},
        **training,
    }
    experiment = tiny_experiment(folder, **values)
    model = change_section(
        experiment.model, {"encoder": {"layers": 4, "history": "blocks"}, "combination": {"period": 1}}, "model"
    )
    return experiment.model_copy(update={"model": model})


def rates(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [r["learning_rate"] for r in records if r["kind"] == "train"]


def test_a_growing_run_reaches_its_depth_and_keeps_each_stage(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, growing(tiny_folder, checkpoint={"every_updates": 2, "keep_last": 9, "average_last": 2}))
    assert open_model(run, which="last").experiment.model.encoder.layers == 4
    assert [p.name for p in sorted((run / "stages").iterdir())] == ["001-layers", "002-layers"]
    for folder, layers in (("001-layers", 1), ("002-layers", 2)):
        translator = ziggurat.load(run / "stages" / folder, device="cpu")
        assert len(translator.model.encoder.layers) == layers  # type: ignore[arg-type]
        assert len(translator.translate(["a b"])) == 1
    # A checkpoint in the middle of an early stage opens at its own depth.
    assert open_model(run, which="2").experiment.model.encoder.layers == 1
    assert open_model(run, which="6").experiment.model.encoder.layers == 2  # written before growing
    averaged = open_model(run, which="averaged")
    assert averaged.experiment.model.encoder.layers == 4


def test_averages_stay_within_a_stage(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    experiment = growing(tiny_folder)
    train(run, experiment)
    kept = [f.name for f in checkpoint_folders(run)]
    assert kept == [f"step-{u:08d}" for u in (2, 4, 6, 8, 9)]
    assert [f.name for f in regular_checkpoints(run, experiment.training)] == ["step-00000008", "step-00000009"]


def test_12_26_the_rate_restarts_at_its_peak_and_never_exceeds_it(tiny_folder: Path, tmp_path: Path) -> None:
    schedule = {"kind": "isqrt", "peak": 1e-3, "warmup_updates": 2, "initial": 0.0}
    run = tmp_path / "run"
    train(run, growing(tiny_folder, schedule=schedule, log_every_updates=1))
    peak, root = 1e-3, 2**0.5
    # t = 1, 2, 3 | 3, 4, 5 (t was set back to 2) | 3, 4, 5
    third = [peak * root / t**0.5 for t in (3, 4, 5)]
    assert rates(run) == pytest.approx([peak / 2, peak, third[0], *third, *third])


def test_12_26_before_the_end_of_the_warm_up_the_counter_goes_on() -> None:
    config = TrainingConfig.model_validate(
        {"growth": STAGES, "schedule": {"kind": "isqrt", "warmup_updates": 10, "peak": 1.0, "initial": 0.0}}
    )
    progress = Progress(update=4, schedule_update=4)
    after_growth(progress, config)
    assert (progress.stage, progress.schedule_update) == (1, 4)
    progress = Progress(update=40, schedule_update=40)
    after_growth(progress, config)
    assert progress.schedule_update == 10
    assert learning_rate(config.schedule, progress.schedule_update, d_model=8) == 1.0


def test_without_restart_the_rate_goes_on(tiny_folder: Path, tmp_path: Path) -> None:
    schedule = {"kind": "isqrt", "peak": 1e-3, "warmup_updates": 2}
    run = tmp_path / "run"
    experiment = growing(tiny_folder, {"restart_rate": False}, schedule=schedule, log_every_updates=1)
    train(run, experiment)
    config = ScheduleConfig.model_validate(schedule)
    assert rates(run) == pytest.approx([learning_rate(config, t, d_model=16) for t in range(1, 10)])


def test_12_26_moments_are_zero_after_growing_or_copied(tiny_folder: Path, tmp_path: Path) -> None:
    for moments in ("reset", "copy"):
        run = tmp_path / moments
        # One update after growing: with reset moments Adam's first moment is (1 - beta1) times the gradient, step 1.
        train(run, growing(tiny_folder, {"moments": moments}, stop={"updates": 4}))
        state = load_checkpoint(checkpoint_folders(run)[-1]).optimiser
        steps = {float(v) for k, v in state.items() if k.endswith("/step")}
        added = {float(v) for k, v in state.items() if k.startswith("encoder.history.") and k.endswith("/step")}
        assert steps == ({1.0} if moments == "reset" else {1.0, 4.0})
        assert added >= {1.0}  # what has another shape now begins anew
        assert float(state["encoder.layers.1.ffn.in_proj.weight/step"]) == (1.0 if moments == "reset" else 4.0)


@pytest.mark.parametrize("stop", [2, 3, 5, 6, 7])
def test_resumed_within_a_stage_or_across_growth_gives_the_same_weights(
    tiny_folder: Path, tmp_path: Path, stop: int
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, growing(tiny_folder))
    experiment = growing(tiny_folder)
    train(
        parts,
        experiment.model_copy(
            update={"training": change_section(experiment.training, {"stop": {"updates": stop}}, "t")}
        ),
    )
    train(parts, experiment, resume=True)
    last = "checkpoints/step-00000009"
    for file in ("model.safetensors", "state/optimiser.safetensors", "state/random.safetensors"):
        ours, theirs = read_tensors(whole / last / file), read_tensors(parts / last / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert read_progress(whole / last).stage == read_progress(parts / last).stage == 2


def test_stages_may_end_by_epochs() -> None:
    config = TrainingConfig.model_validate({"growth": {"stages": [{"layers": 1, "epochs": 2}]}})
    assert not stage_ended(Progress(epoch=1, update=99), config)
    assert stage_ended(Progress(epoch=2), config)
    assert not stage_ended(Progress(epoch=9, stage=1), config)


@pytest.mark.parametrize(
    ("growth", "word"),
    [
        ({"stages": [{"layers": 1}]}, "either `updates` or `epochs`"),
        ({"stages": [{"layers": 2, "updates": 3}, {"layers": 2, "updates": 4}]}, "must grow"),
        ({"stages": [{"layers": 1, "updates": 3}, {"layers": 2, "updates": 3}]}, "count from the start"),
    ],
)
def test_senseless_stages_are_refused(growth: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        TrainingConfig.model_validate({"growth": growth})


def test_a_depth_out_of_reach_is_refused_before_anything_is_written(tiny_folder: Path, tmp_path: Path) -> None:
    experiment = growing(tiny_folder, {"stages": [{"layers": 1, "updates": 3}]})
    with pytest.raises(ConfigError, match="first grow to 2 at most"):
        train(tmp_path / "run", experiment)
    assert not (tmp_path / "run").exists()


def test_growing_a_trained_model_and_training_on(tiny_folder: Path, tmp_path: Path) -> None:
    shallow = tmp_path / "shallow"
    plain = tiny_experiment(tiny_folder, validation={"every_updates": 100, "decode": False})
    train(shallow, plain)
    grow_model(shallow, tmp_path / "grown", layers=3, strategy="g_top")
    grown = open_model(tmp_path / "grown")
    assert grown.experiment.model.encoder.layers == 3
    before = read_tensors(shallow / "last" / "model.safetensors")
    after = dict(grown.model.named_parameters())
    assert torch.equal(after["encoder.layers.2.ffn.in_proj.weight"], before["encoder.layers.1.ffn.in_proj.weight"])

    def started(layers: int) -> Experiment:
        training = {"start_from": str(tmp_path / "grown"), "stop": {"updates": 1}, "schedule": {"peak": 1e-12}}
        model = change_section(plain.model, {"encoder": {"layers": layers}}, "model")
        changed = change_section(plain.training, training, "training")
        return plain.model_copy(update={"model": model, "training": changed})

    train(tmp_path / "on", started(3))
    on = read_tensors(tmp_path / "on" / "last" / "model.safetensors")
    for name, values in on.items():
        torch.testing.assert_close(values, after[name].detach(), atol=1e-6, rtol=0)
    with pytest.raises(CheckpointError, match="ziggurat grow"):
        train(tmp_path / "off", started(4))
    assert not (tmp_path / "off").exists()
    with pytest.raises(ConfigError, match="holds other things"):
        grow_model(shallow, tiny_folder, layers=3, strategy="g_top")
