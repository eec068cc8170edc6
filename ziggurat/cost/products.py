"""Floating-point operations of torch's operators: matrix products and what is made of them, nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

__all__ = ["is_batched", "operations"]

Formula = Callable[[Sequence[Any], dict[str, Any], Any], int]
"""(arguments, options, result) of a call -> its operations."""


def _times_vector(matrix: Tensor) -> int:
    return 2 * matrix.numel()


def _attention(query: Sequence[int], keys: int, products: int) -> int:
    """Return the cost of `products` products of [batch, heads, queries, keys] with [batch, heads, keys, d_head]."""
    return 2 * products * math.prod(query) * keys


_OURS: dict[str, Callable[[Sequence[Any]], int]] = {
    "aten::mv": lambda a: _times_vector(a[0]),
    "aten::addmv": lambda a: _times_vector(a[1]),
    "mkldnn::_linear_pointwise": lambda a: 2 * a[0].numel() * a[1].shape[0],
    # Backwards: the logits once more, and the gradients of weights, values, queries and keys.
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda a: _attention(a[0].shape, a[1].shape[-2], 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda a: _attention(a[1].shape, a[2].shape[-2], 5),
    # Queries are [batch * queries, heads, d_head].
    "torch_attn::_varlen_attn": lambda a: _attention(a[0].shape, a[6], 2),
    "torch_attn::_varlen_attn_backward": lambda a: _attention(a[1].shape, a[9], 5),
}
"""Operators that torch's own table lacks -> operations by the arguments of a call."""


@cache
def _formula(function: torch._ops.OpOverload) -> Formula | None:
    name = function._schema.name.removesuffix("_")  # in place or not
    if (ours := _OURS.get(name)) is not None:
        return lambda args, options, result: ours(args)
    space, _, plain = name.partition("::")
    theirs = flop_registry.get(getattr(getattr(torch.ops, space), plain, function.overloadpacket))
    return theirs and (lambda args, options, result: int(theirs(*args, **options, out_val=result)))


def operations(function: torch._ops.OpOverload, args: Sequence[Any], options: dict[str, Any], result: Any) -> int:
    """Return how many additions and multiplications a call of `function` takes; 0 for what is no product.

    A product of [m, k] and [k, n] takes 2 m k n. Formulas are torch's (torch.utils.flop_counter), and ours for what
    they lack. Shapes alone matter: tensors without values will do.
    """
    formula = _formula(function)
    return 0 if formula is None else formula(args, options, result)


@cache
def is_batched(function: torch._ops.OpOverload) -> bool:
    """Whether a product is many small ones, as those of attention are: slower than one of the same size."""
    name = function._schema.name.removesuffix("_")
    return name in ("aten::bmm", "aten::baddbmm", "aten::mv") or "attention" in name or "attn" in name
