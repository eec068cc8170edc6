"""The Transformer's layers: sub-layers, each joined to the stream by its Residual, and what a layer sees besides it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ziggurat.model.attention.cache import CrossAttentionCache, KeptWeights, LiveBeams, LiveMemory, Mask, RowMoves
from ziggurat.model.attention.multihead import CrossAttention, FirstValues, OwnAttention, OwnCache, SelfAttention
from ziggurat.model.attention.variants import MergedAttention
from ziggurat.model.residual.base import Residual

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


class TargetView(Protocol):
    """Everything a decoder layer sees besides the stream.

    In training this is the whole target (WholeTarget), in decoding one step at a time
    (DecoderLayerCache). A layer asks its view to attend, so one `forward` serves both.
    """

    def attend(self, module: OwnAttention, x: Tensor) -> Tensor:
        """Let `module` attend from `x` to the target so far."""

    def remembered(self, module: CrossAttention) -> CrossAttentionCache:
        """Return the memory as `module` projects it."""


class WholeTarget(NamedTuple):
    """All target positions at once.

    Attributes:
        future: mask that hides future positions.
        memory: [batch, source, d_memory].
        padding: mask that hides the memory's padding.
        first: holds the first layer's values of the target, if there is a value residual.
        first_of_memory: the same for those of the memory.
        kept: receives the weights of attention to the memory.
    """

    future: Mask
    memory: Tensor
    padding: Mask | None
    first: FirstValues | None = None
    first_of_memory: FirstValues | None = None
    kept: KeptWeights | None = None

    def attend(self, module: OwnAttention, x: Tensor) -> Tensor:
        """Let `module` attend from `x` [batch, target, d_model] to itself."""
        return module(x, self.future, self.first)

    def remembered(self, module: CrossAttention) -> CrossAttentionCache:
        """Project the memory."""
        return module.remember(self.memory, self.padding, self.kept, first=self.first_of_memory)


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
