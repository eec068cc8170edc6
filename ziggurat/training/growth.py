"""Shallow-to-deep training: which depth is trained now, and the step from one to the next (Li et al. 2020)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from ziggurat.config import Experiment, TrainingConfig
from ziggurat.config.growth import CopyStrategy, GrowthConfig
from ziggurat.config.model import ModelConfig
from ziggurat.data.subword import load_tokenizers
from ziggurat.errors import ConfigError
from ziggurat.models.build import build_model, count_parameters
from ziggurat.models.directory import may_become_model_directory, open_model, weights, write_model_directory
from ziggurat.models.grow import at_depth, grow_moments, grow_weights, layer_sources
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.training.checkpoint import Progress
from ziggurat.training.optim import Optimiser

__all__ = ["after_growth", "carry_over", "grow_model", "keep_stage", "refuse_impossible", "stage_ended", "stage_model"]

STAGES = "stages"


def refuse_impossible(experiment: Experiment) -> None:
    """Raise ConfigError when the stages of `training.growth` cannot lead to the configured depth."""
    growth = experiment.training.growth
    if growth is None:
        return
    _refuse_ungrowable(experiment.model, growth.copy_strategy)
    depths = [stage.layers for stage in growth.stages] + [experiment.model.encoder.layers]
    for old, new in pairwise(depths):
        layer_sources(growth.copy_strategy, old, new)


def _refuse_ungrowable(model: ModelConfig, strategy: CopyStrategy) -> None:
    if model.family != "transformer":
        raise ConfigError(f"only Transformer encoders grow; `model.family: {model.family}` cannot")
    if strategy == "interpolate" and (model.encoder.history != "latest" or model.memory != "top"):
        across = (
            "memory: transparent" if model.encoder.history == "latest" else f"encoder.history: {model.encoder.history}"
        )
        raise ConfigError(
            "the copy strategy `interpolate` puts new layers between old ones, so the weights of "
            f"`model.{across}` would belong to other layers; use `g_top`"
        )


def stage_model(experiment: Experiment, stage: int) -> ModelConfig:
    """Return the architecture that is trained in stage `stage`, from 0."""
    growth = experiment.training.growth
    if growth is None or stage >= len(growth.stages):
        return experiment.model
    return at_depth(experiment.model, growth.stages[stage].layers)


def stage_ended(p: Progress, config: TrainingConfig) -> bool:
    """Whether the stage that `p` is in is over and a deeper one follows; a function of the progress alone."""
    growth = config.growth
    if growth is None or p.stage >= len(growth.stages):
        return False
    stage = growth.stages[p.stage]
    return (stage.updates is not None and p.update >= stage.updates) or (
        stage.epochs is not None and p.epoch >= stage.epochs
    )


def after_growth(p: Progress, config: TrainingConfig) -> None:
    """Move `p` to the next stage; the schedule's counter t becomes min(t, warm-up) (the released code of P4)."""
    assert config.growth is not None
    p.stage += 1
    if config.growth.restart_rate:
        p.schedule_update = min(p.schedule_update, max(1, config.schedule.warmup_updates))


def carry_over(
    growth: GrowthConfig, shallow: Seq2Seq, shallow_optimiser: Optimiser, model: Seq2Seq, optimiser: Optimiser
) -> None:
    """Give the grown `model` and its new `optimiser` what the shallow ones learned."""
    old, new = len(shallow.encoder.layers), len(model.encoder.layers)  # type: ignore[arg-type]
    sources = layer_sources(growth.copy_strategy, old, new)
    grow_weights(model, weights(shallow), old, sources)
    if growth.moments == "copy":
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimiser.load_state(grow_moments(trained, shallow_optimiser.state(), sources))


def keep_stage(run: Path, experiment: Experiment, stage: int, model: Seq2Seq) -> Path:
    """Write the model at the end of a stage as a model directory; returns it."""
    config = stage_model(experiment, stage)
    folder = run / STAGES / f"{config.encoder.layers:03d}-layers"
    with torch.no_grad():
        write_model_directory(folder, weights(model), experiment.model_copy(update={"model": config}), run)
    return folder


def grow_model(path: Path, out: Path, *, layers: int, strategy: CopyStrategy, which: str | None = None) -> int:
    """Deepen the encoder of a trained model to `layers` and write a model directory; return its parameters.

    `path` and `which` name a run, one of its checkpoints, or a model directory (ziggurat.models.directory). Raises
    ConfigError: a depth that the strategy cannot reach, `out` holds other things; CheckpointError: no such model.
    """
    if not may_become_model_directory(out):
        raise ConfigError(f"{out}: exists and holds other things than a model directory; choose another folder")
    opened = open_model(path, which=which)
    before = opened.experiment.model
    _refuse_ungrowable(before, strategy)
    sources = layer_sources(strategy, before.encoder.layers, layers)
    config = at_depth(before, layers)
    source, target = load_tokenizers(opened.directory)
    grown = build_model(config, source.size, target.size, seed=opened.experiment.training.seed)
    grow_weights(grown, weights(opened.model), before.encoder.layers, sources)
    experiment = opened.experiment.model_copy(update={"model": config})
    write_model_directory(out, weights(grown), experiment, opened.directory)
    return count_parameters(grown)
