"""Attention itself: the one place where it is computed, and the base of all attention to one's own sequence."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.attention.cache import Block
from ziggurat.model.attention.live import LiveBeams, RowMoves
from ziggurat.model.attention.mask import Mask, SequenceBounds
from ziggurat.model.attention.values import FirstValues
from ziggurat.model.dropout import Dropout

EXPLICIT_MAX_LENGTH = 256
"""On CPU, sequences up to this long are attended to by explicit products, with dropout longer ones too
(benchmarks/attention_kernel.py)."""

_wanted_explicit = False


@contextlib.contextmanager
def weights_explicit() -> Iterator[None]:
    """Context in which `attend` always forms its weights and calls `dropout` on them, which hooks can see."""
    global _wanted_explicit
    before, _wanted_explicit = _wanted_explicit, True
    try:
        yield
    finally:
        _wanted_explicit = before


class AttentionResult(NamedTuple):
    """Context [batch, heads, queries, d_head] and, when asked for, weights [batch, heads, queries, keys]."""

    context: Tensor
    weights: Tensor | None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    dropout: Dropout,
    *,
    need_weights: bool = False,
) -> AttentionResult:
    """Return softmax(query key^T / sqrt(d_head) + bias) value (Vaswani et al. 2017, equation 1).

    Args:
        query: [batch, heads, queries, d_head].
        key: [batch, heads, keys, d_head].
        value: [batch, heads, keys, d_head].
        mask: hides keys; its bias broadcasts to [batch, heads, queries, keys]. None: nothing is hidden.
        dropout: on the attention weights.
        need_weights: also return the weights before dropout.

    The kernel is chosen by device and length: on CPU the backward pass of scaled_dot_product_attention costs more than
    explicit products at sentence length, and with dropout, for which it has no kernel, at any; elsewhere, and for long
    inputs, its memory use wins. On a GPU flash attention hides the future itself and, in half types without dropout,
    padding; it takes no bias.
    """
    bias = None if mask is None else mask.bias
    p = dropout.p if dropout.training else 0.0
    if not need_weights and not _explicit_is_faster(query, key, p):
        if mask is not None and mask.bounds is not None and _flash_takes(query, p):
            return AttentionResult(_attend_between(query, key, value, mask.bounds), None)
        causal = mask is not None and mask.causal and _hides_the_future_itself(query)
        context = F.scaled_dot_product_attention(
            query, key, value, None if causal else bias, dropout_p=p, is_causal=causal
        )
        return AttentionResult(context, None)
    logits = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-2, -1))
    if bias is not None:
        logits = logits + bias
    weights = torch.softmax(logits, dim=-1)
    # The bias may be of a wider type than the values, which packed projections give in bf16; so then are the weights.
    context = torch.matmul(dropout(weights).to(value.dtype), value)
    return AttentionResult(context, weights if need_weights else None)


def attend_to_blocks(
    query: Tensor, blocks: Sequence[Block], bias: Tensor | None, dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """Return what `attend` does for keys and values in several tensors, and the weights after dropout.

    It is for the few queries of a decoding step, K beams: explicit products, the softmax over all blocks together.
    """
    scaled = query * query.shape[-1] ** -0.5
    logits = [torch.matmul(scaled, block.key.transpose(-2, -1)) for block in blocks]
    total = logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)
    weights = torch.softmax(total if bias is None else total + bias, dim=-1)
    dropped = dropout(weights).to(query.dtype)
    if len(blocks) == 1:
        return torch.matmul(dropped, blocks[0].value), dropped
    parts = dropped.split([block.key.shape[2] for block in blocks], dim=-1)
    contexts = [torch.matmul(part, block.value) for part, block in zip(parts, blocks, strict=True)]
    return torch.stack(contexts).sum(0), dropped


def _explicit_is_faster(query: Tensor, key: Tensor, dropout: float) -> bool:
    # A choice by length would fix the exported graph to the lengths it was traced with.
    if _wanted_explicit or torch.compiler.is_exporting():
        return True
    return query.device.type == "cpu" and (dropout > 0 or max(query.shape[-2], key.shape[-2]) <= EXPLICIT_MAX_LENGTH)


def _hides_the_future_itself(query: Tensor) -> bool:
    """Return whether scaled_dot_product_attention shall hide the future by itself; on CPU a bias is as fast."""
    return query.is_cuda


def _flash_takes(query: Tensor, dropout: float) -> bool:
    """Return whether varlen_attn can compute this: half types, no dropout, d_head a multiple of 8 up to 256."""
    d_head = query.shape[-1]
    return query.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0 and d_head % 8 == 0 and d_head <= 256


def _attend_between(query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds) -> Tensor:
    """Return [batch, heads, queries, d_head]; positions attend within their sequence of `bounds`."""
    # Here, since it imports torch's compiler: more than a second, which every command on a CPU would wait for.
    from torch.nn.attention.varlen import varlen_attn

    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    # The projections lay their results out as [batch, length, heads, d_head], so these are views, not copies.
    q, k, v = (
        query.transpose(1, 2).flatten(0, 1),
        key.transpose(1, 2).flatten(0, 1),
        value.transpose(1, 2).flatten(0, 1),
    )
    context = varlen_attn(q, k, v, bounds.queries, bounds.keys, queries, keys)
    assert isinstance(context, Tensor)  # a tuple comes back only where more is asked for
    return context.unflatten(0, (batch, queries)).transpose(1, 2)


class OwnCache(Protocol):
    """The state of the live hypotheses that attention to the target keeps between decoding steps."""

    def admit(self, rows: slice) -> None:
        """Start new sentences, which have `rows` among the live ones."""

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""

    def keep(self, moves: RowMoves) -> None:
        """Move rows; `LiveBeams.keep` has counted the live ones already."""


class OwnAttention(nn.Module, ABC):
    """Attention of the target to itself: all positions at once, or the newest one with a cache.

    `first` has the values of the first layer's attention in this pass; a kind without value residuals ignores it.
    """

    @abstractmethod
    def start(self, live: LiveBeams) -> OwnCache:
        """Return the cache for the hypotheses of `live`."""

    @abstractmethod
    def forward(self, x: Tensor, mask: Mask | None, first: FirstValues | None = None) -> Tensor:
        """Return [batch, target, d_model] for `x` of that shape; `mask` hides the future."""

    @abstractmethod
    def step(self, x: Tensor, cache: OwnCache, first: FirstValues | None = None) -> Tensor:
        """Return [N, K, d_model] for one new position of every hypothesis; the cache gains that position."""
