"""Linear maps packed for inference on CPUs, in fp32, bf16 or int8 (ziggurat.model.fast.int8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.attention.multihead import CrossAttention, SelfAttention
from ziggurat.model.attention.variants import MergedAverageAttention
from ziggurat.model.embedding import OutputProjection
from ziggurat.model.fast.compiled import CompiledFeedForward, CompiledLinear, Precision, multiplies
from ziggurat.model.fast.int8 import CENTRE, LEVELS, SMALLEST, QuantisedEmbedding, whole_rows
from ziggurat.model.linear import FeedForward, Linear
from ziggurat.system.errors import ConfigError

_HALF = 0.5


def available(precision: Precision) -> bool:
    """Return whether this CPU has instructions that make `precision` fast."""
    if not torch.backends.mkldnn.is_available():
        return False
    if precision == "bfloat16":
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # int8 needs VNNI: older instructions add two products of bytes in 16 bits, which saturate.
    return precision == "float32" or torch.cpu._is_vnni_supported()


def _padded(x: Tensor) -> tuple[int, Tensor]:
    """Return the number of rows of `x` [..., in], and these rows padded with zeros, by at most an eighth.

    oneDNN compiles a kernel for every number of rows it meets and keeps a thousand of them, as does PyTorch's own cache
    (ideep), at some hundred kilobytes each. A server, whose batches can have any number of rows, grew by 300 MB. With
    eight sizes per octave, both caches soon hold all of them.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    step = 1 << max(0, count.bit_length() - 4)
    missing = -count % step
    return count, nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


class PackedLinear(nn.Module):
    """x W^T + b, and its positive part with `relu`; products in the type of `weight` W [out, in], fp32 or bf16.

    With `narrow`, results stay in that type, otherwise they are fp32.
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
    """x W^T + b in bytes by oneDNN, like CompiledLinear with `int8`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, positive: bool = False, narrow: bool = False) -> None:
        super().__init__()
        weight = weight.detach().float()
        whole, step = whole_rows(weight)
        self.scale = step.squeeze(1)
        self.weight = torch.ops.onednn.qlinear_prepack(whole.to(torch.int8), None)
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

    `as_trained`: the inputs of the second map are signed bytes, as in ziggurat.model.fast.int8.
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
    """hidden W^T + b (ziggurat.model.embedding.OutputProjection, whose matrix stays: the embedding may be the same).

    `as_trained`: with `int8`, the product is in bytes on every CPU, because the model was trained that way.
    """

    def __init__(self, projection: OutputProjection, precision: Precision, *, as_trained: bool = False) -> None:
        super().__init__()
        self.weight = projection.matrix
        self.bias = projection.bias
        self.precision = precision
        self.as_trained = as_trained
        # Without the compiled product, int8 only if required: scaling its sums takes one more pass over [rows,
        # vocabulary].
        narrow = precision != "float32" and available("bfloat16")
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.map = self._of(self.weight, self.bias)

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
    """Prepare `model`, in fp32 and evaluation mode, for translation only: it can no longer be trained or saved.

    On a CPU its linear maps are packed; on a GPU, bf16 becomes the type of the whole model. `as_trained`: it was
    trained with quantised rows (ziggurat.model.fast.int8), and with `int8` it computes the same.

    Raises ConfigError when the model's device does not compute with `precision`.
    """
    if next(model.parameters()).device.type == "cpu":
        if available(precision):
            pack(model, precision, as_trained=as_trained)
        elif precision != "float32":
            needs = "AVX-512-BF16 or AMX" if precision == "bfloat16" else "VNNI"
            way_out = "use float32"
            if precision == "int8":
                way_out += ", or `ziggurat export --to ctranslate2 --quantization int8`, which does not need one"
            raise ConfigError(f"`decoding.precision: {precision}` needs a CPU with {needs}; {way_out}")
    elif precision == "int8":
        raise ConfigError("`decoding.precision: int8` is for CPUs; on a GPU use bfloat16")
    elif precision == "bfloat16":
        model.to(torch.bfloat16)


def pack(model: nn.Module, precision: Precision, *, as_trained: bool = False) -> None:
    """Replace the linear maps of `model`, on a CPU and in fp32, by packed ones; it can no longer be trained or saved.

    Maps of other kinds (Fixup's with shifts, those of LSTM cells) stay in fp32. With `int8` and `as_trained`,
    embeddings are also bytes, and nothing is rounded to bf16.
    """
    if isinstance(model, MergedAverageAttention):
        model.separate_values()
    as_trained = as_trained and precision == "int8"
    # In bf16, half as many bytes of keys and values are read at every step; training does not round them.
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
            rows = child.weight if type(child) is nn.Embedding else F.normalize(child.weight, dim=-1)
            setattr(model, name, QuantisedEmbedding(rows))
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
    """Return whether queries, keys and values are direct outputs of linear maps; others would have to be narrow too."""
    if type(module) is SelfAttention:
        return module.scaling is None and module.rotary is None and module.residual is None
    return isinstance(module, CrossAttention) and module.scaling is None and module.residual is None
