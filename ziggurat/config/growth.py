"""Growth section: training shallow first, then deeper (Li et al. 2020), and the growths that are possible.

The rules for the sections come first, then those that need more than the section: the model (`growth_refused`) and the
end of training (`cut_short`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import Count, Layers, Section
from ziggurat.config.kinds import RESIDUALS
from ziggurat.config.lifecycle import StopConfig
from ziggurat.config.model import ModelConfig
from ziggurat.system.errors import ConfigError, Problem

CopyStrategy = Literal["g_top", "top_only", "g_interpolate", "interpolate", "copy_all", "random"]
BETWEEN: frozenset[CopyStrategy] = frozenset({"interpolate", "g_interpolate"})
"""Strategies that put new layers between old ones, which get other numbers."""


class GrowthStage(Section):
    """One stage before the final depth."""

    layers: Layers = Field(ge=1)
    """Encoder layers of this stage."""
    decoder_layers: Layers | None = Field(default=None, ge=1)
    """Decoder layers of this stage; null: those of the final depth."""
    updates: Count | None = Field(default=None, ge=1)
    """The stage ends after this many updates of the run, earlier stages included."""
    epochs: Count | None = Field(default=None, ge=1)
    """The stage ends after this many passes over the data, earlier stages included."""

    @model_validator(mode="after")
    def _some_end(self) -> Self:
        if (self.updates is None) == (self.epochs is None):
            raise ValueError("give a stage either `updates` or `epochs`, to say when it ends")
        return self

    def depths(self, decoder_layers: int) -> tuple[int, int]:
        """Return the layers of encoder and decoder; `decoder_layers` is the decoder's final depth."""
        return self.layers, self.decoder_layers or decoder_layers


class GrowthConfig(Section):
    """Shallow-to-deep training: stages of increasing depth, the final one being that of `model`.

    Li et al. 2020 grow the encoder; the decoder grows in the same way where `stages` say how deep it is.
    """

    stages: list[GrowthStage]
    """Depths before the final one, shallowest first; the final stage ends as `training.stop` says."""
    copy_strategy: CopyStrategy = "g_top"
    """Initial weights of the g layers added to a stack: copies of the g top layers on top of them (`g_top`), the same
    copies, each right after its layer (`g_interpolate`, Li et al. 2020, table 3), the top layer g times (`top_only`),
    every layer twice in place (`interpolate`), the whole stack again (`copy_all`), or fresh weights (`random`)."""
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
            raise ConfigError(
                "`stages` is empty: give the depths before the final one, or leave `growth` out", key="stages"
            )
        for before, after in pairwise(self.stages):
            old, new = before.depths(_DEEPEST), after.depths(_DEEPEST)
            if old == new or old[0] > new[0] or old[1] > new[1]:
                raise ConfigError(f"`stages` must grow: {_named(after)} follow {_named(before)}", key="stages")
            for unit in ("updates", "epochs"):
                ends = getattr(before, unit), getattr(after, unit)
                if None not in ends and ends[1] <= ends[0]:
                    raise ConfigError(
                        f"`stages`: {unit} count from the start of the run, so {ends[1]} after {ends[0]}", key="stages"
                    )
        return self


_DEEPEST = 2**31
"""In place of the decoder's final depth where only the stages are known: none of them is deeper."""

_STRATEGY = "training.growth.copy_strategy"


def _named(stage: GrowthStage) -> str:
    return f"{stage.layers} layers" + (f" and {stage.decoder_layers} decoder layers" if stage.decoder_layers else "")


def unreachable(
    strategy: CopyStrategy,
    old: int,
    new: int,
    stack: str = "encoder",
    unlike: str | None = None,
    period: int | None = None,
) -> Problem | None:
    """Return why `strategy` cannot grow a stack from `old` to `new` layers, or None when it can.

    `unlike` is the choice that builds the first layer unlike the others, if there is one (`first_unlike`), and `period`
    the number of layers of a block where the stack has connections between blocks (`block_layers`).
    """
    if new <= old:
        deeper = f"growing from {old} to {new} {stack} layers: the new depth must be larger"
        return Problem("training.growth.stages", deeper)
    if strategy in ("g_top", "g_interpolate") and new > 2 * old:
        return Problem(
            _STRATEGY,
            f"`{strategy}` copies the {new - old} top layers of the {stack}, but there are {old}",
            f"first grow to {2 * old} at most, or use `top_only` or `random`",
        )
    if strategy in ("copy_all", "interpolate") and new != 2 * old:
        doubled = f"`{strategy}` doubles the depth: from {old} {stack} layers to {2 * old}, not {new}"
        return Problem(_STRATEGY, doubled)
    if strategy == "g_interpolate" and period and (old % period or new - old != period):
        return Problem(
            _STRATEGY,
            f"`g_interpolate` from {old} to {new} {stack} layers: with `{stack}.history: blocks` it doubles the layers "
            f"of the last block ({period}, `combination.period`), since others would leave their block",
            "or use `g_top`",
        )
    first_copied = strategy in ("copy_all", "interpolate", "g_top", "g_interpolate") and new == 2 * old
    if unlike is not None and (first_copied or (strategy == "top_only" and old == 1)):
        return Problem(
            _STRATEGY,
            f"`{strategy}` from {old} to {new} {stack} layers copies the first layer, which `{unlike}` builds "
            "unlike the others",
            "add fewer layers at a time by `g_top`, or use `random`",
        )
    return None


def first_unlike(model: ModelConfig, *, decoder: bool) -> str | None:
    """Return the choice of `model` that builds the first layer of a stack unlike the others, or None."""
    kind = model.residuals(decoder=decoder)[-1]
    if RESIDUALS[kind].first_differs:
        return f"residual: {kind}"
    residuals = model.value_residuals(decoder=decoder)
    return next((f"{key}: {kind}" for key, kind in residuals.items() if kind != "half"), None)


def block_layers(model: ModelConfig, *, decoder: bool) -> int | None:
    """Return how many layers a block has in a stack with connections between blocks of whole layers, else None."""
    history = (model.decoder if decoder else model.encoder).history
    whole = history == "blocks" and model.combination.unit == "layer"
    return model.combination.period_of(history) if whole else None


def ungrowable(model: ModelConfig, strategy: CopyStrategy, *, decoder: bool = False) -> Problem | None:
    """Return why the encoder of `model`, or its `decoder`, cannot grow by `strategy`, or None when it can."""
    if model.family != "transformer":
        return Problem("model.family", f"only Transformers grow; `model.family: {model.family}` cannot")
    name, stack = ("decoder", model.decoder) if decoder else ("encoder", model.encoder)
    if stack.ranges:
        other = (
            f"layers of other kinds stand in `model.{name}.ranges`: a copy of one would be of another kind higher up"
        )
        return Problem(f"model.{name}.ranges", other)
    kinds = model.residuals(decoder=decoder)
    if strategy in BETWEEN and RESIDUALS[kinds[0]].layer_constants:
        return Problem(
            _STRATEGY,
            f"the copy strategy `{strategy}` moves layers up, and `residual: {kinds[0]}` computes with their number: "
            "trained layers would compute something else",
            "use `g_top`",
        )
    # Doubling the last block moves no other one, and the weights between blocks end up as if a block were added on top.
    within = strategy == "g_interpolate" and block_layers(model, decoder=decoder) is not None
    across = [f"{name}.history: {stack.history}"] if stack.history != "latest" and not within else []
    across += ["memory: transparent"] if model.memory != "top" and not decoder else []
    if strategy in BETWEEN and across:
        return Problem(
            _STRATEGY,
            f"the copy strategy `{strategy}` puts new layers between old ones, so the weights of "
            f"`model.{across[0]}` would belong to other layers",
            "use `g_top`",
        )
    return None


def growth_refused(growth: GrowthConfig | None, model: ModelConfig) -> list[Problem]:
    """Return why the stages, if there are any, cannot lead to the depth of `model`."""
    if growth is None:
        return []
    final = model.encoder.layers, model.decoder.layers
    depths = [*(stage.depths(final[1]) for stage in growth.stages), final]
    reasons: list[Problem | None] = []
    for number, stack in enumerate(("encoder", "decoder")):
        layers = [depth[number] for depth in depths]
        if len(set(layers)) > 1:
            reasons.append(ungrowable(model, growth.copy_strategy, decoder=stack == "decoder"))
        steps = ((old, new) for old, new in pairwise(layers) if old != new)
        unlike = first_unlike(model, decoder=stack == "decoder")
        period = block_layers(model, decoder=stack == "decoder")
        reasons += [unreachable(growth.copy_strategy, old, new, stack, unlike, period) for old, new in steps]
    if depths[-2] == final:
        already = f"the last of `stages` has the depth of `model` already, {final[0]} and {final[1]} layers"
        reasons.append(Problem("training.growth.stages", already))
    return [reason for reason in reasons if reason is not None]


def saved_passes(growth: GrowthConfig, model: ModelConfig, stop: StopConfig) -> float | None:
    """Share of the layer passes of a training at full depth that the stages save, from 0 to 1.

    Only stacks that grow are counted, and every layer's pass as equal: for an encoder that grows this is the share of
    time that Li et al. 2020 save if time is proportional to the encoder's depth. None where `stop` is not given in the
    unit of the stages, since the length of an epoch is not known here.
    """
    final = model.encoder.layers, model.decoder.layers
    depths = [stage.depths(final[1]) for stage in growth.stages]
    growing = [any(depth[stack] != final[stack] for depth in depths) for stack in range(2)]
    full = sum(layers for layers, grows in zip(final, growing, strict=True) if grows)
    for unit in ("updates", "epochs"):
        end = getattr(stop, unit)
        ends = [getattr(stage, unit) for stage in growth.stages]
        if end is None or None in ends:
            continue
        lengths = [min(later, end) - min(earlier, end) for earlier, later in pairwise((0, *ends))]
        layers = [sum(depth[stack] for stack in range(2) if growing[stack]) for depth in depths]
        return sum(n * (full - depth) for n, depth in zip(lengths, layers, strict=True)) / (end * full)
    return None


def cut_short(growth: GrowthConfig, stop: StopConfig) -> Problem | None:
    """Return a warning that names the stage that training will not get beyond before `stop`; None: it reaches all."""
    for stage in growth.stages:
        for unit, end, limit in (("updates", stage.updates, stop.updates), ("epochs", stage.epochs, stop.epochs)):
            if end is not None and limit is not None and end >= limit:
                return Problem(
                    f"training.stop.{unit}",
                    f"`training.stop.{unit}` ({limit}) comes before the end of the stage of {_named(stage)} "
                    f"({end}): the model will not grow beyond it",
                    severity="warning",
                )
    return None
