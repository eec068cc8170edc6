"""Operators that let CPU tensors without values stand in for those of an accelerator.

PyTorch without CUDA has no GPU tensors, not even ones without values. So GPU memory is simulated
(ziggurat.inspect.machine) with CPU tensors that the package treats as those of an accelerator, and operators that keep
other tensors on a GPU are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_map

from ziggurat.model.accelerator import cpu_standing_in
from ziggurat.model.seq2seq import Seq2Seq

_WIDE = {
    "softmax", "log_softmax", "layer_norm", "rms_norm", "nll_loss", "cross_entropy", "exp", "log", "pow", "norm",
    "cumsum", "sum", "logsumexp", "prod", "rsqrt", "reciprocal",
}  # fmt: skip
"""_WIDE names operations that autocast computes in fp32 on an accelerator, but in the operands' type on a CPU."""


@contextmanager
def accelerator_operators(model: Seq2Seq) -> Iterator[None]:
    """Context in which `model`, without values on the CPU, keeps the tensors that it would keep on an accelerator."""
    mode = _Operators()
    for module in model.modules():
        module.register_forward_pre_hook(mode.enter)
        module.register_forward_hook(mode.leave, always_call=True)
    with cpu_standing_in(), mode:
        yield


class _Operators(TorchFunctionMode):
    """Attention in one kernel, dropout that keeps a byte per element, and autocast's types, as in CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: list[bool] = []  # one per module being computed, outermost first

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        narrow = torch.is_autocast_enabled("cpu")
        if function is F.scaled_dot_product_attention:
            return _attention(*args, dtype=torch.get_autocast_dtype("cpu") if narrow else None, **kwargs)
        if function is F.dropout:
            return _dropout(*args, **kwargs)
        if narrow and getattr(function, "__name__", "") in _WIDE:
            args, kwargs = tree_map(_wide, (args, kwargs))
        return function(*args, **kwargs)

    def enter(self, module: nn.Module, args: object) -> None:
        """Re-enter before a module that the backward pass recomputes, where PyTorch has left the mode."""
        self._begun.append(_get_current_function_mode() is None)
        if self._begun[-1]:
            self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, module: nn.Module, args: object, result: object) -> None:
        """Leave after it."""
        if self._begun.pop():
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    dtype: torch.dtype | None,
) -> Any:
    operands = [x if dtype is None or x is None else x.to(dtype) for x in (query, key, value, attn_mask)]
    return _Attention.apply(*operands)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    """The tensors of flash attention, which keeps its operands, the context, and a number for each row of weights."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        # Laid out so that heads can be joined without a copy.
        context = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        ctx.save_for_backward(query, key, value, bias, context, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return context

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors[:4]
        return tuple(
            torch.empty_like(operand) if needed else None
            for operand, needed in zip(operands, ctx.needs_input_grad, strict=True)
        )
