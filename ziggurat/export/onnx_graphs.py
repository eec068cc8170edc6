"""A model as two functions of tensors alone: the encoder, and one decoding step with its state going in and out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from ziggurat.export.onnx_caches import GrowingCache, LayerCache, RecurrentCache, RunningSum, ScannedLstm
from ziggurat.models.layers import AnyDecoderLayer, DecoderLayerCache, MergedDecoderLayer
from ziggurat.models.memory import Memory
from ziggurat.models.rnmt import RnmtDecoder, RnmtEncoder, RnmtLayer
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.models.transformer import Decoder, DecoderCache
from ziggurat.nn.attention import (
    CrossAttention,
    CrossAttentionCache,
    Mask,
    OwnAttention,
    SelfAttention,
    padding_bias,
)
from ziggurat.nn.lstm import LstmLayer, LstmState

__all__ = ["EncoderGraph", "Port", "Ports", "StepGraph", "exportable", "ports_of"]


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

    def remember(self, memory: Memory) -> list[Tensor]:
        """Return the tensors `memory` of encoded sentences, and behind them `initial` ones of states."""

    def cache(
        self, positions: Tensor, padding: Mask, memory: Sequence[Tensor], states: Sequence[Tensor]
    ) -> DecoderCache | RecurrentCache:
        """Return the cache that sentences at `positions` [sentences] have with these tensors."""

    def states_of(self, cache: DecoderCache | RecurrentCache) -> list[Tensor]:
        """Return the tensors `states` of a cache after a step."""


def ports_of(model: Seq2Seq, longest: int) -> Ports:
    """Return how the caches of the model's decoder are laid out; no position is beyond `longest`."""
    if isinstance(model.decoder, RnmtDecoder):
        return _RnmtPorts(model.decoder)
    return _TransformerPorts(cast(Decoder, model.decoder), longest)


class _TransformerPorts:
    """Per layer: keys and values of the memory, and those of the target so far, or the sum of what is averaged."""

    def __init__(self, decoder: Decoder, longest: int) -> None:
        self.longest = longest
        self.memory: list[Port] = []
        self.states: list[Port] = []
        self._attentions = [_attentions(cast(AnyDecoderLayer, layer)) for layer in decoder.layers]
        self._kinds: list[type[GrowingCache] | type[RunningSum]] = []
        for number, (own, cross) in enumerate(self._attentions):
            width = cross.q_proj.weight.shape[0]
            shape = ("sentences", cross.heads, "source", width // cross.heads)
            self.memory += [Port(f"memory.{number}.{part}", shape) for part in ("key", "value")]
            if isinstance(own, SelfAttention):
                grown = ("sentences", "beams", own.heads, "steps", width // own.heads)
                self.states += [Port(f"{number}.{part}", grown) for part in ("key", "value")]
            else:
                self.states.append(Port(f"{number}.sum", ("sentences", "beams", width)))
            self._kinds.append(GrowingCache if isinstance(own, SelfAttention) else RunningSum)

    def remember(self, memory: Memory) -> list[Tensor]:
        projected = [cross.remember(memory.of(n), None) for n, (_, cross) in enumerate(self._attentions)]
        return [part for cache in projected for part in (cache.key, cache.value)]

    def cache(
        self, positions: Tensor, padding: Mask, memory: Sequence[Tensor], states: Sequence[Tensor]
    ) -> DecoderCache:
        remaining, pairs = iter(states), zip(memory[::2], memory[1::2], strict=True)
        layers = []
        for number, ((key, value), kind) in enumerate(zip(pairs, self._kinds, strict=True), start=1):
            cross = CrossAttentionCache(key, value, padding, keep_weights=number == len(self._kinds))
            own = kind([next(remaining) for _ in range(kind.PARTS)], positions, self.longest)
            layers.append(LayerCache(own, cross))
        return DecoderCache(cast(list[DecoderLayerCache], layers))

    def states_of(self, cache: DecoderCache | RecurrentCache) -> list[Tensor]:
        layers = cast(list[LayerCache], cast(DecoderCache, cache).layers)
        return [part for layer in layers for part in layer.own.parts]


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

    def remember(self, memory: Memory) -> list[Tensor]:
        states = memory.of(0)
        cache = self._attention.remember(states, Mask(padding_bias(memory.mask, states.dtype)))
        # Before the first step nothing was attended to: a query of zeros, as RnmtDecoder.admit has it.
        context = self._attention(torch.zeros_like(states[:, :1]), cache)
        return [cache.key, cache.value, context.squeeze(1)]

    def cache(
        self, positions: Tensor, padding: Mask, memory: Sequence[Tensor], states: Sequence[Tensor]
    ) -> RecurrentCache:
        *cells, context = states
        of_layers = [LstmState(*pair) for pair in zip(cells[::2], cells[1::2], strict=True)]
        return RecurrentCache(CrossAttentionCache(memory[0], memory[1], padding, keep_weights=True), context, of_layers)

    def states_of(self, cache: DecoderCache | RecurrentCache) -> list[Tensor]:
        of = cast(RecurrentCache, cache)
        return [*(part for state in of.states for part in state), of.context]


class EncoderGraph(nn.Module):
    """(source ids [sentences, source], mask of that shape, True at real tokens) -> what steps start from.

    Args:
        model: in evaluation mode.
        ports: of its decoder.
    """

    def __init__(self, model: Seq2Seq, ports: Ports) -> None:
        super().__init__()
        self.model = model
        self.ports = ports

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors `memory` of the ports, and behind them the `initial` ones of states."""
        return tuple(self.ports.remember(self.model.encode(source, source_mask)))


class StepGraph(nn.Module):
    """One token per hypothesis, every sentence at its own position -> logits, attention and the new state.

    Args:
        model: in evaluation mode.
        ports: of its decoder.
        longest: no position is beyond it.
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
            positions: [sentences], how many tokens each sentence has taken before.
            source_mask: [sentences, source], True at real tokens.
            memory: what EncoderGraph gave, without `initial` tensors.
            states: those after the step before; a state's `steps` is at least the largest position.
        """
        padding = Mask(padding_bias(source_mask, memory[0].dtype))
        cache = self.ports.cache(positions, padding, memory, states)
        advance = cast(Callable[..., Tensor], self.model.decoder.step)
        hidden = advance(self.model.target_embedding.step(tokens, positions, self.longest), cache)
        attention = cache.cross_attention
        assert attention is not None  # it is kept
        return (self.model.logits(hidden), attention, *self.ports.states_of(cache))


def exportable(model: Seq2Seq) -> Seq2Seq:
    """Return the model with modules that a graph can hold: the loops of a recurrent encoder as scans."""
    if not isinstance(model.encoder, RnmtEncoder):
        return model
    model = copy.deepcopy(model)
    for layer in cast(RnmtEncoder, model.encoder).layers:
        recurrent = cast(RnmtLayer, layer)
        recurrent.lstm = cast(LstmLayer, ScannedLstm(recurrent.lstm))
    return model
