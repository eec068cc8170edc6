"""The whole configuration: one YAML file = one experiment."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from ziggurat.config.base import Count, Section
from ziggurat.config.data import DataConfig
from ziggurat.config.decode import DecodingConfig
from ziggurat.config.growth import growth_refused
from ziggurat.config.model import ModelConfig
from ziggurat.config.train import TrainingConfig

__all__ = ["CONFIG_FORMAT", "Experiment"]

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
        subword = self.data.subword
        separate = (
            (subword.kind in ("bpe", "unigram") and not subword.joint)
            or (subword.kind == "existing" and subword.target_model not in (None, subword.source_model))
            or (subword.kind == "vocabulary" and subword.target_vocabulary not in (None, subword.source_vocabulary))
        )
        if separate and self.model.embedding.sharing == "all":
            raise ValueError(
                "`model.embedding.sharing: all` needs one vocabulary for both sides, but `data.subword` has two; "
                "set `data.subword.joint: true` or `model.embedding.sharing: decoder`"
            )
        growth = self.training.growth
        if growth is not None and (reasons := growth_refused(growth, self.model)):
            raise ValueError(f"`training.growth`: {'; '.join(reasons)}")
        return self
