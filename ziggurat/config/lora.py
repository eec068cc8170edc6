"""Low-rank adaptation: its section of the configuration, and what it asks of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import Real, Section, Width
from ziggurat.config.model import ModelConfig

if TYPE_CHECKING:
    from ziggurat.config.experiment import Experiment
    from ziggurat.config.train import TrainingConfig

LoraMap = Literal["query", "key", "value", "output", "feed_forward", "gate"]


class LoraConfig(Section):
    """Low-rank adaptation (LoRA, Hu et al. 2021) of the model of `start_from`, all of whose weights stay as they are.

    Chosen linear maps W of the layers become W + alpha / rank * B A, and A [rank, in] and B [out, rank] alone are
    trained. B is 0 at first, so that training begins with the model as it was (docs/fine-tuning.md).
    """

    rank: Width = Field(default=8, ge=1)
    """Rank of every update."""
    alpha: Real = Field(default=16.0, gt=0)
    """Every update is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on what the updates read."""
    maps: list[LoraMap] = Field(default=["query", "value"], min_length=1, max_length=6)
    """Maps that have updates, in all layers: of attention `query`, `key`, `value` and `output`, both of every
    `feed_forward` network, and `gate`, that of average attention and SSRU. RNMT+ has `query` and `key` alone."""

    @model_validator(mode="after")
    def _each_map_once(self) -> Self:
        if len(set(self.maps)) < len(self.maps):
            raise ValueError(f"`maps: [{', '.join(self.maps)}]` names one twice")
        return self


def lora_refused(training: TrainingConfig, model: ModelConfig) -> list[str]:
    """Return why low-rank adaptation cannot work in this run; [] where there is none."""
    lora, reasons = training.lora, []
    if lora is None:
        return []
    if training.start_from is None:
        reasons.append("it adapts a trained model: name one by `training.start_from`")
    if training.growth is not None:
        reasons.append("`training.growth` adds layers, and new layers need more than low-rank updates")
    if training.quantise is not None:
        reasons.append(
            "`training.quantise` adapts weights to bytes, and LoRA leaves them as they are: train one after the other"
        )
    if training.optimiser.kind == "muon":
        reasons.append("`training.optimiser.kind: muon` orthogonalises whole matrices, not two factors of one")
    dropping = [f"model.{name}.layer_drop" for name in ("encoder", "decoder") if getattr(model, name).layer_drop]
    if dropping:
        # Embeddings are frozen: without its layers a batch would have nothing to train.
        reasons.append(f"LayerDrop may leave out all that is trained: set `{dropping[0]}: 0`")
    narrowest = min(model.d_model, model.encoder_width)
    if lora.rank > narrowest:
        reasons.append(f"`rank: {lora.rank}` is more than the width of the model, {narrowest}")
    return reasons


def without_lora(experiment: Experiment) -> Experiment:
    """Return the configuration of the model that is left when updates are merged with the weights they belong to."""
    if experiment.training.lora is None:
        return experiment
    return experiment.model_copy(update={"training": experiment.training.model_copy(update={"lora": None})})
