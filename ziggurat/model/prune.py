"""Pruning: a trained model without some of its layers (Fan et al. 2019: what LayerDrop makes possible).

A layer that is left out passes its input on. That is exact where layers read nothing but the one below: what is left is
a smaller model, which decodes, is exported, is trained on and runs as any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.config.model import ModelConfig
from ziggurat.config.pruning import LeftOut, layers_left, pruned_config

_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)")


def prune(
    config: ModelConfig, tensors: Mapping[str, Tensor], left_out: LeftOut
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return configuration and weights of the model without some layers.

    With transparent memory a layer that is left out gives what the one below gives, so the weights of both are added in
    every mixture. Raises ConfigError with all reasons why that is not possible.
    """
    smaller = pruned_config(config, left_out)
    numbers = {
        stack: {old - 1: new for new, old in enumerate(layers_left(config, stack, left_out))}
        for stack in ("encoder", "decoder")
    }
    kept = {}
    for name, tensor in tensors.items():
        if (found := _LAYER.fullmatch(name)) is None:
            kept[name] = tensor
        elif (new := numbers[found[1]].get(int(found[2]))) is not None:
            kept[f"{found[1]}.layers.{new}.{found[3]}"] = tensor
    if (mixtures := tensors.get("encoder.transparent.weight")) is not None:
        kept["encoder.transparent.weight"] = _joined(mixtures, numbers["encoder"], list(numbers["decoder"]))
    return smaller, kept


def pruned_experiment(experiment: Experiment, smaller: ModelConfig, left_out: LeftOut) -> Experiment:
    """Return the configuration of a model without some layers, whose section `model` is `smaller`.

    The layer that guided alignment taught keeps its role under its new number. Without that layer nothing is left of
    guided alignment: alignments are those of a model that never had it. Stages of growth, which lead to the depth that
    the model had, are left out, and so are names of frozen layers.
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
