"""Growth: training shallow first, then deeper (Li et al. 2020)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import Count, Layers, Section

if TYPE_CHECKING:
    from ziggurat.config.model import ModelConfig
    from ziggurat.config.train import StopConfig

__all__ = ["CopyStrategy", "GrowthConfig", "GrowthStage", "cut_short", "growth_refused", "ungrowable", "unreachable"]

CopyStrategy = Literal["g_top", "top_only", "interpolate", "copy_all", "random"]


class GrowthStage(Section):
    """One stage before the final depth."""

    layers: Layers = Field(ge=1)
    """Encoder layers of this stage."""
    updates: Count | None = Field(default=None, ge=1)
    """The stage ends when the run has done so many updates, earlier stages included."""
    epochs: Count | None = Field(default=None, ge=1)
    """The stage ends when the run has made so many passes over the data, earlier stages included."""

    @model_validator(mode="after")
    def _some_end(self) -> Self:
        if (self.updates is None) == (self.epochs is None):
            raise ValueError("give a stage either `updates` or `epochs`: when it ends")
        return self


class GrowthConfig(Section):
    """Shallow-to-deep training: stages of growing encoder depth; `model.encoder.layers` is the final one."""

    stages: list[GrowthStage]
    """Depths before the final one, shallowest first; the final stage ends as `training.stop` says."""
    copy_strategy: CopyStrategy = "g_top"
    """What the g added layers start as: the `g_top` trained layers below them, the last one g times (`top_only`),
    every layer twice in place (`interpolate`), the whole stack again (`copy_all`), or fresh weights (`random`)."""
    restart_rate: bool = True
    """After growing, let the schedule go on from its peak: its update counter goes back to the end of the warm-up."""
    moments: Literal["reset", "copy"] = "reset"
    """The optimiser's moments after growing: all zero (the released code), or copied along with the layers."""
    keep_stages: bool = True
    """Write the model at the end of each stage to `stages/` in the run: each is a system to translate with, and a
    member for an ensemble."""

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
    """Return which stage is the last one that training reaches before `stop`, for people; None: all are reached."""
    for stage in growth.stages:
        for unit, end, limit in (("updates", stage.updates, stop.updates), ("epochs", stage.epochs, stop.epochs)):
            if end is not None and limit is not None and end >= limit:
                return (
                    f"`training.stop.{unit}` ({limit}) comes before the end of the stage of {stage.layers} layers "
                    f"({end}): the encoder will not grow beyond it"
                )
    return None
