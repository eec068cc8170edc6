"""Maps in bytes for training (fake-quantised), and maps packed for inference on CPUs, in fp32, bf16 or int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ziggurat.model.attention.multihead import CrossAttention, SelfAttention
from ziggurat.model.attention.variants import MergedAverageAttention
from ziggurat.model.embedding import InputEmbedding, OutputProjection
from ziggurat.model.fast.compiled import (
    CENTRE,
    LEVELS,
    SMALLEST,
    CompiledFeedForward,
    CompiledLinear,
    Precision,
    multiplies,
)
from ziggurat.model.linear import FeedForward, Linear, product
from ziggurat.system.errors import ConfigError


def _whole_rows(rows: Tensor, *, halves_up: bool = False) -> tuple[Tensor, Tensor]:
    """Return `rows` [n, k] in whole numbers of steps, in their own type, and the step of each row [n, 1].

    `halves_up`: a number half-way between two steps becomes the larger one, as inputs do; else the even one, as weights
    do. A row with a number that is not finite becomes NaN.
    """
    step = rows.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / LEVELS
    if halves_up:  # in the order of the engines, whose bytes are unsigned
        return (rows * step.reciprocal() + (CENTRE + 0.5)).floor() - CENTRE, step
    return (rows / step).round(), step


class _Rounded(torch.autograd.Function):
    """Rows rounded to whole steps, as numbers again; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        whole, step = _whole_rows(rows)
        return whole * step

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def quantised_rows(x: Tensor) -> Tensor:
    """Return `x` [..., k] with every row rounded to whole steps, in fp32 or wider; its gradient passes as it is."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _Rounded.apply(wide)  # type: ignore[no-untyped-call]


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> tuple[Tensor, ...]:
    """Return the products of the rows of `x` [..., in], and what their gradients need: whole numbers and steps."""
    with torch.autocast(x.device.type, enabled=False):
        inputs, input_step = _whole_rows(x.reshape(-1, x.shape[-1]).to(weight.dtype), halves_up=True)
        weights, weight_step = _whole_rows(weight)
        # Whole numbers up to 127 are exact in bf16, too; the steps are only multiplied to their sums.
        y = product(inputs.to(compute), weights.to(compute)).to(weight.dtype) * weight_step.squeeze(1)
        # As ziggurat.model.fast.packed.Int8Linear does it, to the last digit: or a number could round to another byte
        # later on.
        y = y * input_step if bias is None else torch.addcmul(bias, y, input_step)
    y = y.to(compute).view(*x.shape[:-1], weight.shape[0])
    # As bytes: a quarter of the memory that an ordinary product keeps of its inputs.
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


# Registered operators, which torch.compile calls and does not look inside: it cannot trace an autograd function whose
# shapes vary (torch 2.13).
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
"""As in ziggurat.model.lstm."""


def quantised_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b by quantised rows, [..., out], for `x` [..., in], `weight` [out, in] and `bias` [out].

    Under autocast the products, and the result, are of its type.
    """
    kind = x.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return torch.ops.ziggurat.quantised_linear(x, weight, bias, compute)[0]


def quantise(model: nn.Module) -> None:
    """Let every map of `model` that int8 translation has in bytes compute with quantised rows; it can be trained.

    These are its linear maps, the output projection and the rows of the embeddings. Maps of other kinds stay as they
    are (ziggurat.model.fast.packed.pack). Parameters and their names stay the same.
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
        whole, self.step = _whole_rows(weight.detach())
        self.whole = whole.to(torch.int8)

    def forward(self, ids: Tensor) -> Tensor:
        """Return [..., width] for `ids` [...]."""
        return self.whole[ids] * self.step[ids]


_HALF = 0.5


def available(precision: Precision) -> bool:
    """Return whether this CPU has instructions for `precision`, so that it is fast."""
    if not torch.backends.mkldnn.is_available():
        return False
    if precision == "bfloat16":
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # int8 needs VNNI: older instructions add two products of bytes in 16 bits, which saturate.
    return precision == "float32" or torch.cpu._is_vnni_supported()


def _padded(x: Tensor) -> tuple[int, Tensor]:
    """Return the number of rows of `x` [..., in], and these rows above zeros, an eighth more at most.

    oneDNN compiles a kernel for every number of rows that it meets and keeps a thousand of them, as does PyTorch's own
    cache (ideep), some hundred kilobytes each: a server, whose batches have every number of rows, grew by 300 MB. With
    eight numbers to an octave both caches soon have all.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    step = 1 << max(0, count.bit_length() - 4)
    missing = -count % step
    return count, nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


class PackedLinear(nn.Module):
    """x W^T + b, and its positive part with `relu`; products in the type of `weight` W [out, in], fp32 or bf16.

    With `narrow` results are left in that type; else they are fp32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, relu: bool = False, narrow: bool = False) -> None:
        super().__init__()
        # Not a buffer: an opaque tensor can be neither moved nor saved.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self.bias = None if bias is None else bias.detach().to(weight.dtype)
        self.dtype = weight.dtype
        self.activation = "relu" if relu else "none"
        self.result = weight.dtype if narrow else torch.float32

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        rows, padded = _padded(x)
        y = torch.ops.mkldnn._linear_pointwise(padded.to(self.dtype), self.weight, self.bias, self.activation, [], "")
        return y[:rows].to(self.result).view(*x.shape[:-1], y.shape[-1])


class Int8Linear(nn.Module):
    """x W^T + b in bytes, like CompiledLinear with `int8`, by oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, positive: bool = False, narrow: bool = False) -> None:
        super().__init__()
        weight = weight.detach().float()
        self.scale = weight.abs().amax(1).clamp(min=SMALLEST) / LEVELS
        rounded = (weight / self.scale[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(rounded, None)
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias.detach().float()
        self.zero = torch.zeros(len(weight), dtype=torch.int32)
        self.positive = positive
        self.result = torch.bfloat16 if narrow else torch.float32

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        count, rows = _padded(x)
        rows = rows.float()
        levels, centre = (255, 0) if self.positive else (LEVELS, CENTRE)
        largest = (rows if self.positive else rows.abs()).amax(-1, keepdim=True)
        scale = largest.clamp_(min=SMALLEST).div_(levels)
        # The conversion to bytes truncates. No number here is negative, so adding a half first makes it round.
        quantised = (rows * scale.reciprocal()).add_(centre + _HALF).to(torch.uint8)
        y = torch.ops.onednn.qlinear_pointwise(
            quantised, 1.0, centre, self.weight, self.scale, self.zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return torch.addcmul(self.bias, y, scale)[:count].to(self.result).view(*x.shape[:-1], y.shape[-1])


class PackedFeedForward(nn.Module):
    """relu(x W_1 + b_1) W_2 + b_2 (ziggurat.model.linear.FeedForward) without conversions in between.

    `as_trained`: the inputs of the second map are signed bytes, as in ziggurat.model.fast.packed.
    """

    def __init__(self, ffn: FeedForward, precision: Precision, *, as_trained: bool = False) -> None:
        super().__init__()
        first, second = cast(Linear, ffn.in_proj), cast(Linear, ffn.out_proj)
        self.in_proj: PackedLinear | Int8Linear
        self.out_proj: PackedLinear | Int8Linear
        if precision == "int8":
            self.in_proj = Int8Linear(first.weight, first.bias)
            self.out_proj = Int8Linear(second.weight, second.bias, positive=not as_trained)
        else:
            dtype = getattr(torch, precision)
            self.in_proj = PackedLinear(first.weight.to(dtype), first.bias, relu=True, narrow=True)
            self.out_proj = PackedLinear(second.weight.to(dtype), second.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, d_model] for `x` of that shape."""
        inner = self.in_proj(x)
        return self.out_proj(inner if isinstance(self.in_proj, PackedLinear) else inner.relu_())


class PackedOutput(nn.Module):
    """hidden W^T + b (ziggurat.model.embedding.OutputProjection, whose weight stays: the embedding may be the same).

    `as_trained`: with `int8` the product is in bytes on every CPU, since the model was trained so.
    """

    def __init__(self, projection: OutputProjection, precision: Precision, *, as_trained: bool = False) -> None:
        super().__init__()
        self.weight = projection.weight
        self.bias = projection.bias
        self.precision = precision
        self.as_trained = as_trained
        # Without the compiled product in int8 only where it must be: scaling its sums takes one more pass over
        # [rows, vocabulary].
        narrow = precision != "float32" and available("bfloat16")
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.map = self._of(projection.weight, projection.bias)

    def _of(self, weight: Tensor, bias: Tensor | None) -> PackedLinear | Int8Linear | CompiledLinear:
        if multiplies(self.precision):
            return CompiledLinear(weight, bias, self.precision)
        if self.precision == "int8" and self.as_trained:
            return Int8Linear(weight, bias)
        return PackedLinear(weight.to(self.dtype), bias, narrow=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocabulary] for `hidden` [..., d_model]."""
        return self.map(hidden)

    def restricted(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the map from [..., d_model] to logits [..., n] of `tokens` [n] alone, in the same type."""
        bias = None if self.bias is None else self.bias[tokens]
        return self._of(self.weight[tokens], bias)


def packed(
    weight: Tensor, bias: Tensor | None, precision: Precision, *, narrow: bool = False
) -> PackedLinear | Int8Linear | CompiledLinear:
    """Return x W^T + b with products in `precision`; `narrow`: with results in bf16, unless that is `float32`."""
    if multiplies(precision):
        return CompiledLinear(weight, bias, precision, narrow=narrow and precision != "float32")
    if precision == "int8":
        return Int8Linear(weight, bias, narrow=narrow)
    return PackedLinear(weight.to(getattr(torch, precision)), bias, narrow=narrow)


def make_fast(model: nn.Module, precision: Precision, *, as_trained: bool = False) -> None:
    """Change `model`, in fp32 and evaluation mode, for translation alone: it can then no longer be trained or saved.

    On a CPU its linear maps are packed; on a GPU bf16 is the whole model's type. `as_trained`: it was trained with
    quantised rows (ziggurat.model.fast.packed), and with `int8` it computes the same.

    Raises ConfigError when the model's device does not compute with `precision`.
    """
    if next(model.parameters()).device.type == "cpu":
        if available(precision):
            pack(model, precision, as_trained=as_trained)
        elif precision != "float32":
            needs = "AVX-512-BF16 or AMX" if precision == "bfloat16" else "VNNI"
            way_out = "use float32"
            if precision == "int8":
                way_out += ", or `ziggurat export --to ctranslate2 --quantization int8`, which does without"
            raise ConfigError(f"`decoding.precision: {precision}` needs a CPU with {needs}; {way_out}")
    elif precision == "int8":
        raise ConfigError("`decoding.precision: int8` is for CPUs; on a GPU use bfloat16")
    elif precision == "bfloat16":
        model.to(torch.bfloat16)


def pack(model: nn.Module, precision: Precision, *, as_trained: bool = False) -> None:
    """Replace the linear maps of `model`, on a CPU and in fp32, by packed ones; it can then not be trained or saved.

    Maps of other kinds (Fixup's with shifts, those of LSTM cells) stay as they are, in fp32. With `int8` and
    `as_trained`, embeddings are bytes too, and nothing is rounded to bf16.
    """
    if isinstance(model, MergedAverageAttention):
        model.separate_values()
    as_trained = as_trained and precision == "int8"
    # In bf16, there is half as much of keys and values to read from memory at every step; training does not round them.
    halved = not as_trained and _attends_plainly(model) and available("bfloat16")
    narrow = {"qkv_proj", "q_proj", "kv_proj"} if halved else set()
    for name, child in model.named_children():
        if isinstance(child, FeedForward) and child.is_plain:
            setattr(model, name, _feed_forward(child, precision, as_trained))
        elif isinstance(child, Linear):
            setattr(model, name, packed(child.weight, child.bias, precision, narrow=name in narrow))
        elif isinstance(child, OutputProjection):
            setattr(model, name, PackedOutput(child, precision, as_trained=as_trained))
        elif isinstance(child, nn.Embedding) and as_trained:
            setattr(model, name, QuantisedEmbedding(child.weight))
        else:
            pack(child, precision, as_trained=as_trained)


def _feed_forward(ffn: FeedForward, precision: Precision, as_trained: bool) -> PackedFeedForward | CompiledFeedForward:
    if not multiplies(precision):
        return PackedFeedForward(ffn, precision, as_trained=as_trained)
    first, second = cast(Linear, ffn.in_proj), cast(Linear, ffn.out_proj)
    return CompiledFeedForward(
        CompiledLinear(first.weight, first.bias, precision, relu=True),
        CompiledLinear(second.weight, second.bias, precision, positive=not as_trained),
    )


def _attends_plainly(module: nn.Module) -> bool:
    """Return whether queries, keys and values are what linear maps give; others would have to be narrow too."""
    if type(module) is SelfAttention:
        return module.scaling is None and module.rotary is None and module.residual is None
    return isinstance(module, CrossAttention) and module.scaling is None and module.residual is None
