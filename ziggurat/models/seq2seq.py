"""The encoder-decoder: the only model type that decoding and training see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ziggurat.models.layers import DecoderLayerCache
from ziggurat.models.transformer import Decoder, Encoder
from ziggurat.nn.attention import padding_bias
from ziggurat.nn.embedding import InputEmbedding, OutputProjection

__all__ = ["DecoderState", "Memory", "Seq2Seq"]


@dataclass(frozen=True)
class Memory:
    """What the decoder attends to.

    Attributes:
        states: encoder output [batch, source, d_memory].
        mask: [batch, source], True at real tokens.
    """

    states: Tensor
    mask: Tensor


class DecoderState:
    """Decoding state of a batch of `batch` sentences with `beam` hypotheses each.

    Attributes:
        position: number of tokens decoded so far.
        cross_attention: the last layer's attention of the last step, mean over heads, [batch, beam, source];
            None unless the state was started with `keep_attention`.
    """

    def __init__(self, layers: list[DecoderLayerCache], beam_size: int, keep_attention: bool) -> None:
        self.layers = layers
        self.beam_size = beam_size
        self.keep_attention = keep_attention
        self.position = 0

    @property
    def cross_attention(self) -> Tensor | None:
        """Attention of the last step, [batch, beam, source]."""
        return self.layers[-1].cross_attn.weights

    def reorder(self, sentences: Tensor, parents: Tensor) -> None:
        """Keep some sentences and re-order their hypotheses.

        New hypothesis k of new row i continues old hypothesis parents[i, k] of old row sentences[i];
        `sentences` is [new batch], `parents` [new batch, beam].
        """
        rows = (sentences[:, None] * self.beam_size + parents).flatten()
        batch = self.layers[0].cross_attn.key.shape[0]
        # Comparing costs nothing beside copying every layer's cache; on a GPU it would wait for the device.
        on_cpu = rows.device.type == "cpu"
        if on_cpu and rows.numel() == batch * self.beam_size and torch.equal(rows, torch.arange(rows.numel())):
            return
        same = sentences.numel() == batch and (not on_cpu or torch.equal(sentences, torch.arange(batch)))
        for layer in self.layers:
            layer.keep(rows, None if same and on_cpu else sentences)
        self.beam_size = parents.shape[1]


class Seq2Seq(nn.Module):
    """Encoder-decoder model.

    Source sentences end with end-of-sentence; decoder input begins with begin-of-sentence.

    Args:
        source_embedding: of the encoder's input.
        target_embedding: of the decoder's input.
        encoder: stack over the source.
        decoder: stack over the target.
        output: projection to the target vocabulary.
    """

    def __init__(
        self,
        source_embedding: InputEmbedding,
        target_embedding: InputEmbedding,
        encoder: Encoder,
        decoder: Decoder,
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

    def encode(self, source: Tensor, source_mask: Tensor) -> Memory:
        """Encode `source` [batch, source] (ids); `source_mask` [batch, source] is True at real tokens."""
        x = self.source_embedding(source)
        return Memory(self.encoder(x, padding_bias(source_mask, x.dtype)), source_mask)

    def decode(self, target_in: Tensor, memory: Memory) -> Tensor:
        """Return hidden states [batch, target, d_model] for decoder input `target_in` [batch, target] (ids)."""
        x = self.target_embedding(target_in)
        return self.decoder(x, memory.states, padding_bias(memory.mask, x.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., vocabulary] for `hidden` [..., d_model]."""
        return self.output(hidden)

    def forward(self, source: Tensor, source_mask: Tensor, target_in: Tensor) -> Tensor:
        """Return hidden states [batch, target, d_model]; the loss projects them in pieces, never all at once."""
        return self.decode(target_in, self.encode(source, source_mask))

    def start(self, memory: Memory, beam_size: int, *, keep_attention: bool = False) -> DecoderState:
        """Return the state before the first token."""
        bias = padding_bias(memory.mask, memory.states.dtype)
        return DecoderState(self.decoder.start(memory.states, bias), beam_size, keep_attention)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Feed `tokens` [batch, beam] (ids); return logits of the next token [batch, beam, vocabulary]."""
        x = self.target_embedding.step(tokens, state.position)
        hidden = self.decoder.step(x, state.layers, need_weights=state.keep_attention)
        state.position += 1
        return self.logits(hidden)
