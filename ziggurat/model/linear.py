"""Linear maps y = x W^T + b by the faster of the two fp32 kernels that torch has for CPUs, MKL's and oneDNN's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ziggurat.model.roles import Role, Roles

if TYPE_CHECKING:
    from ziggurat.model.low_rank import LowRank

Kernel = Literal["auto", "torch", "onednn"]

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x W^T + b of x [..., in], W [out, in] and b [out] or None."""

_SMALL = 1 << 20
"""Multiplications below which a call costs more than it saves."""


class _Choice:
    kernel: Kernel = "auto"


@contextmanager
def kernel(name: Kernel) -> Iterator[None]:
    """Context in which products take this kernel: `torch` torch's choice, `onednn`, or `auto` (the default)."""
    before, _Choice.kernel = _Choice.kernel, name
    try:
        yield
    finally:
        _Choice.kernel = before


@functools.cache
def _onednn_is_faster() -> bool:
    """Return whether fp32 products should go to oneDNN: on AMD's CPUs with AVX-512.

    torch gives them to MKL, which keeps to AVX2 on processors that are not Intel's. oneDNN generates code for the
    instructions that the processor has, and is twice as fast there (benchmarks/README.md). No time is measured, so a
    run and its resumption take the same kernel.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False


def _by_onednn(a: Tensor, b: Tensor, rows: int) -> bool:
    if _Choice.kernel == "torch" or a.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if not a.dtype == b.dtype == torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    return rows > 0 and (_Choice.kernel == "onednn" or (rows * b.numel() >= _SMALL and _onednn_is_faster()))


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    # Some columns of a wider matrix, such as those of an LSTM's weight that belong to its input: for them oneDNN has a
    # plain loop alone: 430 ms for a product [128, 256] x [256, 512] (Zen 4).
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

    oneDNN copies its first factor where it is transposed, so the narrower one comes first.
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
    """Return a b^T, [m, n], for `a` [m, k] and `b` [n, k], either of them a transposed view or not.

    For hand-written gradients: nothing is recorded.
    """
    return _onednn(a, b) if _by_onednn(a, b, a.shape[0]) else torch.mm(a, b.t())


class Linear(nn.Linear):
    """torch.nn.Linear whose product goes through `linear`.

    Attributes:
        multiply: what is called in its place; see ziggurat.model.fast.fake_quantised.
        low_rank: updates of the map, whose own weights are then frozen; None: there are none.
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
        """Return part `number` of the `parts` equal ones of the output, [..., out / parts], for `x` [..., in]."""
        bias = None if self.bias is None else self.bias.chunk(parts)[number]
        y = self.multiply(x, self.weight.chunk(parts)[number], bias)
        return y if self.low_rank is None else self.low_rank.of_part(x, y, number)


class ShiftedLinear(nn.Module):
    """y = (x + shift) W^T, with one scalar [1], from 0, in place of a bias vector: Fixup (Zhang, Dauphin and Ma 2019).

    Every linear map of the layers has one; the toolkit zero leaves it out on attention's memory and output.
    """

    roles: ClassVar[Roles] = {"shift": Role.WIRING}  # that of the matrix is said by the module that owns this map
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
        """Return part `number` of the `parts` equal ones of x W^T, [..., d_out / parts], without the shift."""
        y = linear(x, self.weight.chunk(parts)[number])
        return y if self.low_rank is None else self.low_rank.of_part(x, y, number)


class NormedLinear(nn.Module):
    """N(x) W^T + b: a norm and the linear map that alone reads it (Sub-LN, Wang et al. 2022)."""

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
