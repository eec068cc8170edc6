"""Self-attention with relative positions (Shaw et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ziggurat.model.attention.cache import KeyValueBlock, LiveBeams, Mask
from ziggurat.model.attention.multihead import LinearMaker, SelfAttention, ValueResidual, attend, attend_to_blocks
from ziggurat.model.attention.scaling import QueryKeyScaling
from ziggurat.model.dropout import Dropout
from ziggurat.model.linear import Linear
from ziggurat.model.roles import Role, Slot, table_slots


class RelativeAttention(SelfAttention):
    """Self-attention with the logits q_i (k_j + r_c(j-i)) / sqrt(d_head), c(m) = clip(m, -k, k) + k.

    The context is sum_j a_ij v_j, or, with a second table s, sum_j a_ij (v_j + s_c(j-i)) (Shaw et al. 2018, equations
    3 and 4). The tables [2k + 1, d_head] are shared by the heads. No tensor is [length, length, d_head]: the
    product of queries and table is spread over the keys by distance, and the weights are summed by distance.

    Arguments are those of SelfAttention, `clip`, which is k, and `values`: whether there is the table s. Scaling and
    value residual leave the tables as they are.
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
        # Both sums over the keys, of values and of the table, need the weights with the same ones dropped.
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
        """Return the part of the logits that goes by distance, [batch, heads, queries, keys], and rows of the tables.

        `distance` of the keys from the queries broadcasts to that shape, and so has the row of each of them.
        """
        index = (distance.clamp(-self.clip, self.clip) + self.clip).expand(*query.shape[:3], -1)
        return torch.matmul(query * query.shape[-1] ** -0.5, self.key_table.t()).gather(-1, index), index

    def _of_distances(self, weights: Tensor, index: Tensor) -> Tensor:
        """Return the part of the context that goes by distance, [batch, heads, queries, d_head]."""
        assert self.value_table is not None
        # Summed in fp32: many small weights fall on the two clipped distances, and a half type would lose them.
        summands = weights.to(torch.promote_types(weights.dtype, torch.float32))
        by_distance = summands.new_zeros(*weights.shape[:3], 2 * self.clip + 1).scatter_add(-1, index, summands)
        return torch.matmul(by_distance.to(weights.dtype), self.value_table)

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        yield from super().slots()
        yield from table_slots(self, {"key_table": Role.RELATIVE, "value_table": Role.RELATIVE})


def _table(clip: int, d_head: int) -> nn.Parameter:
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(2 * clip + 1, d_head)))
