"""The Transformer's stacks of layers (Vaswani et al. 2017) and what connects the layers.

A stack opens its input, passes it through the layers, and closes: `_open`, `_pass`, `_close`. Its history determines
each layer's input and the stack's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ziggurat.model.attention.cache import (
    KeptWeights,
    LiveBeams,
    RowMoves,
    causal_mask,
    padding_mask,
)
from ziggurat.model.attention.multihead import FirstValues
from ziggurat.model.history.base import History, HistoryState
from ziggurat.model.history.kinds import Transparent
from ziggurat.model.layers import (
    AnyDecoderLayer,
    DecoderLayerCache,
    EncoderLayer,
    SourceView,
    Sublayer,
    TransformerLayer,
    View,
    WholeTarget,
)
from ziggurat.model.residual.base import Residual
from ziggurat.model.seq2seq import Memory, Recomputing, StepwiseDecoder
from ziggurat.model.solver import RungeKutta


@dataclass(frozen=True)
class StackWiring:
    """Everything in a stack except its layers.

    Attributes:
        history: determines each layer's input.
        entry_norm: norm on the stack's input.
        final_norm: norm on its output.
        streams: parallel residual streams (hyper-connections); None: the plain stream.
        end: merges the streams at the end; None: their sum.
        split: whether the history acts between sub-layers instead of layers.
        layer_drop: probability of skipping a layer in training (Fan et al. 2019).
        owners: for each layer, the lowest layer that holds its parameters, from 0; (): no layers share parameters.
        solver: makes a step from a layer; None: the layer is the step.
    """

    history: History
    entry_norm: nn.Module | None = None
    final_norm: nn.Module | None = None
    streams: int | None = None
    end: nn.Module | None = None
    split: bool = False
    layer_drop: float = 0.0
    owners: Sequence[int] = ()
    solver: RungeKutta | None = None


def tie(layer: nn.Module, owner: nn.Module) -> None:
    """Give `layer` the parameters of `owner`: attention, feed-forward network and norms.

    So the layers apply the same function repeatedly: y_l = F(y_(l-1), theta_g(l)). g(l) cycles in a loop of layers (Li
    and Li 2021; Dehghani et al. 2019, section 2.1, without halting and step embeddings) or is equal in groups (Takase
    and Kiyono 2021, section 2, whose three orders are all lists of numbers here). Numbers that depend on a layer's
    position, and a Residual's own parameters, such as ADMIN's omega, stay separate for each layer: the papers, whose
    residual connections have no parameters, leave this open. For Li and Li only the abstract was available.
    """
    for mine, its in zip(layer.modules(), owner.modules(), strict=True):
        if not isinstance(mine, Residual):
            for name in list(mine._parameters):
                mine.register_parameter(name, its._parameters[name])


class _Passed(NamedTuple):
    """The history after a run of layers and, on request, the input and output of each layer, streams merged."""

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
        self.solver = wiring.solver
        self.tied = len(set(wiring.owners)) < len(wiring.owners)
        for layer, owner in enumerate(wiring.owners):
            if layer != owner:
                tie(self.layers[layer], self.layers[owner])

    def units(self) -> list[nn.Module]:
        """See Recomputing; with a history between sub-layers, the sub-layers are called instead of their layers.

        Layers that share parameters, or are called several times, can only be gathered together.
        """
        return [] if self.split or self.tied or self.solver is not None else super().units()

    def _open(self, x: Tensor) -> HistoryState:
        if self.entry_norm is not None:
            x = self.entry_norm(x)
        if self.streams is not None:
            # Copied, so that the first layer sees the same strides as the others and all share a compiled graph.
            x = x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1]).contiguous()
        return self.history.start(x)

    def _through(self, module: nn.Module, state: HistoryState, view: View) -> tuple[HistoryState, Tensor]:
        """Return the state after one more layer, and that layer's input."""
        layer = cast(TransformerLayer[View], module)
        units: Sequence[Sublayer[View]] = layer.sublayers() if self.split else [layer]
        # LayerDrop: a skipped layer returns its input, so the history continues as usual. The draw uses the CPU's
        # generator, because the GPU's would require a wait.
        dropped = self.training and self.layer_drop > 0 and float(torch.rand(())) < self.layer_drop
        inputs = []
        for unit in units:
            x, reads = self.history.read(state)
            inputs.append(x)
            if dropped:
                y = x
            elif self.solver is None:
                y = unit(x, view, reads)
            else:
                y = self.solver(unit, x, view)
            state = self.history.push(state, y)
        return state, inputs[0]

    def _pass(
        self, layers: range, state: HistoryState, view: Callable[[int], View], read: bool = False, given: bool = False
    ) -> _Passed:
        """Run `layers`, each with its view; `read` and `given`: also return each layer's input and output."""
        inputs, outputs = [], []
        for number in layers:
            state, x = self._through(self.layers[number], state, view(number))
            if read:
                inputs.append(self._mean(x))
            if given:
                outputs.append(self._mean(state.latest))
        return _Passed(state, inputs, outputs)

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean of the streams [..., d_model], of one stream's magnitude, for readers of a layer's state."""
        return x if self.streams is None else x.mean(-2)

    def _ended(self, state: HistoryState) -> Tensor:
        """Return the stack's output before its final norm, as one stream."""
        y = self.history.output(state)
        if self.end is not None:
            return self.end(y)
        return y if self.streams is None else y.sum(-2)

    def _close(self, state: HistoryState) -> Tensor:
        y = self._ended(state)
        return y if self.final_norm is None else self.final_norm(y)


class Encoder(_Stack):
    """A stack of encoder layers, bottom first; `transparent`: mixtures of all of them are the decoder's memory.

    `hierarchy`: the numbers of layers p of its lower module and M of the decoder, whose lowest p layers attend to the
    output of that module, the others to the stack's output (hierarchical attention: Wu et al. 2019).
    """

    def __init__(
        self,
        layers: Sequence[EncoderLayer],
        wiring: StackWiring,
        transparent: Transparent | None = None,
        hierarchy: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(layers, wiring)
        self.transparent = transparent
        self.hierarchy = hierarchy if hierarchy is not None and hierarchy[0] < len(layers) else None

    def forward(self, x: Tensor, mask: Tensor, outputs: list[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Return the memory: [batch, source, d_model] for all decoder layers, or one such tensor for each.

        `x` is the embedded source [batch, source, d_model], `mask` [batch, source] is True at real tokens. The output
        of every layer is appended to `outputs`, when it is given. `transparent` merges the inputs of all layers and the
        stack's output before its final norm: in the plain stack these are the embedding and the outputs of all layers.
        """
        view = SourceView(padding_mask(mask, x.dtype), FirstValues())
        state = self._open(x)
        sources: list[Tensor] = []
        every: list[Tensor] = [] if outputs is None else outputs
        give = outputs is not None or self.hierarchy is not None
        for run in self.runs():
            state, read, given = run.through(self._pass, state, lambda _: view, self.transparent is not None, give)
            sources.extend(read)
            every.extend(given)
        if self.transparent is not None:
            last = self._ended(state)  # the sum of several streams, whereas the other sources are means
            return self.transparent([*sources, last if self.streams is None else last / self.streams])
        whole = self._close(state)
        if self.hierarchy is None:
            return (whole,)
        below, readers = self.hierarchy
        lower = every[below - len(self.layers) - 1]
        if self.final_norm is not None:  # the shallow model's norm, which also ends the grown stack
            lower = self.final_norm(lower)
        return (*[lower] * below, *[whole] * (readers - below))


class DecoderCache:
    """The decoder's caches between steps, one per layer; one of them stores its attention to the memory in `kept`."""

    def __init__(self, layers: list[DecoderLayerCache], kept: KeptWeights | None) -> None:
        self.layers = layers
        self._kept = kept

    @property
    def cross_attention(self) -> Tensor | None:
        """Attention to the memory at the last step, [N, K, source], if it is kept."""
        return None if self._kept is None else self._kept.weights

    def follow(self, parents: Tensor) -> None:
        """Make beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        for layer in self.layers:
            layer.follow(parents)

    def keep(self, moves: RowMoves) -> None:
        """Move rows; `LiveBeams.keep` has already counted the live ones."""
        for layer in self.layers:
            layer.keep(moves)


class Decoder(_Stack, StepwiseDecoder[DecoderCache]):
    """A stack of decoder layers, bottom first."""

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
        """Project the memory of new sentences, which occupy `rows` among the live ones, once for each layer."""
        first = FirstValues()
        for number, (layer, its_cache) in enumerate(zip(self.layers, cache.layers, strict=True)):
            cast(AnyDecoderLayer, layer).admit(memory.of(number), rows, its_cache, first)

    def step(self, x: Tensor, cache: DecoderCache) -> Tensor:
        """Return [N, K, d_model] for one new position per hypothesis, `x` [N, K, d_model]."""
        state = self._open(x)
        for layer, its_cache in zip(self.layers, cache.layers, strict=True):
            state, _ = self._through(layer, state, its_cache)
        return self._close(state)
