"""The configuration of an experiment (one YAML file), and rules on choices that cannot be combined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from ziggurat.config.data import DataConfig
from ziggurat.config.decode import DecodingConfig
from ziggurat.config.depth import growth_refused
from ziggurat.config.freezing import freeze_refused
from ziggurat.config.model import ModelConfig
from ziggurat.config.section import Count, Section
from ziggurat.config.train import TrainingConfig
from ziggurat.system.errors import ConfigError, Problem

if TYPE_CHECKING:
    from ziggurat.config.train import TrainingConfig


CONFIG_FORMAT = 1
"""CONFIG_FORMAT is the version of the configuration format, written into every saved config."""


class Experiment(Section):
    """Sections `data`, `model`, `training` and `decoding`."""

    format: Count = CONFIG_FORMAT
    """Version of this format."""
    data: DataConfig
    """Corpora, cleaning and segmentation."""
    model: ModelConfig = ModelConfig()
    """Architecture."""
    training: TrainingConfig = TrainingConfig()
    """Optimisation."""
    decoding: DecodingConfig = DecodingConfig()
    """Search."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.format != CONFIG_FORMAT:
            raise ValueError(f"configuration format {self.format} is unknown (this version reads {CONFIG_FORMAT})")
        if problem := next(contradictions(self), None):
            raise ConfigError(problem)
        return self


def without_lora(experiment: Experiment) -> Experiment:
    """Return the configuration of the model after its low-rank updates are merged into its weights."""
    if experiment.training.lora is None:
        return experiment
    return experiment.model_copy(update={"training": experiment.training.model_copy(update={"lora": None})})


def contradictions(experiment: Experiment) -> Iterator[Problem]:
    """Yield why the sections of `experiment` cannot be combined."""
    model, training = experiment.model, experiment.training
    yield from _vocabularies(experiment)
    yield from _transfer(model, training)
    for key, value, reasons, remedy in (
        ("training.loss.alignment", "", _alignment(training, model), ""),
        ("training.quantise", f": {training.quantise}", _quantisation(training, model), "set it to null"),
        ("training.growth", "", growth_refused(training.growth, model), ""),
        ("training.freeze", "", freeze_refused(training, model), ""),
        ("training.lora", "", _lora(training, model), ""),
    ):
        if found := list(reasons):
            named = tuple(other for problem in found for other in (problem.key, *problem.named))
            yield Problem(key, f"`{key}{value}`: {'; '.join(map(str, found))}", remedy, named=named)


def _vocabularies(experiment: Experiment) -> Iterator[Problem]:
    if experiment.data.subword.separate and experiment.model.embedding.sharing == "all":
        yield Problem.of(
            "model.embedding.sharing: all",
            "needs one vocabulary for both sides, but `data.subword` has two",
            "set `data.subword.joint: true` or `model.embedding.sharing: decoder`",
            named=("data.subword", "data.subword.joint"),
        )


def _transfer(model: ModelConfig, training: TrainingConfig) -> Iterator[Problem]:
    if model.transfer is None:
        return
    if training.optimiser.kind == "muon":
        yield Problem.of(
            "model.transfer",
            "scales Adam's rates: `training.optimiser.kind` cannot be muon",
            named=("training.optimiser.kind",),
        )
    if training.schedule.kind == "noam":
        schedule = training.schedule
        peak = schedule.factor * (model.transfer.width * schedule.warmup_updates) ** -0.5
        yield Problem.of(
            "model.transfer",
            "scales rates by the width, and so does `training.schedule.kind: noam`:",
            f"choose `kind: isqrt` with `peak: {peak:.3g}`, noam's highest rate for the base",
            named=("training.schedule.kind",),
        )


def _alignment(training: TrainingConfig, model: ModelConfig) -> Iterator[Problem]:
    chosen, key = training.loss.alignment, "training.loss.alignment.layer"
    if chosen is None:
        return
    if chosen.layer is not None:
        layers = model.decoder.layers
        if model.family == "rnmt" and chosen.layer != 1:
            yield Problem(key, "RNMT+ attends to the source only in decoder layer 1:", "set `layer` to 1 or null")
        elif chosen.layer > layers:
            yield Problem(key, f"`layer: {chosen.layer}`, but the decoder has {layers}")
        if training.growth is not None:
            yield Problem(
                key,
                "`layer` with `training.growth`: new layers change the numbers of those above",
                "set it to null, the last layer at every depth",
                named=("training.growth",),
            )
    if isinstance(chosen.head, int) and chosen.head > model.heads:
        attention = f"`head: {chosen.head}`, but the decoder's attention has {model.heads}"
        yield Problem("training.loss.alignment.head", attention)


def _quantisation(training: TrainingConfig, model: ModelConfig) -> Iterator[Problem]:
    if training.quantise is None:
        return
    if model.family == "rnmt":
        cells = "int8 translation leaves LSTM cells in fp32, so there is almost nothing to adapt to"
        yield Problem("model.family", cells)
        return
    shifted = [
        f"{side} has `residual: fixup`, and int8 translation leaves its maps with shifts in fp32"
        for side, kinds in (("encoder", model.residuals(decoder=False)), ("decoder", model.residuals(decoder=True)))
        if "fixup" in kinds
    ]
    if shifted:
        yield Problem("model.residual", f"the {' and the '.join(shifted)}")


def _lora(training: TrainingConfig, model: ModelConfig) -> Iterator[Problem]:
    if training.lora is None:
        return
    if training.start_from is None:
        yield Problem("training.start_from", "it adapts a trained model:", "name one with `training.start_from`")
    if training.growth is not None:
        yield Problem.of("training.growth", "adds layers, but new layers need more than low-rank updates")
    if training.quantise is not None:
        yield Problem.of(
            "training.quantise",
            "adapts weights to bytes, but LoRA leaves them unchanged:",
            "train one after the other",
        )
    if training.optimiser.kind == "muon":
        yield Problem.of("training.optimiser.kind: muon", "orthogonalises whole matrices, not two factors of one")
    dropping = [f"model.{name}.layer_drop" for name in ("encoder", "decoder") if getattr(model, name).layer_drop]
    if dropping:
        # Embeddings are frozen, so a batch without any layer would have nothing to train.
        yield Problem(dropping[0], "LayerDrop may drop everything that is trained:", f"set `{dropping[0]}: 0`")
    narrowest = min(model.d_model, model.encoder_width)
    if training.lora.rank > narrowest:
        wide = f"`rank: {training.lora.rank}` exceeds the width of the model, {narrowest}"
        yield Problem("training.lora.rank", wide)
