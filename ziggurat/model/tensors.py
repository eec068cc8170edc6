"""Tensors of a model: whole and sharded tensors, safetensors files, weights by name."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ziggurat.config import ModelConfig
from ziggurat.model.build import assemble
from ziggurat.model.embedding import OutputProjection
from ziggurat.system.errors import CheckpointError, ConfigError, other_format, printable, refuse_passing
from ziggurat.system.files import atomic_file
from ziggurat.system.small_files import check_name, check_regular

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_WEIGHTS_FORMAT = "1"
"""_WEIGHTS_FORMAT is the value of `format` in the header of every file that this package writes."""

_BLOCK_BYTES = 1 << 22
_MAX_HEADER_BYTES = 1 << 26  # 64 MiB: 500,000 tensors; moments of two stacks of 4,096 layers have fewer
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def is_cut_up(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether it is a DTensor; recognised by a method, since importing the class takes a second."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor (a DTensor), or any other tensor itself."""
    return tensor.to_local() if is_cut_up(tensor) else tensor


def part_begins(tensor: Tensor) -> int:
    """Return the offset of `local(tensor)` in the flattened whole tensor, sharded by rows as in FSDP.

    With n rows and N processes, each has ceil(n / N) rows, as `torch.chunk` splits, until none are left.
    """
    if not is_cut_up(tensor) or not tensor.numel():
        return 0
    rows, mesh = tensor.shape[0], tensor.device_mesh
    return min(rows, mesh.get_local_rank() * -(-rows // mesh.size())) * (tensor.numel() // rows)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, for which all processes call this together, or any other tensor itself."""
    return tensor.full_tensor() if is_cut_up(tensor) else tensor


def placed_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole `tensor`, which every process has, placed and sharded like `like`, with its dtype unchanged."""
    on_device = tensor.to(like.device)
    if not is_cut_up(like):
        return on_device
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file atomically; return the fingerprint of its bytes (ziggurat.system.files.fingerprint).

    safetensors' own `save` holds the whole file in memory, twice over in version 0.8; here the tensors' memory is
    written directly and the interpreter lock is released, so that training continues in the meantime. `metadata` is
    added to the header. Raises OSError when the file cannot be written; then no trace of it remains.
    """
    digest = xxhash.xxh3_128()
    with atomic_file(path) as file:
        for block in _blocks(tensors, {"format": _WEIGHTS_FORMAT, **(metadata or {})}):
            digest.update(block)
            file.write(block)
    return str(digest.hexdigest())


def _blocks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: length of the header, header, tensors, widest elements first."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps every tensor aligned
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Padded with spaces to a multiple of 8, so that the tensors after the header are aligned.
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        on_cpu = tensors[name].detach().cpu().contiguous()
        content = on_cpu.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), _BLOCK_BYTES):
            yield content[start : start + _BLOCK_BYTES]


_SAID = re.compile(r"unable to (?:open|mmap|stat|read).*\((\d+)\)", re.DOTALL)


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Context in which a system error that PyTorch reports as text while it maps a file becomes an OSError."""
    try:
        yield
    except RuntimeError as error:
        if found := _SAID.fullmatch(str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from None
        raise


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file of this package. Raises CheckpointError when it is missing, damaged or too new."""
    try:
        check_name(path)
        check_regular(path, error=CheckpointError)
        with path.open("rb") as start:  # safetensors reports every file that it cannot open as missing
            size = int.from_bytes(start.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: damaged or not a safetensors file (a header of {size:,} bytes)")
        with system_errors(), safe_open(path, framework="pt", device="cpu") as file:
            version = (file.metadata() or {}).get("format")
            if version != _WEIGHTS_FORMAT:
                raise CheckpointError(other_format(path, version, _WEIGHTS_FORMAT, "train or export again"))
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except ConfigError:  # also a ValueError
        raise
    except (SafetensorError, OSError, ValueError) as error:
        refuse_passing(path, error)
        raise CheckpointError(f"{path}: damaged or not a safetensors file ({error})") from None


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a safetensors file's tensors, whose values are not read. Raises as read_tensors does."""
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into CPU memory. Raises CheckpointError when it is missing, damaged or too new."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter by name; a shared one once, under its first name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Copy `tensors` into the model's parameters; Errors use `name` for their origin.

    Raises CheckpointError naming the first parameter that is missing or unknown, or has a different shape.
    """
    parameters = dict(model.named_parameters())
    _refuse_other_shapes(parameters, {key: tensor.shape for key, tensor in tensors.items()}, name)
    for key, parameter in parameters.items():
        parameter.copy_(placed_as(tensors[key], parameter))
    if isinstance(output := getattr(model, "output", None), OutputProjection):
        output.rule_out(tensors.get("output.bias"))


def _refuse_other_shapes(parameters: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], name: str) -> None:
    if missing := sorted(parameters.keys() - shapes.keys()):
        raise CheckpointError(f"{name}: parameter {missing[0]} is missing ({len(missing)} in all); other architecture?")
    if unknown := sorted(shapes.keys() - parameters.keys()):
        shown = printable(unknown[0])
        raise CheckpointError(f"{name}: parameter {shown} is unknown ({len(unknown)} in all); other architecture?")
    for key, parameter in parameters.items():
        if tuple(parameter.shape) != tuple(shapes[key]):
            raise CheckpointError(
                f"{name}: {key} has shape {list(shapes[key])}, the configuration needs {list(parameter.shape)}"
            )


def check_fit(config: ModelConfig, sizes: tuple[int, int], weights_file: Path) -> None:
    """Compare a configuration with the header of its weights before building a model, which takes memory.

    `sizes` are numbers of source and target tokens. Raises CheckpointError: they do not fit; the file cannot be read.
    """
    shapes = read_shapes(weights_file)
    # Layers first: making 4,096 of them takes a minute even on the meta device.
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        found = {int(key.split(".")[2]) for key in shapes if key.startswith(f"{name}.layers.")}
        if not set(stack.owners()) <= found <= set(range(stack.layers)):
            raise CheckpointError(
                f"{weights_file}: has {len(found)} {name} layers, but the configuration says {stack.layers}; one of "
                "them is not of this model"
            )
    with torch.device("meta"):
        parameters = dict(assemble(config, *sizes).named_parameters())
    _refuse_other_shapes(parameters, shapes, str(weights_file))
