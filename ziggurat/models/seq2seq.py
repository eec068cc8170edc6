"""The encoder-decoder: the only model type that decoding and training see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from ziggurat.models.memory import Memory
from ziggurat.nn.embedding import InputEmbedding, OutputProjection

__all__ = ["DecoderState", "Memory", "Seq2Seq"]


class _Cache(Protocol):
    """What a decoder keeps between steps."""

    @property
    def cross_attention(self) -> Tensor | None:
        """Attention of the last step, mean over heads, [batch, beam, source], if it is kept."""

    def keep(self, rows: Tensor | None, sentences: Tensor | None) -> None:
        """Keep hypotheses `rows` [new rows] and sentences [new batch]; None leaves that part as it is."""


class DecoderState:
    """Decoding state of a batch of `batch` sentences with `beam` hypotheses each.

    Attributes:
        position: number of tokens decoded so far.
        cache: the decoder's.
    """

    def __init__(self, cache: _Cache, batch: int, beam_size: int) -> None:
        self.cache = cache
        self.batch = batch
        self.beam_size = beam_size
        self.position = 0

    @property
    def cross_attention(self) -> Tensor | None:
        """Last attention of the last step, mean over heads, [batch, beam, source]; None unless it is kept."""
        return self.cache.cross_attention

    def reorder(self, sentences: Tensor, parents: Tensor) -> None:
        """Keep some sentences and re-order their hypotheses.

        New hypothesis k of new row i continues old hypothesis parents[i, k] of old row sentences[i];
        `sentences` is [new batch], `parents` [new batch, beam].
        """
        rows = (sentences[:, None] * self.beam_size + parents).flatten()
        # Comparing costs nothing beside copying every layer's cache; on a GPU it would wait for the device.
        on_cpu = rows.device.type == "cpu"
        if on_cpu and rows.numel() == self.batch * self.beam_size and torch.equal(rows, torch.arange(rows.numel())):
            return
        same = sentences.numel() == self.batch and (not on_cpu or torch.equal(sentences, torch.arange(self.batch)))
        self.cache.keep(rows, None if same and on_cpu else sentences)
        self.batch, self.beam_size = parents.shape


class Seq2Seq(nn.Module):
    """Encoder-decoder model.

    Source sentences end with end-of-sentence; decoder input begins with begin-of-sentence.

    Args:
        source_embedding: of the encoder's input.
        target_embedding: of the decoder's input.
        encoder: (x [batch, source, d], mask [batch, source], outputs or None) -> tuple of memory states.
        decoder: (x [batch, target, d], Memory) -> hidden states; with methods `start` and `step` for decoding.
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

    def start(self, memory: Memory, beam_size: int, *, keep_attention: bool = False) -> DecoderState:
        """Return the state before the first token."""
        begin = cast(Callable[..., _Cache], self.decoder.start)
        return DecoderState(begin(memory, keep_attention=keep_attention), len(memory.mask), beam_size)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Feed `tokens` [batch, beam] (ids); return logits of the next token [batch, beam, vocabulary]."""
        advance = cast(Callable[..., Tensor], self.decoder.step)
        hidden = advance(self.target_embedding.step(tokens, state.position), state.cache)
        state.position += 1
        return self.logits(hidden)
