"""ModelConfig -> Seq2Seq; every kind -> class lookup happens here."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from ziggurat.config.model import HistoryKind, InitConfig, ModelConfig, ResidualKind
from ziggurat.errors import ConfigError
from ziggurat.init import Slot, assign_roles, xavier
from ziggurat.models.layers import DecoderLayer, EncoderLayer
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.models.transformer import Decoder, Encoder
from ziggurat.nn.attention import CrossAttention, SelfAttention
from ziggurat.nn.dropout import Dropout
from ziggurat.nn.embedding import InputEmbedding, LearnedPositions, OutputProjection, SinusoidalPositions
from ziggurat.nn.feed_forward import FeedForward
from ziggurat.nn.history import History, Latest
from ziggurat.nn.residual import Residual, post_norm, pre_norm

__all__ = ["HISTORY", "RESIDUAL", "build_model", "count_parameters", "model_slots"]

RESIDUAL: dict[ResidualKind, Callable[[int, Dropout, float], Residual]] = {"post": post_norm, "pre": pre_norm}
"""Residual kind -> maker of one Residual from (d_model, dropout, epsilon)."""

HISTORY: dict[HistoryKind, Callable[[], History]] = {"latest": Latest}
"""History kind -> maker of one stack's History."""

_FINAL_NORM: frozenset[ResidualKind] = frozenset({"pre"})
"""Residual kinds that leave the stream unnormalised, so that each stack ends with a norm."""


def build_model(
    config: ModelConfig,
    source_vocabulary: int,
    target_vocabulary: int,
    *,
    seed: int = 1,
    exact_dropout: bool = False,
) -> Seq2Seq:
    """Build and initialise a model on the CPU in fp32.

    Args:
        config: the architecture.
        source_vocabulary: number of source tokens.
        target_vocabulary: number of target tokens.
        seed: of the initial weights; the global random state is left alone.
        exact_dropout: see ziggurat.nn.dropout.Dropout.

    Raises ConfigError when `model.embedding.sharing: all` meets vocabularies of different size.
    """
    with torch.random.fork_rng(devices=[]):  # torch.nn draws throw-away values while modules are made
        model = _assemble(config, source_vocabulary, target_vocabulary, exact_dropout)
    _initialise(model, config.init, torch.Generator().manual_seed(seed))
    return model


def _assemble(config: ModelConfig, source_vocabulary: int, target_vocabulary: int, exact_dropout: bool) -> Seq2Seq:
    parts = _Parts(config, exact_dropout)
    source_tokens, target_tokens, output = parts.embeddings(source_vocabulary, target_vocabulary)
    return Seq2Seq(
        parts.input_embedding(source_tokens),
        parts.input_embedding(target_tokens),
        Encoder(
            [parts.encoder_layer() for _ in range(config.encoder.layers)],
            HISTORY[config.encoder.history](),
            parts.final_norm(),
        ),
        Decoder(
            [parts.decoder_layer() for _ in range(config.decoder.layers)],
            HISTORY[config.decoder.history](),
            parts.final_norm(),
        ),
        output,
    )


class _Parts:
    """Makes the parts of one model from its configuration."""

    def __init__(self, config: ModelConfig, exact_dropout: bool) -> None:
        self.config = config
        self.exact_dropout = exact_dropout

    def dropout(self, p: float) -> Dropout:
        return Dropout(p, self.exact_dropout)

    def embeddings(self, source_size: int, target_size: int) -> tuple[nn.Embedding, nn.Embedding, OutputProjection]:
        sharing, d_model = self.config.embedding.sharing, self.config.d_model
        if sharing == "all" and source_size != target_size:
            raise ConfigError(
                f"`model.embedding.sharing: all` needs one vocabulary for both sides, but the source has "
                f"{source_size} tokens and the target {target_size}; use `decoder` or a joint vocabulary"
            )
        target = nn.Embedding(target_size, d_model)
        source = target if sharing == "all" else nn.Embedding(source_size, d_model)
        output = OutputProjection(nn.Parameter(torch.empty(target_size, d_model)))
        if sharing != "none":
            output.weight = target.weight
        return source, target, output

    def input_embedding(self, tokens: nn.Embedding) -> InputEmbedding:
        config = self.config
        positions: nn.Module | None = None
        if config.embedding.positions == "sinusoidal":
            positions = SinusoidalPositions(config.d_model)
        elif config.embedding.positions == "learned":
            positions = LearnedPositions(config.d_model, config.embedding.max_positions)
        scale = math.sqrt(config.d_model) if config.embedding.scale else 1.0
        return InputEmbedding(tokens, positions, scale, self.dropout(config.dropout.embedding))

    def residual(self) -> Residual:
        config = self.config
        return RESIDUAL[config.residual](
            config.d_model, self.dropout(config.dropout.residual), config.layer_norm_epsilon
        )

    def self_attention(self) -> SelfAttention:
        return SelfAttention(self.config.d_model, self.config.heads, self.dropout(self.config.dropout.attention))

    def feed_forward(self) -> FeedForward:
        config = self.config
        return FeedForward(config.d_model, config.d_ff, config.activation, self.dropout(config.dropout.activation))

    def encoder_layer(self) -> EncoderLayer:
        return EncoderLayer(self.self_attention(), self.feed_forward(), self.residual)

    def decoder_layer(self) -> DecoderLayer:
        config = self.config
        cross = CrossAttention(config.d_model, config.d_model, config.heads, self.dropout(config.dropout.attention))
        return DecoderLayer(self.self_attention(), cross, self.feed_forward(), self.residual)

    def final_norm(self) -> nn.Module | None:
        config = self.config
        needed = config.residual in _FINAL_NORM
        return nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon) if needed else None


def model_slots(model: Seq2Seq) -> list[Slot]:
    """Return every parameter of the model once, with its role and the number of its layer (0 outside)."""
    slots = assign_roles(model)
    layer_of = {
        parameter.data_ptr(): number
        for stack in (model.encoder, model.decoder)
        for number, layer in enumerate(stack.layers, start=1)
        for slot in assign_roles(layer)
        for parameter in [slot.values]
    }
    return [Slot(s.values, s.role, s.name, s.fused_out, layer_of.get(s.values.data_ptr(), 0)) for s in slots]


def _initialise(model: Seq2Seq, config: InitConfig, generator: torch.Generator) -> None:
    xavier(model_slots(model), generator, fused=config.qkv == "fused")


def count_parameters(model: nn.Module) -> int:
    """Return the number of trained values; a shared matrix counts once."""
    return sum(p.numel() for p in model.parameters())
