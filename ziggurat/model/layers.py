"""Encoder and decoder layers: named sub-layers, each joined to the stream by its Residual."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from ziggurat.model.attention.base import OwnAttention, OwnCache
from ziggurat.model.attention.cache import CrossAttentionCache, KeptWeights, LiveMemory
from ziggurat.model.attention.live import LiveBeams, RowMoves
from ziggurat.model.attention.mask import Mask
from ziggurat.model.attention.merged import MergedAttention
from ziggurat.model.attention.multihead import CrossAttention, SelfAttention
from ziggurat.model.attention.target import TargetView
from ziggurat.model.attention.values import FirstValues
from ziggurat.model.residual.base import Residual

View = TypeVar("View", bound="_View")
"""All that a layer sees besides the stream: a SourceView (encoder), or a TargetView (decoder)."""


Reads = tuple[Tensor, Tensor, Tensor]
"""Inputs of queries, keys and values of self-attention, where these are not the stream
(ziggurat.model.history.mudd)."""


class _View(Protocol):
    def reading(self, reads: Reads) -> Self:
        """Return the view of a layer whose self-attention reads these."""


class SourceView(NamedTuple):
    """All that an encoder layer sees besides the stream.

    Attributes:
        padding: hides it, or None.
        first: where the first layer leaves its values, if there is a value residual.
        reads: see Reads; None: the stream.
    """

    padding: Mask | None
    first: FirstValues | None = None
    reads: Reads | None = None

    def reading(self, reads: Reads) -> SourceView:
        """Return the view of a layer whose self-attention reads these."""
        return self._replace(reads=reads)


class TransformerLayer(nn.Module, Generic[View]):
    """The base of all layers: attention sub-layers, then the feed-forward network `ffn`.

    The stream is [batch, length, d_model], in a decoding step [batch, beam, d_model], and with hyper-connections
    [..., streams, d_model]. A kind of layer registers its Residuals in the order in which a forward pass meets them:
    ziggurat.model.build.stack_residuals relies on it.
    """

    ffn: nn.Module
    ffn_residual: Residual

    @abstractmethod
    def forward(self, x: Tensor, view: View) -> Tensor:
        """Return the stream after the layer, given the stream `x` before it."""

    @abstractmethod
    def sublayers(self) -> list[Callable[[Tensor, View], Tensor]]:
        """Return the sub-layers in order, as functions of (stream, view): for a history that combines between them.

        What they are not given is the input of the whole layer, so no Residual with a bypass can be in this layer.
        """

    def _feed_forward(self, x: Tensor, view: View, bottom: Tensor | None = None) -> Tensor:
        # The last sub-layer alone is given the layer's input, `bottom`: the residual kind `b2t` adds it there.
        return self.ffn_residual(x, self.ffn(self.ffn_residual.enter(x)), bottom)


def _entered(residual: Residual, x: Tensor, reads: Reads | None) -> Tensor:
    """Return the input of self-attention: of the stream `x`, or [3, ...] of queries, keys and values."""
    return residual.enter(x if reads is None else torch.stack(reads))


class EncoderLayer(TransformerLayer[SourceView]):
    """Self-attention and feed-forward network.

    Args:
        self_attn: attention over the source.
        ffn: position-wise network.
        residuals: one per sub-layer.
    """

    def __init__(self, self_attn: SelfAttention, ffn: nn.Module, residuals: Sequence[Residual]) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.ffn = ffn
        self.self_attn_residual, self.ffn_residual = residuals

    def forward(self, x: Tensor, view: SourceView) -> Tensor:
        """Return the stream after the layer."""
        y = self._attend_source(x, view)
        return self._feed_forward(y, view, bottom=x)

    def sublayers(self) -> list[Callable[[Tensor, SourceView], Tensor]]:
        """See TransformerLayer."""
        return [self._attend_source, self._feed_forward]

    def _attend_source(self, x: Tensor, view: SourceView) -> Tensor:
        own = _entered(self.self_attn_residual, x, view.reads)
        return self.self_attn_residual(x, self.self_attn(own, view.padding, view.first))


class DecoderLayerCache:
    """The state of the live hypotheses that one decoder layer keeps between steps; its TargetView in a step.

    Args:
        own: of its attention to the target.
        cross: of its attention to the memory.
        first: where the first layer leaves its values of the newest position, if there is a value residual.
    """

    def __init__(self, own: OwnCache, cross: LiveMemory, first: FirstValues | None = None) -> None:
        self.own = own
        self.cross = cross
        self.first = first
        self.reads: Reads | None = None

    def reading(self, reads: Reads) -> DecoderLayerCache:
        """Return itself, for a layer whose self-attention reads these in this step."""
        self.reads = reads
        return self

    def attend(self, module: OwnAttention, x: Tensor) -> Tensor:
        """Let `module` attend from the newest position `x` [N, K, d_model]; its cache gains that position."""
        return module.step(x, self.own, self.first)

    def remembered(self, module: CrossAttention) -> CrossAttentionCache:
        """Return the memory, which was projected when its sentences were admitted."""
        return self.cross

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        self.own.follow(parents)

    def keep(self, moves: RowMoves) -> None:
        """Move rows; `LiveBeams.keep` has counted the live ones already."""
        self.own.keep(moves)
        self.cross.keep(moves)


class DecoderLayer(TransformerLayer[TargetView]):
    """Attention to the target so far, attention to the memory, feed-forward network.

    Args:
        self_attn: attention over the target so far.
        cross_attn: attention to the memory.
        ffn: position-wise network.
        residuals: one per sub-layer.
    """

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

    def forward(self, x: Tensor, view: TargetView) -> Tensor:
        """Return the stream after the layer."""
        y = self._attend_target(x, view)
        y = self._attend_memory(y, view)
        return self._feed_forward(y, view, bottom=x)

    def sublayers(self) -> list[Callable[[Tensor, TargetView], Tensor]]:
        """See TransformerLayer."""
        return [self._attend_target, self._attend_memory, self._feed_forward]

    def _attend_target(self, x: Tensor, view: TargetView) -> Tensor:
        own = _entered(self.self_attn_residual, x, view.reads)
        return self.self_attn_residual(x, view.attend(self.self_attn, own))

    def _attend_memory(self, x: Tensor, view: TargetView) -> Tensor:
        context = self.cross_attn(self.cross_attn_residual.enter(x), view.remembered(self.cross_attn))
        return self.cross_attn_residual(x, context)

    def start(
        self, live: LiveBeams, *, kept: KeptWeights | None = None, first: FirstValues | None = None
    ) -> DecoderLayerCache:
        """Return the cache for the hypotheses of `live`; weights go to `kept`; `first` is that of all layers."""
        return DecoderLayerCache(self.self_attn.start(live), LiveMemory(live, kept), first)

    def admit(self, memory: Tensor, rows: slice, cache: DecoderLayerCache, first: FirstValues | None = None) -> None:
        """Project the memory [n, source, d_memory] of new sentences, which have `rows` among the live ones.

        `first` has the first layer's values of that memory.
        """
        cache.own.admit(rows)
        cache.cross.admit(self.cross_attn.remember(memory, None, first=first), rows)


class MergedDecoderLayer(TransformerLayer[TargetView]):
    """One sub-layer that attends to the target so far and to the memory, and the feed-forward network.

    Args:
        merged_attn: both attentions.
        ffn: position-wise network.
        residuals: one per sub-layer.
    """

    def __init__(self, merged_attn: MergedAttention, ffn: nn.Module, residuals: Sequence[Residual]) -> None:
        super().__init__()
        self.merged_attn = merged_attn
        self.ffn = ffn
        self.merged_attn_residual, self.ffn_residual = residuals

    def forward(self, x: Tensor, view: TargetView) -> Tensor:
        """Return the stream after the layer."""
        y = self._attend(x, view)
        return self._feed_forward(y, view, bottom=x)

    def sublayers(self) -> list[Callable[[Tensor, TargetView], Tensor]]:
        """See TransformerLayer."""
        return [self._attend, self._feed_forward]

    def _attend(self, x: Tensor, view: TargetView) -> Tensor:
        return self.merged_attn_residual(x, self.merged_attn(self.merged_attn_residual.enter(x), view))

    def start(
        self, live: LiveBeams, *, kept: KeptWeights | None = None, first: FirstValues | None = None
    ) -> DecoderLayerCache:
        """Return the cache for the hypotheses of `live`; weights go to `kept`; `first` is that of all layers."""
        return DecoderLayerCache(self.merged_attn.start(live), LiveMemory(live, kept), first)

    def admit(self, memory: Tensor, rows: slice, cache: DecoderLayerCache, first: FirstValues | None = None) -> None:
        """Project the memory [n, source, d_memory] of new sentences, which have `rows` among the live ones.

        `first` has the first layer's values of that memory.
        """
        cache.own.admit(rows)
        cache.cross.admit(self.merged_attn.cross.remember(memory, None, first=first), rows)


AnyDecoderLayer = DecoderLayer | MergedDecoderLayer
