"""Makes the parts of one model from its configuration; nn sees only numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from ziggurat.config.model import ModelConfig, ResidualKind, StackConfig
from ziggurat.errors import ConfigError
from ziggurat.models.kinds import HISTORY, RESIDUAL, ResidualRow, final_module
from ziggurat.models.transformer import Frame
from ziggurat.nn.attention import LinearMaker
from ziggurat.nn.dropout import Dropout
from ziggurat.nn.embedding import InputEmbedding, LearnedPositions, OutputProjection, SinusoidalPositions
from ziggurat.nn.feed_forward import FeedForward, GatedFeedForward
from ziggurat.nn.history import Combining
from ziggurat.nn.linear import Linear
from ziggurat.nn.residual import Material, Place, Residual, ShiftedLinear
from ziggurat.nn.stochastic import StochasticBranch

__all__ = ["Embeddings", "StackParts"]


class Embeddings:
    """Makes what is outside the stacks: token embeddings, positions, output projection.

    Args:
        config: the architecture.
        exact_dropout: see ziggurat.nn.dropout.Dropout.
    """

    def __init__(self, config: ModelConfig, exact_dropout: bool) -> None:
        self.config = config
        self.exact_dropout = exact_dropout
        shared = config.embedding.shared_bias
        self.bias = nn.Parameter(torch.empty(config.d_model)) if shared else None

    def tokens(
        self, source_size: int, target_size: int, hidden: int
    ) -> tuple[nn.Embedding, nn.Embedding, OutputProjection]:
        """Return source and target embeddings and the projection from states of width `hidden`.

        Raises ConfigError when `sharing: all` meets vocabularies of different size.
        """
        config = self.config
        sharing = config.embedding.sharing
        if sharing == "all" and source_size != target_size:
            raise ConfigError(
                f"`model.embedding.sharing: all` needs one vocabulary for both sides, but the source has "
                f"{source_size} tokens and the target {target_size}; use `decoder` or a joint vocabulary"
            )
        target = nn.Embedding(target_size, config.d_model)
        source = target if sharing == "all" else nn.Embedding(source_size, config.encoder_width)
        weight = nn.Parameter(torch.empty(target_size, hidden)) if sharing == "none" else target.weight
        bias = nn.Parameter(torch.empty(target_size)) if config.embedding.output_bias else None
        return source, target, OutputProjection(weight, bias)

    def input(self, tokens: nn.Embedding, *, zero_start: bool = False) -> InputEmbedding:
        """Return the embedding of one side, positions included."""
        config, width = self.config.embedding, tokens.embedding_dim
        positions: SinusoidalPositions | LearnedPositions | None = None
        if config.positions == "sinusoidal":
            positions = SinusoidalPositions(width)
        elif config.positions == "learned":
            positions = LearnedPositions(width, config.max_positions)
        scale = math.sqrt(width) if config.scale else 1.0
        dropout = Dropout(self.config.dropout.embedding, self.exact_dropout)
        return InputEmbedding(tokens, positions, scale, dropout, bias=self.bias, zero_start=zero_start)


class StackParts:
    """Makes the parts of one stack of Transformer layers.

    Args:
        config: the architecture.
        decoder: which of its two stacks.
        exact_dropout: see ziggurat.nn.dropout.Dropout.
    """

    def __init__(self, config: ModelConfig, *, decoder: bool, exact_dropout: bool) -> None:
        self.config = config
        self.decoder = decoder
        self.exact_dropout = exact_dropout
        self.stack: StackConfig = config.decoder if decoder else config.encoder
        self.d_model = config.d_model if decoder else config.encoder_width
        self.d_ff = config.d_ff if decoder else config.encoder_d_ff
        self.heads = config.heads if decoder else config.encoder_heads
        self.kind: ResidualKind = config.decoder_residual if decoder else config.encoder_residual
        self.row: ResidualRow = RESIDUAL[self.kind]
        self.linear: LinearMaker = ShiftedLinear if self.row.shifted else Linear

    def dropout(self, p: float) -> Dropout:
        """Return a Dropout of probability `p`."""
        return Dropout(p, self.exact_dropout)

    def norm(self) -> nn.Module:
        """Return a normalisation of the stream."""
        make: Callable[..., nn.Module] = nn.RMSNorm if self.config.norm == "rms" else nn.LayerNorm
        return make(self.d_model, eps=self.stack.layer_norm_epsilon or self.config.layer_norm_epsilon)

    def residuals(self, layer: int, attentions: Sequence[bool]) -> list[Residual]:
        """Return the Residuals of layer `layer`, from 1; `attentions` says of each sub-layer what it is."""
        wiring = self.config.wiring
        material = Material(
            self.d_model,
            partial(self._branch_dropout, layer),
            self.norm,
            omega_trainable=wiring.omega_trainable,
            layer_scale=wiring.layer_scale,
            streams=wiring.streams,
            dynamic=wiring.dynamic,
        )
        return [
            self.row.make(
                Place(
                    self.decoder,
                    layer,
                    number,
                    len(attentions),
                    attention,
                    self.config.planned_encoder_layers,
                    self.config.decoder.layers,
                ),
                material,
            )
            for number, attention in enumerate(attentions)
        ]

    def _branch_dropout(self, layer: int) -> nn.Module:
        dropout, config = self.dropout(self.config.dropout.residual), self.config.dropout
        if not config.sublayer:
            return dropout
        depth = self.stack.layers if self.decoder else self.config.planned_encoder_layers
        return StochasticBranch(dropout, config.sublayer * layer / depth, config.sublayer_unit)

    def feed_forward(self) -> nn.Module:
        """Return a feed-forward network."""
        config, dropout = self.config, self.dropout(self.config.dropout.activation)
        if config.activation == "swiglu":
            return GatedFeedForward(
                self.d_model,
                self.d_ff,
                dropout,
                linear=self.linear if self.row.shifted else partial(Linear, bias=False),
                shifted=self.row.shifted,
            )
        return FeedForward(
            self.d_model, self.d_ff, config.activation, dropout, linear=self.linear, shifted=self.row.shifted
        )

    def frame(self, sublayers: int) -> Frame:
        """Return what is around the layers, each of which has `sublayers` sub-layers."""
        options, row = self.config.combination, self.row
        split = options.unit == "sublayer" and self.stack.history != "latest"
        combining = Combining(
            units=self.stack.layers * (sublayers if split else 1),
            d_model=self.d_model,
            norm=self.norm,
            dropout=partial(self.dropout, options.dropout),
            norm_at=row.history_norm if options.norm == "auto" else options.norm,
            start=options.start,
            learnable=options.learnable,
            normalize_embedding=options.normalize_embedding,
            softmax=options.softmax,
            window=options.window,
            groups=options.groups,
            period=options.period_of(self.stack.history),
            dilation=options.dilation,
        )
        # An encoder without residuals ends as the stack it is an ablation of.
        host = RESIDUAL[self.config.residual] if self.kind == "none" else row
        return Frame(
            history=HISTORY[self.stack.history](combining),
            entry_norm=self.norm() if row.entry_norm else None,
            final_norm=final_module(host, self.norm, decoder=self.decoder),
            streams=self.config.wiring.streams if row.streams else None,
            split=split,
            layer_drop=self.stack.layer_drop,
        )
