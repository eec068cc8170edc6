"""The whole configuration of an experiment (one YAML file)."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from ziggurat.config.base import Count, Section
from ziggurat.config.data import DataConfig
from ziggurat.config.decode import DecodingConfig
from ziggurat.config.model import ModelConfig
from ziggurat.config.rules.experiment import contradictions
from ziggurat.config.train import TrainingConfig
from ziggurat.system.errors import ConfigError

CONFIG_FORMAT = 1
"""Version of the configuration format, written into every saved config."""


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
            raise ValueError(
                f"configuration format {self.format} is not known here (this version reads {CONFIG_FORMAT})"
            )
        if problem := next(contradictions(self), None):
            raise ConfigError(problem)
        return self


def without_lora(experiment: Experiment) -> Experiment:
    """Return the configuration of the model that is left when updates are merged with the weights they belong to."""
    if experiment.training.lora is None:
        return experiment
    return experiment.model_copy(update={"training": experiment.training.model_copy(update={"lora": None})})
