"""Attention, its multi-head forms (Vaswani et al. 2017, section 3.2), QK-norm, value residuals."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.accelerator import has_cpu_kernels
from ziggurat.model.attention.cache import (
    BeamCache,
    CrossAttentionCache,
    KeptWeights,
    KeyValueBlock,
    LiveBeams,
    LiveMemory,
    Mask,
    SelfAttentionCache,
    SequenceBounds,
)
from ziggurat.model.dropout import Dropout
from ziggurat.model.embedding import Rotary
from ziggurat.model.fast import compiled
from ziggurat.model.linear import Linear, NormedLinear, ShiftedLinear
from ziggurat.model.roles import QUERY_KEY_VALUE, Role, Roles, Slot, linear_slots, table_slots

_NORMS: dict[str, Callable[[int, float], nn.LayerNorm | nn.RMSNorm]] = {
    "layer": lambda width, epsilon: nn.LayerNorm(width, epsilon, bias=False),
    "rms": lambda width, epsilon: nn.RMSNorm(width, epsilon),
}


class QueryKeyScaling(nn.Module):
    """Normalisation of the queries, keys and values of every head, and scaling of the queries; heads share parameters.

    Args:
        norm: "layer", "rms": LN or RMSNorm with a learned gain and no bias, one for queries and one for keys; the
            division of the logits by sqrt(d_head) stays (Dehghani et al. 2023). "l2": queries and keys have length 1,
            and one learned factor g of the logits replaces that division (Henry et al. 2020). "none": neither.
        length: L in the initial value log2(L^2 - L) of g, the 97.5th percentile of sentence lengths; at least 2.
        per_dimension: also multiply queries by softplus(a) / softplus(0), a [d_head] learned from 0 (lingvo).
        value_norm: also normalise values, by "layer" or "rms" (HybridNorm, Zhuo et al. 2025).
        epsilon: epsilon of the norms; with "l2", a shorter query or key is divided by it.
    """

    roles: ClassVar[Roles] = {"factor": Role.WIRING, "dimensions": Role.WIRING}
    factor: nn.Parameter | None
    dimensions: nn.Parameter | None

    def __init__(
        self,
        d_head: int,
        *,
        norm: Literal["none", "layer", "rms", "l2"],
        length: int,
        per_dimension: bool,
        epsilon: float,
        value_norm: Literal["none", "layer", "rms"] = "none",
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.root = math.sqrt(d_head)
        make = _NORMS.get(norm)
        self.query_norm = None if make is None else make(d_head, epsilon)
        self.key_norm = None if make is None else make(d_head, epsilon)
        self.value_norm = None if value_norm == "none" else _NORMS[value_norm](d_head, epsilon)
        factor = nn.Parameter(torch.tensor([math.log2(length**2 - length)])) if norm == "l2" else None
        self.register_parameter("factor", factor)
        self.register_parameter("dimensions", nn.Parameter(torch.zeros(d_head)) if per_dimension else None)

    def query(self, query: Tensor) -> Tensor:
        """Return `query` [batch, heads, length, d_head] scaled, in its own type."""
        scaled = self._normalised(query, self.query_norm)
        if self.factor is not None:
            scaled = scaled * (self.factor * self.root)  # `attend` divides by this root
        if self.dimensions is not None:
            scaled = scaled * (F.softplus(self.dimensions) / math.log(2.0))
        return scaled.to(query.dtype)

    def key(self, key: Tensor) -> Tensor:
        """Return `key` scaled, in the same shape and type."""
        return self._normalised(key, self.key_norm).to(key.dtype)

    def value(self, value: Tensor) -> Tensor:
        """Return `value` normalised, in the same shape and type."""
        return self._by(self.value_norm, value).to(value.dtype)

    def _normalised(self, x: Tensor, norm: nn.LayerNorm | nn.RMSNorm | None) -> Tensor:
        if self.factor is not None:
            return F.normalize(x, dim=-1, eps=self.epsilon)
        return self._by(norm, x)

    def _by(self, norm: nn.LayerNorm | nn.RMSNorm | None, x: Tensor) -> Tensor:
        # Under autocast, queries and keys have a half type, the gain is fp32; RMSNorm has no fused kernel for both.
        return x if norm is None else norm(x.to(norm.weight.dtype))


ValueResidualKind = Literal["half", "learned", "single"]


class FirstValues:
    """Holder in which the first layer stores V_1 [batch, heads, length, d_head] for the layers above, in each pass."""

    def __init__(self) -> None:
        self.values: Tensor | None = None


class ValueResidual(nn.Module):
    """The values V_n' that layer n attends to, from its projections V_n and those of the first layer.

    V_1' = V_1, and in the layers above (ResFormer, Zhou et al. 2024, and the authors' code)

        half      V_n' = V_1 / 2 + V_n / 2
        learned   V_n' = a V_1 + b V_n, both numbers trained from 1/2
        single    V_n' = V_1: there is no value map above the first layer (SVFormer)

    Gradients flow into V_1 from every layer. Norms of values (`attention.value_norm`) are applied first, in each layer.
    """

    roles: ClassVar[Roles] = {"shares": Role.WIRING}
    shares: nn.Parameter | None

    def __init__(self, kind: ValueResidualKind, *, first: bool) -> None:
        super().__init__()
        self.kind = kind
        self.first = first
        learned = kind == "learned" and not first
        self.register_parameter("shares", nn.Parameter(torch.full((2,), 0.5)) if learned else None)

    @property
    def projects(self) -> bool:
        """True if the layer has a value map."""
        return self.first or self.kind != "single"

    def forward(self, own: Sequence[Tensor], first: FirstValues) -> Tensor:
        """Return V_n' [batch, heads, length, d_head]; `own` is V_n of that shape, or None without a value map."""
        if self.first:
            (first.values,) = own
        assert first.values is not None, "no first layer has been called in this pass"
        if self.first or not own:
            return first.values
        if self.shares is None:
            return torch.lerp(first.values, own[0], 0.5)
        of_first, of_own = self.shares.unbind()
        return of_first * first.values + of_own * own[0]


def _attended_values(residual: ValueResidual | None, own: Sequence[Tensor], first: FirstValues | None) -> Tensor:
    if residual is None:
        return own[0]
    assert first is not None, "attention with a value residual is called within a stack"
    return residual(own, first)


EXPLICIT_MAX_LENGTH = 256
"""On CPU, attention uses explicit products up to this sequence length, and at any length with dropout
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
    """Context [batch, heads, queries, d_head] and, on request, weights [batch, heads, queries, keys]."""

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
        value: the same shape.
        mask: hides keys; its bias broadcasts to [batch, heads, queries, keys]. None: nothing is hidden.
        dropout: probability of dropping an attention weight.
        need_weights: also return the weights before dropout.

    The kernel is chosen by device and length. On CPU, the backward pass of scaled_dot_product_attention costs more than
    explicit products at sentence length, and at any length with dropout, for which it has no kernel. Elsewhere, and for
    long inputs, it wins by using less memory. On a GPU flash attention hides the future itself and, in half types
    without dropout, padding; it takes no bias.
    """
    bias = None if mask is None else mask.bias
    p = dropout.p if dropout.training else 0.0
    if not need_weights and not _explicit_is_faster(query, key, p):
        if mask is not None and mask.bounds is not None and _flash_takes(query, p):
            return AttentionResult(_attend_between(query, key, value, mask.bounds), None)
        causal = mask is not None and mask.causal and not has_cpu_kernels(query)  # on CPU a bias is as fast
        context = F.scaled_dot_product_attention(
            query, key, value, None if causal else bias, dropout_p=p, is_causal=causal
        )
        return AttentionResult(context, None)
    logits = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-2, -1))
    if bias is not None:
        logits = logits + bias
    weights = torch.softmax(logits, dim=-1)
    # The bias, and so the weights, may have a wider type than the values, which packed projections return in bf16.
    context = torch.matmul(dropout(weights).to(value.dtype), value)
    return AttentionResult(context, weights if need_weights else None)


def attend_to_blocks(
    query: Tensor, blocks: Sequence[KeyValueBlock], bias: Tensor | None, dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """Return the result of `attend` for keys and values in several tensors, and the weights after dropout.

    Meant for the few queries of a decoding step, K beams: explicit products and one softmax over all blocks.
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
    # A choice by length would tie the exported graph to the lengths with which it was traced.
    if _wanted_explicit or torch.compiler.is_exporting():
        return True
    return has_cpu_kernels(query) and (dropout > 0 or max(query.shape[-2], key.shape[-2]) <= EXPLICIT_MAX_LENGTH)


def _flash_takes(query: Tensor, dropout: float) -> bool:
    """Return whether varlen_attn can compute this: half types, no dropout, d_head a multiple of 8 up to 256."""
    d_head = query.shape[-1]
    return query.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0 and d_head % 8 == 0 and d_head <= 256


def _attend_between(query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds) -> Tensor:
    # Imported here because it imports torch's compiler, for which every command on a CPU would wait over a second.
    from torch.nn.attention.varlen import varlen_attn

    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    # The projections lay their results out as [batch, length, heads, d_head], so these are views, not copies.
    q, k, v = (
        query.transpose(1, 2).flatten(0, 1),
        key.transpose(1, 2).flatten(0, 1),
        value.transpose(1, 2).flatten(0, 1),
    )
    context = varlen_attn(q, k, v, bounds.queries, bounds.keys, queries, keys)
    assert isinstance(context, Tensor)  # returns a tuple only if more is requested
    return context.unflatten(0, (batch, queries)).transpose(1, 2)


class OwnCache(BeamCache, Protocol):
    """The state that attention to the target keeps."""

    def admit(self, rows: slice) -> None:
        """Start new sentences, which have `rows` among the live ones."""


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


LinearMaker = Callable[[int, int], Linear | ShiftedLinear | NormedLinear]
"""Makes a linear map from (width in, width out)."""


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return `x` [batch, length, d_model] as [batch, heads, length, d_head], a view."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Return `x` [batch, heads, length, d_head] as [batch, length, d_model]."""
    return x.transpose(1, 2).flatten(2)


def _joined_for(x: Tensor, context: Tensor) -> Tensor:
    joined = join_heads(context)
    # Compiled attention returns fp32 even in a model that is entirely bf16. With packed maps, which read either type,
    # the stream is fp32 and nothing is converted.
    return joined if x.dtype == torch.float32 else joined.to(x.dtype)


class SelfAttention(OwnAttention):
    """Attention of a sequence to itself; query, key and value maps are one matrix `qkv_proj` [3 d_model, d_model].

    If `residual` has no value map, the matrix is [2 d_model, d_model].

    Args:
        d_model: width of input and output.
        heads: number of heads; divides d_model.
        dropout: probability of dropping an attention weight.
        linear: makes the linear maps.
        scaling: scales queries, keys and values.
        rotary: rotation of queries and keys by their positions.
        residual: joins the values to those of the first layer.
        out: makes the output map; None: as `linear`.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        dropout: Dropout,
        *,
        linear: LinearMaker = Linear,
        scaling: QueryKeyScaling | None = None,
        rotary: Rotary | None = None,
        residual: ValueResidual | None = None,
        out: LinearMaker | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.maps = 3 if residual is None or residual.projects else 2
        self.qkv_proj = linear(d_model, self.maps * d_model)
        self.out_proj = (out or linear)(d_model, d_model)
        self.dropout = dropout
        self.scaling = scaling
        self.rotary = rotary
        self.residual = residual

    def start(self, live: LiveBeams) -> SelfAttentionCache:
        """Return the cache for the hypotheses of `live`."""
        return SelfAttentionCache(live)

    def forward(self, x: Tensor, mask: Mask | None, first: FirstValues | None = None) -> Tensor:
        """Return [batch, length, d_model] for `x` of that shape; keys that `mask` hides are not attended to."""
        query, key, value = self._project(x, first)
        return self.out_proj(join_heads(self._context(query, key, value, mask)))

    def step(  # type: ignore[override]
        self, x: Tensor, cache: SelfAttentionCache, first: FirstValues | None = None
    ) -> Tensor:
        """Attend from the newest position, `x` [N, K, d_model], to all so far, itself included; see OwnAttention."""
        query, key, value = self._project(x, first, cache.live)
        context = self._context_of_beams(query, cache.append(key, value), cache.live)
        return self.out_proj(_joined_for(x, context))

    def _context(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        return attend(query, key, value, mask, self.dropout).context

    def _context_of_beams(self, query: Tensor, blocks: Sequence[KeyValueBlock], live: LiveBeams) -> Tensor:
        """Return [N, heads, K, d_head] for `query` of that shape, the newest position of every hypothesis."""
        mask = live.seen(sum(block.key.shape[2] for block in blocks))
        bias = None if mask is None else mask.bias
        if not self.training and compiled.attends(query, blocks[0].key, bias):
            return compiled.attend(query, blocks, bias)
        return attend_to_blocks(query, blocks, bias, self.dropout)[0]

    def _project(
        self, x: Tensor, first: FirstValues | None, live: LiveBeams | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, *value = (split_heads(part, self.heads) for part in self._maps_of(x))
        if self.scaling is not None:
            query, key, value = self.scaling.query(query), self.scaling.key(key), [*map(self.scaling.value, value)]
        if self.rotary is not None:
            query, key = self._rotated(query, live), self._rotated(key, live)
        return query, key, _attended_values(self.residual, value, first)

    def _maps_of(self, x: Tensor) -> Sequence[Tensor]:
        if x.dim() == 3:
            return self.qkv_proj(x).chunk(self.maps, dim=-1)
        if not isinstance(self.qkv_proj, Linear):  # packed for inference, where its parts cannot be distinguished
            return [self.qkv_proj(part).chunk(self.maps, dim=-1)[n] for n, part in enumerate(x[: self.maps])]
        return [self.qkv_proj.part(part, number, self.maps) for number, part in enumerate(x[: self.maps])]

    def _rotated(self, x: Tensor, live: LiveBeams | None) -> Tensor:
        assert self.rotary is not None
        return self.rotary(x, 0) if live is None else self.rotary.at(x, live.positions, live.longest)

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        d = self.out_proj.weight.shape[0]
        for role, part in zip(QUERY_KEY_VALUE[: self.maps], self.qkv_proj.weight.split(d), strict=True):
            yield Slot(part, role, f"qkv_proj.weight[{role.value}]", 3 * d)
        if self.qkv_proj.bias is not None:
            yield Slot(self.qkv_proj.bias, Role.BIAS, "qkv_proj.bias")
        yield from linear_slots(self, "out_proj", Role.ATTENTION_OUT)


class CrossAttention(nn.Module):
    """Attention of the decoder to the memory; key and value maps are one matrix `kv_proj` [2 d_model, d_memory].

    If `residual` has no value map, the matrix is [d_model, d_memory]. Other arguments are as in SelfAttention.

    Args:
        d_memory: width of the memory (the encoder's d_model).
        residual: joins the memory's values to those of the first layer.
        project_out: whether there is an output map.
    """

    def __init__(
        self,
        d_model: int,
        d_memory: int,
        heads: int,
        dropout: Dropout,
        *,
        linear: LinearMaker = Linear,
        scaling: QueryKeyScaling | None = None,
        residual: ValueResidual | None = None,
        project_out: bool = True,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.maps = 2 if residual is None or residual.projects else 1
        self.q_proj = linear(d_model, d_model)
        self.kv_proj = linear(d_memory, self.maps * d_model)
        self.out_proj = linear(d_model, d_model) if project_out else None
        self.dropout = dropout
        self.scaling = scaling
        self.residual = residual

    def remember(
        self, memory: Tensor, mask: Mask | None, kept: KeptWeights | None = None, first: FirstValues | None = None
    ) -> CrossAttentionCache:
        """Project `memory` [batch, source, d_memory] once; `mask` hides padding, and `kept` receives the weights."""
        key, *value = (split_heads(part, self.heads) for part in self.kv_proj(memory).chunk(self.maps, dim=-1))
        if self.scaling is not None:
            key, value = self.scaling.key(key), [*map(self.scaling.value, value)]
        return CrossAttentionCache(key, _attended_values(self.residual, value, first), mask, kept)

    def forward(self, x: Tensor, cache: CrossAttentionCache) -> Tensor:
        """Return [batch, queries, d_model] for `x` of that shape: target positions in training, beams in decoding."""
        query = split_heads(self.q_proj(x), self.heads)
        if self.scaling is not None:
            query = self.scaling.query(query)
        in_step = isinstance(cache, LiveMemory) and cache.kept is None and not self.training
        bias = None if cache.mask is None else cache.mask.bias
        if in_step and compiled.attends(query, cache.key, bias):
            context = compiled.attend(query, [KeyValueBlock(cache.key, cache.value)], bias)
        else:
            context, weights = attend(
                query, cache.key, cache.value, cache.mask, self.dropout, need_weights=cache.kept is not None
            )
            if cache.kept is not None and weights is not None:
                cache.kept.take(weights)
        joined = _joined_for(x, context)
        return joined if self.out_proj is None else self.out_proj(joined)

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        d = self.q_proj.weight.shape[0]
        yield Slot(self.q_proj.weight, Role.ATTENTION_QUERY, "q_proj.weight", 3 * d, cross=True)
        for role, part in zip(QUERY_KEY_VALUE[1 : self.maps + 1], self.kv_proj.weight.split(d), strict=True):
            yield Slot(part, role, f"kv_proj.weight[{role.value}]", 3 * d, cross=True)
        for name in ("q_proj", "kv_proj"):
            if (bias := getattr(self, name).bias) is not None:
                yield Slot(bias, Role.BIAS, f"{name}.bias", cross=True)
        yield from table_slots(self, {"out_proj": Role.ATTENTION_OUT}, cross=True)
