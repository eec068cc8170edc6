"""Parts and layers of a model that training leaves unchanged: `training.freeze`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ziggurat.config.depth import BETWEEN, LeftOut
from ziggurat.config.model import ModelConfig
from ziggurat.system.errors import ConfigError, Problem, printable

if TYPE_CHECKING:
    from ziggurat.config.train import TrainingConfig


PARTS = ("source_embedding", "target_embedding", "encoder", "decoder", "output")
"""PARTS are the names of a model's parts, which are also the names of its modules."""
_OUTSIDE = frozenset({"source_embedding", "target_embedding", "output"})
_STACKS = ("encoder", "decoder")
_TIED = {"none": frozenset[str](), "decoder": frozenset({"target_embedding", "output"}), "all": _OUTSIDE}
"""_TIED maps a value of `model.embedding.sharing` to the parts that are one matrix."""


class Frozen(NamedTuple):
    """Parts, and layers of the two stacks by number, that are not trained."""

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
                    f"`{printable(name)}` is not a part of a model; {meant}Parts are {', '.join(PARTS)}, and layers as "
                    "in `encoder.1-6` or `decoder.3`, where 1 is the lowest"
                ) from None
        numbers = (frozenset().union(*(one.of(stack) for one in layers)) for stack in _STACKS)
        return cls(frozenset(PARTS) & set(names), LeftOut(*numbers))

    def has(self, stack: str, number: int) -> bool:
        """Return whether layer `number` of a stack, from 1, is frozen."""
        return stack in self.parts or number in self.layers.of(stack)


def freeze_refused(training: TrainingConfig, model: ModelConfig) -> list[Problem]:
    """Return why these parts cannot be frozen in this run; [] if they can, or if nothing is frozen."""
    if not training.freeze:
        return []
    if training.lora is not None:
        return [
            Problem.of(
                "training.lora", "already leaves all weights of the model unchanged", "leave `training.freeze` out"
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
        for layer, owner in enumerate(section.owners()):
            if stack not in frozen.parts and (layer + 1 in numbers) != (owner + 1 in numbers):
                yield Problem.of(
                    f"model.{stack}.tied_layers",
                    f"lets layers {owner + 1} and {layer + 1} of the {stack} share their parameters:",
                    "name both or neither in `training.freeze`",
                )
                break
        first = section.layers if growth is None else growth.stages[0].depths(model.decoder.layers)[stack == "decoder"]
        if first < section.layers and (stack in frozen.parts or max(numbers, default=0) > first):
            yield Problem.of(
                "training.growth",
                f"adds layers to the {stack} above {first}, which would be frozen and never trained:",
                f"name layers up to {first}, or continue from the grown model (`ziggurat grow`, `training.start_from`)",
            )
        elif growth is not None and growth.copy_strategy in BETWEEN and numbers and first < section.layers:
            key = "training.growth.copy_strategy"
            yield Problem(key, f"`{key}: {growth.copy_strategy}` renumbers the layers of the {stack}")


def _of_shared(frozen: Frozen, model: ModelConfig) -> Iterator[Problem]:
    """Yield a problem for each shared weight that only some of its parts would freeze."""
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
            "training.optimiser.kind: muon", "trains the layers' matrices, but all are frozen:", "use `adamw`"
        )
    kept = [stack for stack in trained if trained[stack] and not getattr(model, stack).layer_drop]
    if not outside and any(trained.values()) and not kept:
        key = f"model.{next(stack for stack in trained if trained[stack])}.layer_drop"
        yield Problem(key, "LayerDrop may drop everything that is trained:", f"set `{key}: 0`")
