"""Average attention: each target position reads the mean of all positions up to it (Zhang, Xiong and Su 2018)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ziggurat.model.attention.base import OwnAttention
from ziggurat.model.attention.cache import StateCache
from ziggurat.model.attention.live import LiveBeams
from ziggurat.model.attention.mask import Mask
from ziggurat.model.attention.multihead import LinearMaker
from ziggurat.model.attention.values import FirstValues
from ziggurat.model.linear import Linear
from ziggurat.model.roles import Role, Slot, linear_slots


def causal_average(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean of x_1 .. x_j at every position j, [batch, length, d_model] like `x`.

    With `mask` [batch, length], True at real positions, the mean is of real positions only and the others are zero.
    """
    # A cumulative sum in a half type would stop growing: small addends vanish beside a large sum.
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
        """Add one position, [N, K, d_model]; return the mean of all so far, of the same shape and type.

        In a first step it is one beam, [N, 1, d_model], that stands for all.
        """
        total = self.current(x).add_(x)[:, : x.shape[1]]
        return (total / (self.live.positions + 1)[:, None, None]).to(x.dtype)


class AverageAttention(OwnAttention):
    """Average attention (AAN): y_j is the mean of x_1 .. x_j, through a network if there is one; i * x + o * y.

    The gates are [i; o] = sigmoid([x; y] W_g + b_g), W_g [2 d_model, 2 d_model] (Zhang, Xiong and Su 2018). The
    residual around it adds x once more. The authors' code has no network by default.

    Args:
        d_model: width of input and output.
        gate: whether there are gates; without them the output is y.
        ffn: position-wise network on the mean, or None.
        linear: makes the map of the gates.
    """

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

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself, outside its network."""
        if self.gate_proj is not None:
            yield from linear_slots(self, "gate_proj", Role.GATE)


class SimplifiedAverageAttention(OwnAttention):
    """Simplified average attention (SAAN): W_o (mean of W_v x_1 + b_v .. W_v x_j + b_v) + b_o.

    It is causal self-attention with all logits equal: there are no queries, keys or heads, and no dropout on the
    weights (Zhang, Titov and Sennrich 2019).

    Args:
        d_model: width of input and output.
        linear: makes the linear maps.
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
