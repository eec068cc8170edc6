"""Growth: training shallow first, then deeper (Li et al. 2020)."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import Section

__all__ = ["CopyStrategy", "GrowthConfig", "GrowthStage"]

CopyStrategy = Literal["g_top", "top_only", "interpolate", "copy_all", "random"]


class GrowthStage(Section):
    """One stage before the final depth."""

    layers: int = Field(ge=1)
    """Encoder layers of this stage."""
    updates: int | None = Field(default=None, ge=1)
    """The stage ends when the run has done so many updates, earlier stages included."""
    epochs: int | None = Field(default=None, ge=1)
    """The stage ends when the run has made so many passes over the data, earlier stages included."""

    @model_validator(mode="after")
    def _some_end(self) -> Self:
        if (self.updates is None) == (self.epochs is None):
            raise ValueError("give a stage either `updates` or `epochs`: when it ends")
        return self


class GrowthConfig(Section):
    """Shallow-to-deep training: stages of growing encoder depth; `model.encoder.layers` is the final one."""

    stages: list[GrowthStage] = Field(min_length=1)
    """Depths before the final one, shallowest first; the final stage ends as `training.stop` says."""
    copy_strategy: CopyStrategy = "g_top"
    """What the g added layers start as: the `g_top` trained layers below them, the last one g times (`top_only`),
    every layer twice in place (`interpolate`), the whole stack again (`copy_all`), or fresh weights (`random`)."""
    restart_rate: bool = True
    """After growing, let the schedule go on from its peak: its update counter becomes min(t, `warmup_updates`)."""
    moments: Literal["reset", "copy"] = "reset"
    """The optimiser's moments after growing: all zero (the released code), or copied along with the layers."""
    keep_stages: bool = True
    """Write the model at the end of each stage to `stages/` in the run: each is a system to translate with, and a
    member for an ensemble."""

    @model_validator(mode="after")
    def _deeper_and_later(self) -> Self:
        for before, after in pairwise(self.stages):
            if after.layers <= before.layers:
                raise ValueError(f"`stages` must grow: {after.layers} layers follow {before.layers}")
            for unit in ("updates", "epochs"):
                ends = getattr(before, unit), getattr(after, unit)
                if None not in ends and ends[1] <= ends[0]:
                    raise ValueError(f"`stages`: {unit} count from the start of the run, so {ends[1]} after {ends[0]}")
        return self
