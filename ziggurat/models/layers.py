"""Encoder and decoder layers: named sub-layers, each joined to the stream by its Residual."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor, nn

from ziggurat.nn.attention import (
    CrossAttention,
    CrossAttentionCache,
    Live,
    LiveMemory,
    Mask,
    MergedAttention,
    Moved,
    OwnAttention,
    OwnCache,
    SelfAttention,
    TargetView,
)
from ziggurat.nn.residual import Residual

__all__ = ["AnyDecoderLayer", "DecoderLayer", "DecoderLayerCache", "EncoderLayer", "Layer", "MergedDecoderLayer"]

View = TypeVar("View")
"""What a layer sees besides the stream: the mask that hides padding (encoder), or a TargetView (decoder)."""


class Layer(nn.Module, Generic[View]):
    """Sub-layers in their order, the last of them the feed-forward network `ffn`.

    Kinds register their Residuals in the order in which a forward pass meets them.
    """

    ffn: nn.Module
    ffn_residual: Residual

    @abstractmethod
    def _attentions(self) -> list[Callable[[Tensor, View, Tensor], Tensor]]:
        """Return the attention sub-layers as functions of (stream, view, input of the layer)."""

    def _sublayers(self) -> list[Callable[[Tensor, View, Tensor], Tensor]]:
        return [*self._attentions(), self._transform]

    def _transform(self, x: Tensor, view: View, below: Tensor) -> Tensor:
        return self.ffn_residual(x, self.ffn(self.ffn_residual.enter(x)), below)

    def forward(self, x: Tensor, view: View) -> Tensor:
        """Return what the layer makes of the stream `x`: [batch, length, d_model], [batch, beam, d_model] in a step.

        With hyper-connections the stream is [..., streams, d_model].
        """
        below = x
        for sublayer in self._sublayers():
            x = sublayer(x, view, below)
        return x

    def sublayers(self) -> list[Callable[[Tensor, View], Tensor]]:
        """Return the sub-layers as functions of (stream, view), for wiring between them; each is its own `below`."""
        return [lambda x, view, f=f: f(x, view, x) for f in self._sublayers()]  # type: ignore[misc]


class EncoderLayer(Layer[Mask | None]):
    """Self-attention and feed-forward network; the view hides padding.

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

    def _attentions(self) -> list[Callable[[Tensor, Mask | None, Tensor], Tensor]]:
        return [self._attend]

    def _attend(self, x: Tensor, mask: Mask | None, below: Tensor) -> Tensor:
        return self.self_attn_residual(x, self.self_attn(self.self_attn_residual.enter(x), mask), below)


class DecoderLayerCache:
    """What one decoder layer keeps of the live hypotheses between steps.

    Args:
        own: of its attention to the target.
        cross: of its attention to the memory.
    """

    def __init__(self, own: OwnCache, cross: LiveMemory) -> None:
        self.own = own
        self.cross = cross

    def attend(self, module: OwnAttention, x: Tensor) -> Tensor:
        """Let `module` attend from the newest position `x` [N, K, d_model]; its cache gains that position."""
        return module.step(x, self.own)

    def remembered(self, module: CrossAttention) -> CrossAttentionCache:
        """Return the memory as projected when the sentences came."""
        return self.cross

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        self.own.follow(parents)

    def keep(self, moved: Moved) -> None:
        """Move rows; the live ones are counted already."""
        self.own.keep(moved)
        self.cross.keep(moved)


class DecoderLayer(Layer[TargetView]):
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

    def start(self, live: Live, *, keep_weights: bool = False) -> DecoderLayerCache:
        """Return the cache for the hypotheses of `live`."""
        return DecoderLayerCache(self.self_attn.start(live), LiveMemory(live, keep_weights))

    def admit(self, memory: Tensor, rows: slice, cache: DecoderLayerCache) -> None:
        """Project the memory [n, source, d_memory] of new sentences, which have `rows` among the live ones."""
        cache.own.admit(rows)
        cache.cross.admit(self.cross_attn.remember(memory, None), rows)

    def _attentions(self) -> list[Callable[[Tensor, TargetView, Tensor], Tensor]]:
        return [self._attend_target, self._attend_memory]

    def _attend_target(self, x: Tensor, at: TargetView, below: Tensor) -> Tensor:
        return self.self_attn_residual(x, at.attend(self.self_attn, self.self_attn_residual.enter(x)), below)

    def _attend_memory(self, x: Tensor, at: TargetView, below: Tensor) -> Tensor:
        context = self.cross_attn(self.cross_attn_residual.enter(x), at.remembered(self.cross_attn))
        return self.cross_attn_residual(x, context, below)


class MergedDecoderLayer(Layer[TargetView]):
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

    def start(self, live: Live, *, keep_weights: bool = False) -> DecoderLayerCache:
        """Return the cache for the hypotheses of `live`."""
        return DecoderLayerCache(self.merged_attn.start(live), LiveMemory(live, keep_weights))

    def admit(self, memory: Tensor, rows: slice, cache: DecoderLayerCache) -> None:
        """Project the memory [n, source, d_memory] of new sentences, which have `rows` among the live ones."""
        cache.own.admit(rows)
        cache.cross.admit(self.merged_attn.cross.remember(memory, None), rows)

    def _attentions(self) -> list[Callable[[Tensor, TargetView, Tensor], Tensor]]:
        return [self._attend]

    def _attend(self, x: Tensor, at: TargetView, below: Tensor) -> Tensor:
        return self.merged_attn_residual(x, self.merged_attn(self.merged_attn_residual.enter(x), at), below)


AnyDecoderLayer = DecoderLayer | MergedDecoderLayer
