"""Multi-head additive attention to the memory (RNMT+: Chen et al. 2018, section 3; Bahdanau et al. 2015)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ziggurat.model.attention.cache import CrossAttentionCache, KeptWeights, Mask
from ziggurat.model.attention.multihead import join_heads, split_heads
from ziggurat.model.dropout import Dropout
from ziggurat.model.linear import Linear
from ziggurat.model.roles import Role, Slot, linear_slots


class AdditiveAttention(nn.Module):
    """Per head, with keys K = memory W_s + b_s and a query q = x W_q + b_q: softmax(v^T tanh(K A + q B)) K.

    The values are the keys; `key_map` A, `query_map` B [d_head, d_head] and `score` v [d_head] are shared by the
    heads; there is no output map (lingvo's MultiHeadedAttention over AdditiveAttention).

    Args:
        width: of queries, memory and result.
        heads: number of heads; divides `width`.
        dropout: on the attention weights.
    """

    def __init__(self, width: int, heads: int, dropout: Dropout) -> None:
        super().__init__()
        d_head = width // heads
        self.heads = heads
        self.k_proj = Linear(width, width)
        self.q_proj = Linear(width, width)
        self.key_map = nn.Parameter(torch.empty(d_head, d_head))
        self.query_map = nn.Parameter(torch.empty(d_head, d_head))
        self.score = nn.Parameter(torch.empty(d_head))
        self.dropout = dropout

    def remember(self, memory: Tensor, mask: Mask | None, kept: KeptWeights | None = None) -> CrossAttentionCache:
        """Project `memory` [batch, source, width] once; `mask` hides its padding.

        The cache has K A as its keys and K as its values. `forward` leaves its weights in `kept`, if given.
        """
        keys = split_heads(self.k_proj(memory), self.heads)
        return CrossAttentionCache(keys @ self.key_map, keys, mask, kept)

    def forward(self, x: Tensor, cache: CrossAttentionCache) -> Tensor:
        """Return [batch, queries, width] for `x` of that shape.

        The queries are one target position in training and beams in decoding; all share the projected memory, which is
        never repeated. One call takes memory for [batch, heads, queries, source, d_head].
        """
        query = split_heads(self.q_proj(x), self.heads) @ self.query_map
        logits = torch.tanh(query.unsqueeze(3) + cache.key.unsqueeze(2)) @ self.score
        if cache.mask is not None:
            logits = logits + cache.mask.bias
        weights = torch.softmax(logits, dim=-1)
        if cache.kept is not None:
            cache.kept.take(weights)
        return join_heads(torch.matmul(self.dropout(weights), cache.value))

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        yield from linear_slots(self, "k_proj", Role.ATTENTION_KEY, cross=True)
        yield from linear_slots(self, "q_proj", Role.ATTENTION_QUERY, cross=True)
        for name in ("key_map", "query_map", "score"):
            yield Slot(getattr(self, name), Role.ADDITIVE, name, cross=True)
