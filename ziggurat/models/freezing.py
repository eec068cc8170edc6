"""Freezing: parameters that training leaves as they are, without gradients, moments and weight decay."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ziggurat.config.freezing import Frozen
from ziggurat.models.seq2seq import Seq2Seq

__all__ = ["freeze"]


def freeze(model: Seq2Seq, names: Sequence[str]) -> None:
    """Have no parameter of the parts and layers with these names trained (ziggurat.config.freezing), in place.

    A layer that the model does not have yet, before it has grown, is passed over. Raises ConfigError: no such part.
    """
    frozen = Frozen.parse(names)
    modules: list[nn.Module] = [model.get_submodule(part) for part in frozen.parts]
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        modules += [layer for number, layer in enumerate(stack.layers, start=1) if frozen.has(name, number)]
    for module in modules:
        module.requires_grad_(False)
