"""Guided alignment: its section of the configuration, and what it asks of a model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from ziggurat.config.base import Layers, Real, Section, Width
from ziggurat.config.model import ModelConfig


class GuidedAlignmentConfig(Section):
    """Guided alignment (Chen et al. 2016; Garg et al. 2019): word alignments teach one head where to look.

    Needs a store with word alignments: `data.train[].alignment`, or `data.alignment.compute: hmm`.
    """

    weight: Real = Field(default=0.05, gt=0)
    """Weight, beside the cross-entropy of the same target token, of the cross-entropy between the head's attention and
    the alignment, in which all source pieces linked to the token have equal shares."""
    layer: Layers | None = Field(default=None, ge=1)
    """Decoder layer, from 1; null: the last."""
    head: Width | Literal["mean"] = Field(default=1)
    """Head of its attention to the source, from 1; `mean`: the mean over all heads."""

    @field_validator("head")
    @classmethod
    def _counted_from_one(cls, head: int | str) -> int | str:
        if isinstance(head, int) and head < 1:
            raise ValueError("heads are counted from 1")
        return head


def alignment_refused(config: GuidedAlignmentConfig | None, model: ModelConfig, grows: bool) -> list[str]:
    """Return why guided alignment cannot teach this model; `grows`: the run has stages of growth."""
    if config is None:
        return []
    reasons = []
    if config.layer is not None:
        layers = model.decoder.layers
        if model.family == "rnmt" and config.layer != 1:
            reasons.append("RNMT+ attends to the source in decoder layer 1 alone: set `layer` to 1 or null")
        elif config.layer > layers:
            reasons.append(f"`layer: {config.layer}`, but the decoder has {layers}")
        if grows:
            reasons.append(
                "`layer` with `training.growth`: new layers change the numbers of those above; set it to null, which "
                "is the last layer at every depth"
            )
    if isinstance(config.head, int) and config.head > model.heads:
        reasons.append(f"`head: {config.head}`, but the decoder's attention has {model.heads}")
    return reasons
