"""Masks: what queries may attend to, as a bias of the logits and as fused kernels take it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Cuts", "Mask", "causal_mask", "cuts_of", "padding_bias", "padding_mask"]


class Cuts(NamedTuple):
    """A padded batch as flash attention takes it: laid end to end, cut into sequences that see only themselves.

    Each sentence is one sequence and the padding behind it another, which attends to itself and is read by nobody. So
    nothing is packed or copied, no size depends on the data, and the kernel skips padding all the same. (Packing the
    real tokens would save the padding's share of the products too, 3 % in batches of like lengths, but would wait for
    the device, and every batch would have a shape of its own.)

    Attributes:
        queries: int32 [2 batch + 1], where the sequences begin among the batch * queries rows, and the end.
        keys: the same among the batch * keys rows.
    """

    queries: Tensor
    keys: Tensor


class Mask(NamedTuple):
    """What queries may attend to.

    Attributes:
        bias: is added to the logits: 0, or -inf where nothing is to be seen; broadcasts to [batch, heads, queries,
            keys]. It holds everything, and is for kernels that know no better.
        causal: whether it hides the future and nothing else.
        cuts: of a batch on a GPU that hides padding and nothing else, or None.
    """

    bias: Tensor
    causal: bool = False
    cuts: Cuts | None = None


def padding_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [batch, 1, 1, keys] with 0 at real tokens and -inf at padding, for `mask` [batch, keys] (True: real).

    Every sentence must have one real token (it has: end-of-sentence), else its softmax is undefined.
    """
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, -math.inf)[:, None, None, :]


def padding_mask(mask: Tensor, dtype: torch.dtype, queries: int | None = None) -> Mask:
    """Hide padding, which comes behind the real tokens, for `mask` [batch, keys] (True: real).

    `queries` is the number of queries per sentence; None: the keys themselves attend.
    """
    return Mask(padding_bias(mask, dtype), cuts=cuts_of(mask, queries) if _takes_cuts(mask.device) else None)


def causal_mask(length: int, dtype: torch.dtype, device: torch.device) -> Mask:
    """Hide the future; the bias is [1, 1, length, length]: 0 where key <= query, -inf after it."""
    bias = torch.full((length, length), -math.inf, dtype=dtype, device=device).triu_(1)[None, None]
    return Mask(bias, causal=True)


def cuts_of(mask: Tensor, queries: int | None = None) -> Cuts:
    """Return the cuts of a padded batch; arguments as for `padding_mask`."""
    batch, length = mask.shape
    begin = torch.arange(batch + 1, device=mask.device)
    keys = _interleaved(begin * length, begin[:-1] * length + mask.sum(1))
    # With other queries than the keys all of a sentence's belong to its real keys, and none to its padding.
    return Cuts(keys if queries is None else _interleaved(begin * queries, begin[1:] * queries), keys)


def _interleaved(begin: Tensor, border: Tensor) -> Tensor:
    """Return [begin[0], border[0], begin[1], ..., begin[batch]] in int32."""
    return torch.cat([torch.stack([begin[:-1], border], dim=1).flatten(), begin[-1:]]).int()


def _takes_cuts(device: torch.device) -> bool:
    """Whether flash attention runs there: an NVIDIA GPU from Ampere on."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
