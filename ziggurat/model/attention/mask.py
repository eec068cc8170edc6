"""Masks of attention: a bias of the logits, and the same in the forms that fused kernels take."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_MOST_SEQUENCES = 65_535
"""Of a call of flash attention: they are an axis of the kernel's grid, whose size CUDA bounds."""


class SequenceBounds(NamedTuple):
    """A padded batch for flash attention: laid end to end and cut into sequences that see only themselves.

    Each sentence is one sequence and the padding behind it another, which attends to itself and is read by nobody. So
    nothing is packed or copied, no size depends on the data, and the kernel skips padding all the same. (Packing the
    real tokens would save the padding's share of the products too, 3 % in batches of like lengths, but would wait for
    the device, and every batch would have another shape.)

    Attributes:
        queries: int32 [2 batch + 1], the rows among batch * queries at which the sequences begin, and the end.
        keys: the same among the batch * keys rows.
    """

    queries: Tensor
    keys: Tensor


class Mask(NamedTuple):
    """The keys that queries may attend to.

    Attributes:
        bias: is added to the logits: 0, or -inf at hidden keys; broadcasts to [batch, heads, queries, keys]. It is the
            whole mask, for kernels that cannot use the other two.
        causal: whether the mask hides the future and nothing else.
        bounds: the same mask for flash attention, where it hides padding and nothing else; None on devices without it.
    """

    bias: Tensor
    causal: bool = False
    bounds: SequenceBounds | None = None


def padding_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [batch, 1, 1, keys] with 0 at real tokens and -inf at padding, for `mask` [batch, keys] (True: real).

    A softmax over padding alone would be undefined; every sentence has one real token, end-of-sentence.
    """
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, -math.inf)[:, None, None, :]


def padding_mask(mask: Tensor, dtype: torch.dtype, queries: int | None = None) -> Mask:
    """Return the mask that hides padding, which comes behind the real tokens, for `mask` [batch, keys] (True: real).

    `queries` is the number of queries per sentence; None: the keys themselves attend.
    """
    bounded = _takes_bounds(mask.device) and 2 * len(mask) <= _MOST_SEQUENCES
    return Mask(padding_bias(mask, dtype), bounds=sequence_bounds(mask, queries) if bounded else None)


def causal_mask(length: int, dtype: torch.dtype, device: torch.device) -> Mask:
    """Return the mask that hides the future; its bias is [1, 1, length, length]: 0 where key <= query, else -inf."""
    bias = torch.full((length, length), -math.inf, dtype=dtype, device=device).triu_(1)[None, None]
    return Mask(bias, causal=True)


def sequence_bounds(mask: Tensor, queries: int | None = None) -> SequenceBounds:
    """Return the bounds of the sequences of a padded batch; the arguments are those of `padding_mask`."""
    batch, length = mask.shape
    begin = torch.arange(batch + 1, device=mask.device)
    keys = _interleaved(begin * length, begin[:-1] * length + mask.sum(1))
    # Self-attention: a sentence's padding attends to itself. Queries that are not the keys all attend to the sentence's
    # real keys, and the sequence of its padding has no queries.
    return SequenceBounds(keys if queries is None else _interleaved(begin * queries, begin[1:] * queries), keys)


def _interleaved(begin: Tensor, border: Tensor) -> Tensor:
    """Return [begin[0], border[0], begin[1], ..., begin[batch]] in int32."""
    return torch.cat([torch.stack([begin[:-1], border], dim=1).flatten(), begin[-1:]]).int()


def _takes_bounds(device: torch.device) -> bool:
    """Return whether flash attention runs on this device: an NVIDIA GPU of the Ampere generation or later."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
