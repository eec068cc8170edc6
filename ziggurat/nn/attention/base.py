"""Masks and the one place where attention is computed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ziggurat.nn.dropout import Dropout

__all__ = ["EXPLICIT_MAX_LENGTH", "AttentionResult", "attend", "causal_bias", "padding_bias"]

EXPLICIT_MAX_LENGTH = 256
"""On CPU, sequences up to this long are attended to by explicit products (benchmarks/attention_kernel.py)."""


class AttentionResult(NamedTuple):
    """Context [batch, heads, queries, d_head] and, when asked for, weights [batch, heads, queries, keys]."""

    context: Tensor
    weights: Tensor | None


def padding_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [batch, 1, 1, keys] with 0 at real tokens and -inf at padding, for `mask` [batch, keys] (True: real).

    Every sentence must have one real token (it has: end-of-sentence), else its softmax is undefined.
    """
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, -math.inf)[:, None, None, :]


def causal_bias(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [1, 1, length, length]: 0 where key <= query, -inf after it."""
    return torch.full((length, length), -math.inf, dtype=dtype, device=device).triu_(1)[None, None]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: Dropout,
    *,
    need_weights: bool = False,
) -> AttentionResult:
    """Return softmax(query key^T / sqrt(d_head) + bias) value (Vaswani et al. 2017, equation 1).

    Args:
        query: [batch, heads, queries, d_head].
        key: [batch, heads, keys, d_head].
        value: [batch, heads, keys, d_head].
        bias: added to the logits; broadcasts to [batch, heads, queries, keys].
        dropout: on the attention weights.
        need_weights: also return the weights before dropout.

    The kernel is chosen by device and length: on CPU the backward pass of scaled_dot_product_attention costs
    more than explicit products at sentence length; elsewhere, and for long inputs, its memory use wins.
    """
    if not need_weights and not _explicit_is_faster(query, key):
        p = dropout.p if dropout.training else 0.0
        return AttentionResult(F.scaled_dot_product_attention(query, key, value, bias, dropout_p=p), None)
    logits = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-2, -1))
    if bias is not None:
        logits = logits + bias
    weights = torch.softmax(logits, dim=-1)
    return AttentionResult(torch.matmul(dropout(weights), value), weights if need_weights else None)


def _explicit_is_faster(query: Tensor, key: Tensor) -> bool:
    return query.device.type == "cpu" and max(query.shape[-2], key.shape[-2]) <= EXPLICIT_MAX_LENGTH
