"""Multi-head self-attention and cross-attention (Vaswani et al. 2017, section 3.2.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ziggurat.nn.attention.base import attend
from ziggurat.nn.attention.cache import CrossAttentionCache, SelfAttentionCache
from ziggurat.nn.dropout import Dropout

__all__ = ["CrossAttention", "SelfAttention"]


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, length, d_model] -> [batch, heads, length, d_head]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _join_heads(x: Tensor) -> Tensor:
    """[batch, heads, length, d_head] -> [batch, length, d_model]."""
    return x.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Attention of a sequence to itself; query, key and value maps are one matrix `qkv_proj` [3 d_model, d_model].

    Args:
        d_model: width of input and output.
        heads: number of heads; divides d_model.
        dropout: on the attention weights.
    """

    def __init__(self, d_model: int, heads: int, dropout: Dropout) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = dropout

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return [batch, length, d_model] for such an `x`; `bias` broadcasts to [batch, heads, length, length]."""
        query, key, value = (_split_heads(part, self.heads) for part in self.qkv_proj(x).chunk(3, dim=-1))
        context = attend(query, key, value, bias, self.dropout).context
        return self.out_proj(_join_heads(context))

    def step(self, x: Tensor, cache: SelfAttentionCache) -> Tensor:
        """Attend from the newest position to all so far, itself included.

        `x` is [batch, beam, d_model], one new position per beam; the cache gains that position.
        Returns [batch, beam, d_model].
        """
        rows = x.flatten(0, 1).unsqueeze(1)
        query, key, value = (_split_heads(part, self.heads) for part in self.qkv_proj(rows).chunk(3, dim=-1))
        keys, values = cache.append(key, value)
        context = attend(query, keys, values, None, self.dropout).context
        return self.out_proj(_join_heads(context)).view(x.shape)


class CrossAttention(nn.Module):
    """Attention of the decoder to the memory; key and value maps are one matrix `kv_proj` [2 d_model, d_memory].

    Args:
        d_model: width of the decoder.
        d_memory: width of the memory (the encoder's d_model).
        heads: number of heads; divides d_model.
        dropout: on the attention weights.
    """

    def __init__(self, d_model: int, d_memory: int, heads: int, dropout: Dropout) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.kv_proj = nn.Linear(d_memory, 2 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = dropout

    def remember(self, memory: Tensor, bias: Tensor | None) -> CrossAttentionCache:
        """Project `memory` [batch, source, d_memory] once; `bias` is [batch, 1, 1, source]."""
        key, value = (_split_heads(part, self.heads) for part in self.kv_proj(memory).chunk(2, dim=-1))
        return CrossAttentionCache(key, value, bias)

    def forward(self, x: Tensor, cache: CrossAttentionCache, *, need_weights: bool = False) -> Tensor:
        """Return [batch, queries, d_model] for `x` of that shape.

        The queries are target positions in training and beams in decoding: either way the projected memory is
        shared by all of them, never repeated. With `need_weights`, the weights averaged over heads,
        [batch, queries, source], are left in `cache.weights`.
        """
        query = _split_heads(self.q_proj(x), self.heads)
        context, weights = attend(query, cache.key, cache.value, cache.bias, self.dropout, need_weights=need_weights)
        cache.weights = None if weights is None else torch.mean(weights, dim=1)
        return self.out_proj(_join_heads(context))
