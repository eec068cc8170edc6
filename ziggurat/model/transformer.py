"""The Transformer (Vaswani et al. 2017): layers of sub-layers, each joined to the stream by its Residual, and stacks.

A stack opens its input, passes it through the layers, and closes: `_open`, `_pass`, `_close`. Its history determines
each layer's input and the stack's output.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from ziggurat.model.attention.cache import (
    CrossAttentionCache,
    KeptWeights,
    LiveBeams,
    LiveMemory,
    Mask,
    RowMoves,
    causal_mask,
    padding_mask,
)
from ziggurat.model.attention.multihead import CrossAttention, FirstValues, OwnAttention, OwnCache, SelfAttention
from ziggurat.model.attention.variants import MergedAttention, TargetView, WholeTarget
from ziggurat.model.history.base import History, HistoryState
from ziggurat.model.history.kinds import Transparent
from ziggurat.model.residual.base import Residual
from ziggurat.model.seq2seq import Memory, Recomputing, StepwiseDecoder
from ziggurat.model.solver import RungeKutta

View = TypeVar("View")
"""Everything a layer sees besides the stream: a SourceView (encoder) or a TargetView (decoder)."""

Reads = tuple[Tensor, Tensor, Tensor] | None
"""Inputs of queries, keys and values of self-attention if these are not the stream (MUDD)."""

Sublayer = Callable[[Tensor, View, Reads], Tensor]
"""(stream, view, reads) -> stream; only self-attention uses `reads`."""


class SourceView(NamedTuple):
    """Everything an encoder layer sees besides the stream; the attributes are those of WholeTarget."""

    padding: Mask | None
    first: FirstValues | None = None


class TransformerLayer(nn.Module, Generic[View]):
    """The base of all layers: attention sub-layers, then the feed-forward network `ffn`.

    The stream is [batch, length, d_model], in a decoding step [batch, beam, d_model], and with hyper-connections
    [..., streams, d_model]. A kind of layer registers its Residuals in the order in which a forward pass meets them:
    ziggurat.model.build.stack_residuals relies on it.
    """

    ffn: nn.Module
    ffn_residual: Residual

    @abstractmethod
    def sublayers(self) -> list[Sublayer[View]]:
        """Return the sub-layers in order, `_feed_forward` last.

        A history may combine between them. In that case none receives the input of the whole layer, which a bypass
        needs.
        """

    def forward(self, x: Tensor, view: View, reads: Reads = None) -> Tensor:
        """Return the stream after the layer, given the stream `x` before it."""
        y = x
        for attention in self.sublayers()[:-1]:
            y = attention(y, view, reads)
        return self._feed_forward(y, view, reads, bottom=x)

    def _feed_forward(self, x: Tensor, view: View, reads: Reads, bottom: Tensor | None = None) -> Tensor:
        # Only the last sub-layer receives the layer's input, `bottom`, which the residual kind `b2t` adds there.
        return self.ffn_residual(x, self.ffn(self.ffn_residual.enter(x)), bottom)


def _entered(residual: Residual, x: Tensor, reads: Reads) -> Tensor:
    """Return the input of self-attention: of the stream `x`, or [3, ...] of queries, keys and values."""
    return residual.enter(x if reads is None else torch.stack(reads))


class EncoderLayer(TransformerLayer[SourceView]):
    """Self-attention over the source and feed-forward network; `residuals`: one per sub-layer."""

    def __init__(self, self_attn: SelfAttention, ffn: nn.Module, residuals: Sequence[Residual]) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.ffn = ffn
        self.self_attn_residual, self.ffn_residual = residuals

    def sublayers(self) -> list[Sublayer[SourceView]]:
        """See TransformerLayer."""
        return [self._attend_source, self._feed_forward]

    def _attend_source(self, x: Tensor, view: SourceView, reads: Reads) -> Tensor:
        own = _entered(self.self_attn_residual, x, reads)
        return self.self_attn_residual(x, self.self_attn(own, view.padding, view.first))


class DecoderLayerCache:
    """The state that one decoder layer keeps for the live hypotheses between steps; its TargetView in a step.

    `own` is the cache of its attention to the target, `cross` to the memory. `first` holds the first layer's values of
    the newest position, if there is a value residual.
    """

    def __init__(self, own: OwnCache, cross: LiveMemory, first: FirstValues | None = None) -> None:
        self.own = own
        self.cross = cross
        self.first = first

    def attend(self, module: OwnAttention, x: Tensor) -> Tensor:
        """Let `module` attend from the newest position `x` [N, K, d_model]; its cache gains that position."""
        return module.step(x, self.own, self.first)

    def remembered(self, module: CrossAttention) -> CrossAttentionCache:
        """Return the memory, which was projected when its sentences were admitted."""
        return self.cross

    def follow(self, parents: Tensor) -> None:
        """Make beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        self.own.follow(parents)

    def keep(self, moves: RowMoves) -> None:
        """Move rows; `LiveBeams.keep` has already counted the live ones."""
        self.own.keep(moves)
        self.cross.keep(moves)


class AnyDecoderLayer(TransformerLayer[TargetView]):
    """The base of both kinds of decoder layers."""

    @abstractmethod
    def attentions(self) -> tuple[OwnAttention, CrossAttention]:
        """Return the modules that attend to the target and to the memory."""

    def start(
        self, live: LiveBeams, *, kept: KeptWeights | None = None, first: FirstValues | None = None
    ) -> DecoderLayerCache:
        """Return the cache for the hypotheses of `live`; weights go to `kept`; all layers share `first`."""
        own, _ = self.attentions()
        return DecoderLayerCache(own.start(live), LiveMemory(live, kept), first)

    def admit(self, memory: Tensor, rows: slice, cache: DecoderLayerCache, first: FirstValues | None = None) -> None:
        """Project the memory [n, source, d_memory] of new sentences, which have `rows` among the live ones.

        `first` has the first layer's values of that memory.
        """
        _, cross = self.attentions()
        cache.own.admit(rows)
        cache.cross.admit(cross.remember(memory, None, first=first), rows)


class DecoderLayer(AnyDecoderLayer):
    """Attention to the target so far, attention to the memory, feed-forward network; a residual for each."""

    def __init__(
        self,
        self_attn: OwnAttention,
        cross_attn: CrossAttention,
        ffn: nn.Module,
        residuals: Sequence[Residual],
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.cross_attn = cross_attn
        self.ffn = ffn
        self.self_attn_residual, self.cross_attn_residual, self.ffn_residual = residuals

    def attentions(self) -> tuple[OwnAttention, CrossAttention]:
        """See AnyDecoderLayer."""
        return self.self_attn, self.cross_attn

    def sublayers(self) -> list[Sublayer[TargetView]]:
        """See TransformerLayer."""
        return [self._attend_target, self._attend_memory, self._feed_forward]

    def _attend_target(self, x: Tensor, view: TargetView, reads: Reads) -> Tensor:
        own = _entered(self.self_attn_residual, x, reads)
        return self.self_attn_residual(x, view.attend(self.self_attn, own))

    def _attend_memory(self, x: Tensor, view: TargetView, reads: Reads) -> Tensor:
        context = self.cross_attn(self.cross_attn_residual.enter(x), view.remembered(self.cross_attn))
        return self.cross_attn_residual(x, context)


class MergedDecoderLayer(AnyDecoderLayer):
    """One sub-layer that attends to the target so far and to the memory, and the feed-forward network."""

    def __init__(self, merged_attn: MergedAttention, ffn: nn.Module, residuals: Sequence[Residual]) -> None:
        super().__init__()
        self.merged_attn = merged_attn
        self.ffn = ffn
        self.merged_attn_residual, self.ffn_residual = residuals

    def attentions(self) -> tuple[OwnAttention, CrossAttention]:
        """See AnyDecoderLayer."""
        return self.merged_attn.own, self.merged_attn.cross

    def sublayers(self) -> list[Sublayer[TargetView]]:
        """See TransformerLayer."""
        return [self._attend, self._feed_forward]

    def _attend(self, x: Tensor, view: TargetView, reads: Reads) -> Tensor:
        return self.merged_attn_residual(x, self.merged_attn(self.merged_attn_residual.enter(x), view))


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
