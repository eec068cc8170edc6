"""Export of any model to ONNX, as two graphs of tensors: the encoder, and one step from one state to the next."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from ziggurat.config import ModelConfig
from ziggurat.exchange.onnx_caches import GrowingCache, LayerCache, RecurrentCache, RunningCell, RunningSum, ScannedLstm
from ziggurat.model.attention.cache import CrossAttentionCache, KeptWeights, Mask, padding_bias
from ziggurat.model.attention.multihead import FirstValues, SelfAttention
from ziggurat.model.attention.variants import Ssru
from ziggurat.model.embedding import Rotary, SinusoidalPositions
from ziggurat.model.layers import AnyDecoderLayer, DecoderLayerCache
from ziggurat.model.lstm import LstmLayer, LstmState
from ziggurat.model.rnmt import RnmtDecoder, RnmtEncoder, RnmtLayer
from ziggurat.model.seq2seq import Memory, Seq2Seq
from ziggurat.model.transformer import Decoder, DecoderCache
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import write_atomically


@dataclass(frozen=True)
class Port:
    """A tensor that is passed from the encoder to the steps, or from step to step.

    Attributes:
        name: its name in the graphs.
        shape: numbers, and the names of varying axes: `sentences`, `beams`, `source`, `steps`.
        initial: for a state, the encoder's output [sentences, ...] that every beam starts with; None: zeros.
    """

    name: str
    shape: tuple[str | int, ...]
    initial: str | None = None


class Ports(Protocol):
    """Layout of the caches of one family of decoders as named tensors."""

    memory: list[Port]
    """Tensors of the source, which every step reads."""
    states: list[Port]
    """Tensors that each step passes to the next; an axis `steps` grows by one each time."""

    def remember(self, memory: Memory) -> list[Tensor]:
        """Return the tensors `memory` of encoded sentences, followed by the `initial` ones of states."""

    def cache(
        self, positions: Tensor, padding: Mask, memory: Sequence[Tensor], states: Sequence[Tensor]
    ) -> DecoderCache | RecurrentCache:
        """Return the cache of sentences at `positions` [sentences] that consists of these tensors."""

    def states_of(self, cache: DecoderCache | RecurrentCache) -> list[Tensor]:
        """Return the tensors `states` of a cache after a step."""


def _ports_of(model: Seq2Seq, longest: int) -> Ports:
    """Return the layout of the caches of the model's decoder; no position is beyond `longest`."""
    if isinstance(model.decoder, RnmtDecoder):
        return _RnmtPorts(model.decoder)
    return _TransformerPorts(cast(Decoder, model.decoder), longest)


class _TransformerPorts:
    """Layout with, for each layer, keys and values of the memory, and those of the target so far, a sum, or cells."""

    def __init__(self, decoder: Decoder, longest: int) -> None:
        self.longest = longest
        self.memory: list[Port] = []
        self.states: list[Port] = []
        self._aligned = decoder.aligned
        self._attentions = [cast(AnyDecoderLayer, layer).attentions() for layer in decoder.layers]
        self._kinds: list[type[GrowingCache] | type[RunningSum]] = []
        for number, (own, cross) in enumerate(self._attentions):
            width = cross.q_proj.weight.shape[0]
            shape = ("sentences", cross.heads, "source", width // cross.heads)
            self.memory += [Port(f"memory.{number}.{part}", shape) for part in ("key", "value")]
            if isinstance(own, SelfAttention):
                grown = ("sentences", "beams", own.heads, "steps", width // own.heads)
                self.states += [Port(f"{number}.{part}", grown) for part in ("key", "value")]
                self._kinds.append(GrowingCache)
            else:
                self.states.append(Port(f"{number}.sum", ("sentences", "beams", width)))
                self._kinds.append(RunningCell if isinstance(own, Ssru) else RunningSum)

    def remember(self, memory: Memory) -> list[Tensor]:
        first = FirstValues()
        projected = [cross.remember(memory.of(n), None, first=first) for n, (_, cross) in enumerate(self._attentions)]
        return [part for cache in projected for part in (cache.key, cache.value)]

    def cache(
        self, positions: Tensor, padding: Mask, memory: Sequence[Tensor], states: Sequence[Tensor]
    ) -> DecoderCache:
        remaining, pairs = iter(states), zip(memory[::2], memory[1::2], strict=True)
        layers, first, kept = [], FirstValues(), KeptWeights(self._aligned.head)
        for number, ((key, value), kind) in enumerate(zip(pairs, self._kinds, strict=True)):
            aligned = number == self._aligned.layer % len(self._kinds)
            cross = CrossAttentionCache(key, value, padding, kept if aligned else None)
            own = kind([next(remaining) for _ in range(kind.PARTS)], positions, self.longest)
            layers.append(LayerCache(own, cross, first))
        return DecoderCache(cast(list[DecoderLayerCache], layers), kept)

    def states_of(self, cache: DecoderCache | RecurrentCache) -> list[Tensor]:
        layers = cast(list[LayerCache], cast(DecoderCache, cache).layers)
        return [part for layer in layers for part in layer.own.parts]


class _RnmtPorts:
    """Layout: keys and values of the memory, the states of all LSTM layers, and the result of the last attention."""

    def __init__(self, decoder: RnmtDecoder) -> None:
        self._aligned = decoder.aligned
        self._attention = decoder.attention
        heads, width = self._attention.heads, self._attention.q_proj.weight.shape[0]
        keys = ("sentences", heads, "source", width // heads)
        self.memory = [Port(f"memory.{part}", keys) for part in ("key", "value")]
        shape = ("sentences", "beams", width)
        layers = range(len(decoder.layers))
        self.states = [Port(f"{number}.{part}", shape) for number in layers for part in ("output", "cell")]
        self.states.append(Port("context", shape, initial="initial.context"))

    def remember(self, memory: Memory) -> list[Tensor]:
        states = memory.of(0)
        cache = self._attention.remember(states, Mask(padding_bias(memory.mask, states.dtype)))
        # The first step needs the result of a previous attention: that of a query of zeros, as in RnmtDecoder.admit.
        context = self._attention(torch.zeros_like(states[:, :1]), cache)
        return [cache.key, cache.value, context.squeeze(1)]

    def cache(
        self, positions: Tensor, padding: Mask, memory: Sequence[Tensor], states: Sequence[Tensor]
    ) -> RecurrentCache:
        *cells, context = states
        of_layers = [LstmState(*pair) for pair in zip(cells[::2], cells[1::2], strict=True)]
        kept = KeptWeights(self._aligned.head)
        return RecurrentCache(CrossAttentionCache(memory[0], memory[1], padding, kept), context, of_layers)

    def states_of(self, cache: DecoderCache | RecurrentCache) -> list[Tensor]:
        of = cast(RecurrentCache, cache)
        return [*(part for state in of.states for part in state), of.context]


class EncoderGraph(nn.Module):
    """Graph: source ids and mask (True at real tokens) [sentences, source] -> the tensors that steps start from.

    Args:
        model: the model, in evaluation mode.
        ports: layout of its decoder's caches.
    """

    def __init__(self, model: Seq2Seq, ports: Ports) -> None:
        super().__init__()
        self.model = model
        self.ports = ports

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors `memory` of the ports, followed by the `initial` ones of states."""
        return tuple(self.ports.remember(self.model.encode(source, source_mask)))


class StepGraph(nn.Module):
    """Graph: one token per hypothesis, each sentence at its own position -> logits, attention and the new state.

    Args:
        model: the model, in evaluation mode.
        ports: layout of its decoder's caches.
        longest: an upper bound of the positions.
    """

    def __init__(self, model: Seq2Seq, ports: Ports, longest: int) -> None:
        super().__init__()
        self.model = model
        self.ports = ports
        self.longest = longest

    def forward(
        self, tokens: Tensor, positions: Tensor, source_mask: Tensor, memory: list[Tensor], states: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return logits [sentences, beams, vocabulary], attention [sentences, beams, source] and the new states.

        Args:
            tokens: ids [sentences, beams]; begin-of-sentence at position 0.
            positions: [sentences], number of tokens that each sentence has already taken.
            source_mask: [sentences, source], True at real tokens.
            memory: results of EncoderGraph, without the `initial` ones.
            states: the states after the previous step; their axis `steps` is at least the largest position.
        """
        padding = Mask(padding_bias(source_mask, memory[0].dtype))
        cache = self.ports.cache(positions, padding, memory, states)
        # The decoder's own step, because Seq2Seq's step keeps its state in buffers.
        advance = cast(Callable[..., Tensor], self.model.decoder.step)
        hidden = advance(self.model.target_embedding.step(tokens, positions, self.longest), cache)
        attention = cache.cross_attention
        assert attention is not None  # every layout keeps the attention of one layer
        return (self.model.logits(hidden), attention, *self.ports.states_of(cache))


def _exportable(model: Seq2Seq) -> Seq2Seq:
    """Return the model with modules that a graph can contain: a recurrent encoder's loops become scans."""
    if not isinstance(model.encoder, RnmtEncoder):
        return model
    # The caller's model keeps its loops.
    model = copy.deepcopy(model)
    for layer in cast(RnmtEncoder, model.encoder).layers:
        recurrent = cast(RnmtLayer, layer)
        recurrent.lstm = cast(LstmLayer, ScannedLstm(recurrent.lstm))
    return model


ENCODER_FILE = "encoder.onnx"
STEP_FILE = "step.onnx"
MANIFEST_FILE = "onnx.json"
FORMAT = 1
"""FORMAT is the version of the manifest, and of the graphs' inputs and outputs."""
_OPSET = 20
"""_OPSET is the version of ai.onnx; onnxruntime has supported it since 1.17 (January 2024)."""
_EXAMPLE = {"sentences": 2, "beams": 3, "source": 5, "steps": 7}
"""Sizes while a graph is traced; none is 1, which would be baked into the graph as a constant."""


def write_onnx(folder: Path, model: Seq2Seq, config: ModelConfig, *, positions: int) -> None:
    """Write `encoder.onnx`, `step.onnx` and, last, `onnx.json`, which names and describes their inputs and outputs.

    Args:
        folder: an existing folder.
        model: the model, in evaluation mode, on the CPU, in fp32.
        config: its architecture.
        positions: size of sinusoid tables, which cannot grow in a graph: the longest source and target, including
            begin- or end-of-sentence. Used only with sinusoidal or rotary positions; learned ones already have a limit,
            and other models have none.

    A graph of more than 2 GB keeps its weights in a file `*.onnx.data` next to it. Raises ConfigError if a package of
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
    model = _exportable(model)
    _make_room(model, limit)
    # The largest position; models without positions do not use it.
    longest = (limit or 1) - 1
    ports = _ports_of(model, longest)
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
    # Last, because a folder without a manifest is incomplete.
    write_atomically(folder / MANIFEST_FILE, json.dumps(_manifest(model, ports, limit), indent=1).encode())


def _position_limit(config: ModelConfig, positions: int) -> int | None:
    """Return the number of positions of the graphs, or None if they have no limit."""
    if config.family == "rnmt" or config.embedding.positions == "none":
        return None
    return config.embedding.limit or positions


def _make_room(model: nn.Module, positions: int | None) -> None:
    """Grow sinusoid tables to `positions` by using them once."""
    for module in model.modules():
        if isinstance(module, SinusoidalPositions) and positions is not None:
            module(positions)
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
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None  # never None with dynamo
    # Source lines of ziggurat and paths on this machine make up half of the file.
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
    program.save(path)


def _example(port: Port) -> Tensor:
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
        "opset": _OPSET,
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
