"""Encoder and decoder layers: named sub-layers, each joined to the stream by its Residual."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ziggurat.nn.attention import CrossAttention, CrossAttentionCache, SelfAttention, SelfAttentionCache
from ziggurat.nn.feed_forward import FeedForward
from ziggurat.nn.residual import Residual

__all__ = ["DecoderLayer", "DecoderLayerCache", "EncoderLayer"]


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward network.

    Args:
        self_attn: attention over the source.
        ffn: position-wise network.
        residual: makes one Residual; called once per sub-layer.
    """

    def __init__(self, self_attn: SelfAttention, ffn: FeedForward, residual: Callable[[], Residual]) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.self_attn_residual = residual()
        self.ffn = ffn
        self.ffn_residual = residual()

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return [batch, source, d_model] for `x` of that shape; `bias` is [batch, 1, 1, source]."""
        x = self.self_attn_residual(x, self.self_attn(self.self_attn_residual.enter(x), bias))
        return self.ffn_residual(x, self.ffn(self.ffn_residual.enter(x)))


class DecoderLayerCache:
    """What one decoder layer keeps between steps."""

    def __init__(self, cross: CrossAttentionCache) -> None:
        self.self_attn = SelfAttentionCache()
        self.cross_attn = cross

    def keep(self, rows: Tensor | None, sentences: Tensor | None) -> None:
        """Keep hypotheses `rows` [new rows] and sentences [new batch]; None leaves that part as it is."""
        if rows is not None:
            self.self_attn.keep(rows)
        if sentences is not None:
            self.cross_attn.keep(sentences)


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the memory, feed-forward network.

    Args:
        self_attn: attention over the target so far.
        cross_attn: attention to the memory.
        ffn: position-wise network.
        residual: makes one Residual; called once per sub-layer.
    """

    def __init__(
        self,
        self_attn: SelfAttention,
        cross_attn: CrossAttention,
        ffn: FeedForward,
        residual: Callable[[], Residual],
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.self_attn_residual = residual()
        self.cross_attn = cross_attn
        self.cross_attn_residual = residual()
        self.ffn = ffn
        self.ffn_residual = residual()

    def remember(self, memory: Tensor, bias: Tensor | None) -> CrossAttentionCache:
        """Project the memory [batch, source, d_memory] once for all target positions and beams."""
        return self.cross_attn.remember(memory, bias)

    def forward(self, x: Tensor, bias: Tensor, memory: CrossAttentionCache) -> Tensor:
        """Return [batch, target, d_model] for `x` of that shape; `bias` [1, 1, target, target] hides the future."""
        x = self.self_attn_residual(x, self.self_attn(self.self_attn_residual.enter(x), bias))
        return self._after_self_attention(x, memory, need_weights=False)

    def step(self, x: Tensor, cache: DecoderLayerCache, *, need_weights: bool = False) -> Tensor:
        """Return [batch, beam, d_model] for one new position of each hypothesis, `x` [batch, beam, d_model]."""
        x = self.self_attn_residual(x, self.self_attn.step(self.self_attn_residual.enter(x), cache.self_attn))
        return self._after_self_attention(x, cache.cross_attn, need_weights=need_weights)

    def _after_self_attention(self, x: Tensor, memory: CrossAttentionCache, *, need_weights: bool) -> Tensor:
        context = self.cross_attn(self.cross_attn_residual.enter(x), memory, need_weights=need_weights)
        x = self.cross_attn_residual(x, context)
        return self.ffn_residual(x, self.ffn(self.ffn_residual.enter(x)))
