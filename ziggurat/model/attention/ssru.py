"""The simpler simple recurrent unit, a recurrent layer in place of attention to the target (Kim et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ziggurat.model.attention.cache import LiveBeams, Mask, StateCache
from ziggurat.model.attention.multihead import FirstValues, LinearMaker, OwnAttention
from ziggurat.model.linear import Linear
from ziggurat.model.lstm import decayed_sum
from ziggurat.model.roles import Role, Slot, linear_slots


class CellCache(StateCache):
    """The cells of all live hypotheses, [slots, K, d_model]."""

    def append(self, x: Tensor, keep: Tensor) -> Tensor:
        """Let each cell become keep * cell + x, both [N, K, d_model]; return the cells, of the same shape.

        In a first step it is one beam, [N, 1, d_model], that stands for all.
        """
        return self.current(x).mul_(keep).add_(x)[:, : x.shape[1]]


class Ssru(OwnAttention):
    """The simpler simple recurrent unit (SSRU): y_j = ReLU(c_j), c_j = f_j * c_{j-1} + (1 - f_j) * W x_j, c_0 = 0.

    f_j = sigmoid(W_f x_j + b_f) (Kim et al. 2019, "From research to production and back: ludicrously fast neural
    machine translation"). There are no heads, and no map of the output.

    Args:
        d_model: width of input and output.
        linear: makes the map of the gate.
        value: makes the map of the cell's input, which has no bias.
    """

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
        """Return what the cells gain, and what they keep of themselves."""
        value, gate = self.v_proj(x), self.gate_proj(x)
        # A gate in a half type is 1 from 0.998 on (bf16): its cell would forget nothing, and take nothing in.
        wide = torch.promote_types(gate.dtype, torch.float32)
        gate = gate.to(wide)
        return torch.sigmoid(-gate) * value.to(wide), torch.sigmoid(gate)

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        yield from linear_slots(self, "v_proj", Role.ATTENTION_VALUE)
        yield from linear_slots(self, "gate_proj", Role.GATE)
