"""Int8 quantisation: how rows are quantised, and maps that compute with quantised rows during training.

Inference uses the int8 maps of ziggurat.model.fast.compiled, or of ziggurat.model.fast.packed where that is not built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ziggurat.model.embedding import InputEmbedding, OutputProjection
from ziggurat.model.linear import Linear, product

# As in compiled.c.
LEVELS = 127
"""LEVELS is the number of steps from zero to the largest number of a row."""
CENTRE = 128
"""CENTRE is the unsigned byte that stands for zero."""
SMALLEST = 1e-30
"""SMALLEST stands for the largest number of a row of zeros: a smaller one could make the step's reciprocal infinite."""


def whole_rows(rows: Tensor, *, halves_up: bool = False) -> tuple[Tensor, Tensor]:
    """Return `rows` [n, k] in whole numbers of steps, in their own type, and the step of each row [n, 1].

    `halves_up`: a number half-way between two steps becomes the larger one, as for inputs; otherwise the even one, as
    for weights. A row with a number that is not finite becomes NaN.
    """
    step = rows.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / LEVELS
    if halves_up:  # same order of operations as the engines, whose bytes are unsigned
        return (rows * step.reciprocal() + (CENTRE + 0.5)).floor() - CENTRE, step
    return (rows / step).round(), step


class _Rounded(torch.autograd.Function):
    """Rows rounded to whole steps and dequantised; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        whole, step = whole_rows(rows)
        return whole * step

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def quantised_rows(x: Tensor) -> Tensor:
    """Return `x` [..., k] with every row rounded to whole steps, in fp32 or wider; its gradient passes unchanged."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _Rounded.apply(wide)  # type: ignore[no-untyped-call]


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> tuple[Tensor, ...]:
    """Return the products of the rows of `x` [..., in], and the whole numbers and steps that their gradients need."""
    with torch.autocast(x.device.type, enabled=False):
        inputs, input_step = whole_rows(x.reshape(-1, x.shape[-1]).to(weight.dtype), halves_up=True)
        weights, weight_step = whole_rows(weight)
        # Whole numbers up to 127 are also exact in bf16; only their sums are multiplied by the steps.
        y = product(inputs.to(compute), weights.to(compute)).to(weight.dtype) * weight_step.squeeze(1)
        # Exactly as in Int8Linear, to the last digit; otherwise a number could later round to another byte.
        y = y * input_step if bias is None else torch.addcmul(bias, y, input_step)
    y = y.to(compute).view(*x.shape[:-1], weight.shape[0])
    # Saved as bytes: a quarter of the memory in which an ordinary product saves its inputs.
    return y, inputs.to(torch.int8), input_step, weights.to(torch.int8), weight_step


def _shapes(x: Tensor, weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> tuple[Tensor, ...]:
    rows = x.shape[:-1].numel()
    return (
        x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=compute),
        x.new_empty((rows, x.shape[-1]), dtype=torch.int8),
        x.new_empty((rows, 1), dtype=weight.dtype),
        torch.empty_like(weight, dtype=torch.int8),
        weight.new_empty((weight.shape[0], 1)),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, bias, ctx.compute = inputs
    ctx.save_for_backward(*output[1:])
    ctx.dtype, ctx.shape, ctx.has_bias = x.dtype, x.shape, bias is not None


def _gradients(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias as if the quantised numbers were the numbers themselves."""
    inputs, input_step, weights, weight_step = ctx.saved_tensors
    g, compute = gradients[0].reshape(-1, weights.shape[0]).to(weight_step.dtype), ctx.compute
    into_x = into_weight = into_bias = None
    if ctx.needs_input_grad[0]:
        scaled = (g * weight_step.squeeze(1)).to(compute)
        into_x = product(scaled, weights.to(compute).t()).to(ctx.dtype).view(ctx.shape)
    if ctx.needs_input_grad[1]:
        scaled = (g * input_step).to(compute)
        into_weight = product(scaled.t(), inputs.to(compute).t()).to(weight_step.dtype)
    if ctx.has_bias and ctx.needs_input_grad[2]:
        into_bias = g.sum(0)
    return into_x, into_weight, into_bias, None


# Registered operators, which are opaque to torch.compile: it cannot trace an autograd function whose shapes vary (torch
# 2.13).
_LIBRARY = torch.library.Library("ziggurat", "FRAGMENT")
_NAME = "ziggurat::quantised_linear"
_LIBRARY.define(
    "quantised_linear(Tensor x, Tensor weight, Tensor? bias, ScalarType compute) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("quantised_linear", _sums, "CompositeExplicitAutograd")
torch.library.register_fake(_NAME, _shapes, lib=_LIBRARY)
torch.library.register_autograd(_NAME, _gradients, setup_context=_keep, lib=_LIBRARY)

STEP_BY_STEP: dict[Any, Callable[..., Any]] = {torch.ops.ziggurat.quantised_linear.default: _sums}
"""STEP_BY_STEP serves the same purpose as that of ziggurat.model.lstm."""


def quantised_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b with quantised rows, [..., out], for `x` [..., in], `weight` [out, in] and `bias` [out].

    Under autocast, the products and the result have its type.
    """
    kind = x.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return torch.ops.ziggurat.quantised_linear(x, weight, bias, compute)[0]


def quantise(model: nn.Module) -> None:
    """Make every map of `model` that int8 translation quantises compute with quantised rows; it can be trained.

    These are its linear maps, the output projection and the rows of the embeddings. Maps of other kinds are left
    unchanged (ziggurat.model.fast.packed.pack). Parameters and their names stay the same.
    """
    for module in model.modules():
        if isinstance(module, Linear | OutputProjection):
            module.multiply = quantised_linear
        if isinstance(module, InputEmbedding | OutputProjection):
            module.rounded = quantised_rows


class QuantisedEmbedding(nn.Module):
    """Embeddings `weight` [rows, width] stored as whole numbers of steps, a byte each, for inference."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        whole, self.step = whole_rows(weight.detach())
        self.whole = whole.to(torch.int8)

    def forward(self, ids: Tensor) -> Tensor:
        """Return [..., width] for `ids` [...]."""
        return self.whole[ids] * self.step[ids]
