"""Multi-head additive attention (RNMT+, Chen et al. 2018; Bahdanau et al. 2015)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ziggurat.nn.attention.cache import CrossAttentionCache
from ziggurat.nn.attention.multihead import split_heads
from ziggurat.nn.dropout import Dropout
from ziggurat.nn.roles import Role, Slot, linear_slots

__all__ = ["AdditiveAttention"]


class AdditiveAttention(nn.Module):
    """Additive attention."""

    def __init__(self, width: int, heads: int, dropout: Dropout) -> None:
        super().__init__()
        self.heads = heads
        a = width // heads
        self.k_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.key = nn.Parameter(torch.empty(a, a))
        self.query = nn.Parameter(torch.empty(a, a))
        self.score = nn.Parameter(torch.empty(a))
        self.dropout = dropout

    def remember(self, memory: Tensor, bias: Tensor | None, keep_weights: bool = False) -> CrossAttentionCache:
        values = split_heads(self.k_proj(memory), self.heads)
        return CrossAttentionCache(values @ self.key, values, bias, keep_weights)

    def forward(self, x: Tensor, cache: CrossAttentionCache) -> Tensor:
        query = split_heads(self.q_proj(x), self.heads) @ self.query
        logits = torch.tanh(query.unsqueeze(3) + cache.key.unsqueeze(2)) @ self.score
        if cache.bias is not None:
            logits = logits + cache.bias
        weights = logits.softmax(-1)
        if cache.keep_weights:
            cache.weights = weights.mean(1)
        return (self.dropout(weights) @ cache.value).transpose(1, 2).flatten(2)

    def slots(self) -> Iterator[Slot]:
        """Yield the role of every parameter of its own."""
        yield from linear_slots(self, "k_proj", Role.ATTENTION_KEY)
        yield from linear_slots(self, "q_proj", Role.ATTENTION_QUERY)
        yield Slot(self.key, Role.ADDITIVE, "key")
        yield Slot(self.query, Role.ADDITIVE, "query")
        yield Slot(self.score, Role.ADDITIVE, "score")
