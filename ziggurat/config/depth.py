"""Growth, which adds layers during training, and pruning, which removes layers from a trained model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, assert_never

from pydantic import Field, model_validator

from ziggurat.config.kinds import RESIDUALS
from ziggurat.config.lifecycle import StopConfig
from ziggurat.config.model import ModelConfig, StackConfig
from ziggurat.config.section import Count, Layers, Section
from ziggurat.system.errors import ConfigError, Problem, printable

if TYPE_CHECKING:
    pass


CopyStrategy = Literal["g_top", "top_only", "g_interpolate", "interpolate", "copy_all", "random", "midas", "lidas"]
BETWEEN: frozenset[CopyStrategy] = frozenset({"interpolate", "g_interpolate", "midas", "lidas"})
"""BETWEEN are the strategies that put new layers between old ones and so renumber the old ones."""


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
            raise ValueError("give a stage either `updates` or `epochs` to say when it ends")
        return self

    def depths(self, decoder_layers: int) -> tuple[int, int]:
        """Return the layers of encoder and decoder; `decoder_layers` is the decoder's final depth."""
        return self.layers, self.decoder_layers or decoder_layers


class GrowthConfig(Section):
    """Shallow-to-deep training: stages of increasing depth, ending with that of `model`.

    Li et al. 2020 grow the encoder; the decoder grows in the same way if `stages` sets its depth.
    """

    stages: list[GrowthStage]
    """Depths before the final one, shallowest first; `training.stop` ends the final stage."""
    copy_strategy: CopyStrategy = "g_top"
    """Initial weights of the g layers added to a stack. `g_top`: copies of the top g layers, on top of them.
    `g_interpolate`: the same copies, each right after its original (Li et al. 2020, table 3). `top_only`: the top
    layer, g times. `interpolate`: every layer twice, in place. `copy_all`: the whole stack again. `random`: fresh
    weights. `midas`: a copy of the middle block of g layers, right above it (Saunshi et al. 2024). `lidas`: a copy of
    the middle g layers, right above them (Kapl et al. 2025)."""
    restart_rate: bool = True
    """After growing, restart the schedule at its peak: its update counter returns to the end of the warm-up."""
    moments: Literal["reset", "copy"] = "reset"
    """The optimiser's moments after growing: all zero (the released code), or copied along with the layers."""
    keep_stages: bool = True
    """Write the model at the end of each stage to `stages/` in the run; each can translate, alone or in an ensemble."""

    @model_validator(mode="after")
    def _deeper_and_later(self) -> Self:
        if not self.stages:
            raise ConfigError.of("stages", "is empty: give the depths before the final one, or leave `growth` out")
        for before, after in pairwise(self.stages):
            old, new = before.depths(_DEEPEST), after.depths(_DEEPEST)
            if old == new or old[0] > new[0] or old[1] > new[1]:
                raise ConfigError.of("stages", f"must grow: {_named(after)} follow {_named(before)}")
            for unit in ("updates", "epochs"):
                ends = getattr(before, unit), getattr(after, unit)
                if None not in ends and ends[1] <= ends[0]:
                    raise ConfigError.of(
                        "stages", f": {unit} count from the start of the run, so {ends[1]} after {ends[0]}"
                    )
        return self


_DEEPEST = 2**31
"""_DEEPEST stands in for the decoder's final depth if only the stages are known; no stage is deeper."""

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
    owners: Sequence[int] = (),
) -> Problem | None:
    """Return why `strategy` cannot grow a stack from `old` to `new` layers, or None if it can.

    `unlike` is the choice that makes the first layer different from the others, if any (`ModelConfig.first_unlike`).
    `period` is the number of layers per block if the stack connects blocks (`block_layers`). `owners` are the deep
    stack's (`StackConfig.owners`).
    """
    if new <= old:
        deeper = f"growing from {old} to {new} {stack} layers: the new depth must be larger"
        return Problem("training.growth.stages", deeper)
    if strategy in ("g_top", "g_interpolate", "midas", "lidas") and new > 2 * old:
        which = "middle" if strategy in ("midas", "lidas") else "top"
        return Problem(
            _STRATEGY,
            f"`{strategy}` copies the {new - old} {which} layers of the {stack}, but it has only {old}",
            f"first grow to at most {2 * old}, or use `top_only` or `random`",
        )
    if strategy in ("copy_all", "interpolate") and new != 2 * old:
        doubled = f"`{strategy}` doubles the depth: from {old} {stack} layers to {2 * old}, not {new}"
        return Problem(_STRATEGY, doubled)
    if strategy == "midas" and old % (new - old):
        blocks = f"`midas` from {old} to {new} {stack} layers: {old} layers do not divide into blocks of {new - old}"
        return Problem(_STRATEGY, blocks, "or use `lidas`")
    if strategy == "g_interpolate" and period and (old % period or new - old != period):
        return Problem(
            _STRATEGY,
            f"`g_interpolate` from {old} to {new} {stack} layers: with `{stack}.history: blocks` it doubles the layers "
            f"of the last block ({period}, `combination.period`), since others would leave their block",
            "or use `g_top`",
        )
    if unlike is not None and copied_layers(strategy, old, new).count(0) > 1:
        return Problem(
            _STRATEGY,
            f"`{strategy}` from {old} to {new} {stack} layers copies the first layer, which `{unlike}` makes "
            "different from the others",
            "add fewer layers at a time with `g_top`, or use `random`",
        )
    for layer, source in enumerate(copied_layers(strategy, old, new)):
        owner = owners[layer] if owners else layer
        start = None if source is None or not owners else owners[source]
        if owner != layer and start != owner:
            return Problem.of(
                f"model.{stack}.tied_layers",
                f": growing by `{strategy}` from {old} to {new} layers, layer {layer + 1} would start differently from "
                f"layer {owner + 1}, with which it shares its parameters",
                "grow by whole loops (`g_top`) or groups (`g_interpolate`)",
            )
    return None


def copied_layers(strategy: CopyStrategy, old: int, new: int) -> list[int | None]:
    """Return for each layer of a stack grown from `old` to `new` layers which layer it copies, from 0, or None.

    With g added layers, `g_top` copies the top g layers on top, and `g_interpolate` puts each of these copies right
    after its original. `top_only` copies the last layer g times, `copy_all` the whole stack on top of itself, and
    `interpolate` every layer in place; `random` copies none. `midas` copies block ceil(n / 2) of n blocks of g layers
    in place, and `lidas` layers (L - g) / 2 + 1 to (L + g) / 2 of L, which are the same block if n is odd. Only
    summaries of the two papers, which are about decoder-only models, were available; that MIDAS takes the lower of two
    middle blocks and that LIDAS rounds down is an interpretation.
    """
    kept, added = list(range(old)), new - old
    match strategy:
        case "g_top":
            return [*kept, *kept[old - added :]]
        case "g_interpolate":
            return [*sorted(kept + kept[old - added :])]
        case "top_only":
            return [*kept, *[old - 1] * added]
        case "random":
            return [*kept, *[None] * added]
        case "copy_all":
            return [*kept, *kept]
        case "interpolate":
            return [layer for layer in kept for _ in range(2)]
        case "midas" | "lidas":
            lower = (-(-(old // added) // 2) - 1) * added if strategy == "midas" else (old - added) // 2
            return [*kept[: lower + added], *kept[lower:]]
        case _:
            assert_never(strategy)


def block_layers(model: ModelConfig, *, decoder: bool) -> int | None:
    """Return the layers per block of a stack that connects blocks of whole layers; None for other stacks."""
    history = (model.decoder if decoder else model.encoder).history
    whole = history == "blocks" and model.combination.unit == "layer"
    return model.combination.period_of(history) if whole else None


def ungrowable(model: ModelConfig, strategy: CopyStrategy, *, decoder: bool = False) -> Problem | None:
    """Return why the encoder of `model`, or its `decoder`, cannot grow by `strategy`, or None if it can."""
    if model.family != "transformer":
        return Problem("model.family", f"only Transformers grow; `model.family: {model.family}` cannot")
    name, stack = ("decoder", model.decoder) if decoder else ("encoder", model.encoder)
    if stack.ranges:
        other = f"`model.{name}.ranges` has layers of other kinds: a copy of one higher up would be of a different kind"
        return Problem(f"model.{name}.ranges", other)
    kinds = model.residuals(decoder=decoder)
    if strategy in BETWEEN and RESIDUALS[kinds[0]].layer_constants:
        return Problem(
            _STRATEGY,
            f"the copy strategy `{strategy}` moves layers up, but `residual: {kinds[0]}` depends on their number: "
            "trained layers would compute something else",
            "use `g_top`",
        )
    # Doubling the last block moves no other block, so the weights between blocks are as if a block were added on top.
    within = strategy == "g_interpolate" and block_layers(model, decoder=decoder) is not None
    across = [f"{name}.history: {stack.history}"] if stack.history != "latest" and not within else []
    across += [f"memory: {model.memory}"] if model.memory != "top" and not decoder else []
    if strategy in BETWEEN and across:
        return Problem(
            _STRATEGY,
            f"the copy strategy `{strategy}` puts new layers between old ones, so the weights of "
            f"`model.{across[0]}` would belong to other layers",
            "use `g_top`",
        )
    return None


def growth_refused(growth: GrowthConfig | None, model: ModelConfig) -> list[Problem]:
    """Return why the stages, if any, cannot lead to the depth of `model`."""
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
        unlike = model.first_unlike(decoder=stack == "decoder")
        period = block_layers(model, decoder=stack == "decoder")
        section = model.decoder if stack == "decoder" else model.encoder
        reasons += [
            unreachable(growth.copy_strategy, old, new, stack, unlike, period, section.owners(new))
            for old, new in steps
        ]
    if depths[-2] == final:
        already = f"the last of `stages` already has the depth of `model`, {final[0]} and {final[1]} layers"
        reasons.append(Problem("training.growth.stages", already))
    return [reason for reason in reasons if reason is not None]


def saved_passes(growth: GrowthConfig, model: ModelConfig, stop: StopConfig) -> float | None:
    """Share of the layer passes of training at full depth that the stages save, from 0 to 1.

    Counts only stacks that grow, and all layer passes alike. For a growing encoder this is the time saved by Li et al.
    2020 if time is proportional to the encoder's depth. None if `stop` is not in the same unit as the stages, since the
    length of an epoch is unknown here.
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
    """Return a warning that names the stage in which `stop` ends training; None if training reaches the final depth."""
    for stage in growth.stages:
        for unit, end, limit in (("updates", stage.updates, stop.updates), ("epochs", stage.epochs, stop.epochs)):
            if end is not None and limit is not None and end >= limit:
                return Problem.of(
                    f"training.stop.{unit}",
                    f"({limit}) comes before the end of the stage of {_named(stage)} "
                    f"({end}): the model will not grow beyond it",
                    severity="warning",
                )
    return None


_MOST = 1 << 20
"""_MOST is the largest layer number for which a range is listed in full; no model is that deep."""
_PART = re.compile(r"(encoder|decoder)\.(\d{1,9})(?:-(\d{1,9}))?")


class LeftOut(NamedTuple):
    """Numbers of the layers to leave out, from 1."""

    encoder: frozenset[int] = frozenset()
    decoder: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str, key: str = "--without-layers ") -> LeftOut:
        """Return the layers that `encoder.5-8,decoder.3` names. Raises ConfigError, with `key` before the text."""
        found: dict[str, set[int]] = {"encoder": set(), "decoder": set()}
        for part in text.split(","):
            match = _PART.fullmatch(part.strip())
            first, last = (int(match[2]), int(match[3] or match[2])) if match else (0, 0)
            if match is None or not 1 <= first <= last:
                raise ConfigError(
                    f"`{key}{printable(text)}`: `{printable(part)}` does not name layers; write `encoder.5` or "
                    "`encoder.5-8`, separated by commas; the lowest layer is 1"
                )
            # For a range beyond any model, only the last number is kept; a later check rejects it.
            found[match[1]] |= {*range(first, min(last, _MOST) + 1), last}
        return cls(*map(frozenset, found.values()))

    def names(self) -> list[str]:
        """Return the names of the layers, such as `decoder.3`, in order."""
        return [f"{stack}.{number}" for stack in ("encoder", "decoder") for number in sorted(self.of(stack))]

    def of(self, stack: str) -> frozenset[int]:
        """Return the numbers for one stack."""
        return self.decoder if stack == "decoder" else self.encoder


def unprunable(config: ModelConfig, left_out: LeftOut) -> list[Problem]:
    """Return why these layers of the model cannot be left out; empty if they can."""
    if config.family != "transformer":
        return [Problem.of(f"model.family: {config.family}", "has no layers that could be left out")]
    return [problem for stack in ("encoder", "decoder") for problem in _problems(config, stack, left_out.of(stack))]


def _problems(config: ModelConfig, stack: str, numbers: frozenset[int]) -> Iterator[Problem]:
    if not numbers:
        return
    decoder = stack == "decoder"
    section, kinds = (config.decoder if decoder else config.encoder), config.residuals(decoder=decoder)
    if (last := max(numbers)) > section.layers:
        yield Problem(f"model.{stack}.layers", f"the {stack} has {section.layers} layers, no layer {last}")
        return
    left = [kind for number, kind in enumerate(kinds, start=1) if number not in numbers]
    if not left:
        yield Problem(f"model.{stack}.layers", f"nothing would be left of the {stack}")
        return
    if section.history != "latest":
        weights = f"`{stack}.history: {section.history}` has weights for the outputs of all layers"
        yield Problem(f"model.{stack}.history", weights)
    if config.memory == "hierarchical":
        yield Problem.of("model.memory: hierarchical", "depends on the numbers of layers, which would change")
    if counting := sorted({kind for kind in kinds if RESIDUALS[kind].layer_constants}):
        number = f"`residual: {counting[0]}` depends on a layer's number, which would change for those above"
        yield Problem("model.residual", number)
    if 1 in numbers and RESIDUALS[kinds[0]].first_differs:
        yield Problem("model.residual", f"`residual: {kinds[0]}` has a first layer that differs from the others")
    if 1 in numbers and (residuals := config.value_residuals(decoder=decoder)):
        key = next(iter(residuals))
        yield Problem(f"model.{key}", f"`{key}`: all layers read the values of the first")
    if (kinds[0], kinds[-1]) != (left[0], left[-1]):
        ends = f"the {stack} starts and ends like its first and last layers, and no layer of one of these kinds is left"
        yield Problem(f"model.{stack}.ranges", ends)


def pruned_config(config: ModelConfig, left_out: LeftOut) -> ModelConfig:
    """Return the architecture without some layers; depth constants stay those of the whole model.

    Raises ConfigError with all reasons why this is impossible.
    """
    if problems := unprunable(config, left_out):
        keys = [problem.key for problem in problems]
        raise ConfigError(f"layers cannot be left out: {'; '.join(map(str, problems))}", key=keys[0], named=keys[1:])
    values = config.model_dump()
    if config.depth_matters:
        values["wiring"] |= {
            "planned_encoder_layers": config.planned_encoder_layers,
            "planned_decoder_layers": config.planned_decoder_layers,
        }
    for stack, section in (("encoder", config.encoder), ("decoder", config.decoder)):
        left = layers_left(config, stack, left_out)
        owners = section.owners()
        ties = [owners[number - 1] + 1 for number in left] if section.tied_layers else []
        values[stack] |= {"layers": len(left), "ranges": _ranges(section, left), "tied_layers": ties}
    return ModelConfig.model_validate(values)


def layers_left(config: ModelConfig, stack: str, left_out: LeftOut) -> list[int]:
    """Return the numbers of the layers of a stack that are not left out, from 1."""
    section = config.decoder if stack == "decoder" else config.encoder
    return [number for number in range(1, section.layers + 1) if number not in left_out.of(stack)]


def _ranges(section: StackConfig, left: list[int]) -> list[dict[str, object]]:
    ranges: list[dict[str, object]] = []
    first = 1
    for part in section.ranges:
        layers = sum(first <= number < first + part.layers for number in left)
        first += part.layers
        if layers:
            ranges.append({"layers": layers, "residual": part.residual})
    return ranges
