"""Binary Marian models (`.bin`), as used by `pymarian convert` and Firefox's engine.

A file starts with the number 1, the number of arrays, and a header for each (lengths of its name, shape and bytes, and
its type). Then come all names, all shapes, and all bytes, starting at a multiple of 256. All of it is little-endian;
numbers in headers have 8 bytes, those in shapes 4. Marian and the browsers' fork of it number quantised types
differently, and the fork also quantises embeddings.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.exchange.imported import first_bytes, read_file
from ziggurat.system.errors import DataError, ExportError, printable

Array = NDArray[Any]

OPTIONS_ENTRY = "special:model.yml"
"""OPTIONS_ENTRY is the entry with the options that Marian needs to build the model, as NUL-terminated YAML."""

SCALE_OF_INPUT = "_QuantMultA"
"""SCALE_OF_INPUT is the suffix of numbers by which the browsers' fork multiplies the input of a matrix."""

_VERSION, _ENCRYPTED = 1, 2
_HEAD = struct.Struct("<4Q")
_BLOCK = 256
"""_BLOCK is the alignment in bytes of the first array and, in Marian's own files, of all others."""

MOST_UNPACKED = 16
"""MOST_UNPACKED limits the unpacked size, as a multiple of the file's: trained weights shrink by only a tenth."""
_SMALL = 1 << 24
"""_SMALL is the number of bytes to which any file may unpack."""

_PLAIN = {
    **{0x101: "i1", 0x102: "<i2", 0x104: "<i4", 0x108: "<i8"},
    **{0x201: "u1", 0x202: "<u2", 0x204: "<u4", 0x208: "<u8"},
    **{0x402: "<f2", 0x404: "<f4", 0x408: "<f8"},
}
"""Number of a type -> its name in numpy."""


class _Quantised(NamedTuple):
    name: str
    stored: str
    browser: bool = False


_QUANTISED = {
    0x10001: _Quantised("intgemm8", "i1"),
    0x10002: _Quantised("intgemm16", "<i2"),
    0x4101: _Quantised("intgemm8", "i1", True),
    0x4102: _Quantised("intgemm16", "<i2", True),
}
"""Number of a type -> transposed integer matrices, followed by the factor that they were multiplied by."""

_OF_ONE_PROCESSOR = {
    **{0x802: "packed16", 0x1801: "packed8avx2", 0x2801: "packed8avx512"},
    **{0x18001: "intgemm8ssse3", 0x11001: "intgemm8avx2", 0x12001: "intgemm8avx512", 0x13001: "intgemm8avx512vnni"},
    **{0x14002: "intgemm16sse2", 0x11002: "intgemm16avx2", 0x12002: "intgemm16avx512"},
}
"""Number of a type whose matrices are in an undocumented order for one kind of processor -> its name."""


class _Head(NamedTuple):
    name_bytes: int
    type: int
    dimensions: int
    bytes: int


def is_binary_model(path: Path) -> bool:
    """Return True for a file that starts like a binary Marian model, encrypted or not."""
    return first_bytes(path, 8) in (struct.pack("<Q", _VERSION), struct.pack("<Q", _ENCRYPTED))


def read_binary(path: Path) -> tuple[dict[str, Array], dict[str, int]]:
    """Return the arrays of a binary model by name, and the number of matrices of each quantised type.

    Quantised matrices are divided by their stored factor. Numbers in the file never cause memory to be allocated unless
    the bytes that follow bear them out.

    Raises DataError if the file is damaged or missing, ExportError for an unreadable type, by name.
    """
    size = path.stat().st_size if path.is_file() else 0
    content = read_file(path, size if path.suffix != ".gz" else MOST_UNPACKED * size + _SMALL)
    try:
        arrays: dict[str, Array] = {}
        counts: Counter[str] = Counter()
        for name, kind, shape, data in _entries(content):
            if kind in _OF_ONE_PROCESSOR:
                raise ExportError(
                    f"{path}: {printable(name)} is of the type {_OF_ONE_PROCESSOR[kind]}, in an order for one kind of "
                    "processor; import the .npz file that it was made from, or convert that with `--gemm-type intgemm8`"
                )
            if name in arrays:
                raise ValueError(f"{printable(name)} twice")
            counts.update([_QUANTISED[kind].name] if kind in _QUANTISED else [])
            arrays[name] = _array(name, kind, shape, data)
    except (ValueError, struct.error) as error:
        raise DataError(f"{path}: damaged, or not a binary Marian model ({printable(str(error), 120)})") from None
    return arrays, dict(counts)


def _entries(content: bytes) -> Iterator[tuple[str, int, tuple[int, ...], memoryview]]:
    """Yield name, type, shape and bytes of each array. Raises ValueError or struct.error for a damaged file."""
    version, count = struct.unpack_from("<2Q", content)
    if version == _ENCRYPTED:
        raise ValueError("encrypted: only its owner's key opens it")
    place = 16
    if version != _VERSION or count > (len(content) - place) // _HEAD.size:
        raise ValueError(f"version {version}, {count:,} arrays in {len(content):,} bytes")
    heads = [_Head(*_HEAD.unpack_from(content, place + number * _HEAD.size)) for number in range(count)]
    place += count * _HEAD.size
    named = sum(head.name_bytes + 4 * head.dimensions for head in heads)
    if named + sum(head.bytes for head in heads) > len(content) - place:
        raise ValueError("its headers name more bytes than it has")
    names = []
    for head in heads:
        names.append(content[place : place + head.name_bytes].rstrip(b"\0").decode("utf-8"))
        place += head.name_bytes
    shapes = []
    for head in heads:
        shapes.append(struct.unpack_from(f"<{head.dimensions}i", content, place))
        place += 4 * head.dimensions
    (skipped,) = struct.unpack_from("<Q", content, place)
    place += 8 + skipped
    for name, head, shape in zip(names, heads, shapes, strict=True):
        if place + head.bytes > len(content):
            raise ValueError(f"ends within {name}")
        yield name, head.type, shape, memoryview(content)[place : place + head.bytes]
        place += head.bytes


def _array(name: str, kind: int, shape: tuple[int, ...], data: memoryview) -> Array:
    """Return the array of an entry, in fp32 if it is quantised. Raises ValueError if it has too few bytes."""
    quantised = _QUANTISED.get(kind)
    stored = _PLAIN.get(kind) if quantised is None else quantised.stored
    if stored is None:
        raise ValueError(f"{name} is of the unknown type {kind:#x}")
    dtype = np.dtype(stored)
    if min(shape, default=0) < 0 or len(shape) > 8:
        raise ValueError(f"{name} of shape {list(shape)}")
    count = prod(shape)
    needed = count * dtype.itemsize + (0 if quantised is None else 4)
    if needed > len(data) or not shape:
        raise ValueError(f"{name} of shape {list(shape)} in {len(data):,} bytes")
    values = np.frombuffer(data, dtype, count)
    if quantised is None:
        return values.reshape(shape)
    (factor,) = struct.unpack_from("<f", data, count * dtype.itemsize)
    if len(shape) != 2 or not 0 < factor < float("inf"):
        raise ValueError(f"{name} of shape {list(shape)}, multiplied by {factor}")
    rows, columns = shape
    # The fork does not transpose the embedding, because single rows of it are read.
    placed = values.reshape(rows, columns) if quantised.browser and "Wemb" in name else values.reshape(columns, rows).T
    return np.ascontiguousarray(placed, np.float32) / np.float32(factor)


_BYTES, _FLOAT, _BROWSER_INT8 = 0x101, 0x404, 0x4101


def browser_binary(arrays: Mapping[str, Array], options: bytes, quantised: Collection[str]) -> bytes:
    """Return the content of a binary model as the browsers' fork of Marian reads it.

    Args:
        arrays: arrays in fp32, by name.
        options: NUL-terminated YAML.
        quantised: names of the matrices that are stored as 8-bit integers, each multiplied by 127 / max |w|.
    """
    entries = []
    for name, array in sorted(arrays.items()):
        kind, data = _FLOAT, array.astype("<f4").tobytes()
        if name in quantised:
            kind, data = _BROWSER_INT8, _integers(array if "Wemb" in name else array.T)
        entries.append((name.encode() + b"\0", kind, array.shape, _filled(data)))
    entries.append((OPTIONS_ENTRY.encode() + b"\0", _BYTES, (len(options),), options))
    parts = [struct.pack("<2Q", _VERSION, len(entries))]
    parts += [_HEAD.pack(len(name), kind, len(shape), len(data)) for name, kind, shape, data in entries]
    parts += [name for name, *_ in entries]
    parts += [struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in entries]
    # If the position is already aligned, a whole extra block is skipped, as in Marian.
    skipped = _BLOCK - (sum(map(len, parts)) + 8) % _BLOCK
    parts += [struct.pack("<Q", skipped), bytes(skipped), *(data for *_, data in entries)]
    return b"".join(parts)


def _integers(matrix: Array) -> bytes:
    """Return a matrix as 8-bit integers, row by row, and the factor that it was multiplied by."""
    largest = np.abs(matrix).max()
    factor = np.float32(127) / np.float32(largest if largest > 0 else 1)
    return np.rint(matrix * factor).clip(-127, 127).astype(np.int8).tobytes() + struct.pack("<f", factor)


def _filled(data: bytes) -> bytes:
    return data + bytes(-len(data) % _BLOCK)
