"""Compiled inner loops of translation on a CPU (compiled.c): products of bytes, and attention of a decoding step.

The library is built with the package, where there is a C compiler (hatch_build.py); without it, or on a processor that
lacks the instructions, PyTorch's operators do the same, more slowly. Nothing here can be trained.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ziggurat.nn.attention.cache import Block

__all__ = ["LIBRARY", "CompiledFeedForward", "CompiledLinear", "Precision", "attend", "attends", "multiplies", "notice"]

LIBRARY = Path(__file__).with_name("_compiled.so")
"""The library, if it was built."""

Precision = Literal["float32", "bfloat16", "int8"]
"""Precision of the products; with `int8`, weights and inputs have 8 bits and sums 32."""

# As in compiled.c.
_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2}
_NUMBERS = {"float32": 1, "bfloat16": 2, "int8": 4}
_PANEL = 64
_CENTRE = 128
"""The unsigned byte that stands for zero."""
_ADDRESS, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class _Map(ctypes.Structure):
    _fields_ = (
        ("type", _LONG),
        ("in_features", _LONG),
        ("out_features", _LONG),
        ("weight", _ADDRESS),
        ("bias", _ADDRESS),
        ("scale", _ADDRESS),
        ("shift", _ADDRESS),
        ("positive", _LONG),
        ("relu", _LONG),
        ("narrow", _LONG),
    )


class _Block(ctypes.Structure):
    _fields_ = (
        ("key", _ADDRESS),
        ("value", _ADDRESS),
        ("entries", _LONG),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("sentences", _LONG),
        ("beams", _LONG),
        ("heads", _LONG),
        ("d_head", _LONG),
        ("narrow_query", _LONG),
        ("narrow_key", _LONG),
        ("blocks", _LONG),
        ("key_sentence", _LONG),
        ("key_head", _LONG),
        ("key_entry", _LONG),
        ("query_sentence", _LONG),
        ("query_beam", _LONG),
        ("query_head", _LONG),
        ("bias_sentence", _LONG),
        ("bias_beam", _LONG),
        ("scale", ctypes.c_float),
    )


def _load() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or why there is none."""
    try:
        # The library has no OpenMP of its own: PyTorch, imported above, has made its own visible to all.
        found = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None, "was not compiled"
    found.source.restype = ctypes.c_char_p
    if found.source().decode() != hashlib.sha256(LIBRARY.with_name("compiled.c").read_bytes()).hexdigest():
        return None, "was compiled from another version of the source"
    found.linear.argtypes = [_ADDRESS, _ADDRESS, _LONG, _LONG, _ADDRESS, _INT]
    found.feed_forward.argtypes = [_ADDRESS, _ADDRESS, _ADDRESS, _LONG, _LONG, _ADDRESS, _INT]
    found.attend.argtypes = [_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _INT]
    return found, ""


_library, _problem = _load()


def notice() -> str:
    """Return a sentence where translation on this Linux machine is slower than it could be; else ""."""
    if not _problem or not sys.platform.startswith("linux"):
        return ""
    return f"translation could be faster: {LIBRARY.name} {_problem}; install the package again, with gcc"


def multiplies(precision: Precision) -> bool:
    """Return whether CompiledLinear works here: AVX-512 for fp32, with its extensions BF16 and VNNI for the others."""
    if _library is None or not _library.supported(_TYPES[precision]):
        return False
    # With AMX, oneDNN's products in these types are several times as fast as any with vectors.
    return precision == "float32" or not torch.cpu._is_amx_tile_supported()


def attends(query: Tensor, key: Tensor) -> bool:
    """Return whether `attend` takes these: on a CPU, fp32 or bf16, no gradients, heads as wide as a multiple of 16."""
    return (
        _library is not None
        and type(query) is Tensor  # not one that records what is done to it
        and query.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and query.dtype in (torch.float32, torch.bfloat16)
        and key.dtype in (torch.float32, torch.bfloat16)
        and query.shape[-1] % 16 == 0
    )


def attend(query: Tensor, blocks: Sequence[Block], bias: Tensor | None) -> Tensor:
    """Return softmax(query key^T / sqrt(d_head) + bias) value, [N, heads, K, d_head] in fp32.

    Args:
        query: [N, heads, K, d_head], of any strides with rows of d_head dense.
        blocks: keys and values [N, heads, entries, d_head] each; entries of all stand one behind the other.
        bias: [N, 1, K or 1, entries of all], fp32; entries with -inf are never read. None: 0.
    """
    assert _library is not None
    assert bias is None or (bias.dtype == torch.float32 and bias.stride(3) == 1)
    sentences, heads, beams, d_head = query.shape
    query = query if query.stride(3) == 1 else query.contiguous()
    strides = blocks[0].key.stride()
    shape = _Shape(
        sentences,
        beams,
        heads,
        d_head,
        query.dtype == torch.bfloat16,
        blocks[0].key.dtype == torch.bfloat16,
        len(blocks),
        *strides[:3],
        query.stride(0),
        query.stride(2),
        query.stride(1),
        0 if bias is None or bias.shape[0] == 1 else bias.stride(0),
        0 if bias is None or bias.shape[2] == 1 else bias.stride(2),
        d_head**-0.5,
    )
    table = (_Block * len(blocks))()
    for row, (key, value) in zip(table, blocks, strict=True):
        assert key.stride() == value.stride() == strides, "the keys and values of a cache have the same strides"
        row.key, row.value, row.entries = key.data_ptr(), value.data_ptr(), key.shape[2]
    out = torch.empty(sentences, beams, heads, d_head)
    address = None if bias is None else bias.data_ptr()
    threads = torch.get_num_threads()
    if not _library.attend(ctypes.addressof(shape), query.data_ptr(), table, address, out.data_ptr(), threads):
        raise MemoryError("no memory for the attention of a decoding step")
    return out.transpose(1, 2)


class CompiledLinear(nn.Module):
    """x W^T + b with products in fp32, bf16 or bytes, and sums in 32 bits.

    Bytes have a scale for every row of W and, at run time, for every row of x: |largest| / 127. A row's scale is its
    own, so that a sentence's result does not depend on its neighbours in the batch.

    Args:
        weight: W [out, in].
        bias: b [out], or None.
        precision: of the products.
        positive: inputs are never negative, so with `int8` all 8 bits are for their magnitude.
        relu: negative results become 0.
        narrow: results are bf16; else they are fp32.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        precision: Precision,
        *,
        positive: bool = False,
        relu: bool = False,
        narrow: bool = False,
    ) -> None:
        super().__init__()
        out, width = weight.shape
        numbers = _NUMBERS[precision]  # in 32 bits
        # Filled up with zeros, so that the inner loop has no last panel or group of another size.
        full = torch.zeros(-(-out // _PANEL) * _PANEL, -(-width // numbers) * numbers)
        full[:out, :width] = weight.detach()
        self.bias = full.new_zeros(len(full))
        if bias is not None:
            self.bias[:out] = bias.detach()
        self.scale = full.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        if precision == "int8":
            full = (full / self.scale[:, None]).round()
        typed = full.to(getattr(torch, precision))
        self.shift = typed.sum(1, dtype=torch.int32) * (0 if positive else _CENTRE)
        # Not buffers: they can be neither moved nor saved. [panels, groups, outputs of a panel, numbers of a group]
        self.weight = typed.view(-1, _PANEL, full.shape[1] // numbers, numbers).transpose(1, 2).contiguous()
        self.out_features = out
        self.result = torch.bfloat16 if narrow else torch.float32
        fields = (each.data_ptr() for each in (self.weight, self.bias, self.scale, self.shift))
        self.map = _Map(_TYPES[precision], width, out, *fields, positive, relu, narrow)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        assert _library is not None
        rows, y = _rows(x), torch.empty(*x.shape[:-1], self.out_features, dtype=self.result)
        arguments = rows.data_ptr(), rows.stride(0), rows.shape[0], y.data_ptr(), torch.get_num_threads()
        _check(_library.linear(ctypes.addressof(self.map), *arguments))
        return y


class CompiledFeedForward(nn.Module):
    """relu(x W_1 + b_1) W_2 + b_2 with two CompiledLinear of one precision, in one call.

    Args:
        first: W_1, b_1, with ReLU.
        second: W_2, b_2, for positive inputs.
    """

    def __init__(self, first: CompiledLinear, second: CompiledLinear) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        assert _library is not None
        rows, y = _rows(x), torch.empty(*x.shape[:-1], self.second.out_features, dtype=self.second.result)
        maps = ctypes.addressof(self.first.map), ctypes.addressof(self.second.map)
        arguments = rows.data_ptr(), rows.stride(0), rows.shape[0], y.data_ptr(), torch.get_num_threads()
        _check(_library.feed_forward(*maps, *arguments))
        return y


def _rows(x: Tensor) -> Tensor:
    """Return `x` [..., in] as fp32 rows that are dense."""
    rows = x.reshape(-1, x.shape[-1]).float()
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _check(done: int) -> None:
    if not done:
        raise MemoryError("no memory for the inputs of a linear map")
