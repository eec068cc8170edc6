"""Multi-head self-attention and cross-attention (Vaswani et al. 2017, section 3.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ziggurat.model.attention.base import OwnAttention, attend, attend_to_blocks
from ziggurat.model.attention.cache import Block, CrossAttentionCache, KeptWeights, LiveMemory, SelfAttentionCache
from ziggurat.model.attention.live import LiveBeams
from ziggurat.model.attention.mask import Mask
from ziggurat.model.attention.rotary import Rotary
from ziggurat.model.attention.scaling import QueryKeyScaling
from ziggurat.model.attention.values import FirstValues, ValueResidual, attended_values
from ziggurat.model.dropout import Dropout
from ziggurat.model.fast import compiled
from ziggurat.model.linear import Linear, NormedLinear
from ziggurat.model.residual.fixup import ShiftedLinear
from ziggurat.model.roles import QUERY_KEY_VALUE, Role, Slot, linear_slots

LinearMaker = Callable[[int, int], Linear | ShiftedLinear | NormedLinear]
"""Makes a linear map from (width in, width out)."""


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return `x` [batch, length, d_model] as [batch, heads, length, d_head], a view."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Return `x` [batch, heads, length, d_head] as [batch, length, d_model]."""
    return x.transpose(1, 2).flatten(2)


def _joined_for(x: Tensor, context: Tensor) -> Tensor:
    """Return `context` [batch, heads, length, d_head] as the output map reads it, `x` being the sub-layer's input."""
    joined = join_heads(context)
    # Compiled attention gives fp32, also in a model that is bf16 throughout. Beside packed maps, which read either, the
    # stream is fp32 and nothing is converted.
    return joined if x.dtype == torch.float32 else joined.to(x.dtype)


class SelfAttention(OwnAttention):
    """Attention of a sequence to itself; query, key and value maps are one matrix `qkv_proj` [3 d_model, d_model].

    Where `residual` says that there is no value map it is [2 d_model, d_model].

    Args:
        d_model: width of input and output.
        heads: number of heads; divides d_model.
        dropout: on the attention weights.
        linear: makes the linear maps.
        scaling: of queries, keys and values, or None.
        rotary: rotation of queries and keys by their positions, or None.
        residual: joins the values to those of the first layer, or None.
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
        """Return [batch, length, d_model] for `x` of that shape; keys that `mask` hides are not attended to.

        `first` has the first layer's values, if there is a value residual.
        """
        query, key, value = self._project(x, first)
        return self.out_proj(join_heads(self._context(query, key, value, mask)))

    def step(  # type: ignore[override]
        self, x: Tensor, cache: SelfAttentionCache, first: FirstValues | None = None
    ) -> Tensor:
        """Attend from the newest position to all so far, itself included.

        `x` is [N, K, d_model], one new position per hypothesis; the cache gains that position. Returns the same shape.
        """
        query, key, value = self._project(x, first, cache.live)
        context = self._context_of_beams(query, cache.append(key, value), cache.live)
        return self.out_proj(_joined_for(x, context))

    def _context(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        """Return [batch, heads, length, d_head] for such queries, keys and values."""
        return attend(query, key, value, mask, self.dropout).context

    def _context_of_beams(self, query: Tensor, blocks: Sequence[Block], live: LiveBeams) -> Tensor:
        """Return [N, heads, K, d_head] for `query` of that shape, the newest position of every hypothesis."""
        mask = live.seen(sum(block.key.shape[2] for block in blocks))
        bias = None if mask is None else mask.bias
        if not self.training and compiled.attends(query, blocks[0].key, bias):
            return compiled.attend(query, blocks, bias)
        return attend_to_blocks(query, blocks, bias, self.dropout)[0]

    def _project(
        self, x: Tensor, first: FirstValues | None, live: LiveBeams | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, [batch, heads, length, d_head] each, of positions from 0, or beams of `live`."""
        query, key, *value = (split_heads(part, self.heads) for part in self._maps_of(x))
        if self.scaling is not None:
            query, key, value = self.scaling.query(query), self.scaling.key(key), [*map(self.scaling.value, value)]
        if self.rotary is not None:
            query, key = self._rotated(query, live), self._rotated(key, live)
        return query, key, attended_values(self.residual, value, first)

    def _maps_of(self, x: Tensor) -> Sequence[Tensor]:
        """Return queries, keys and, if there are any, values, [batch, length, d_model] each.

        `x` is [batch, length, d_model], or [3, batch, length, d_model] where each has an input of its own.
        """
        if x.dim() == 3:
            return self.qkv_proj(x).chunk(self.maps, dim=-1)
        if not isinstance(self.qkv_proj, Linear):  # packed for inference: its parts cannot be told apart
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

    Where `residual` says that there is no value map it is [d_model, d_memory].

    Args:
        d_model: width of the decoder.
        d_memory: width of the memory (the encoder's d_model).
        heads: number of heads; divides d_model.
        dropout: on the attention weights.
        linear: makes the linear maps.
        scaling: of queries and keys, or None.
        residual: joins the memory's values to those of the first layer, or None.
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
        """Project `memory` [batch, source, d_memory] once; `mask` hides its padding.

        `forward` leaves its weights in `kept`, if given. `first` has the first layer's values, if there is a value
        residual.
        """
        key, *value = (split_heads(part, self.heads) for part in self.kv_proj(memory).chunk(self.maps, dim=-1))
        if self.scaling is not None:
            key, value = self.scaling.key(key), [*map(self.scaling.value, value)]
        return CrossAttentionCache(key, attended_values(self.residual, value, first), mask, kept)

    def forward(self, x: Tensor, cache: CrossAttentionCache) -> Tensor:
        """Return [batch, queries, d_model] for `x` of that shape.

        The queries are target positions in training and beams in decoding: either way the projected memory is
        shared by all of them, never repeated.
        """
        query = split_heads(self.q_proj(x), self.heads)
        if self.scaling is not None:
            query = self.scaling.query(query)
        in_step = isinstance(cache, LiveMemory) and cache.kept is None and not self.training
        bias = None if cache.mask is None else cache.mask.bias
        if in_step and compiled.attends(query, cache.key, bias):
            context = compiled.attend(query, [Block(cache.key, cache.value)], bias)
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
        if self.out_proj is not None:
            yield from linear_slots(self, "out_proj", Role.ATTENTION_OUT, cross=True)
