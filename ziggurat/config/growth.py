"""Growth section: training shallow first, then deeper (Li et al. 2020), and the growths that are possible.

The rules for the sections come first, then those that need more than the section: the model (`growth_refused`) and the
end of training (`cut_short`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import Count, Layers, Section
from ziggurat.config.lifecycle import StopConfig
from ziggurat.config.model import ModelConfig

__all__ = ["CopyStrategy", "GrowthConfig", "GrowthStage", "cut_short", "growth_refused", "ungrowable", "unreachable"]

CopyStrategy = Literal["g_top", "top_only", "interpolate", "copy_all", "random"]


class GrowthStage(Section):
    """One stage before the final depth."""

    layers: Layers = Field(ge=1)
    """Encoder layers of this stage."""
    updates: Count | None = Field(default=None, ge=1)
    """The stage ends after this many updates of the run, earlier stages included."""
    epochs: Count | None = Field(default=None, ge=1)
    """The stage ends after this many passes over the data, earlier stages included."""

    @model_validator(mode="after")
    def _some_end(self) -> Self:
        if (self.updates is None) == (self.epochs is None):
            raise ValueError("give a stage either `updates` or `epochs`, to say when it ends")
        return self


class GrowthConfig(Section):
    """Shallow-to-deep training: stages of increasing encoder depth; `model.encoder.layers` is the final depth."""

    stages: list[GrowthStage]
    """Depths before the final one, shallowest first; the final stage ends as `training.stop` says."""
    copy_strategy: CopyStrategy = "g_top"
    """Initial weights of the g added layers: copies of the g top layers (`g_top`), the top layer g times
    (`top_only`), every layer twice in place (`interpolate`), the whole stack again (`copy_all`), or fresh weights
    (`random`)."""
    restart_rate: bool = True
    """After growing, restart the schedule at its peak: its update counter returns to the end of the warm-up."""
    moments: Literal["reset", "copy"] = "reset"
    """The optimiser's moments after growing: all zero (the released code), or copied along with the layers."""
    keep_stages: bool = True
    """Write the model at the end of each stage to `stages/` in the run; each can translate, alone or in an
    ensemble."""

    @model_validator(mode="after")
    def _deeper_and_later(self) -> Self:
        if not self.stages:
            raise ValueError("`stages` is empty: give the depths before the final one, or leave `growth` out")
        for before, after in pairwise(self.stages):
            if after.layers <= before.layers:
                raise ValueError(f"`stages` must grow: {after.layers} layers follow {before.layers}")
            for unit in ("updates", "epochs"):
                ends = getattr(before, unit), getattr(after, unit)
                if None not in ends and ends[1] <= ends[0]:
                    raise ValueError(f"`stages`: {unit} count from the start of the run, so {ends[1]} after {ends[0]}")
        return self


def unreachable(strategy: CopyStrategy, old: int, new: int) -> str | None:
    """Return why `strategy` cannot grow an encoder from `old` to `new` layers, or None when it can."""
    if new <= old:
        return f"growing from {old} to {new} encoder layers: the new depth must be larger"
    if strategy == "g_top" and new > 2 * old:
        return (
            f"`g_top` copies the {new - old} top layers, but there are {old}; first grow to {2 * old} at most, or use "
            "`top_only` or `random`"
        )
    if strategy in ("copy_all", "interpolate") and new != 2 * old:
        return f"`{strategy}` doubles the depth: from {old} layers to {2 * old}, not {new}"
    return None


def ungrowable(model: ModelConfig, strategy: CopyStrategy) -> str | None:
    """Return why the encoder of `model` cannot grow by `strategy`, or None when it can."""
    if model.family != "transformer":
        return f"only Transformer encoders grow; `model.family: {model.family}` cannot"
    if strategy == "interpolate" and (model.encoder.history != "latest" or model.memory != "top"):
        latest = model.encoder.history == "latest"
        across = "memory: transparent" if latest else f"encoder.history: {model.encoder.history}"
        return (
            "the copy strategy `interpolate` puts new layers between old ones, so the weights of "
            f"`model.{across}` would belong to other layers; use `g_top`"
        )
    return None


def growth_refused(growth: GrowthConfig, model: ModelConfig) -> list[str]:
    """Return why the stages cannot lead to the depth of `model`."""
    depths = [stage.layers for stage in growth.stages] + [model.encoder.layers]
    reasons = [ungrowable(model, growth.copy_strategy)]
    reasons += [unreachable(growth.copy_strategy, old, new) for old, new in pairwise(depths)]
    return [reason for reason in reasons if reason is not None]


def cut_short(growth: GrowthConfig, stop: StopConfig) -> str | None:
    """Return a message naming the stage that training will not get beyond before `stop`; None: it reaches all."""
    for stage in growth.stages:
        for unit, end, limit in (("updates", stage.updates, stop.updates), ("epochs", stage.epochs, stop.epochs)):
            if end is not None and limit is not None and end >= limit:
                return (
                    f"`training.stop.{unit}` ({limit}) comes before the end of the stage of {stage.layers} layers "
                    f"({end}): the encoder will not grow beyond it"
                )
    return None
