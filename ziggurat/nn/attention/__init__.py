"""Attention kinds and their caches."""

from ziggurat.nn.attention.base import attend, causal_bias, padding_bias
from ziggurat.nn.attention.cache import CrossAttentionCache, SelfAttentionCache
from ziggurat.nn.attention.multihead import CrossAttention, SelfAttention

__all__ = [
    "CrossAttention",
    "CrossAttentionCache",
    "SelfAttention",
    "SelfAttentionCache",
    "attend",
    "causal_bias",
    "padding_bias",
]
