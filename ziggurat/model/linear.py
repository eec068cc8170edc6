"""Linear maps using the faster of two fp32 CPU kernels, and feed-forward networks made of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ziggurat.model.accelerator import has_cpu_kernels
from ziggurat.model.dropout import Dropout
from ziggurat.model.roles import Role, Roles, Slot, linear_slots, table_slots

if TYPE_CHECKING:
    from ziggurat.model.low_rank import LowRank


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The type of a product: x W^T + b for x [..., in], W [out, in] and b [out] or None."""

_SMALL = 1 << 20
"""_SMALL is the number of multiplications below which a call costs more than it saves."""


@functools.cache
def _onednn_is_faster() -> bool:
    """Return whether fp32 products should go to oneDNN: on AMD's CPUs with AVX-512.

    torch uses MKL, which is limited to AVX2 on non-Intel processors. oneDNN generates code for the instructions that
    the processor has, and is twice as fast there (benchmarks/README.md). No time is measured, so a run and its
    resumption take the same kernel.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False


def _by_onednn(a: Tensor, b: Tensor, rows: int) -> bool:
    if not has_cpu_kernels(a) or torch.compiler.is_compiling():
        return False
    if not a.dtype == b.dtype == torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    return rows * b.numel() >= _SMALL and _onednn_is_faster()


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    # A column slice of a wider matrix, such as the input columns of an LSTM's weight: oneDNN handles it with a plain
    # loop, which takes 430 ms for a product [128, 256] x [256, 512] (Zen 4).
    if not (b.is_contiguous() or b.t().is_contiguous()):
        b = b.contiguous()
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    """x W^T + b and its gradients, every product by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        g = gradients[0].reshape(-1, weight.shape[0])
        into_x = into_weight = into_bias = None
        if ctx.needs_input_grad[0]:
            into_x = _onednn(g, weight.t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            into_weight = _transposed_product(g, x.reshape(-1, x.shape[-1]))
        if ctx.needs_input_grad[2]:
            into_bias = g.sum(0)
        return into_x, into_weight, into_bias


def _transposed_product(g: Tensor, x: Tensor) -> Tensor:
    """Return g^T x, [n, k] for g [m, n] and x [m, k].

    oneDNN copies its first factor if it is transposed, so the narrower one comes first.
    """
    if g.shape[1] <= x.shape[1]:
        return _onednn(g.t(), x.t())
    return _onednn(x.t(), g.t()).t()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, [..., out], for `x` [..., in], `weight` [out, in] and `bias` [out]."""
    if not _by_onednn(x, weight, x.numel() // max(1, x.shape[-1])):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (x, weight, bias)):
        return _OneDnnLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return _onednn(x, weight, bias)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b^T, [m, n], for `a` [m, k] and `b` [n, k], either of which may be a transposed view.

    For hand-written gradients: nothing is recorded.
    """
    return _onednn(a, b) if _by_onednn(a, b, a.shape[0]) else torch.mm(a, b.t())


class Linear(nn.Linear):
    """torch.nn.Linear whose product goes through `linear`.

    Attributes:
        multiply: the product that is called; see ziggurat.model.fast.int8.
        low_rank: updates of the map, whose weights are then frozen; None: no updates.
    """

    multiply: Multiply
    low_rank: LowRank | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.multiply = linear
        self.register_module("low_rank", None)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        y = self.multiply(x, self.weight, self.bias)
        return y if self.low_rank is None else self.low_rank(x, y)

    def part(self, x: Tensor, number: int, parts: int) -> Tensor:
        """Return part `number` of the output, which has `parts` equal parts, [..., out / parts], for `x` [..., in]."""
        bias = None if self.bias is None else self.bias.chunk(parts)[number]
        y = self.multiply(x, self.weight.chunk(parts)[number], bias)
        return y if self.low_rank is None else self.low_rank.of_part(x, y, number)


class ShiftedLinear(nn.Module):
    """y = (x + shift) W^T, with one scalar [1], at first 0, in place of a bias: Fixup (Zhang, Dauphin and Ma 2019).

    Every linear map of the layers has one; the toolkit zero leaves it out on attention's memory and output.
    """

    roles: ClassVar[Roles] = {"shift": Role.WIRING}  # the module that owns this map assigns the matrix's role
    low_rank: LowRank | None

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.shift = nn.Parameter(torch.zeros(1))
        self.bias: nn.Parameter | None = None
        self.register_module("low_rank", None)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., d_out] for `x` [..., d_in]."""
        shifted = x + self.shift
        y = linear(shifted, self.weight)
        return y if self.low_rank is None else self.low_rank(shifted, y)

    def part(self, x: Tensor, number: int, parts: int) -> Tensor:
        """Return part `number` of x W^T, which has `parts` equal parts, [..., d_out / parts], without the shift."""
        y = linear(x, self.weight.chunk(parts)[number])
        return y if self.low_rank is None else self.low_rank.of_part(x, y, number)


class NormedLinear(nn.Module):
    """N(x) W^T + b: a norm and the only linear map that reads it (Sub-LN, Wang et al. 2022)."""

    def __init__(self, norm: nn.Module, width_in: int, width_out: int, *, bias: bool = True) -> None:
        super().__init__()
        self.norm = norm
        self.map = Linear(width_in, width_out, bias=bias)

    @property
    def weight(self) -> Tensor:
        """W [out, in]."""
        return self.map.weight

    @property
    def bias(self) -> Tensor | None:
        """b [out], or None."""
        return self.map.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        return self.map(self.norm(x))


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
    """dropout(activation(x W_1 + b_1)) W_2 + b_2: Vaswani et al. 2017, equation 2; with `depth` n, W_1 to W_n.

    Args:
        d_model: width of input and output.
        d_ff: inner width.
        activation: "relu", "gelu" or "silu".
        dropout: dropout after the activation.
        linear: makes the two maps from (width in, width out).
        out: makes the second one; None: as `linear`.
        shifted: add one trained scalar, from 0, before the activation (Fixup).
        depth: number of maps, at least 2; an activation and dropout follow each but the last.
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
        depth: int = 2,
    ) -> None:
        super().__init__(linear(d_model, d_ff), (out or linear)(d_ff, d_model), dropout, shifted=shifted)
        self.between = nn.ModuleList(linear(d_ff, d_ff) for _ in range(depth - 2))
        self.activation = _ACTIVATIONS[activation]

    @property
    def is_plain(self) -> bool:
        """True if it is two linear maps with a ReLU between them and nothing else."""
        linear = isinstance(self.in_proj, Linear) and isinstance(self.out_proj, Linear)
        return linear and self.activation is F.relu and self.shift is None and not self.between

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, d_model] for `x` of that shape."""
        active = self._active(self.in_proj(x))
        for inner in self.between:
            active = self._active(inner(active))
        return self.out_proj(active)

    def _active(self, inner: Tensor) -> Tensor:
        shifted = self._shifted(inner)
        if self.activation is F.relu and isinstance(self.dropout, Dropout):
            active: Tensor = self.dropout(shifted, relu=True)
            return active
        return self.dropout(self.activation(shifted))

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        yield from table_slots(self, self.roles)
        for number in range(len(self.between)):
            yield from linear_slots(self.between, str(number), Role.FFN_IN)


class GatedFeedForward(_TwoMaps):
    """SwiGLU: dropout(silu(x W_1) * x W_3) W_2, no biases: Shazeer 2020, equation 6.

    The inner width is 2/3 d_ff, rounded up to a multiple of gcd(64, d_ff), so that it has as many parameters as
    FeedForward. Other arguments are those of FeedForward. W_1 and W_3 are one matrix, `in_proj`, in this order.
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
