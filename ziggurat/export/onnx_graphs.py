"""A model as two functions of tensors alone: the encoder, and one decoding step with its state going in and out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor, nn

from ziggurat.export.onnx_caches import GrowingCache, RunningSum, ScannedLstm
from ziggurat.models.layers import AnyDecoderLayer, DecoderLayerCache, MergedDecoderLayer
from ziggurat.models.rnmt import RnmtCache, RnmtDecoder, RnmtEncoder, RnmtLayer
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.models.transformer import Decoder, DecoderCache
from ziggurat.nn.attention import (
    CrossAttention,
    CrossAttentionCache,
    Mask,
    OwnAttention,
    OwnCache,
    SelfAttention,
    padding_bias,
)
from ziggurat.nn.lstm import LstmLayer, LstmState

__all__ = ["EncoderGraph", "Port", "StepGraph", "exportable", "ports_of"]


@dataclass(frozen=True)
class Port:
    """A tensor that goes from the encoder to the steps, or from step to step.

    Attributes:
        name: its name in the graphs.
        shape: numbers, and the names of axes that vary: `sentences`, `beams`, `source`, `steps`.
        initial: of a state: the encoder's output [sentences, ...] that every beam starts with; None: zeros.
    """

    name: str
    shape: tuple[str | int, ...]
    initial: str | None = None


class Ports(Protocol):
    """How the caches of one family of decoders are laid out as named tensors."""

    memory: list[Port]
    """What every step reads of the source."""
    states: list[Port]
    """What steps hand on; those with an axis `steps` grow by one each time."""

    def remember(self, cache: object) -> list[Tensor]:
        """Return the tensors `memory` of a cache before the first step, and behind them `initial` ones of states."""

    def cache(
        self, positions: Tensor, padding: Mask, memory: Sequence[Tensor], states: Sequence[Tensor]
    ) -> DecoderCache | RnmtCache:
        """Return the cache that sentences at `positions` [sentences] have with these tensors."""

    def states_of(self, cache: object, beams: int) -> list[Tensor]:
        """Return the tensors `states` of a cache after a step."""


def ports_of(model: Seq2Seq) -> Ports:
    """Return how the caches of the model's decoder are laid out."""
    if isinstance(model.decoder, RnmtDecoder):
        return _RnmtPorts(model.decoder)
    return _TransformerPorts(cast(Decoder, model.decoder))


class _TransformerPorts:
    """Per layer: keys and values of the memory, and those of the target so far, or the sum of what is averaged."""

    def __init__(self, decoder: Decoder) -> None:
        self.memory: list[Port] = []
        self.states: list[Port] = []
        self._own: list[type[GrowingCache] | type[RunningSum]] = []
        for number, layer in enumerate(decoder.layers):
            own, cross = _attentions(cast(AnyDecoderLayer, layer))
            width = cross.q_proj.weight.shape[0]
            shape = ("sentences", cross.heads, "source", width // cross.heads)
            self.memory += [Port(f"memory.{number}.{part}", shape) for part in ("key", "value")]
            if isinstance(own, SelfAttention):
                grown = ("sentences", "beams", own.heads, "steps", width // own.heads)
                self.states += [Port(f"{number}.{part}", grown) for part in ("key", "value")]
            else:
                self.states.append(Port(f"{number}.sum", ("sentences", "beams", width)))
            self._own.append(GrowingCache if isinstance(own, SelfAttention) else RunningSum)

    def remember(self, cache: object) -> list[Tensor]:
        layers = cast(DecoderCache, cache).layers
        return [part for layer in layers for part in (layer.cross.key, layer.cross.value)]

    def cache(
        self, positions: Tensor, padding: Mask, memory: Sequence[Tensor], states: Sequence[Tensor]
    ) -> DecoderCache:
        remaining, pairs = iter(states), zip(memory[::2], memory[1::2], strict=True)
        layers = []
        for number, ((key, value), kind) in enumerate(zip(pairs, self._own, strict=True), start=1):
            cross = CrossAttentionCache(key, value, padding, keep_weights=number == len(self._own))
            own = kind([next(remaining) for _ in range(kind.PARTS)], positions)
            layers.append(DecoderLayerCache(cast(OwnCache, own), cross))
        return DecoderCache(layers)

    def states_of(self, cache: object, beams: int) -> list[Tensor]:
        own = [cast(GrowingCache | RunningSum, layer.own) for layer in cast(DecoderCache, cache).layers]
        return [part.unflatten(0, (-1, beams)) for its in own for part in its.parts]


def _attentions(layer: AnyDecoderLayer) -> tuple[OwnAttention, CrossAttention]:
    """Return the attentions of a decoder layer: to the target and to the memory."""
    if isinstance(layer, MergedDecoderLayer):
        return layer.merged_attn.own, layer.merged_attn.cross
    return layer.self_attn, layer.cross_attn


class _RnmtPorts:
    """Keys and values of the memory, the states of all LSTM layers, and what was attended to last."""

    def __init__(self, decoder: RnmtDecoder) -> None:
        self._attention = decoder.attention
        heads, width = self._attention.heads, self._attention.q_proj.weight.shape[0]
        keys = ("sentences", heads, "source", width // heads)
        self.memory = [Port(f"memory.{part}", keys) for part in ("key", "value")]
        shape = ("sentences", "beams", width)
        layers = range(len(decoder.layers))
        self.states = [Port(f"{number}.{part}", shape) for number in layers for part in ("output", "cell")]
        self.states.append(Port("context", shape, initial="initial.context"))

    def remember(self, cache: object) -> list[Tensor]:
        memory = cast(RnmtCache, cache).memory
        # Before the first step nothing was attended to: a query of zeros, as RnmtDecoder.step has it.
        nothing = memory.key.new_zeros(memory.key.shape[0], 1, self._attention.q_proj.weight.shape[0])
        return [memory.key, memory.value, self._attention(nothing, memory).squeeze(1)]

    def cache(self, positions: Tensor, padding: Mask, memory: Sequence[Tensor], states: Sequence[Tensor]) -> RnmtCache:
        *cells, context = states
        cache = RnmtCache(CrossAttentionCache(memory[0], memory[1], padding, keep_weights=True))
        rows = [part.flatten(0, 1) for part in cells]
        cache.states = [LstmState(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
        cache.context = context
        return cache

    def states_of(self, cache: object, beams: int) -> list[Tensor]:
        of = cast(RnmtCache, cache)
        assert of.context is not None  # it was given
        return [*(part.unflatten(0, (-1, beams)) for state in of.states for part in state), of.context]


class EncoderGraph(nn.Module):
    """(source ids [sentences, source], mask of that shape, True at real tokens) -> what steps start from."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model
        self.ports = ports_of(model)

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors `memory` of the model's ports, and behind them the `initial` ones of its states."""
        decoder = cast(Decoder | RnmtDecoder, self.model.decoder)
        return tuple(self.ports.remember(decoder.start(self.model.encode(source, source_mask))))


class StepGraph(nn.Module):
    """One token per hypothesis, every sentence at its own position -> logits, attention and the new state."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model
        self.ports = ports_of(model)

    def forward(
        self, tokens: Tensor, positions: Tensor, source_mask: Tensor, memory: list[Tensor], states: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return logits [sentences, beams, vocabulary], attention [sentences, beams, source] and the new states.

        Args:
            tokens: ids [sentences, beams]; begin-of-sentence at position 0.
            positions: [sentences], how many tokens each sentence has taken before.
            source_mask: [sentences, source], True at real tokens.
            memory: what EncoderGraph gave, without `initial` tensors.
            states: those after the step before; a state's `steps` is at least the largest position.
        """
        padding = Mask(padding_bias(source_mask, memory[0].dtype))
        cache = self.ports.cache(positions, padding, memory, states)
        decoder = cast(Decoder | RnmtDecoder, self.model.decoder)
        hidden = decoder.step(self.model.target_embedding.step(tokens, positions), cache)  # type: ignore[arg-type]
        attention = cache.cross_attention
        assert attention is not None  # it is kept
        return (self.model.logits(hidden), attention, *self.ports.states_of(cache, tokens.shape[1]))


def exportable(model: Seq2Seq) -> Seq2Seq:
    """Return the model with modules that a graph can hold: the loops of a recurrent encoder as scans."""
    if not isinstance(model.encoder, RnmtEncoder):
        return model
    model = copy.deepcopy(model)
    for layer in cast(RnmtEncoder, model.encoder).layers:
        recurrent = cast(RnmtLayer, layer)
        recurrent.lstm = cast(LstmLayer, ScannedLstm(recurrent.lstm))
    return model
