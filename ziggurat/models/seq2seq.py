"""The encoder-decoder: the only model type that decoding and training see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from ziggurat.models.memory import Memory
from ziggurat.nn.attention import Live, Moved
from ziggurat.nn.embedding import InputEmbedding, OutputProjection

__all__ = ["DecoderState", "Memory", "Seq2Seq"]


class _Cache(Protocol):
    """What a decoder keeps of the live hypotheses between steps."""

    @property
    def cross_attention(self) -> Tensor | None:
        """Attention of the last step, mean over heads, [N, K, source], if it is kept."""

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""

    def keep(self, moved: Moved) -> None:
        """Move rows; the live ones are counted already."""


class DecoderState:
    """Decoding state of N sentences with K hypotheses each; sentences come and go.

    Attributes:
        live: where every hypothesis is.
        cache: the decoder's.
    """

    def __init__(self, live: Live, cache: _Cache) -> None:
        self.live = live
        self.cache = cache

    @property
    def cross_attention(self) -> Tensor | None:
        """Last attention of the last step, mean over heads, [N, K, source]; None unless it is kept."""
        weights = self.cache.cross_attention
        return None if weights is None else weights.expand(-1, self.live.beam_size, -1)

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        self.live.follow(parents)
        self.cache.follow(parents)

    def keep(self, sentences: Tensor) -> None:
        """Let row i be the old row sentences[i]; `sentences` is [new N], without repetition."""
        self.cache.keep(self.live.keep(sentences))


class Seq2Seq(nn.Module):
    """Encoder-decoder model.

    Source sentences end with end-of-sentence; decoder input begins with begin-of-sentence.

    Args:
        source_embedding: of the encoder's input.
        target_embedding: of the decoder's input.
        encoder: (x [batch, source, d], mask [batch, source], outputs or None) -> tuple of memory states.
        decoder: (x [batch, target, d], Memory) -> hidden states; with methods `start`, `admit` and `step` for decoding.
        output: projection to the target vocabulary.
    """

    def __init__(
        self,
        source_embedding: InputEmbedding,
        target_embedding: InputEmbedding,
        encoder: nn.Module,
        decoder: nn.Module,
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
        """Where the parameters are."""
        return self.output.weight.device

    def encode(self, source: Tensor, source_mask: Tensor, outputs: list[Tensor] | None = None) -> Memory:
        """Encode `source` [batch, source] (ids); `source_mask` [batch, source] is True at real tokens.

        The output of every encoder layer, [batch, source, d], is appended to `outputs`, when it is given.
        """
        return Memory(self.encoder(self.source_embedding(source), source_mask, outputs), source_mask)

    def decode(self, target_in: Tensor, memory: Memory) -> Tensor:
        """Return hidden states [batch, target, d_hidden] for decoder input `target_in` [batch, target] (ids)."""
        hidden: Tensor = self.decoder(self.target_embedding(target_in), memory)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., vocabulary] for `hidden` [..., d_hidden]."""
        return self.output(hidden)

    def forward(
        self, source: Tensor, source_mask: Tensor, target_in: Tensor, outputs: list[Tensor] | None = None
    ) -> Tensor:
        """Return hidden states [batch, target, d_hidden]; the loss projects them in pieces, never all at once.

        `outputs` as in `encode`.
        """
        return self.decode(target_in, self.encode(source, source_mask, outputs))

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> DecoderState:
        """Return the state of an empty batch for at most `slots` sentences of `beam_size` hypotheses at a time."""
        begin = cast(Callable[..., _Cache], self.decoder.start)
        live = Live(beam_size, slots)
        return DecoderState(live, begin(live, keep_attention=keep_attention))

    def admit(self, memory: Memory, state: DecoderState) -> None:
        """Take the sentences of `memory` into the batch, behind those that are there."""
        take = cast(Callable[..., None], self.decoder.admit)
        take(memory, state.live.admit(memory.mask, memory.of(0)), state.cache)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Feed `tokens` [N, K] (ids); return logits of the next token [N, K, vocabulary].

        A sentence's first tokens must be the same in all its beams.
        """
        count = tokens.shape[1]
        logits = self.logits(self.advance(tokens, state))
        return logits if logits.shape[1] == count else logits.repeat(1, count, 1)

    def advance(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Feed `tokens` as `step` does; return hidden states [N, K, d_hidden], or [N, 1, d_hidden] for all K."""
        advance = cast(Callable[..., Tensor], self.decoder.step)
        live = state.live
        if live.first:
            tokens = tokens[:, :1]
        live.begin()
        hidden = advance(self.target_embedding.step(tokens, live.positions, live.longest), state.cache)
        live.end()
        return hidden
