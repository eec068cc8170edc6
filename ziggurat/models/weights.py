"""Weights of a model by name: taken out, put in, and compared with a configuration before a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ziggurat.config import ModelConfig
from ziggurat.errors import CheckpointError, printable
from ziggurat.models.build import assemble
from ziggurat.models.tensors import placed_as, read_shapes
from ziggurat.nn.embedding import OutputProjection

__all__ = ["check_fit", "load_weights", "weights"]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter by name; a shared one once, under its first name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Copy `tensors` into the model's parameters; `name` says in errors where they came from.

    Raises CheckpointError listing the first parameter that is missing, unknown or of another shape.
    """
    parameters = dict(model.named_parameters())
    _refuse_other_shapes(parameters, {key: tensor.shape for key, tensor in tensors.items()}, name)
    for key, parameter in parameters.items():
        parameter.copy_(placed_as(tensors[key], parameter))
    if isinstance(output := getattr(model, "output", None), OutputProjection):
        output.rule_out(tensors.get("output.bias"))


def _refuse_other_shapes(parameters: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], name: str) -> None:
    """Raise CheckpointError naming the first parameter that is missing, unknown or of another shape in `name`."""
    if missing := sorted(parameters.keys() - shapes.keys()):
        raise CheckpointError(f"{name}: parameter {missing[0]} is missing ({len(missing)} in all); other architecture?")
    if unknown := sorted(shapes.keys() - parameters.keys()):
        shown = printable(unknown[0])
        raise CheckpointError(f"{name}: parameter {shown} is unknown ({len(unknown)} in all); other architecture?")
    for key, parameter in parameters.items():
        if tuple(parameter.shape) != tuple(shapes[key]):
            raise CheckpointError(
                f"{name}: {key} has shape {list(shapes[key])}, the configuration needs {list(parameter.shape)}"
            )


def check_fit(config: ModelConfig, sizes: tuple[int, int], weights_file: Path) -> None:
    """Compare a configuration with the header of its weights before a model is built, which takes its memory.

    Args:
        config: the architecture.
        sizes: numbers of source and target tokens.
        weights_file: `model.safetensors`.

    Raises CheckpointError: they do not fit; the file cannot be read.
    """
    shapes = read_shapes(weights_file)
    # Layers first: to make 4,096 of them takes a minute even without memory.
    for stack, layers in (("encoder", config.encoder.layers), ("decoder", config.decoder.layers)):
        found = len({key.split(".")[2] for key in shapes if key.startswith(f"{stack}.layers.")})
        if found != layers:
            raise CheckpointError(
                f"{weights_file}: has {found} {stack} layers, but the configuration says {layers}; one of them is not "
                "of this model"
            )
    with torch.device("meta"):
        parameters = dict(assemble(config, *sizes).named_parameters())
    _refuse_other_shapes(parameters, shapes, str(weights_file))
