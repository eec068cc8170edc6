"""Growth of shallow-to-deep training (Li et al. 2020): stages, and what a deeper model takes over.

It depends only on the progress, so a resumed run grows at the same update. `grow_model` takes the same step outside a
run, on a trained model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ziggurat.config import Experiment, TrainingConfig
from ziggurat.config.depth import CopyStrategy, GrowthConfig, ungrowable
from ziggurat.config.model import ModelConfig
from ziggurat.model.build import build_model, count_parameters
from ziggurat.model.depth import Deepening, added_layers, at_depth, deepening, grow_moments, grow_weights
from ziggurat.model.directory import open_model, refuse_replacing, write_model_directory
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import weights, whole
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import made_by
from ziggurat.train.checkpoint import RunProgress
from ziggurat.train.optim import Optimiser
from ziggurat.train.schedule import peak_update

STAGES = "stages"


def stage_model(experiment: Experiment, stage: int) -> ModelConfig:
    """Return the architecture of stage `stage`, from 0; the last stage is `model`."""
    growth = experiment.training.growth
    if growth is None or stage >= len(growth.stages):
        return experiment.model
    return at_depth(experiment.model, *growth.stages[stage].depths(experiment.model.decoder.layers))


def of_depth(experiment: Experiment, model: ModelConfig, **training: Any) -> Experiment:
    """Return the configuration of a model directory of another depth: without stages, which lead to the old depth."""
    changed = experiment.training.model_copy(update={"growth": None, **training})
    return experiment.model_copy(update={"model": model, "training": changed})


def _with_guided_layer(experiment: Experiment, plan: Deepening) -> Experiment:
    """Return the configuration with the new number of the decoder layer that guided alignment trained, if it names one.

    The first copy of a layer counts as the trained one, as in ziggurat.model.depth.added_layers.
    """
    guided = experiment.training.loss.alignment
    if guided is None or guided.layer is None:
        return experiment
    number = plan.decoder.sources.index(guided.layer - 1) + 1
    loss = experiment.training.loss.model_copy(update={"alignment": guided.model_copy(update={"layer": number})})
    return experiment.model_copy(update={"training": experiment.training.model_copy(update={"loss": loss})})


def stage_experiment(experiment: Experiment, stage: int) -> Experiment:
    """Return the configuration of the model of stage `stage`, from 0."""
    model = stage_model(experiment, stage)
    return experiment if model == experiment.model else of_depth(experiment, model)


def stage_ended(p: RunProgress, config: TrainingConfig) -> bool:
    """True when the present stage is over and a deeper one follows; depends only on the progress."""
    growth = config.growth
    if growth is None or p.stage >= len(growth.stages):
        return False
    stage = growth.stages[p.stage]
    return (stage.updates is not None and p.update >= stage.updates) or (
        stage.epochs is not None and p.epoch >= stage.epochs
    )


def after_growth(p: RunProgress, config: TrainingConfig) -> None:
    """Move `p` to the next stage; with `restart_rate`, the rate restarts after the warm-up (Li et al.'s code)."""
    assert config.growth is not None
    p.stage += 1
    p.losses = []  # losses of the grown model may be higher without being spikes
    p.validations_since_best = 0  # these belonged to the shallower model
    if config.growth.restart_rate:
        # During the warm-up, the counter is left unchanged.
        p.schedule_update = min(p.schedule_update, peak_update(config.schedule) - 1)


def carry_weights(
    growth: GrowthConfig, shallow: Mapping[str, Tensor], depths: tuple[ModelConfig, ModelConfig], model: Seq2Seq
) -> list[str]:
    """Copy the weights `shallow` into the deeper `model`; return the names of the layers that it adds.

    `depths` are the architectures of the shallow model and the deep one.
    """
    plan = deepening(growth.copy_strategy, *depths)
    grow_weights(model, shallow, plan)
    stacks = ("encoder", plan.encoder), ("decoder", plan.decoder)
    return [f"{name}.layers.{number}" for name, copies in stacks for number in added_layers(copies)]


def carry_moments(
    growth: GrowthConfig, shallow: Mapping[str, Tensor], depths: tuple[ModelConfig, ModelConfig], optimiser: Optimiser
) -> None:
    """Copy the optimiser state `shallow` into the deeper model's `optimiser`, if `growth.moments` asks for it."""
    if growth.moments == "copy":
        # Running means of weights restart, because the deeper model was grown from the weights themselves.
        shallow = {key: moment for key, moment in shallow.items() if not key.endswith("/trained")}
        plan = deepening(growth.copy_strategy, *depths)
        trained = {name: parameter for parameter, name in optimiser.names.items()}
        optimiser.load_state(grow_moments(trained, {key: whole(value) for key, value in shallow.items()}, plan))


def stage_folder(run: Path, experiment: Experiment, stage: int) -> Path:
    """Return the folder for the model at the end of a stage; stages differ in depth."""
    growth, model = experiment.training.growth, stage_model(experiment, stage)
    both = growth is not None and any(stage.decoder_layers is not None for stage in growth.stages)
    depth = f"{model.encoder.layers:03d}-{model.decoder.layers:03d}" if both else f"{model.encoder.layers:03d}"
    return run / STAGES / f"{depth}-layers"


def keep_stage(run: Path, experiment: Experiment, stage: int, tensors: Mapping[str, Tensor]) -> None:
    """Write the weights at the end of a stage as a model directory."""
    again = f"training writes it once: restore a copy, or train {run} again (the run itself continues without it)"
    folder = stage_folder(run, experiment, stage)
    write_model_directory(folder, tensors, stage_experiment(experiment, stage), run, again=again)


def grow_model(
    path: Path,
    out: Path,
    *,
    strategy: CopyStrategy,
    layers: int | None = None,
    decoder_layers: int | None = None,
    which: str | None = None,
    force: bool = False,
) -> tuple[ModelConfig, int]:
    """Deepen a trained model and write a model directory; return its architecture and parameter count.

    The encoder gets `layers` layers and the decoder `decoder_layers`; None: unchanged. `path` and `which` name
    a run, one of its checkpoints, or a model directory (ziggurat.model.directory). Raises ConfigError if the strategy
    cannot reach the depth, if the model already has that depth, or if `out` holds other things or, without `force`, a
    model; CheckpointError if there is no such model.
    """
    refuse_replacing(out, force=force)
    opened = open_model(path, which=which)
    before = opened.experiment.model
    depths = layers or before.encoder.layers, decoder_layers or before.decoder.layers
    if depths == (before.encoder.layers, before.decoder.layers):
        raise ConfigError(f"{path} has {depths[0]} encoder and {depths[1]} decoder layers already: nothing grows")
    for decoder in (False, True):
        grows = depths[decoder] != (before.decoder if decoder else before.encoder).layers
        if grows and (problem := ungrowable(before, strategy, decoder=decoder)):
            raise ConfigError(problem)
    config = at_depth(before, *depths)
    plan = deepening(strategy, before, config)
    source, target = opened.tokenizers
    grown = build_model(config, source.size, target.size, seed=opened.experiment.training.seed)
    grow_weights(grown, weights(opened.model), plan)
    deeper = {"layers": layers, "decoder_layers": decoder_layers}
    again = made_by("grow", path, **deeper, copy=strategy, which=which, out=out, force=True)
    # Nothing is frozen, because frozen layers may have new numbers now.
    grown_experiment = _with_guided_layer(of_depth(opened.experiment, config, freeze=[]), plan)
    write_model_directory(out, weights(grown), grown_experiment, opened.directory, again=again)
    return config, count_parameters(grown)
