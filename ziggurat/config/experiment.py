"""The whole configuration of an experiment (one YAML file), and the keys in which two configurations differ."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from ziggurat.config.base import Count, Section
from ziggurat.config.data import DataConfig
from ziggurat.config.decode import DecodingConfig
from ziggurat.config.freezing import freeze_refused
from ziggurat.config.growth import growth_refused
from ziggurat.config.lora import lora_refused
from ziggurat.config.model import ModelConfig
from ziggurat.config.train import TrainingConfig, alignment_refused

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
        # As ziggurat.data.subword_training decides it; equal paths of both sides mean one joint vocabulary.
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
        if self.model.transfer is not None and self.training.optimiser.kind == "muon":
            raise ValueError("`model.transfer` scales the rates of Adam: `training.optimiser.kind` cannot be muon")
        if self.model.transfer is not None and self.training.schedule.kind == "noam":
            schedule = self.training.schedule
            peak = schedule.factor * (self.model.transfer.width * schedule.warmup_updates) ** -0.5
            raise ValueError(
                "`model.transfer` scales rates by the width, and so does `training.schedule.kind: noam`: choose "
                f"`kind: isqrt` with `peak: {peak:.3g}`, the highest rate of noam for the base"
            )
        if reasons := alignment_refused(self.training.loss.alignment, self.model, self.training.growth is not None):
            raise ValueError(f"`training.loss.alignment`: {'; '.join(reasons)}")
        if self.training.quantise is not None and (reasons := _quantisation_refused(self.model)):
            raise ValueError(f"`training.quantise: {self.training.quantise}`: {'; '.join(reasons)}; set it to null")
        growth = self.training.growth
        if growth is not None and (reasons := growth_refused(growth, self.model)):
            raise ValueError(f"`training.growth`: {'; '.join(reasons)}")
        if reasons := freeze_refused(self.training, self.model):
            raise ValueError(f"`training.freeze`: {'; '.join(reasons)}")
        if reasons := lora_refused(self.training, self.model):
            raise ValueError(f"`training.lora`: {'; '.join(reasons)}")
        return self


def _quantisation_refused(model: ModelConfig) -> list[str]:
    """Return why training with bytes would not teach what int8 translation computes."""
    if model.family == "rnmt":
        return ["int8 translation leaves LSTM cells in fp32, so there is next to nothing to get used to"]
    shifted = [
        f"{side} has `residual: fixup`, whose maps with shifts int8 translation leaves in fp32"
        for side, kinds in (("encoder", model.residuals(decoder=False)), ("decoder", model.residuals(decoder=True)))
        if "fixup" in kinds
    ]
    return [f"the {' and the '.join(shifted)}"] if shifted else []
