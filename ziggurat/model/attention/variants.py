"""Relative positions, and replacements for self-attention in decoders: averages, merged attention, SSRU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from ziggurat.model.attention.cache import KeyValueBlock, LiveBeams, Mask, StateCache
from ziggurat.model.attention.multihead import (
    CrossAttention,
    FirstValues,
    LinearMaker,
    OwnAttention,
    QueryKeyScaling,
    SelfAttention,
    ValueResidual,
    attend,
    attend_to_blocks,
)
from ziggurat.model.dropout import Dropout
from ziggurat.model.linear import Linear, NormedLinear
from ziggurat.model.lstm import decayed_sum
from ziggurat.model.roles import Role, Roles, Slot, linear_slots, table_slots
from ziggurat.system.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.model.layers import TargetView


class RelativeAttention(SelfAttention):
    """Self-attention with the logits q_i (k_j + r_c(j-i)) / sqrt(d_head), c(m) = clip(m, -k, k) + k.

    The context is sum_j a_ij v_j, or, with a second table s, sum_j a_ij (v_j + s_c(j-i)) (Shaw et al. 2018, equations
    3 and 4). The tables [2k + 1, d_head] are shared by the heads. No tensor is [length, length, d_head]: the
    product of queries and table is spread over the keys by distance, and the weights are summed by distance.

    Arguments are those of SelfAttention, `clip` (k), and `values` (whether the table s exists). Scaling and
    value residual do not affect the tables.
    """

    value_table: nn.Parameter | None

    def __init__(
        self,
        d_model: int,
        heads: int,
        dropout: Dropout,
        *,
        clip: int,
        values: bool = False,
        linear: LinearMaker = Linear,
        scaling: QueryKeyScaling | None = None,
        residual: ValueResidual | None = None,
        out: LinearMaker | None = None,
    ) -> None:
        super().__init__(d_model, heads, dropout, linear=linear, scaling=scaling, residual=residual, out=out)
        self.clip = clip
        self.key_table = _table(clip, d_model // heads)
        self.register_parameter("value_table", _table(clip, d_model // heads) if values else None)

    def _context(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        position = torch.arange(key.shape[2], device=query.device)
        relative, index = self._relative(query, position - position[:, None])
        if mask is not None:
            relative = relative + mask.bias
        if self.value_table is None:
            return attend(query, key, value, Mask(relative), self.dropout).context
        # Both sums over the keys, of values and of the table, need the same dropout mask on the weights.
        context, weights = attend_to_blocks(query, [KeyValueBlock(key, value)], relative, self.dropout)
        return context + self._of_distances(weights, index)

    def _context_of_beams(self, query: Tensor, blocks: Sequence[KeyValueBlock], live: LiveBeams) -> Tensor:
        entries = sum(block.key.shape[2] for block in blocks)
        relative, index = self._relative(query, live.distances(entries)[:, None, None])
        mask = live.seen(entries)
        bias = relative if mask is None else relative + mask.bias
        context, weights = attend_to_blocks(query, blocks, bias, self.dropout)
        return context if self.value_table is None else context + self._of_distances(weights, index)

    def _relative(self, query: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits that depend on distance, [batch, heads, queries, keys], and rows of the tables.

        `distance` of the keys from the queries broadcasts to that shape, as do the rows.
        """
        index = (distance.clamp(-self.clip, self.clip) + self.clip).expand(*query.shape[:3], -1)
        return torch.matmul(query * query.shape[-1] ** -0.5, self.key_table.t()).gather(-1, index), index

    def _of_distances(self, weights: Tensor, index: Tensor) -> Tensor:
        """Return the part of the context that depends on distance, [batch, heads, queries, d_head]."""
        assert self.value_table is not None
        # Summed in fp32, because many small weights fall on the two clipped distances and a half type would lose them.
        summands = weights.to(torch.promote_types(weights.dtype, torch.float32))
        by_distance = summands.new_zeros(*weights.shape[:3], 2 * self.clip + 1).scatter_add(-1, index, summands)
        return torch.matmul(by_distance.to(weights.dtype), self.value_table)

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        yield from super().slots()
        yield from table_slots(self, {"key_table": Role.RELATIVE, "value_table": Role.RELATIVE})


def _table(clip: int, d_head: int) -> nn.Parameter:
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(2 * clip + 1, d_head)))


def causal_average(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean of x_1 .. x_j at every position j, [batch, length, d_model] like `x`.

    With `mask` [batch, length], True at real positions, the mean is of real positions only and the others are zero.
    """
    # In a half type a cumulative sum would stop growing, since small terms vanish when added to a large one.
    dtype = torch.promote_types(x.dtype, torch.float32)
    if mask is None:
        count = torch.arange(1, x.shape[1] + 1, device=x.device)
        return (x.cumsum(1, dtype=dtype) / count[:, None]).to(x.dtype)
    padding = ~mask.unsqueeze(-1)
    count = mask.cumsum(1).clamp(min=1)
    average = x.masked_fill(padding, 0.0).cumsum(1, dtype=dtype) / count.unsqueeze(-1)
    return average.masked_fill(padding, 0.0).to(x.dtype)


class AverageCache(StateCache):
    """The sum of all inputs of each live hypothesis so far, [slots, K, d_model]."""

    def append(self, x: Tensor) -> Tensor:
        """Add one position, [N, K or 1, d_model]; return the mean of all so far, of the same shape and type."""
        total = self.current(x).add_(x)[:, : x.shape[1]]
        return (total / (self.live.positions + 1)[:, None, None]).to(x.dtype)


class AverageAttention(OwnAttention):
    """Average attention (AAN): y_j is the mean of x_1 .. x_j, through a network if there is one; i * x + o * y.

    The gates are [i; o] = sigmoid([x; y] W_g + b_g), W_g [2 d_model, 2 d_model] (Zhang, Xiong and Su 2018); without
    them the output is y. The residual around it adds x once more. The authors' code has no network by default.
    """

    roles: ClassVar[Roles] = {"gate_proj": Role.GATE}

    def __init__(self, d_model: int, *, gate: bool, ffn: nn.Module | None, linear: LinearMaker = Linear) -> None:
        super().__init__()
        self.ffn = ffn
        self.gate_proj = linear(2 * d_model, 2 * d_model) if gate else None

    def start(self, live: LiveBeams) -> AverageCache:
        """Return the cache for the hypotheses of `live`."""
        return AverageCache(live)

    def forward(self, x: Tensor, mask: Mask | None, first: FirstValues | None = None) -> Tensor:
        """Return [batch, target, d_model] for `x` of that shape; means are causal anyway, so `mask` is not used."""
        return self._gated(x, causal_average(x))

    def step(  # type: ignore[override]
        self, x: Tensor, cache: AverageCache, first: FirstValues | None = None
    ) -> Tensor:
        """Return [N, K, d_model] for one new position per hypothesis; the cache gains that position."""
        return self._gated(x, cache.append(x))

    def _gated(self, x: Tensor, average: Tensor) -> Tensor:
        y: Tensor = average if self.ffn is None else self.ffn(average)
        if self.gate_proj is None:
            return y
        of_x, of_y = torch.sigmoid(self.gate_proj(torch.cat([x, y], dim=-1))).chunk(2, dim=-1)
        return of_x * x + of_y * y


class SimplifiedAverageAttention(OwnAttention):
    """Simplified average attention (SAAN): W_o (mean of W_v x_1 + b_v .. W_v x_j + b_v) + b_o.

    It is causal self-attention with all logits equal: there are no queries, keys or heads, and no dropout on the
    weights (Zhang, Titov and Sennrich 2019).
    """

    def __init__(self, d_model: int, *, linear: LinearMaker = Linear) -> None:
        super().__init__()
        self.v_proj = linear(d_model, d_model)
        self.out_proj = linear(d_model, d_model)

    def start(self, live: LiveBeams) -> AverageCache:
        """Return the cache for the hypotheses of `live`."""
        return AverageCache(live)

    def forward(self, x: Tensor, mask: Mask | None, first: FirstValues | None = None) -> Tensor:
        """Return [batch, target, d_model] for `x` of that shape; means are causal anyway, so `mask` is not used."""
        return self.out_proj(causal_average(self.v_proj(x)))

    def step(  # type: ignore[override]
        self, x: Tensor, cache: AverageCache, first: FirstValues | None = None
    ) -> Tensor:
        """Return [N, K, d_model] for one new position per hypothesis; the cache gains that position."""
        return self.out_proj(cache.append(self.v_proj(x)))

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        yield from linear_slots(self, "v_proj", Role.ATTENTION_VALUE, 3 * self.v_proj.weight.shape[0])
        yield from linear_slots(self, "out_proj", Role.ATTENTION_OUT)


class MergedAttention(nn.Module):
    """own(x) + cross(x): attention to the target so far and attention to the memory read the same input."""

    def __init__(self, own: OwnAttention, cross: CrossAttention) -> None:
        super().__init__()
        self.own = own
        self.cross = cross

    def forward(self, x: Tensor, view: TargetView) -> Tensor:
        """Return [batch, target, d_model] for `x` of that shape, or [batch, beam, d_model] in a step."""
        return view.attend(self.own, x) + self.cross(x, view.remembered(self.cross))


class MergedAverageAttention(MergedAttention):
    """MAtt: W_o (context of the memory + mean of V x_1 .. V x_j) + b_o: Zhang, Titov and Sennrich 2019.

    `cross` has no output map. With `share_value`, as in the authors' code, V is its value map. Raises ConfigError when
    V cannot be shared because encoder and decoder are not equally wide.
    """

    def __init__(self, cross: CrossAttention, *, share_value: bool, linear: LinearMaker = Linear) -> None:
        d_model, d_memory = cross.q_proj.weight.shape[0], cross.kv_proj.weight.shape[1]
        if share_value and d_memory != d_model:
            raise ConfigError(
                f"`model.attention.share_value` needs equal widths of encoder ({d_memory}) and decoder ({d_model}): "
                "one matrix projects the states of both; set it to false"
            )
        super().__init__(AverageAttention(d_model, gate=False, ffn=None), cross)
        self.v_proj = None if share_value else linear(d_model, d_model)
        self.out_proj = linear(d_model, d_model)

    def forward(self, x: Tensor, view: TargetView) -> Tensor:
        """Return [batch, target, d_model] for `x` of that shape, or [batch, beam, d_model] in a step."""
        context = self.cross(x, view.remembered(self.cross))
        return self.out_proj(context + view.attend(self.own, self._values(x)))

    @torch.no_grad()
    def separate_values(self) -> None:
        """Copy the value map that V shares into a map for V alone, for inference; a map with shifts stays shared."""
        shared = self.cross.kv_proj
        if self.v_proj is None and isinstance(shared, Linear):
            d_model = shared.out_features // 2
            self.v_proj = Linear(shared.in_features, d_model, bias=shared.bias is not None).to(shared.weight)
            for ours, theirs in zip(self.v_proj.parameters(), shared.parameters(), strict=True):
                ours.copy_(theirs[d_model:])

    def _values(self, x: Tensor) -> Tensor:
        if self.v_proj is not None:
            return self.v_proj(x)
        # Where linear maps have a scalar shift (Fixup) only the matrix is shared; the shift stays with the memory. A
        # second one, before x, would add nothing: the weights of either attention sum to 1, so both shifts would add
        # the same vector to the result.
        shared = self.cross.kv_proj
        assert not isinstance(shared, NormedLinear)
        return shared.part(x, 1, 2)

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself; a shared value map is in `cross`."""
        if self.v_proj is not None:
            yield from linear_slots(self, "v_proj", Role.ATTENTION_VALUE, 3 * self.v_proj.weight.shape[0])
        yield from linear_slots(self, "out_proj", Role.ATTENTION_OUT)


class CellCache(StateCache):
    """The cells of all live hypotheses, [slots, K, d_model]."""

    def append(self, x: Tensor, keep: Tensor) -> Tensor:
        """Let each cell become keep * cell + x, both [N, K or 1, d_model]; return the cells, of the same shape."""
        return self.current(x).mul_(keep).add_(x)[:, : x.shape[1]]


class Ssru(OwnAttention):
    """The simpler simple recurrent unit (SSRU): y_j = ReLU(c_j), c_j = f_j * c_{j-1} + (1 - f_j) * W x_j, c_0 = 0.

    f_j = sigmoid(W_f x_j + b_f) (Kim et al. 2019, "From research to production and back: ludicrously fast neural
    machine translation"). There are no heads, and no map of the output. `value` makes W, which has no bias.
    """

    roles: ClassVar[Roles] = {"v_proj": Role.ATTENTION_VALUE, "gate_proj": Role.GATE}

    def __init__(self, d_model: int, *, linear: LinearMaker = Linear, value: LinearMaker) -> None:
        super().__init__()
        self.v_proj = value(d_model, d_model)
        self.gate_proj = linear(d_model, d_model)

    def start(self, live: LiveBeams) -> CellCache:
        """Return the cache for the hypotheses of `live`."""
        return CellCache(live)

    def forward(self, x: Tensor, mask: Mask | None, first: FirstValues | None = None) -> Tensor:
        """Return [batch, target, d_model] for `x` of that shape; cells are causal anyway, so `mask` is not used."""
        return decayed_sum(*self._inputs(x)).relu().to(x.dtype)

    def step(  # type: ignore[override]
        self, x: Tensor, cache: CellCache, first: FirstValues | None = None
    ) -> Tensor:
        """Return [N, K, d_model] for one new position per hypothesis; the cache gains that position."""
        return cache.append(*self._inputs(x)).relu().to(x.dtype)

    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the amount added to each cell, and the share of itself that each keeps."""
        value, gate = self.v_proj(x), self.gate_proj(x)
        # In a half type, a gate above 0.998 (bf16) is 1: its cell would forget nothing and take nothing in.
        wide = torch.promote_types(gate.dtype, torch.float32)
        gate = gate.to(wide)
        return torch.sigmoid(-gate) * value.to(wide), torch.sigmoid(gate)
