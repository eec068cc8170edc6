"""Encoder and decoder stacks: the loop over layers and their history (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ziggurat.models.layers import AnyDecoderLayer, DecoderLayerCache, EncoderLayer, Layer, View
from ziggurat.models.memory import Memory
from ziggurat.models.recompute import Recomputing
from ziggurat.nn.attention import Live, Moved, WholeTarget, causal_mask, padding_mask
from ziggurat.nn.history import History, Past
from ziggurat.nn.history.transparent import Transparent

__all__ = ["Decoder", "DecoderCache", "Encoder", "Frame"]


@dataclass(frozen=True)
class Frame:
    """What a stack has around its layers.

    Attributes:
        history: what each layer reads.
        entry_norm: on the stack's input, or None.
        final_norm: on its output, or None.
        streams: parallel residual streams (hyper-connections); None: the plain stream.
        split: the history acts between sub-layers, not between layers.
        layer_drop: probability of skipping a layer in training (Fan et al. 2019).
    """

    history: History
    entry_norm: nn.Module | None = None
    final_norm: nn.Module | None = None
    streams: int | None = None
    split: bool = False
    layer_drop: float = 0.0


class _Passed(NamedTuple):
    """What a run of layers gives.

    Attributes:
        past: what is known after it.
        read: what each of its layers read, streams merged; empty unless asked for.
        given: what each gave, likewise.
    """

    past: Past
    read: list[Tensor]
    given: list[Tensor]


class _Stack(Recomputing):
    """Layers within their frame."""

    def __init__(self, layers: Sequence[nn.Module], frame: Frame) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.history = frame.history
        self.entry_norm = frame.entry_norm
        self.final_norm = frame.final_norm
        self.streams = frame.streams
        self.split = frame.split
        self.layer_drop = frame.layer_drop

    def units(self) -> list[nn.Module]:
        """See Recomputing; a history between sub-layers calls those instead of their layers."""
        return [] if self.split else super().units()

    def _open(self, x: Tensor) -> Past:
        if self.entry_norm is not None:
            x = self.entry_norm(x)
        if self.streams is not None:
            # Copied, so that the first layer sees the strides that the others see: one compiled graph for all.
            x = x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1]).contiguous()
        return self.history.start(x)

    def _through(self, module: nn.Module, past: Past, view: View) -> tuple[Past, Tensor]:
        """Return what is known after one more layer, and what that layer read."""
        layer = cast(Layer[View], module)
        units: Sequence[Callable[[Tensor, View], Tensor]] = layer.sublayers() if self.split else [layer]
        dropped = self.training and self.layer_drop > 0 and float(torch.rand(())) < self.layer_drop
        inputs = []
        for unit in units:
            inputs.append(self.history(past))
            past = self.history.push(past, inputs[-1] if dropped else unit(inputs[-1], view))
        return past, inputs[0]

    def _pass(
        self, layers: range, past: Past, view: Callable[[int], View], read: bool = False, given: bool = False
    ) -> _Passed:
        """Go through `layers`, each with its own view; `read` and `given` say what of each layer is returned too."""
        inputs, outputs = [], []
        for number in layers:
            past, x = self._through(self.layers[number], past, view(number))
            if read:
                inputs.append(self._merged(x))
            if given:
                outputs.append(self._merged(past.latest))
        return _Passed(past, inputs, outputs)

    def _merged(self, x: Tensor) -> Tensor:
        """Return the sum of the streams [..., d_model]."""
        return x if self.streams is None else x.sum(-2)

    def _close(self, past: Past) -> Tensor:
        y = self._merged(self.history.output(past))
        return y if self.final_norm is None else self.final_norm(y)


class Encoder(_Stack):
    """A stack of encoder layers.

    Args:
        layers: bottom first.
        frame: what is around them.
        transparent: mixtures of all layers as the decoder's memory, or None: the stack's output.
    """

    def __init__(self, layers: Sequence[EncoderLayer], frame: Frame, transparent: Transparent | None = None) -> None:
        super().__init__(layers, frame)
        self.transparent = transparent

    def forward(self, x: Tensor, mask: Tensor, outputs: list[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Return the memory: [batch, source, d_model] for all decoder layers, or one such tensor for each.

        `x` is the embedded source [batch, source, d_model], `mask` [batch, source] is True at real tokens. The
        output of every layer is appended to `outputs`, when it is given.

        What `transparent` merges is the embedding, what each further layer reads, and the stack's output before
        its final norm: in the plain stack these are the embedding and the outputs of all layers.
        """
        padding = padding_mask(mask, x.dtype)
        past = self._open(x)
        sources: list[Tensor] = []
        for run in self.runs():
            past, read, given = run.through(
                self._pass, past, lambda _: padding, self.transparent is not None, outputs is not None
            )
            sources.extend(read)
            if outputs is not None:
                outputs.extend(given)
        if self.transparent is None:
            return (self._close(past),)
        return self.transparent([*sources, self._merged(self.history.output(past))])


class DecoderCache:
    """What the decoder keeps of the live hypotheses between steps: one cache per layer."""

    def __init__(self, layers: list[DecoderLayerCache]) -> None:
        self.layers = layers

    @property
    def cross_attention(self) -> Tensor | None:
        """Attention of the last layer to the memory at the last step, [N, K, source], if it is kept."""
        return self.layers[-1].cross.weights

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        for layer in self.layers:
            layer.follow(parents)

    def keep(self, moved: Moved) -> None:
        """Move rows; the live ones are counted already."""
        for layer in self.layers:
            layer.keep(moved)


class Decoder(_Stack):
    """A stack of decoder layers; the arguments are those of Encoder."""

    def __init__(self, layers: Sequence[AnyDecoderLayer], frame: Frame) -> None:
        super().__init__(layers, frame)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """Return [batch, target, d_model] for the embedded target input `x`, all positions at once."""
        future = causal_mask(x.shape[1], x.dtype, x.device)
        padding = padding_mask(memory.mask, x.dtype, queries=x.shape[1])
        past = self._open(x)
        for run in self.runs():
            past = run.through(self._pass, past, lambda number: WholeTarget(future, memory.of(number), padding)).past
        return self._close(past)

    def start(self, live: Live, *, keep_attention: bool = False) -> DecoderCache:
        """Return caches for the hypotheses of `live`; with `keep_attention`, the last keeps attention to the memory."""
        layers = [cast(AnyDecoderLayer, layer) for layer in self.layers]
        last = len(layers) - 1
        return DecoderCache(
            [layer.start(live, keep_weights=keep_attention and number == last) for number, layer in enumerate(layers)]
        )

    def admit(self, memory: Memory, rows: slice, cache: DecoderCache) -> None:
        """Project the memory of new sentences, which have `rows` among the live ones, once for every layer."""
        for number, (layer, its_cache) in enumerate(zip(self.layers, cache.layers, strict=True)):
            cast(AnyDecoderLayer, layer).admit(memory.of(number), rows, its_cache)

    def step(self, x: Tensor, cache: DecoderCache) -> Tensor:
        """Return [N, K, d_model] for one new position per hypothesis, `x` [N, K, d_model]."""
        past = self._open(x)
        for layer, its_cache in zip(self.layers, cache.layers, strict=True):
            past, _ = self._through(layer, past, its_cache)
        return self._close(past)
