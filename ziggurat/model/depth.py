"""Changing a trained model's depth: more layers (growing) or fewer (pruning).

Growing follows shallow-to-deep training (Li et al. 2020, section 4). The paper and its code grow the encoder; a
decoder's added layers are initialised by the same rules.

Pruning leaves layers out (Fan et al. 2019, made possible by LayerDrop): a layer that is left out passes its input
through. That is exact where layers read only the one below; the result is a smaller model, which trains and exports
like any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.config.depth import (
    CopyStrategy,
    LeftOut,
    block_layers,
    copied_layers,
    layers_left,
    pruned_config,
    unreachable,
)
from ziggurat.config.model import ModelConfig
from ziggurat.model.layers import AnyDecoderLayer, EncoderLayer
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.transformer import Decoder, Encoder
from ziggurat.system.errors import ConfigError

_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)")
_OWN = re.compile(r"\w+_residual\.\w+")
"""Names of parameters that a layer does not share with layers tied to it (ziggurat.model.transformer.tie)."""
_ACROSS = ("encoder.history.", "encoder.transparent.", "decoder.history.")
"""Parts whose tensors belong to several layers; their modules extend them (`extend`)."""


class Copies(NamedTuple):
    """Origins of the layers of one stack, which had `before` layers.

    `sources` gives, for each layer it now has, the old layer it is copied from, counted from 0; None: initial weights.
    `owners` gives, for each old layer, the layer that holds its parameters where layers are tied.
    """

    before: int
    sources: Sequence[int | None]
    owners: Sequence[int] = ()


class Deepening(NamedTuple):
    """Origins of the layers of a grown model."""

    encoder: Copies
    decoder: Copies


def deepening(strategy: CopyStrategy, before: ModelConfig, after: ModelConfig) -> Deepening:
    """Return where the layers of `after` come from, given `before`. Raises ConfigError: the strategy cannot do it."""
    return Deepening(*(_copies(strategy, before, after, decoder=decoder) for decoder in (False, True)))


def _copies(strategy: CopyStrategy, before: ModelConfig, after: ModelConfig, *, decoder: bool) -> Copies:
    """Return where each layer of one stack comes from; a stack of unchanged depth keeps its layers."""
    shallow, deep = ((model.decoder if decoder else model.encoder) for model in (before, after))
    unlike, period = after.first_unlike(decoder=decoder), block_layers(after, decoder=decoder)
    old, new = shallow.layers, deep.layers
    if new == old:
        return Copies(old, range(old), shallow.owners())
    stack = "decoder" if decoder else "encoder"
    if problem := unreachable(strategy, old, new, stack, unlike, period, deep.owners()):
        raise ConfigError(problem)
    return Copies(old, copied_layers(strategy, old, new), shallow.owners())


def added_layers(copies: Copies) -> list[int]:
    """Return the layers of a grown stack, from 0, that were added: random ones and second copies."""
    sources = copies.sources
    return [layer for layer, source in enumerate(sources) if source is None or source in sources[:layer]]


def at_depth(config: ModelConfig, encoder_layers: int, decoder_layers: int | None = None) -> ModelConfig:
    """Return the architecture with stacks of the given depths; without `decoder_layers`, the decoder is unchanged.

    Constants that depend on depth, such as DeepNorm's, stay those of `config`, so that layers compute the same in both.
    In a run with stages of growth they are those of the final depth from the start.
    """
    planned: dict[str, int] = {}
    if config.depth_matters:
        planned["planned_encoder_layers"] = config.planned_encoder_layers
        if decoder_layers not in (None, config.decoder.layers):
            planned["planned_decoder_layers"] = config.planned_decoder_layers
    return config.model_copy(
        update={
            "encoder": config.encoder.model_copy(update={"layers": encoder_layers}),
            "decoder": config.decoder.model_copy(update={"layers": decoder_layers or config.decoder.layers}),
            "wiring": config.wiring.model_copy(update=planned),
        }
    )


@torch.no_grad()
def grow_weights(model: Seq2Seq, old: Mapping[str, Tensor], plan: Deepening) -> None:
    """Copy the weights `old` of a shallow model, by name, into `model`, which was built with the new depth.

    Layers without an origin keep their weights. Everything outside the layers is copied; histories and mixtures
    extend as their kind says. Raises ConfigError when the models differ in more than their depth.
    """
    across = _extended(model, old, plan)
    for name, parameter in model.named_parameters():
        source = _source_name(name, plan)
        values = across.get(name) if name.startswith(_ACROSS) else None if source is None else old.get(source)
        if values is None and source is None:
            continue
        if values is None or values.shape != parameter.shape:
            raise ConfigError(f"{name}: the shallow model has no such parameter; it differs in more than its depth")
        parameter.copy_(values)
    model.output.rule_out(old.get("output.bias"))


def grow_moments(parameters: Mapping[str, Tensor], old: Mapping[str, Tensor], plan: Deepening) -> dict[str, Tensor]:
    """Return an optimiser state for the grown model: each layer takes the moments of the layer that it copies.

    `old` is the state of the shallow model's optimiser, `<parameter>/<moment>` (ziggurat.train.optim). A parameter with
    no trained counterpart of the same shape has no moments, as before a first step: the optimiser that owns it creates
    zeros, and its bias correction treats the next step as the first.
    """
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in old.items():
        name, _, moment = key.rpartition("/")
        by_name.setdefault(name, {})[moment] = value
    state = {}
    for name, parameter in parameters.items():
        source = _source_name(name, plan)
        before = by_name.get(source) if source is not None else None
        if before is not None and all(v.shape in ((), parameter.shape) for v in before.values()):
            state.update({f"{name}/{moment}": value.clone() for moment, value in before.items()})
    return state


def _source_name(name: str, plan: Deepening) -> str | None:
    """Return the shallow model's parameter from which `name` is copied; None: it keeps its initial values."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    stack, number, rest = found.groups()
    copies = plan.encoder if stack == "encoder" else plan.decoder
    source = copies.sources[int(number)]
    if source is None:
        return None
    holder = source if _OWN.fullmatch(rest) or not copies.owners else copies.owners[source]
    return f"{stack}.layers.{holder}.{rest}"


def untied(config: ModelConfig, tensors: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return configuration and weights of an equivalent model without tied layers.

    Layers that shared parameters hold the same tensors, each under its own names.
    """
    stacks = {"encoder": config.encoder, "decoder": config.decoder}
    copies = dict(tensors)
    for name, tensor in tensors.items():
        if (found := _LAYER.fullmatch(name)) is None or _OWN.fullmatch(found[3]):
            continue
        for layer, owner in enumerate(stacks[found[1]].owners()):
            if owner == int(found[2]):
                copies[f"{found[1]}.layers.{layer}.{found[3]}"] = tensor
    bare = {name: stack.model_copy(update={"tied_layers": []}) for name, stack in stacks.items()}
    return config.model_copy(update=bare), copies


def _extended(model: Seq2Seq, old: Mapping[str, Tensor], plan: Deepening) -> dict[str, Tensor]:
    extended = {}
    for stack, copies in ((model.encoder, plan.encoder), (model.decoder, plan.decoder)):
        assert isinstance(stack, Encoder | Decoder)
        per_layer = len(cast(EncoderLayer | AnyDecoderLayer, stack.layers[0]).sublayers()) if stack.split else 1
        units = copies.before * per_layer
        part = "encoder.history." if stack is model.encoder else "decoder.history."
        extended.update({part + name: v for name, v in stack.history.extend(_within(old, part), units).items()})
    encoder, part = model.encoder, "encoder.transparent."
    if isinstance(encoder, Encoder) and encoder.transparent is not None:
        before = _within(old, part)
        if "weight" in before:  # readers are decoder layers: copies keep their mixture, others are uniform
            weight = before["weight"]
            even = torch.zeros_like(weight[0])
            before["weight"] = torch.stack([even if s is None else weight[s] for s in plan.decoder.sources])
        mixtures = encoder.transparent.extend(before, plan.encoder.before)
        extended.update({part + name: values for name, values in mixtures.items()})
    return extended


def _within(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(part): values for name, values in tensors.items() if name.startswith(part)}


def prune(
    config: ModelConfig, tensors: Mapping[str, Tensor], left_out: LeftOut
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return configuration and weights of the model without some layers.

    With transparent memory, a layer that is left out returns the output of the one below, so every mixture adds the
    weights of both. Raises ConfigError with all reasons why that is not possible.
    """
    smaller = pruned_config(config, left_out)
    numbers = {
        stack: {old - 1: new for new, old in enumerate(layers_left(config, stack, left_out))}
        for stack in ("encoder", "decoder")
    }
    owners = {"encoder": smaller.encoder.owners(), "decoder": smaller.decoder.owners()}
    kept = {}
    for name, tensor in untied(config, tensors)[1].items():
        if (found := _LAYER.fullmatch(name)) is None:
            kept[name] = tensor
        elif (new := numbers[found[1]].get(int(found[2]))) is not None and (
            owners[found[1]][new] == new or _OWN.fullmatch(found[3])
        ):
            kept[f"{found[1]}.layers.{new}.{found[3]}"] = tensor
    if (mixtures := tensors.get("encoder.transparent.weight")) is not None:
        kept["encoder.transparent.weight"] = _joined(mixtures, numbers["encoder"], list(numbers["decoder"]))
    return smaller, kept


def pruned_experiment(experiment: Experiment, smaller: ModelConfig, left_out: LeftOut) -> Experiment:
    """Return the configuration of a model without some layers, whose section `model` is `smaller`.

    The layer that guided alignment trained keeps its role under its new number. If that layer is removed, guided
    alignment is removed from the configuration, and alignments are those of a model trained without it. Stages of
    growth, which lead to the old depth, are left out, as are names of frozen layers.
    """
    guided = experiment.training.loss.alignment
    if guided is not None and left_out.decoder:
        layer = guided.layer or experiment.model.decoder.layers
        below = sum(number < layer for number in left_out.decoder)
        guided = None if layer in left_out.decoder else guided.model_copy(update={"layer": layer - below})
    loss = experiment.training.loss.model_copy(update={"alignment": guided})
    training = experiment.training.model_copy(update={"loss": loss, "growth": None, "freeze": []})
    return experiment.model_copy(update={"model": smaller, "training": training})


def _joined(mixtures: Tensor, encoder: Mapping[int, int], readers: list[int]) -> Tensor:
    """Return the logits of transparent memory [readers, sources] for the remaining layers.

    Source l is the state after layer l, 0 the stack's input. Without layer l it is the state after the nearest layer
    below that remains: that state gets the weight of both if its logit is the log-sum-exp of their two logits.
    """
    groups: list[list[int]] = [[0]]
    for layer in range(mixtures.shape[1] - 1):
        if layer in encoder:
            groups.append([])
        groups[-1].append(layer + 1)
    return torch.stack([mixtures[readers][:, group].logsumexp(-1) for group in groups], dim=1)
