"""Inverted dropout (Srivastava et al. 2014) with masks from random bytes where that is faster (CPU)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Dropout", "random_bytes"]


def random_bytes(like: Tensor) -> Tensor:
    """Return uniform random bytes (uint8) shaped like `like`, from torch's CPU generator.

    It is an operator of its own, so that torch.compile takes it as it is. One 64-bit draw decides eight elements,
    where bernoulli_ spends one draw each: in a bf16 update on CPU bernoulli_ took 23 % of the time. The draw covers
    all 64 bits: random_() without bounds leaves the sign bit zero, which would bias every eighth element.
    """
    noise: Tensor = torch.ops.ziggurat.random_bytes(like)
    return noise


def _random_bytes(like: Tensor) -> Tensor:
    count = like.numel()
    words = torch.empty((count + 7) // 8, dtype=torch.int64)
    words.random_(torch.iinfo(torch.int64).min, None)
    return words.view(torch.uint8)[:count].view(like.shape)


_LIBRARY = torch.library.Library("ziggurat", "FRAGMENT")
# Seeded: two draws are never taken for one, nor one drawn again for the backward pass.
_LIBRARY.define("random_bytes(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.impl("random_bytes", _random_bytes, "CPU")
torch.library.register_fake(
    "ziggurat::random_bytes", lambda like: like.new_empty(like.shape, dtype=torch.uint8), lib=_LIBRARY
)


def _kept(noise: Tensor, threshold: int, dtype: torch.dtype) -> Tensor:
    """Return 1 where an element is kept and 0 where it is dropped; far faster as numbers than as truth values."""
    if torch.compiler.is_compiling():
        return (noise >= threshold).to(dtype)
    return torch.ge(noise, threshold, out=torch.empty(noise.shape, dtype=dtype))


class _ByteDropout(torch.autograd.Function):
    """x * kept / share kept, plus `residual` if there is one; the random bytes are all that is saved."""

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
        # A bf16 branch on an fp32 stream: of mixed types addcmul would make copies of both factors.
        return torch.add(residual, kept.mul_(x), alpha=ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (noise,) = ctx.saved_tensors
        (gradient,) = gradients
        into_x = _kept(noise, ctx.threshold, ctx.dtype).mul_(gradient.to(ctx.dtype)).mul_(ctx.scale)
        return into_x, gradient if ctx.needs_input_grad[1] else None, None


class Dropout(nn.Module):
    """Zero elements with probability `p` in training and scale the rest by 1/(1-p).

    Args:
        p: probability of an element being dropped.
        exact: use p as it is; otherwise, on CPU, p is rounded to the nearest 1/256 (at least 1/256) and the
            scale is the exact inverse of the rounded kept share, so the expectation is unchanged.
    """

    def __init__(self, p: float, exact: bool = False) -> None:
        super().__init__()
        self.p = p
        self.exact = exact

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `x` of any shape with dropout applied; with `residual`, of that shape too, their sum in one pass."""
        if not self.training or self.p == 0.0:
            return x if residual is None else residual + x
        if self.exact or x.device.type != "cpu":
            dropped = nn.functional.dropout(x, self.p)
            return dropped if residual is None else residual + dropped
        threshold = min(255, max(1, round(self.p * 256)))
        result: Tensor = _ByteDropout.apply(x, residual, threshold)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        """Return p for printing."""
        return f"p={self.p}" + (", exact" if self.exact else "")
