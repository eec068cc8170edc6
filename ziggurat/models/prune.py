"""Pruning: a trained model without some of its layers (Fan et al. 2019: what LayerDrop makes possible).

A layer that is left out passes its input on. That is exact where layers read nothing but the one below: what is left is
a smaller model, which decodes, is exported and runs as any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.config.compatibility import depth_matters
from ziggurat.config.kinds import RESIDUALS
from ziggurat.config.model import ModelConfig
from ziggurat.errors import ConfigError, printable

__all__ = ["LeftOut", "prune", "pruned_experiment", "unprunable"]

_MOST = 1 << 20
"""Layers that are named one by one; no model has so many."""
_PART = re.compile(r"(encoder|decoder)\.(\d{1,9})(?:-(\d{1,9}))?")
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)")


class LeftOut(NamedTuple):
    """Numbers of the layers to leave out, from 1."""

    encoder: frozenset[int] = frozenset()
    decoder: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> LeftOut:
        """Return the layers that `encoder.5-8,decoder.3` names. Raises ConfigError."""
        found: dict[str, set[int]] = {"encoder": set(), "decoder": set()}
        for part in text.split(","):
            match = _PART.fullmatch(part.strip())
            first, last = (int(match[2]), int(match[3] or match[2])) if match else (0, 0)
            if match is None or not 1 <= first <= last:
                raise ConfigError(
                    f"`--without-layers {printable(text)}`: `{printable(part)}` names no layers; write `encoder.5` or "
                    "`encoder.5-8`, separated by commas; the lowest layer is 1"
                )
            # Beyond any model the last alone: it says later on that there is no such layer.
            found[match[1]] |= {*range(first, min(last, _MOST) + 1), last}
        return cls(*map(frozenset, found.values()))

    def of(self, stack: str) -> frozenset[int]:
        """Return those of one stack."""
        return self.decoder if stack == "decoder" else self.encoder


def unprunable(config: ModelConfig, left_out: LeftOut) -> list[str]:
    """Return why the model cannot do without these layers; nothing when it can."""
    if config.family != "transformer":
        return [f"`model.family: {config.family}` has no layers that could be left out"]
    return [reason for stack in ("encoder", "decoder") for reason in _reasons(config, stack, left_out.of(stack))]


def _reasons(config: ModelConfig, stack: str, numbers: frozenset[int]) -> Iterator[str]:
    if not numbers:
        return
    decoder = stack == "decoder"
    section, kinds = (config.decoder if decoder else config.encoder), config.residuals(decoder=decoder)
    if (last := max(numbers)) > section.layers:
        yield f"the {stack} has {section.layers} layers, no layer {last}"
        return
    left = [kind for number, kind in enumerate(kinds, start=1) if number not in numbers]
    if not left:
        yield f"nothing would be left of the {stack}"
        return
    if section.history != "latest":
        yield f"`{stack}.history: {section.history}` has weights for the outputs of all layers"
    if counting := sorted({kind for kind in kinds if RESIDUALS[kind].layer_constants}):
        yield f"`residual: {counting[0]}` computes with the number of a layer, which would change for those above"
    if 1 in numbers and RESIDUALS[kinds[0]].first_differs:
        yield f"`residual: {kinds[0]}` has a first layer unlike the others"
    if 1 in numbers and (residuals := config.value_residuals(decoder=decoder)):
        yield f"`{next(iter(residuals))}`: all layers read the values of the first"
    if (kinds[0], kinds[-1]) != (left[0], left[-1]):
        yield f"the {stack} begins and ends as its first and its last layers do, and no layer of one kind would be left"


def prune(
    config: ModelConfig, tensors: Mapping[str, Tensor], left_out: LeftOut
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return configuration and weights of the model without some layers.

    Constants of depth stay those of the whole model. With transparent memory a layer that is left out gives what the
    one below gives, so the weights of both are added in every mixture. Raises ConfigError with all reasons why that is
    not possible.
    """
    if reasons := unprunable(config, left_out):
        raise ConfigError(f"layers cannot be left out: {'; '.join(reasons)}")
    values = config.model_dump()
    if depth_matters(config):
        values["wiring"] |= {
            "planned_encoder_layers": config.planned_encoder_layers,
            "planned_decoder_layers": config.planned_decoder_layers,
        }
    numbers: dict[str, dict[int, int]] = {}
    for stack, section in (("encoder", config.encoder), ("decoder", config.decoder)):
        left = [n for n in range(1, section.layers + 1) if n not in left_out.of(stack)]
        numbers[stack] = {old - 1: new for new, old in enumerate(left)}
        values[stack] |= {"layers": len(left), "ranges": _ranges(config, stack, left)}
    kept = {}
    for name, tensor in tensors.items():
        if (found := _LAYER.fullmatch(name)) is None:
            kept[name] = tensor
        elif (new := numbers[found[1]].get(int(found[2]))) is not None:
            kept[f"{found[1]}.layers.{new}.{found[3]}"] = tensor
    if (mixtures := tensors.get("encoder.transparent.weight")) is not None:
        kept["encoder.transparent.weight"] = _joined(mixtures, numbers["encoder"], list(numbers["decoder"]))
    return ModelConfig.model_validate(values), kept


def pruned_experiment(experiment: Experiment, smaller: ModelConfig, left_out: LeftOut) -> Experiment:
    """Return the configuration of a model without some layers, whose section `model` is `smaller`.

    The layer that guided alignment taught keeps its role under its new number. Without that layer nothing is left of
    guided alignment: alignments are those of a model that never had it. Stages of growth, which lead to the depth that
    the model had, are left out.
    """
    guided = experiment.training.loss.alignment
    if guided is not None and left_out.decoder:
        layer = guided.layer or experiment.model.decoder.layers
        below = sum(number < layer for number in left_out.decoder)
        guided = None if layer in left_out.decoder else guided.model_copy(update={"layer": layer - below})
    loss = experiment.training.loss.model_copy(update={"alignment": guided})
    training = experiment.training.model_copy(update={"loss": loss, "growth": None})
    return experiment.model_copy(update={"model": smaller, "training": training})


def _ranges(config: ModelConfig, stack: str, left: list[int]) -> list[dict[str, object]]:
    """Return `ranges` for the layers with the numbers `left`."""
    ranges: list[dict[str, object]] = []
    first = 1
    for part in (config.decoder if stack == "decoder" else config.encoder).ranges:
        layers = sum(first <= number < first + part.layers for number in left)
        first += part.layers
        if layers:
            ranges.append({"layers": layers, "residual": part.residual})
    return ranges


def _joined(mixtures: Tensor, encoder: Mapping[int, int], readers: list[int]) -> Tensor:
    """Return the logits of transparent memory [readers, sources] for the layers that are left.

    Source l is the state after layer l, 0 the stack's input. Without layer l it is the state after the nearest layer
    below that is left: the softmax gives that one the weight of both if its logit is the logarithm of the sum.
    """
    groups: list[list[int]] = [[0]]
    for layer in range(mixtures.shape[1] - 1):
        if layer in encoder:
            groups.append([])
        groups[-1].append(layer + 1)
    return torch.stack([mixtures[readers][:, group].logsumexp(-1) for group in groups], dim=1)
