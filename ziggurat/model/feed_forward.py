"""Position-wise feed-forward networks: two linear maps, plain or with a gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.dropout import Dropout
from ziggurat.model.linear import Linear
from ziggurat.model.roles import Role, Roles, Slot, table_slots

_without_bias = partial(Linear, bias=False)
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class _TwoMaps(nn.Module):
    """The base of both networks: two linear maps, dropout between them, Fixup's scalar [1] before the activation."""

    roles: ClassVar[Roles] = {"in_proj": Role.FFN_IN, "out_proj": Role.FFN_OUT, "shift": Role.WIRING}
    shift: nn.Parameter | None

    def __init__(self, in_proj: nn.Module, out_proj: nn.Module, dropout: nn.Module, *, shifted: bool) -> None:
        super().__init__()
        self.in_proj = in_proj
        self.out_proj = out_proj
        self.register_parameter("shift", nn.Parameter(torch.zeros(1)) if shifted else None)
        self.dropout = dropout

    def _shifted(self, inner: Tensor) -> Tensor:
        return inner if self.shift is None else inner + self.shift


class FeedForward(_TwoMaps):
    """dropout(activation(x W_1 + b_1)) W_2 + b_2: Vaswani et al. 2017, equation 2.

    Args:
        d_model: width of input and output.
        d_ff: inner width.
        activation: "relu", "gelu" or "silu".
        dropout: after the activation.
        linear: makes the two maps from (width in, width out).
        out: makes the second one; None: as `linear`.
        shifted: add one trained scalar, from 0, before the activation (Fixup).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str,
        dropout: nn.Module,
        *,
        linear: Callable[[int, int], nn.Module] = Linear,
        out: Callable[[int, int], nn.Module] | None = None,
        shifted: bool = False,
    ) -> None:
        super().__init__(linear(d_model, d_ff), (out or linear)(d_ff, d_model), dropout, shifted=shifted)
        self.activation = _ACTIVATIONS[activation]

    @property
    def is_plain(self) -> bool:
        """True if it is two linear maps with a ReLU between them and nothing else."""
        linear = isinstance(self.in_proj, Linear) and isinstance(self.out_proj, Linear)
        return linear and self.activation is F.relu and self.shift is None

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, d_model] for `x` of that shape."""
        inner = self._shifted(self.in_proj(x))
        if self.activation is F.relu and isinstance(self.dropout, Dropout):
            active = self.dropout(inner, relu=True)
        else:
            active = self.dropout(self.activation(inner))
        return self.out_proj(active)


class GatedFeedForward(_TwoMaps):
    """SwiGLU: dropout(silu(x W_1) * x W_3) W_2, no biases: Shazeer 2020, equation 6.

    The inner width is 2/3 d_ff, rounded up to a multiple of gcd(64, d_ff), so that it has as many parameters as
    FeedForward, of which it has the other arguments too. W_1 and W_3 are one matrix, `in_proj`, in this order.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        dropout: nn.Module,
        *,
        linear: Callable[[int, int], nn.Module] = _without_bias,
        out: Callable[[int, int], nn.Module] | None = None,
        shifted: bool = False,
    ) -> None:
        step = math.gcd(64, d_ff)
        width = -(-2 * d_ff // (3 * step)) * step
        super().__init__(linear(d_model, 2 * width), (out or linear)(width, d_model), dropout, shifted=shifted)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, d_model] for `x` of that shape."""
        opened, carried = self.in_proj(x).chunk(2, dim=-1)
        return self.out_proj(self.dropout(F.silu(self._shifted(opened)) * carried))

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        weight: Tensor = self.in_proj.weight  # type: ignore[assignment]
        gate, value = weight.chunk(2)
        yield Slot(gate, Role.FFN_IN, "in_proj.weight[gate]")
        yield Slot(value, Role.FFN_IN, "in_proj.weight[value]")
        yield from table_slots(self, {"out_proj": Role.FFN_OUT, "shift": Role.WIRING})
