"""Compiled inner loops of translation on a CPU (compiled.c): linear maps, and attention of a decoding step.

The library is built with the package if there is a C compiler (hatch_build.py); without it, or on a processor that
lacks the instructions, PyTorch's operators do the same, only more slowly. Nothing here can be trained.
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

from ziggurat.model.fast.int8 import CENTRE, whole_rows

if TYPE_CHECKING:
    from ziggurat.model.attention.cache import KeyValueBlock

LIBRARY = Path(__file__).with_name("_compiled.so")
"""LIBRARY is the path of the compiled library, which exists if it was built."""

Precision = Literal["float32", "bfloat16", "int8"]
"""Precision of the products; with `int8`, weights and inputs have 8 bits and sums 32."""

_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2}
_NUMBERS = {"float32": 1, "bfloat16": 2, "int8": 4}
_PANEL = 64
_FLOATS = (torch.float32, torch.bfloat16)
_ADDRESS, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def _of_type(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Map(ctypes.Structure):
    _fields_ = (
        *_of_type(_LONG, "type in_features out_features"),
        *_of_type(_ADDRESS, "weight bias scale shift"),
        *_of_type(_LONG, "positive relu narrow"),
    )


class _Block(ctypes.Structure):
    _fields_ = (*_of_type(_ADDRESS, "key value"), ("entries", _LONG))


class _Shape(ctypes.Structure):
    _fields_ = (
        *_of_type(_LONG, "sentences beams heads d_head narrow_query narrow_key blocks"),
        *_of_type(_LONG, "key_sentence key_head key_entry query_sentence query_beam query_head"),
        *_of_type(_LONG, "bias_sentence bias_beam"),
        ("scale", ctypes.c_float),
    )


def _load() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or the reason it is unavailable."""
    if not LIBRARY.is_file():
        return None, "was not compiled"
    try:
        # The library does not link OpenMP: PyTorch, imported above, has made its copy visible to all.
        found = ctypes.CDLL(str(LIBRARY))
        found.source.restype = ctypes.c_char_p
        compiled_from = found.source().decode()
        source = LIBRARY.with_name("compiled.c").read_bytes()
    except (OSError, AttributeError) as error:
        return None, f"cannot be used ({error})"
    # The functions of another version may take other arguments.
    if compiled_from != hashlib.sha256(source).hexdigest():
        return None, "was compiled from another version of the source"
    found.linear.argtypes = [_ADDRESS, _ADDRESS, _LONG, _LONG, _ADDRESS, _INT]
    found.feed_forward.argtypes = [_ADDRESS, _ADDRESS, _ADDRESS, _LONG, _LONG, _ADDRESS, _INT]
    found.attend.argtypes = [_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _INT]
    return found, ""


_library, _problem = _load()


def notice() -> str:
    """Return a sentence if translation on this Linux machine is slower than it could be, otherwise ""."""
    if not _problem or not sys.platform.startswith("linux"):
        return ""
    return f'translation could be faster: {LIBRARY.name} {_problem} (docs/index.md#install, "Compiled loops")'


def multiplies(precision: Precision) -> bool:
    """Return whether CompiledLinear works here: AVX-512 for fp32, with its extensions BF16 and VNNI for the others."""
    if _library is None or not _library.supported(_TYPES[precision]):
        return False
    # With AMX, oneDNN's products in these types are several times as fast as vector instructions.
    return precision == "float32" or not torch.cpu._is_amx_tile_supported()


def attends(query: Tensor, key: Tensor, bias: Tensor | None) -> bool:
    """Return whether `attend` accepts these: on a CPU, fp32 or bf16, no gradients, head width a multiple of 16."""
    return (
        _library is not None
        and type(query) is Tensor  # a tensor subclass may record operations
        and query.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and query.dtype in _FLOATS
        and key.dtype in _FLOATS
        and (bias is None or bias.dtype == torch.float32)  # the bias is not fp32 in a model that is entirely bf16
        and query.shape[-1] % 16 == 0
    )


def attend(query: Tensor, blocks: Sequence[KeyValueBlock], bias: Tensor | None) -> Tensor:
    """Return softmax(query key^T / sqrt(d_head) + bias) value, [N, heads, K, d_head] in fp32.

    Args:
        query: [N, heads, K, d_head], of any strides with rows of d_head dense.
        blocks: keys and values, [N, heads, entries, d_head] each; their entries are concatenated.
        bias: [N or 1, 1, K or 1, entries of all], fp32; entries with -inf are never read. None: 0.

    Raises ValueError for tensors of other shapes, types, devices or strides: C would read beyond them.
    """
    assert _library is not None
    sentences, heads, beams, d_head = query.shape
    query = query if query.stride(3) == 1 else query.contiguous()
    first = blocks[0].key
    table = (_Block * len(blocks))()
    entries = 0
    for row, (key, value) in zip(table, blocks, strict=True):
        for part in (key, value):
            alike = part.dtype == first.dtype and part.stride() == first.stride() and part.device.type == "cpu"
            if not alike or part.shape != (sentences, heads, key.shape[2], d_head):
                raise ValueError(f"keys and values of {tuple(query.shape)} queries: {tuple(part.shape)}, {part.dtype}")
        row.key, row.value, row.entries = key.data_ptr(), value.data_ptr(), key.shape[2]
        entries += key.shape[2]
    if first.stride(3) != 1 or not (query.dtype in _FLOATS and first.dtype in _FLOATS):
        raise ValueError(f"queries, keys and values must be dense fp32 or bf16, not {query.dtype} and {first.dtype}")
    if bias is not None and (
        bias.dtype != torch.float32
        or bias.stride(3) != 1
        or bias.shape not in {(n, 1, k, entries) for n in (1, sentences) for k in (1, beams)}
    ):
        raise ValueError(f"a bias {tuple(bias.shape)} of {bias.dtype} for {entries} entries of {tuple(query.shape)}")
    shape = _Shape(
        sentences,
        beams,
        heads,
        d_head,
        query.dtype == torch.bfloat16,
        first.dtype == torch.bfloat16,
        len(blocks),
        *first.stride()[:3],
        query.stride(0),
        query.stride(2),
        query.stride(1),
        0 if bias is None or bias.shape[0] == 1 else bias.stride(0),
        0 if bias is None or bias.shape[2] == 1 else bias.stride(2),
        d_head**-0.5,
    )
    out = torch.empty(sentences, beams, heads, d_head, dtype=torch.float32, device="cpu")
    address = None if bias is None else bias.data_ptr()
    threads = torch.get_num_threads()
    if not _library.attend(ctypes.addressof(shape), query.data_ptr(), table, address, out.data_ptr(), threads):
        raise MemoryError("no memory for the attention of a decoding step")
    return out.transpose(1, 2)


class CompiledLinear(nn.Module):
    """x W^T + b with products in fp32, bf16 or bytes, and sums in 32 bits.

    Bytes have a scale for every row of W and, at run time, for every row of x: |largest| / 127. Scales are per row, so
    that a sentence's result does not depend on its neighbours in the batch.

    Args:
        weight: W [out, in].
        bias: b [out].
        precision: precision of the products.
        positive: inputs are never negative, so with `int8` all 8 bits hold their magnitude.
        relu: negative results become 0.
        narrow: results are bf16, otherwise fp32.
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
        # Padded with zeros, so that the last panel and group have the same size as the others.
        panels, groups = -(-out // _PANEL), -(-width // numbers)
        full = torch.zeros(panels * _PANEL, groups * numbers, dtype=torch.float32, device="cpu")
        full[:out, :width] = weight.detach()
        self.bias = full.new_zeros(len(full))
        if bias is not None:
            self.bias[:out] = bias.detach()
        scale = shift = torch.empty(0)  # for bytes only; not a view, which would keep all of `full` in memory
        if precision == "int8":
            full, step = whole_rows(full)
            scale = step.squeeze(1)
            shift = full.sum(1).to(torch.int32) * (0 if positive else CENTRE)  # whole numbers below 2^24: exact
        self.scale, self.shift = scale, shift
        # Not buffers: they can be neither moved nor saved. [panels, groups, PANEL], a group stored as one 32-bit
        # number: moving those is three times as fast as moving the elements.
        typed = full.to(getattr(torch, precision)).view(torch.int32)
        self.weight = typed.view(panels, _PANEL, groups).transpose(1, 2).contiguous()
        self.in_features, self.out_features, self.precision = width, out, precision
        self.result = torch.bfloat16 if narrow else torch.float32
        fields = (each.data_ptr() for each in (self.weight, self.bias, self.scale, self.shift))
        self.map = _Map(_TYPES[precision], width, out, *fields, positive, relu, narrow)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]. Raises ValueError for an `x` of another width or device."""
        assert _library is not None
        rows, y = _rows(x, self), _room(x, self)
        arguments = rows.data_ptr(), rows.stride(0), rows.shape[0], y.data_ptr(), torch.get_num_threads()
        _check(_library.linear(ctypes.addressof(self.map), *arguments))
        return y


class CompiledFeedForward(nn.Module):
    """relu(x W_1 + b_1) W_2 + b_2 with two CompiledLinear of one precision, the first with ReLU, in one call.

    Raises ValueError if one cannot follow the other.
    """

    def __init__(self, first: CompiledLinear, second: CompiledLinear) -> None:
        super().__init__()
        if first.out_features != second.in_features or first.precision != second.precision:
            raise ValueError("the second map's input must be the first one's output, in the same precision")
        if first.result != torch.float32:
            raise ValueError("between the maps numbers are fp32")
        self.first = first
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in]."""
        assert _library is not None
        rows, y = _rows(x, self.first), _room(x, self.second)
        maps = ctypes.addressof(self.first.map), ctypes.addressof(self.second.map)
        arguments = rows.data_ptr(), rows.stride(0), rows.shape[0], y.data_ptr(), torch.get_num_threads()
        _check(_library.feed_forward(*maps, *arguments))
        return y


def _rows(x: Tensor, taker: CompiledLinear) -> Tensor:
    """Return `x` [..., in] as fp32 rows that are dense."""
    if x.device.type != "cpu" or x.shape[-1] != taker.in_features:
        raise ValueError(f"a map of {taker.in_features} numbers on a CPU cannot take {tuple(x.shape)} on {x.device}")
    rows = x.reshape(-1, taker.in_features).float()
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _room(x: Tensor, giver: CompiledLinear) -> Tensor:
    return torch.empty(*x.shape[:-1], giver.out_features, dtype=giver.result, device="cpu")


def _check(done: int) -> None:
    if not done:
        raise MemoryError("no memory for the inputs of a linear map")
