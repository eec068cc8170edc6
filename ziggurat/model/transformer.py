"""The stacks of the Transformer: loops over layers, wired across depth by their history (Vaswani et al. 2017).

A stack opens its input, passes it through the layers, and closes: `_open`, `_pass`, `_close`. The history says what
each layer reads and what the stack gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ziggurat.model.attention.cache import KeptWeights
from ziggurat.model.attention.live import LiveBeams, RowMoves
from ziggurat.model.attention.mask import causal_mask, padding_mask
from ziggurat.model.attention.target import WholeTarget
from ziggurat.model.attention.values import FirstValues
from ziggurat.model.history.base import History, HistoryState
from ziggurat.model.history.transparent import Transparent
from ziggurat.model.layers import (
    AnyDecoderLayer,
    DecoderLayerCache,
    EncoderLayer,
    SourceView,
    TransformerLayer,
    View,
)
from ziggurat.model.recompute import Recomputing
from ziggurat.model.seq2seq import Memory, StepwiseDecoder


@dataclass(frozen=True)
class StackWiring:
    """Everything of a stack but its layers.

    Attributes:
        history: says what each layer reads.
        entry_norm: on the stack's input, or None.
        final_norm: on its output, or None.
        streams: parallel residual streams (hyper-connections); None: the plain stream.
        end: merges the streams at the end; None: their sum.
        split: the history acts between sub-layers, not between layers.
        layer_drop: probability of skipping a layer in training (Fan et al. 2019).
    """

    history: History
    entry_norm: nn.Module | None = None
    final_norm: nn.Module | None = None
    streams: int | None = None
    end: nn.Module | None = None
    split: bool = False
    layer_drop: float = 0.0


class _Passed(NamedTuple):
    """The result of a run of layers.

    Attributes:
        state: the history's, after the run.
        read: the input of each layer, streams merged; empty unless asked for.
        given: the output of each layer, likewise.
    """

    state: HistoryState
    read: list[Tensor]
    given: list[Tensor]


class _Stack(Recomputing):
    """Layers within their wiring."""

    def __init__(self, layers: Sequence[nn.Module], wiring: StackWiring) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.history = wiring.history
        self.entry_norm = wiring.entry_norm
        self.final_norm = wiring.final_norm
        self.streams = wiring.streams
        self.end = wiring.end
        self.split = wiring.split
        self.layer_drop = wiring.layer_drop

    def units(self) -> list[nn.Module]:
        """See Recomputing; with a history between sub-layers these are called, and their layers are not."""
        return [] if self.split else super().units()

    def _open(self, x: Tensor) -> HistoryState:
        if self.entry_norm is not None:
            x = self.entry_norm(x)
        if self.streams is not None:
            # Copied, so that the first layer sees the strides that the others see: one compiled graph for all.
            x = x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1]).contiguous()
        return self.history.start(x)

    def _through(self, module: nn.Module, state: HistoryState, view: View) -> tuple[HistoryState, Tensor]:
        """Return the state after one more layer, and what that layer read."""
        layer = cast(TransformerLayer[View], module)
        units: Sequence[Callable[[Tensor, View], Tensor]] = layer.sublayers() if self.split else [layer]
        # LayerDrop: a skipped layer gives what it reads, so the history goes on as always. The draw is from the CPU's
        # generator; asking the GPU's would wait for it.
        dropped = self.training and self.layer_drop > 0 and float(torch.rand(())) < self.layer_drop
        inputs = []
        for unit in units:
            reading = self.history.read(state)
            inputs.append(reading.stream)
            seen = view if reading.attention is None else view.reading(reading.attention)
            state = self.history.push(state, inputs[-1] if dropped else unit(inputs[-1], seen))
        return state, inputs[0]

    def _pass(
        self, layers: range, state: HistoryState, view: Callable[[int], View], read: bool = False, given: bool = False
    ) -> _Passed:
        """Go through `layers`, each with its view; `read` and `given`: also return each layer's input and output."""
        inputs, outputs = [], []
        for number in layers:
            state, x = self._through(self.layers[number], state, view(number))
            if read:
                inputs.append(self._merged(x))
            if given:
                outputs.append(self._merged(state.latest))
        return _Passed(state, inputs, outputs)

    def _merged(self, x: Tensor) -> Tensor:
        """Return the sum of the streams [..., d_model]."""
        return x if self.streams is None else x.sum(-2)

    def _ended(self, state: HistoryState) -> Tensor:
        """Return the stack's output before its final norm, as one stream."""
        y = self.history.output(state)
        return self._merged(y) if self.end is None else self.end(y)

    def _close(self, state: HistoryState) -> Tensor:
        y = self._ended(state)
        return y if self.final_norm is None else self.final_norm(y)


class Encoder(_Stack):
    """A stack of encoder layers.

    Args:
        layers: bottom first.
        wiring: everything else.
        transparent: mixtures of all layers as the decoder's memory, or None: the stack's output.
    """

    def __init__(
        self, layers: Sequence[EncoderLayer], wiring: StackWiring, transparent: Transparent | None = None
    ) -> None:
        super().__init__(layers, wiring)
        self.transparent = transparent

    def forward(self, x: Tensor, mask: Tensor, outputs: list[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Return the memory: [batch, source, d_model] for all decoder layers, or one such tensor for each.

        `x` is the embedded source [batch, source, d_model], `mask` [batch, source] is True at real tokens. The
        output of every layer is appended to `outputs`, when it is given.

        `transparent` merges the inputs of all layers and the stack's output before its final norm: in the plain stack
        these are the embedding and the outputs of all layers.
        """
        view = SourceView(padding_mask(mask, x.dtype), FirstValues())
        state = self._open(x)
        sources: list[Tensor] = []
        for run in self.runs():
            state, read, given = run.through(
                self._pass, state, lambda _: view, self.transparent is not None, outputs is not None
            )
            sources.extend(read)
            if outputs is not None:
                outputs.extend(given)
        if self.transparent is None:
            return (self._close(state),)
        return self.transparent([*sources, self._ended(state)])


class DecoderCache:
    """The decoder's caches between steps, one per layer.

    Args:
        layers: bottom first.
        kept: where one of the layers leaves its attention to the memory, or None.
    """

    def __init__(self, layers: list[DecoderLayerCache], kept: KeptWeights | None) -> None:
        self.layers = layers
        self._kept = kept

    @property
    def cross_attention(self) -> Tensor | None:
        """Attention to the memory at the last step, [N, K, source], if it is kept."""
        return None if self._kept is None else self._kept.weights

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        for layer in self.layers:
            layer.follow(parents)

    def keep(self, moves: RowMoves) -> None:
        """Move rows; `LiveBeams.keep` has counted the live ones already."""
        for layer in self.layers:
            layer.keep(moves)


class Decoder(_Stack, StepwiseDecoder[DecoderCache]):
    """A stack of decoder layers; the arguments are those of Encoder."""

    def __init__(self, layers: Sequence[AnyDecoderLayer], wiring: StackWiring) -> None:
        super().__init__(layers, wiring)

    def forward(self, x: Tensor, memory: Memory, kept: KeptWeights | None = None) -> Tensor:
        """Return [batch, target, d_model] for the embedded target input `x`, all positions at once; see the base."""
        future = causal_mask(x.shape[1], x.dtype, x.device)
        padding = padding_mask(memory.mask, x.dtype, queries=x.shape[1])
        first, first_of_memory = FirstValues(), FirstValues()

        def view(number: int) -> WholeTarget:
            mine = kept if number == self.aligned.layer % len(self.layers) else None
            return WholeTarget(future, memory.of(number), padding, first, first_of_memory, mine)

        state = self._open(x)
        for run in self.runs():
            state = run.through(self._pass, state, view).state
        return self._close(state)

    def start(self, live: LiveBeams, *, keep_attention: bool = False) -> DecoderCache:
        """Return the caches for `live`; with `keep_attention` the `aligned` layer keeps its attention to the memory."""
        kept = KeptWeights(self.aligned.head) if keep_attention else None
        aligned, first = self.aligned.layer % len(self.layers), FirstValues()
        layers = [
            cast(AnyDecoderLayer, layer).start(live, kept=kept if number == aligned else None, first=first)
            for number, layer in enumerate(self.layers)
        ]
        return DecoderCache(layers, kept)

    def admit(self, memory: Memory, rows: slice, cache: DecoderCache) -> None:
        """Project the memory of new sentences, which have `rows` among the live ones, once for every layer."""
        first = FirstValues()
        for number, (layer, its_cache) in enumerate(zip(self.layers, cache.layers, strict=True)):
            cast(AnyDecoderLayer, layer).admit(memory.of(number), rows, its_cache, first)

    def step(self, x: Tensor, cache: DecoderCache) -> Tensor:
        """Return [N, K, d_model] for one new position per hypothesis, `x` [N, K, d_model]."""
        state = self._open(x)
        for layer, its_cache in zip(self.layers, cache.layers, strict=True):
            state, _ = self._through(layer, state, its_cache)
        return self._close(state)
