"""Layers that are left out of a trained model, and parts of a model that training leaves as they are: names and rules.

Pruning (Fan et al. 2019): whether layers can be left out, and what is left; the weights follow in ziggurat.model.depth.
Freezing: whether a run can do without training the parts; ziggurat.train.objective finds the parameters.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ziggurat.config.growth import BETWEEN
from ziggurat.config.kinds import RESIDUALS
from ziggurat.config.model import ModelConfig, StackConfig
from ziggurat.system.errors import ConfigError, Problem, printable

if TYPE_CHECKING:
    from ziggurat.config.train import TrainingConfig


_MOST = 1 << 20
"""Layers that are named one by one; no model has so many."""
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
                    f"`{key}{printable(text)}`: `{printable(part)}` names no layers; write `encoder.5` or "
                    "`encoder.5-8`, separated by commas; the lowest layer is 1"
                )
            # Beyond any model the last alone: it says later on that there is no such layer.
            found[match[1]] |= {*range(first, min(last, _MOST) + 1), last}
        return cls(*map(frozenset, found.values()))

    def names(self) -> list[str]:
        """Return the names of the layers, such as `decoder.3`, in order."""
        return [f"{stack}.{number}" for stack in ("encoder", "decoder") for number in sorted(self.of(stack))]

    def of(self, stack: str) -> frozenset[int]:
        """Return those of one stack."""
        return self.decoder if stack == "decoder" else self.encoder


def unprunable(config: ModelConfig, left_out: LeftOut) -> list[Problem]:
    """Return why the model cannot do without these layers; nothing when it can."""
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
    if counting := sorted({kind for kind in kinds if RESIDUALS[kind].layer_constants}):
        number = f"`residual: {counting[0]}` computes with the number of a layer, which would change for those above"
        yield Problem("model.residual", number)
    if 1 in numbers and RESIDUALS[kinds[0]].first_differs:
        yield Problem("model.residual", f"`residual: {kinds[0]}` has a first layer unlike the others")
    if 1 in numbers and (residuals := config.value_residuals(decoder=decoder)):
        key = next(iter(residuals))
        yield Problem(f"model.{key}", f"`{key}`: all layers read the values of the first")
    if (kinds[0], kinds[-1]) != (left[0], left[-1]):
        ends = (
            f"the {stack} begins and ends as its first and its last layers do, and no layer of one kind would be left"
        )
        yield Problem(f"model.{stack}.ranges", ends)


def pruned_config(config: ModelConfig, left_out: LeftOut) -> ModelConfig:
    """Return the architecture without some layers; constants of depth stay those of the whole model.

    Raises ConfigError with all reasons why that is not possible.
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
        values[stack] |= {"layers": len(left), "ranges": _ranges(section, left)}
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


PARTS = ("source_embedding", "target_embedding", "encoder", "decoder", "output")
"""Names of the parts that make up a model, and of its modules."""
_OUTSIDE = frozenset({"source_embedding", "target_embedding", "output"})
_STACKS = ("encoder", "decoder")
_TIED = {"none": frozenset[str](), "decoder": frozenset({"target_embedding", "output"}), "all": _OUTSIDE}
"""Value of `model.embedding.sharing` -> the parts that are one matrix."""


class Frozen(NamedTuple):
    """Whole parts, and layers of the two stacks by their numbers, that are not trained."""

    parts: frozenset[str]
    layers: LeftOut

    @classmethod
    def parse(cls, names: Sequence[str]) -> Frozen:
        """Return what `training.freeze` names: `encoder`, `encoder.1-6`, `output`, ... Raises ConfigError."""
        layers = []
        for name in [name for name in names if name not in PARTS]:
            try:
                layers.append(LeftOut.parse(name))
            except ConfigError:
                near = difflib.get_close_matches(name.partition(".")[0], PARTS, n=2, cutoff=0.5)
                meant = f"did you mean {' or '.join(f'`{part}`' for part in near)}? " if near else ""
                raise ConfigError(
                    f"`{printable(name)}` is no part of a model; {meant}Parts are {', '.join(PARTS)}, and layers as in "
                    "`encoder.1-6` or `decoder.3`, of which the lowest is 1"
                ) from None
        numbers = (frozenset().union(*(one.of(stack) for one in layers)) for stack in _STACKS)
        return cls(frozenset(PARTS) & set(names), LeftOut(*numbers))

    def has(self, stack: str, number: int) -> bool:
        """Return whether layer `number` of a stack, from 1, is frozen."""
        return stack in self.parts or number in self.layers.of(stack)


def freeze_refused(training: TrainingConfig, model: ModelConfig) -> list[Problem]:
    """Return why these parts cannot stay as they are in this run; [] where nothing is frozen or nothing is wrong."""
    if not training.freeze:
        return []
    if training.lora is not None:
        return [
            Problem.of(
                "training.lora", "leaves all weights of the model as they are already", "leave `training.freeze` out"
            )
        ]
    try:
        frozen = Frozen.parse(training.freeze)
    except ConfigError as error:
        return list(error.problems)
    return [*_of_layers(frozen, training, model), *_of_shared(frozen, model), *_of_the_rest(frozen, training, model)]


def _of_layers(frozen: Frozen, training: TrainingConfig, model: ModelConfig) -> Iterator[Problem]:
    growth = training.growth
    for stack, section in (("encoder", model.encoder), ("decoder", model.decoder)):
        numbers = frozen.layers.of(stack)
        if numbers and (last := max(numbers)) > section.layers:
            yield Problem("training.freeze", f"the {stack} has {section.layers} layers, no layer {last}")
            continue
        first = section.layers if growth is None else growth.stages[0].depths(model.decoder.layers)[stack == "decoder"]
        if first < section.layers and (stack in frozen.parts or max(numbers, default=0) > first):
            yield Problem.of(
                "training.growth",
                f"adds layers to the {stack} above {first}, and frozen they would never be trained:",
                f"name layers up to {first}, or train on from the grown model (`ziggurat grow`, `training.start_from`)",
            )
        elif growth is not None and growth.copy_strategy in BETWEEN and numbers and first < section.layers:
            key = "training.growth.copy_strategy"
            yield Problem(key, f"`{key}: {growth.copy_strategy}` gives the layers of the {stack} other numbers")


def _of_shared(frozen: Frozen, model: ModelConfig) -> Iterator[Problem]:
    """Yield the matrices and vectors that parts share, and that would be frozen in some of them only."""
    embedding = model.embedding
    shared = [("model.embedding.sharing", f": {embedding.sharing}", _TIED[embedding.sharing])]
    if embedding.shared_bias:
        shared.append(("model.embedding.shared_bias", "", frozenset({"source_embedding", "target_embedding"})))
    for key, value, parts in shared:
        if parts & frozen.parts and not parts <= frozen.parts:
            names = ", ".join(part for part in PARTS if part in parts)
            yield Problem(key, f"`{key}{value}` lets {names} share their weights:", "name all of them or none")


def _of_the_rest(frozen: Frozen, training: TrainingConfig, model: ModelConfig) -> Iterator[Problem]:
    trained = {
        stack: [n for n in range(1, section.layers + 1) if not frozen.has(stack, n)]
        for stack, section in (("encoder", model.encoder), ("decoder", model.decoder))
    }
    outside = not frozen.parts >= _OUTSIDE
    if not outside and not any(trained.values()):
        yield Problem("training.freeze", "nothing would be trained")
    elif training.optimiser.kind == "muon" and not any(trained.values()):
        yield Problem.of(
            "training.optimiser.kind: muon", "trains matrices of the layers, and all are frozen:", "use `adamw`"
        )
    kept = [stack for stack in trained if trained[stack] and not getattr(model, stack).layer_drop]
    if not outside and any(trained.values()) and not kept:
        key = f"model.{next(stack for stack in trained if trained[stack])}.layer_drop"
        yield Problem(key, "LayerDrop may leave out all that is trained:", f"set `{key}: 0`")
