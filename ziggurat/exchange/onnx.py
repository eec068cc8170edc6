"""Export to ONNX of any model, as two graphs: the encoder, and one decoding step."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from ziggurat.config import ModelConfig
from ziggurat.exchange.onnx_graphs import EncoderGraph, Port, Ports, StepGraph, exportable, ports_of
from ziggurat.model.attention.rotary import Rotary
from ziggurat.model.embedding import SinusoidalPositions
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import write_atomically

ENCODER_FILE = "encoder.onnx"
STEP_FILE = "step.onnx"
MANIFEST_FILE = "onnx.json"
FORMAT = 1
"""Version of the manifest, and of the graphs' inputs and outputs."""
OPSET = 20
"""Version of ai.onnx; onnxruntime has it since 1.17 (January 2024)."""
_EXAMPLE = {"sentences": 2, "beams": 3, "source": 5, "steps": 7}
"""Sizes while a graph is traced; none is 1, which the graph would take for a constant."""


def write_onnx(folder: Path, model: Seq2Seq, config: ModelConfig, *, positions: int) -> None:
    """Write `encoder.onnx`, `step.onnx` and, last, `onnx.json`, which names and describes their inputs and outputs.

    Args:
        folder: an existing folder.
        model: the model, in evaluation mode, on the CPU, in fp32.
        config: its architecture.
        positions: size of tables of sinusoids, which cannot grow in a graph: the longest source and target, begin- or
            end-of-sentence counted. Used only with sinusoidal or rotary positions; learned ones have a limit already,
            and other models have none.

    A graph of more than 2 GB keeps its weights in a file `*.onnx.data` beside it. Raises ConfigError when a package of
    the extra `export` is missing, and OSError.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401  (torch.onnx needs it)
    except ImportError as error:
        raise ConfigError(
            f"the export to ONNX needs the package {error.name}: pip install 'ziggurat-mt[export]'"
        ) from None
    limit = _position_limit(config, positions)
    model = exportable(model)
    _make_room(model, limit)
    # The largest position; models without positions do not use it.
    longest = (limit or 1) - 1
    ports = ports_of(model, longest)
    source = [Port("source", ("sentences", "source")), Port("source_mask", ("sentences", "source"))]
    state_in = [Port(f"state.{port.name}", port.shape) for port in ports.states]
    state_out = [f"next.{port.name}" for port in ports.states]
    step_inputs = [Port("tokens", ("sentences", "beams")), Port("positions", ("sentences",)), source[1]]
    remembered = [port.name for port in ports.memory] + [port.initial for port in ports.states if port.initial]
    _write(EncoderGraph(model, ports), source, remembered, limit, folder / ENCODER_FILE)
    _write(
        StepGraph(model, ports, longest),
        [*step_inputs, ports.memory, state_in],
        ["logits", "attention", *state_out],
        limit,
        folder / STEP_FILE,
    )
    for name in (ENCODER_FILE, STEP_FILE):
        onnx.checker.check_model(str(folder / name), full_check=True)
    # Last: a folder without a manifest is incomplete.
    write_atomically(folder / MANIFEST_FILE, json.dumps(_manifest(model, ports, limit), indent=1).encode())


def _position_limit(config: ModelConfig, positions: int) -> int | None:
    """Return the number of positions of the graphs, or None where they have no limit."""
    if config.family == "rnmt" or config.embedding.positions == "none":
        return None
    return config.embedding.limit or positions


def _make_room(model: nn.Module, positions: int | None) -> None:
    """Grow tables of sinusoids to `positions` by using them once."""
    for module in model.modules():
        if isinstance(module, SinusoidalPositions) and positions is not None:
            module(0, positions)
        if isinstance(module, Rotary) and positions is not None:
            module(torch.empty(1, 1, positions, module.d_head), 0)


def _write(
    module: nn.Module, inputs: Sequence[Port | Sequence[Port]], outputs: Sequence[str], limit: int | None, path: Path
) -> None:
    """Trace `module`, whose arguments are `inputs` (tensors and lists of tensors), and write its graph."""
    axes = {name: Dim(name) for name in ("sentences", "beams")}
    axes["source"] = Dim("source", max=limit)
    axes["steps"] = Dim("steps", max=None if limit is None else limit - 1)
    flat = [port for item in inputs for port in ([item] if isinstance(item, Port) else item)]
    with _quietly(), torch.no_grad():
        program = torch.onnx.export(
            module,
            tuple(_example(item) if isinstance(item, Port) else [_example(port) for port in item] for item in inputs),
            input_names=[port.name for port in flat],
            output_names=list(outputs),
            dynamic_shapes=tuple(
                _varying(item, axes) if isinstance(item, Port) else [_varying(port, axes) for port in item]
                for item in inputs
            ),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None  # it is with dynamo
    # Lines of our source, and paths of this machine: half the size of the file.
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
    program.save(path)


def _example(port: Port) -> Tensor:
    """Return a tensor of example size for one input."""
    shape = [_EXAMPLE[size] if isinstance(size, str) else size for size in port.shape]
    if port.name == "source_mask":
        return torch.ones(shape, dtype=torch.bool)
    if port.name in ("source", "tokens", "positions"):
        return torch.ones(shape, dtype=torch.int64)
    return torch.zeros(shape)


def _varying(port: Port, axes: dict[str, Any]) -> dict[int, Any]:
    return {axis: axes[size] for axis, size in enumerate(port.shape) if isinstance(size, str)}


def _manifest(model: Seq2Seq, ports: Ports, limit: int | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "opset": OPSET,
        "vocabulary_size": model.vocabulary_size,
        "max_positions": limit,
        "memory": [{"name": port.name, "shape": port.shape} for port in ports.memory],
        "states": [{"name": port.name, "shape": port.shape, "initial": port.initial} for port in ports.states],
    }


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence messages of torch's exporter about itself (versions, deprecations, torchvision)."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
