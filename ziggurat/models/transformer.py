"""Encoder and decoder stacks: the loop over layers and their history (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from ziggurat.models.layers import DecoderLayer, DecoderLayerCache, EncoderLayer
from ziggurat.nn.attention import causal_bias
from ziggurat.nn.history import History

__all__ = ["Decoder", "Encoder"]


class Encoder(nn.Module):
    """A stack of encoder layers.

    Args:
        layers: bottom first.
        history: what each layer reads.
        final_norm: on the stack's output (pre-norm), or None.
    """

    def __init__(self, layers: Sequence[EncoderLayer], history: History, final_norm: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.history = history
        self.final_norm = final_norm

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return [batch, source, d_model] for the embedded source `x`; `bias` [batch, 1, 1, source] hides padding."""
        outputs = [x]
        for layer in self.layers:
            outputs = self.history.push(outputs, layer(self.history(outputs), bias))
        y = self.history(outputs)
        return y if self.final_norm is None else self.final_norm(y)


class Decoder(nn.Module):
    """A stack of decoder layers; the arguments are those of Encoder."""

    def __init__(self, layers: Sequence[DecoderLayer], history: History, final_norm: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.history = history
        self.final_norm = final_norm

    def forward(self, x: Tensor, memory: Tensor, memory_bias: Tensor | None) -> Tensor:
        """Return [batch, target, d_model] for the embedded target input `x`, all positions at once.

        `memory` is [batch, source, d_memory], `memory_bias` [batch, 1, 1, source].
        """
        bias = causal_bias(x.shape[1], x.dtype, x.device)
        outputs = [x]
        for layer in self._decoder_layers():
            y = layer(self.history(outputs), bias, layer.remember(memory, memory_bias))
            outputs = self.history.push(outputs, y)
        y = self.history(outputs)
        return y if self.final_norm is None else self.final_norm(y)

    def start(self, memory: Tensor, memory_bias: Tensor | None) -> list[DecoderLayerCache]:
        """Return empty caches, with the memory projected once per sentence."""
        return [DecoderLayerCache(layer.remember(memory, memory_bias)) for layer in self._decoder_layers()]

    def step(self, x: Tensor, caches: Sequence[DecoderLayerCache], *, need_weights: bool = False) -> Tensor:
        """Return [batch, beam, d_model] for one new position per hypothesis, `x` [batch, beam, d_model].

        With `need_weights`, the last layer leaves its attention to the memory in its cache.
        """
        outputs = [x]
        for number, (layer, cache) in enumerate(zip(self._decoder_layers(), caches, strict=True), start=1):
            last = number == len(self.layers)
            y = layer.step(self.history(outputs), cache, need_weights=need_weights and last)
            outputs = self.history.push(outputs, y)
        y = self.history(outputs)
        return y if self.final_norm is None else self.final_norm(y)

    def _decoder_layers(self) -> list[DecoderLayer]:
        return [cast(DecoderLayer, layer) for layer in self.layers]
