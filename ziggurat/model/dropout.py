"""Dropout of elements (Srivastava et al. 2014) and of whole residual branches."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ziggurat.model.accelerator import has_cpu_kernels


def random_bytes(like: Tensor) -> Tensor:
    """Return uniform random bytes (uint8) shaped like `like`, from torch's CPU generator.

    It is a registered operator, so torch.compile calls it and does not look inside. One 64-bit draw decides eight
    elements, where bernoulli_ spends one draw each: in a bf16 update on a CPU bernoulli_ took 23 % of the time.
    """
    return torch.ops.ziggurat.random_bytes(like)


def _random_bytes(like: Tensor) -> Tensor:
    count = like.numel()
    words = torch.empty((count + 7) // 8, dtype=torch.int64)
    # Draws all 64 bits: random_() without bounds leaves the sign bit zero, which would bias every eighth element.
    words.random_(torch.iinfo(torch.int64).min, None)
    return words.view(torch.uint8)[:count].view(like.shape)


_LIBRARY = torch.library.Library("ziggurat", "FRAGMENT")
# Tagged as seeded, so that a compiler neither merges two draws into one nor repeats a draw in the backward pass.
_LIBRARY.define("random_bytes(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.impl("random_bytes", _random_bytes, "CPU")
torch.library.register_fake(
    "ziggurat::random_bytes", lambda like: like.new_empty(like.shape, dtype=torch.uint8), lib=_LIBRARY
)


def _threshold(p: float) -> int:
    """Return the number of the 256 bytes that drop an element."""
    return min(255, max(1, round(p * 256)))


def _kept(noise: Tensor, threshold: int, dtype: torch.dtype) -> Tensor:
    """Return 1 where an element is kept and 0 elsewhere, as numbers, because products with booleans are far slower."""
    if torch.compiler.is_compiling():
        return (noise >= threshold).to(dtype)
    return torch.ge(noise, threshold, out=torch.empty(noise.shape, dtype=dtype))


class _ByteDropout(torch.autograd.Function):
    """x * kept / share kept, plus `residual` if there is one; only the random bytes are saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, threshold: int) -> Tensor:
        noise = random_bytes(x)
        ctx.save_for_backward(noise)
        ctx.threshold, ctx.scale, ctx.dtype = threshold, 256.0 / (256 - threshold), x.dtype
        kept = _kept(noise, threshold, x.dtype)
        if residual is None:
            return kept.mul_(x).mul_(ctx.scale)
        if residual.dtype == x.dtype:
            return torch.addcmul(residual, x, kept, value=ctx.scale)
        # A bf16 branch on an fp32 stream: given mixed types, addcmul would copy both factors.
        return torch.add(residual, kept.mul_(x), alpha=ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (noise,) = ctx.saved_tensors
        (gradient,) = gradients
        into_x = _kept(noise, ctx.threshold, ctx.dtype).mul_(gradient.to(ctx.dtype)).mul_(ctx.scale)
        return into_x, gradient if ctx.needs_input_grad[1] else None, None


class _ByteDropoutOfRelu(torch.autograd.Function):
    """relu(x) * kept / share kept, in fewer passes than applying both in turn, with identical numbers.

    Only the result is saved, which the next linear map saves anyway: it is positive exactly where x is positive and was
    kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: int) -> Tensor:
        ctx.scale = 256.0 / (256 - threshold)
        # Takes the positive part first, since a dropped -inf would become NaN.
        y = x.clamp_min(0).mul_(_kept(random_bytes(x), threshold, x.dtype)).mul_(ctx.scale)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(gradients[0], y, 0).mul_(ctx.scale), None


class Dropout(nn.Module):
    """Zero elements with probability `p` in training and scale the rest by 1/(1-p).

    Args:
        p: probability of an element being dropped.
        exact: use p unchanged; otherwise, on CPU, p is rounded to the nearest 1/256 (at least 1/256), and the scale is
            the inverse of the share that is then kept, so the expectation is unchanged.
    """

    def __init__(self, p: float, exact: bool = False) -> None:
        super().__init__()
        self.p = p
        self.exact = exact

    def forward(self, x: Tensor, residual: Tensor | None = None, *, relu: bool = False) -> Tensor:
        """Return `x` of any shape with dropout applied; with `residual`, of that shape too, their sum in one pass.

        `relu`: dropout of the positive part of `x`.
        """
        if relu:
            fused = self.training and self.p > 0.0 and not self.exact and has_cpu_kernels(x) and residual is None
            if fused and not torch.compiler.is_compiling():
                return _ByteDropoutOfRelu.apply(x, _threshold(self.p))  # type: ignore[no-untyped-call]
            x = nn.functional.relu(x)
        if not self.training or self.p == 0.0:
            return x if residual is None else residual + x
        if self.exact or not has_cpu_kernels(x):
            dropped = nn.functional.dropout(x, self.p)
            return dropped if residual is None else residual + dropped
        return _ByteDropout.apply(x, residual, _threshold(self.p))  # type: ignore[no-untyped-call]


class StochasticBranch(nn.Module):
    """b / (1 - p) dropout(fx) in training, b ~ Bernoulli(1 - p); fx itself in evaluation.

    With `unit` "batch" each sub-layer draws one b for the whole batch: stochastic sub-layers, Pham et al. 2019, whose p
    grows with the number of the layer. With "sample" it draws one b for each element of dimension 0: DropPath, Larsson
    et al. 2017, as in TorchScale. The branch is computed in any case.

    `dropout` drops elements; called as dropout(fx, residual=...) it also adds. p is less than 1.
    """

    p: Tensor

    def __init__(self, dropout: nn.Module, p: float, unit: Literal["batch", "sample"]) -> None:
        super().__init__()
        self.dropout = dropout
        self.unit = unit
        # A tensor, not a number: p differs from layer to layer, and one compiled graph must serve them all.
        self.register_buffer("p", torch.tensor([p]), persistent=False)

    def forward(self, fx: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `fx` [batch, ..., d_model] kept or dropped; with `residual`, of that shape too, their sum."""
        if self.training:
            draws = fx.shape[0] if self.unit == "sample" else 1
            kept = torch.rand(draws, device=fx.device) >= self.p
            factor = (kept / (1 - self.p)).to(fx.dtype)
            fx = fx * factor.view(draws, *[1] * (fx.dim() - 1))
        return self.dropout(fx, residual=residual)
