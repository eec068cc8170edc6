"""Hooks that record what passes through a model: the input, the sum and the output of every sub-layer.

Hooks exist only inside the contexts of this module; outside of them a model runs as if it did not exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ziggurat.model.recompute import Recomputing
from ziggurat.model.residual.base import Residual
from ziggurat.model.seq2seq import Seq2Seq

STACKS = ("encoder", "decoder")


def layers_of(model: Seq2Seq, stack: str) -> list[nn.Module]:
    """Return the layers of the stack `encoder` or `decoder`, bottom first."""
    return list(cast(nn.ModuleList, getattr(model, stack).layers))


def residuals_of(layer: nn.Module) -> dict[str, Residual]:
    """Return the Residuals of a layer by the name of their sub-layer (`self_attn`, `ffn`), in order.

    Layers of RNMT+ have none.
    """
    return {
        name.removesuffix("_residual"): child for name, child in layer.named_children() if isinstance(child, Residual)
    }


@dataclass
class Sublayer:
    """Tensors of one residual sub-layer y = out_norm(r), r = skip * x + branch * f(x), in a forward pass.

    Attributes:
        residual: the module that joins f(x) to the stream.
        x: the stream before it, [batch, length, d_model], or with hyper-connections [batch, length, streams, d_model].
        fx: the output of f, [batch, length, d_model].
        r: the sum, before `out_norm` if there is one; of the shape of x.
        y: the stream after it, of the shape of x; r itself if there is no `out_norm`.
    """

    residual: Residual
    x: Tensor
    fx: Tensor
    r: Tensor
    y: Tensor


class Trace:
    """Record of a forward pass inside the context; a second pass replaces the first.

    The tensors are those of the pass itself, so gradients can be taken with respect to them. Layers that LayerDrop left
    out are None.

    Args:
        model: any family, in any mode.

    Attributes:
        sublayers: place (`encoder.self_attn`, `decoder.ffn`) -> one per layer, bottom first; empty for RNMT+.
        outputs: stack -> output of each layer, [batch, length, d], before any final norm.
        embedded: stack -> embedding and position of its input, [batch, length, d_model].
        opened: stack -> input of its first layer: `embedded`, normalised if the stack normalises its input.
    """

    def __init__(self, model: Seq2Seq) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self.sublayers: dict[str, list[Sublayer | None]] = {}
        self.outputs: dict[str, list[Tensor | None]] = {}
        self.embedded: dict[str, Tensor] = {}
        self.opened: dict[str, Tensor] = {}

    def __enter__(self) -> Trace:
        embeddings = self._model.source_embedding, self._model.target_embedding
        for stack, embedding in zip(STACKS, embeddings, strict=True):
            self._hook(embedding, partial(self._embeds, stack))
            if (norm := getattr(getattr(self._model, stack), "entry_norm", None)) is not None:
                self._hook(norm, partial(self._opens, stack))
            layers = layers_of(self._model, stack)
            self.outputs[stack] = [None] * len(layers)
            for number, layer in enumerate(layers):
                self._watch(stack, number, len(layers), layer)
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, module: nn.Module, hook: Any) -> None:
        self._handles.append(module.register_forward_hook(hook))

    def _watch(self, stack: str, number: int, count: int, layer: nn.Module) -> None:
        residuals = residuals_of(layer)
        for name, residual in residuals.items():
            places = self.sublayers.setdefault(f"{stack}.{name}", [None] * count)
            # A layer's output is that of its last sub-layer.
            last = name == next(reversed(residuals))
            inside: list[Tensor] = []
            if residual.out_norm is not None:
                self._handles.append(residual.out_norm.register_forward_pre_hook(partial(_keep, inside)))
            self._hook(residual, partial(self._joins, places, stack if last else None, number, inside))
        # An LSTM layer. The decoder's first runs cell by cell, not as a module: its output is the next one's input.
        if not residuals:
            self._hook(layer, partial(self._runs, stack, number))

    def _embeds(self, stack: str, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
        self.embedded[stack] = self.opened[stack] = output

    def _opens(self, stack: str, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
        self.opened[stack] = output

    def _joins(
        self,
        places: list[Sublayer | None],
        stack: str | None,
        number: int,
        inside: list[Tensor],
        residual: nn.Module,
        inputs: tuple[Tensor, ...],
        y: Tensor,
    ) -> None:
        # The sum r is the input of `out_norm`; without that norm it is y itself.
        r = inside.pop() if inside else y
        places[number] = Sublayer(cast(Residual, residual), inputs[0], inputs[1], r, y)
        if stack is not None:
            self.outputs[stack][number] = y

    def _runs(self, stack: str, number: int, _layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if number:
            self.outputs[stack][number - 1] = inputs[0]
        self.outputs[stack][number] = output


def _keep(inside: list[Tensor], _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    inside[:] = inputs[:1]


@contextlib.contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Run without compiled layers, in which hooks of inner modules do not run."""
    if all(module._compiled_call_impl is None for module in model.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def seen_once(model: nn.Module) -> Iterator[None]:
    """Run without compiled layers, and without recomputation, which would run hooks inside layers a second time."""
    stacks = [module for module in model.modules() if isinstance(module, Recomputing)]
    before = [stack.recompute for stack in stacks]
    for stack in stacks:
        stack.recompute = None
    try:
        with eagerly(model):
            yield
    finally:
        for stack, recompute in zip(stacks, before, strict=True):
            stack.recompute = recompute
