"""The encoder-decoder: the only model type that training and decoding use, and the interface of its decoder."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ziggurat.config.train import GuidedAlignmentConfig, Recompute
from ziggurat.model.attention.cache import BeamCache, KeptWeights, LiveBeams
from ziggurat.model.embedding import InputEmbedding, OutputProjection

_T = TypeVar("_T")

_INSIDE = 16
"""Approximate size of a layer's saved activations, in multiples of its input: 13 to 21 (base size, pre-norm)."""


class LayerRange(NamedTuple):
    """Consecutive layers of a stack, by number, from 0.

    With `again`, only their inputs are kept, and their activations are recomputed in the backward pass (activation
    checkpointing, Chen et al. 2016).
    """

    layers: range
    again: bool

    def through(self, function: Callable[..., _T], *inputs: Any) -> _T:
        """Return function(`layers`, *inputs), which must be repeatable.

        A second call draws the same random numbers, so that gradients are bit-identical.
        """
        if not self.again:
            return function(self.layers, *inputs)
        # The reentrant form does not propagate gradients to tensors inside lists and named tuples, which runs of layers
        # return.
        return checkpoint(function, self.layers, *inputs, use_reentrant=False)


def runs(layers: int, recompute: Recompute) -> list[LayerRange]:
    """Return the runs of a stack of `layers` layers, bottom first; `recompute` has the values of ziggurat.config.train.

    The input of every run and the activations of one run are kept between the passes. With runs of r of L layers, this
    amounts to L / r + _INSIDE * r inputs, which is minimal if both terms are equal: r = sqrt(L / _INSIDE).
    """
    if recompute is None:
        return [LayerRange(range(layers), again=False)]
    if recompute == "segments":
        count = math.ceil(layers / max(1, round(math.sqrt(layers / _INSIDE))))
        cuts = [layers * cut // count for cut in range(count + 1)]
        return [LayerRange(range(first, end), again=True) for first, end in pairwise(cuts)]
    found = []
    for first in range(0, layers, recompute):
        last = first + recompute - 1
        found.append(LayerRange(range(first, min(last, layers)), again=False))
        found.append(LayerRange(range(last, min(last + 1, layers)), again=True))
    return [run for run in found if run.layers]


class Recomputing(nn.Module):
    """A stack of layers, bottom first; training may choose which of them are recomputed (ziggurat.config.train)."""

    layers: nn.ModuleList

    def __init__(self) -> None:
        super().__init__()
        self.recompute: Recompute = None

    def units(self) -> list[nn.Module]:
        """Return the layers that are always called as modules, and so can be gathered one by one (FSDP2)."""
        return list(self.layers)

    def runs(self) -> list[LayerRange]:
        """Return the runs of a pass over all layers; evaluation keeps no activations, so nothing is recomputed."""
        training = self.training and torch.is_grad_enabled()
        return runs(len(self.layers), self.recompute if training else None)


@dataclass(frozen=True)
class Memory:
    """Encoder states of a batch.

    Attributes:
        states: one [batch, source, d_memory] for the whole decoder, or one per decoder layer (transparent memory).
        mask: [batch, source], True at real tokens.
    """

    states: tuple[Tensor, ...]
    mask: Tensor

    def of(self, layer: int) -> Tensor:
        """Return the states that decoder layer `layer`, from 0, attends to."""
        return self.states[layer] if len(self.states) > 1 else self.states[0]


class AlignmentHead(NamedTuple):
    """The attention to the memory that shows which source tokens a target token comes from.

    Attributes:
        layer: number of its decoder layer, from 0; -1: the last.
        head: number of its head, from 0; None: the mean over all heads.
    """

    layer: int = -1
    head: int | None = None

    @classmethod
    def of(cls, config: GuidedAlignmentConfig | None) -> AlignmentHead:
        """Return the head that guided alignment trains, or by default the mean over the last layer's heads."""
        if config is None:
            return cls()
        return cls(-1 if config.layer is None else config.layer - 1, None if config.head == "mean" else config.head - 1)


class StepCache(BeamCache, Protocol):
    """The state that a decoder keeps, and shows to the search."""

    @property
    def cross_attention(self) -> Tensor | None:
        """The last step's attention to the memory, [N, K, source], if it is kept."""


Cache = TypeVar("Cache", bound=StepCache)


class StepwiseDecoder(Recomputing, Generic[Cache]):
    """A stack that returns hidden states for whole targets (training), or position by position (search).

    `aligned` is the attention to the memory that is kept on request.
    """

    def __init__(self) -> None:
        super().__init__()
        self.aligned = AlignmentHead()

    @abstractmethod
    def forward(self, x: Tensor, memory: Memory, kept: KeptWeights | None = None) -> Tensor:
        """Return [batch, target, d_hidden] for the embedded target input `x` [batch, target, d_model].

        Attention to the memory [batch, target, source] is stored in `kept`, if given; if LayerDrop skips its layer,
        `kept` stays empty.
        """

    @abstractmethod
    def start(self, live: LiveBeams, *, keep_attention: bool = False) -> Cache:
        """Return the cache for the hypotheses of `live`; with `keep_attention` it keeps attention to the memory."""

    @abstractmethod
    def admit(self, memory: Memory, rows: slice, cache: Cache) -> None:
        """Project the memory of new sentences, which have `rows` among the live ones."""

    @abstractmethod
    def step(self, x: Tensor, cache: Cache) -> Tensor:
        """Return [N, K, d_hidden] for one new position per hypothesis, `x` [N, K, d_model]; K may be 1 at first."""


class DecoderState:
    """Decoding state of N sentences with K hypotheses each, which enter and leave the batch."""

    def __init__(self, live: LiveBeams, cache: StepCache) -> None:
        self.live = live
        self.cache = cache

    @property
    def cross_attention(self) -> Tensor | None:
        """The last step's attention to the memory (`aligned`), [N, K, source]; None unless it is kept."""
        weights = self.cache.cross_attention
        return None if weights is None else weights.expand(-1, self.live.beam_size, -1)

    def follow(self, parents: Tensor) -> None:
        """Make beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        self.live.follow(parents)
        self.cache.follow(parents)

    def keep(self, sentences: Tensor) -> None:
        """Make row i the old row sentences[i]; `sentences` is [new N], without repetition, on the CPU."""
        self.cache.keep(self.live.keep(sentences))


class Seq2Seq(nn.Module):
    """An encoder-decoder model. Source sentences end with end-of-sentence; decoder input starts with begin-of-sentence.

    Args:
        source_embedding: embeds the encoder's input.
        target_embedding: embeds the decoder's input.
        encoder: (x [batch, source, d], mask [batch, source], outputs or None) -> tuple of memory states.
        decoder: (x [batch, target, d], Memory) -> hidden states, at once or step by step.
        output: projection to the target vocabulary.
    """

    def __init__(
        self,
        source_embedding: InputEmbedding,
        target_embedding: InputEmbedding,
        encoder: Recomputing,
        decoder: StepwiseDecoder[Any],
        output: OutputProjection,
    ) -> None:
        super().__init__()
        self.source_embedding = source_embedding
        self.target_embedding = target_embedding
        self.encoder = encoder
        self.decoder = decoder
        self.output = output

    @property
    def vocabulary_size(self) -> int:
        """Number of target tokens."""
        return self.output.weight.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.output.weight.device

    def encode(self, source: Tensor, source_mask: Tensor, outputs: list[Tensor] | None = None) -> Memory:
        """Encode `source` [batch, source] (ids); `source_mask` [batch, source] is True at real tokens.

        The output of every encoder layer, [batch, source, d], is appended to `outputs`, when it is given.
        """
        return Memory(self.encoder(self.source_embedding(source), source_mask, outputs), source_mask)

    def decode(self, target_in: Tensor, memory: Memory, kept: KeptWeights | None = None) -> Tensor:
        """Return hidden states [batch, target, d_hidden] for decoder input `target_in` [batch, target] (ids)."""
        return self.decoder(self.target_embedding(target_in), memory, kept)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., vocabulary] for `hidden` [..., d_hidden]."""
        return self.output(hidden)

    def forward(
        self,
        source: Tensor,
        source_mask: Tensor,
        target_in: Tensor,
        outputs: list[Tensor] | None = None,
        kept: KeptWeights | None = None,
    ) -> Tensor:
        """Return hidden states [batch, target, d_hidden]; the loss projects them in chunks, never all at once."""
        return self.decode(target_in, self.encode(source, source_mask, outputs), kept)

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> DecoderState:
        """Return the state of an empty batch for at most `slots` sentences of `beam_size` hypotheses at a time."""
        live = LiveBeams(beam_size, slots)
        return DecoderState(live, self.decoder.start(live, keep_attention=keep_attention))

    def admit(self, memory: Memory, state: DecoderState) -> None:
        """Append the sentences of `memory` to the batch."""
        rows = state.live.admit(memory.mask, memory.of(0))
        self.decoder.admit(memory, rows, state.cache)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Feed `tokens` [N, K] (ids); return logits of the next token [N, K, vocabulary].

        A sentence's first tokens must be the same in all its beams.
        """
        count = tokens.shape[1]
        logits = self.logits(self.advance(tokens, state))
        # Repeated, not expanded, because the search writes into each beam's scores separately.
        return logits if logits.shape[1] == count else logits.repeat(1, count, 1)

    def advance(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Feed `tokens` as `step` does; return hidden states [N, K, d_hidden], or [N, 1, d_hidden] for all K."""
        live = state.live
        if live.first:
            tokens = tokens[:, :1]  # the same in all beams
        live.begin()
        x = self.target_embedding.step(tokens, live.positions, live.longest)
        hidden = self.decoder.step(x, state.cache)
        live.end()
        return hidden
