"""Tables of residual, history and attention kinds, and factories for a model's parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, assert_never

import torch
from torch import nn

from ziggurat.config.kinds import (
    ATTENTIONS,
    RESIDUALS,
    DecoderAttentionKind,
    EncoderAttentionKind,
    HistoryKind,
    ResidualKind,
)
from ziggurat.config.model import ModelConfig, StackConfig
from ziggurat.model.attention.multihead import (
    CrossAttention,
    LinearMaker,
    OwnAttention,
    QueryKeyScaling,
    SelfAttention,
    ValueResidual,
    ValueResidualKind,
)
from ziggurat.model.attention.variants import (
    AverageAttention,
    MergedAttention,
    MergedAverageAttention,
    RelativeAttention,
    SimplifiedAverageAttention,
    Ssru,
)
from ziggurat.model.dropout import Dropout, StochasticBranch
from ziggurat.model.embedding import (
    Rotary,
)
from ziggurat.model.history import kinds as history
from ziggurat.model.history.base import History, HistoryOptions
from ziggurat.model.history.kinds import Transparent
from ziggurat.model.history.state_dependent import AttentionResiduals, BlockAttentionResiduals, Mudd
from ziggurat.model.layers import AnyDecoderLayer, DecoderLayer, MergedDecoderLayer
from ziggurat.model.linear import FeedForward, GatedFeedForward, Linear, NormedLinear, ShiftedLinear
from ziggurat.model.rate_transfer import branch_factor, output_factor
from ziggurat.model.residual import kinds as residual
from ziggurat.model.residual.base import Residual, ResidualOptions, ScaledNorm, ScaleNorm, ShiftScale, SublayerPosition
from ziggurat.model.solver import solver
from ziggurat.model.transformer import StackWiring

Folding = Literal["post", "pre", "skip_vector", "alpha", "branch_vector", "norm_constant"]
"""Rules by which ziggurat.exchange.plain converts a stack to a plain one.

`post`, `pre`: it is already plain. `skip_vector`: post-norm, and the parameter `skip` moves. `alpha`: post-norm, and
DeepNorm's constant moves. `branch_vector`: pre-norm, and the parameter `branch` moves. `norm_constant`: pre-norm, and
the constant of each layer's norms moves into them.
"""


@dataclass(frozen=True)
class ResidualRow:
    """One residual kind.

    Attributes:
        make: makes the Residual of one sub-layer.
        final_norm: the layers leave the stream unnormalised, so each stack ends with a norm.
        folding: how a stack of this kind becomes a plain one; None: no plain stack computes the same.
        entry_norm: the stack normalises its input.
        ends_as_model: an encoder of this kind is an ablation and ends like one of kind `model.residual`.
        shifted: linear maps have scalar shifts instead of biases (Fixup).
        inner_norm: the last map of self-attention and of the feed-forward network has a norm before it (Sub-LN).
        streams: number of parallel streams, or `wiring.streams` to use that setting; None: a single stream.
        end: given a norm factory, makes the module that merges the streams at the end; None: they are summed.
    """

    make: Callable[[SublayerPosition, ResidualOptions], Residual]
    final_norm: bool
    folding: Folding | None = None
    entry_norm: bool = False
    ends_as_model: bool = False
    shifted: bool = False
    inner_norm: bool = False
    streams: int | Literal["option"] | None = None
    end: Callable[[Callable[[], nn.Module]], nn.Module] | None = None


RESIDUAL: dict[ResidualKind, ResidualRow] = {
    "post": ResidualRow(residual.post_norm, False, "post"),
    "pre": ResidualRow(residual.pre_norm, True, "pre"),
    "lingvo": ResidualRow(residual.lingvo, False),
    "none": ResidualRow(residual.no_skip, True, ends_as_model=True),
    "admin": ResidualRow(residual.admin, False, "skip_vector"),
    "deepnorm": ResidualRow(residual.deepnorm, False, "alpha"),
    "branch_norm": ResidualRow(residual.branch_norm, False, "post"),
    "rezero": ResidualRow(residual.rezero, False),
    "layer_scale": ResidualRow(residual.layer_scale, True, "branch_vector"),
    "ln_scaling": ResidualRow(residual.ln_scaling, True, "norm_constant"),
    "peri": ResidualRow(residual.peri, True, entry_norm=True),
    "sandwich": ResidualRow(residual.peri, True),
    "res_post": ResidualRow(residual.res_post, True),
    "b2t": ResidualRow(residual.b2t, False),
    "no_norm": ResidualRow(residual.no_norm, False),
    "fixup": ResidualRow(residual.fixup, False, shifted=True),
    "hyper": ResidualRow(residual.hyper, True, streams="option"),
    "manifold_hyper": ResidualRow(residual.manifold_hyper, True, streams="option"),
    "siamese": ResidualRow(residual.siamese, True, streams=2, end=residual.SiameseEnd),
    "keel": ResidualRow(residual.keel, True),
    "hybrid": ResidualRow(residual.hybrid, True),
    "sub_ln": ResidualRow(residual.pre_norm, True, inner_norm=True),
}


Feeding = int | Literal["below", "shared"]
"""The source of a layer's input, as folding needs it: combination number k; `below`: the output of the layer below,
which nothing else reads; `shared`: something that others also read, or that no single norm produces."""


@dataclass(frozen=True)
class HistoryRow:
    """One history kind.

    Attributes:
        make: makes the History of one stack.
        feeding: what layer n, from 0, reads in a stack with blocks of `period` layers, as a function of (n, period).
            A combination counts only if no other layer reads it; with norms at the consumers it has norm k.
    """

    make: Callable[[HistoryOptions], History]
    feeding: Callable[[int, int], Feeding]


def _each_its_own(layer: int, period: int) -> Feeding:
    return layer


HISTORY: dict[HistoryKind, HistoryRow] = {
    "latest": HistoryRow(lambda options: history.Latest(), lambda layer, period: "below"),
    "dlcl": HistoryRow(history.Dlcl, _each_its_own),
    "dense": HistoryRow(history.dense, _each_its_own),
    "average": HistoryRow(history.average, _each_its_own),
    "blocks": HistoryRow(history.Blocks, lambda layer, period: "below" if layer % period else layer // period),
    "top_only": HistoryRow(history.TopOnly, lambda layer, period: "shared"),
    "depth_weighted": HistoryRow(history.DepthWeighted, lambda layer, period: "shared"),
    "attention_residuals": HistoryRow(AttentionResiduals, lambda layer, period: "shared"),
    "block_attention_residuals": HistoryRow(BlockAttentionResiduals, lambda layer, period: "shared"),
    "mudd": HistoryRow(Mudd, lambda layer, period: "shared"),
    "cross_module": HistoryRow(history.CrossModule, lambda layer, period: "shared"),
}


class StackParts:
    """Makes the parts of one stack of Transformer layers."""

    def __init__(self, config: ModelConfig, *, decoder: bool) -> None:
        self.config = config
        self.decoder = decoder
        self.stack: StackConfig = config.decoder if decoder else config.encoder
        self.d_model = config.d_model if decoder else config.encoder_width
        self.d_ff = config.d_ff if decoder else config.encoder_d_ff
        self.heads = config.heads if decoder else config.encoder_heads
        self.kinds: tuple[ResidualKind, ...] = config.residuals(decoder=decoder)
        self.row: ResidualRow = RESIDUAL[self.kinds[-1]]  # the stack ends as its top layers do
        self.linear: LinearMaker = ShiftedLinear if self.row.shifted else Linear
        self.linear_without_bias: LinearMaker = self.linear if self.row.shifted else partial(Linear, bias=False)

    def norm(self, width: int | None = None) -> nn.Module:
        """Return a normalisation of the stream, or of another given width."""
        width = width or self.d_model
        epsilon = self.stack.layer_norm_epsilon or self.config.layer_norm_epsilon
        match self.config.norm:
            case "layer":
                return nn.LayerNorm(width, eps=epsilon)
            case "rms":
                return nn.RMSNorm(width, eps=epsilon)
            case "scale":
                return ScaleNorm(width, epsilon)
            case _:
                assert_never(self.config.norm)

    @property
    def normed_linear(self) -> LinearMaker | None:
        """Makes the last map of a sub-layer preceded by a norm (Sub-LN); None: no such norm."""
        return self._normed_linear if self.row.inner_norm else None

    def _normed_linear(self, width_in: int, width_out: int, *, bias: bool = True) -> NormedLinear:
        return NormedLinear(self.norm(width_in), width_in, width_out, bias=bias)

    def residuals(self, layer: int, attentions: Sequence[bool]) -> list[Residual]:
        """Return the Residuals of layer `layer`, from 1; `attentions` is True for each attention sub-layer."""
        wiring, kind = self.config.wiring, self.kinds[layer - 1]
        options = ResidualOptions(
            self.d_model,
            partial(self._branch_dropout, layer),
            self.norm,
            omega_trainable=wiring.omega_trainable,
            branch_updates=wiring.branch_updates,
            layer_scale=wiring.layer_scale,
            streams=wiring.streams,
            dynamic=wiring.dynamic,
            mixing=wiring.mixing,
            stream_start=wiring.stream_start,
            branch=branch_factor(self.config, self.decoder),
        )
        made = [
            RESIDUAL[kind].make(
                SublayerPosition(
                    self.decoder,
                    layer,
                    number,
                    len(attentions),
                    attention,
                    self.config.planned_encoder_layers,
                    self.config.planned_decoder_layers,
                ),
                options,
            )
            for number, attention in enumerate(attentions)
        ]
        if wiring.gpas and "wiring.gpas" in RESIDUALS[kind].options:
            gate = nn.Parameter(torch.zeros(1))  # a single one per layer, as in the authors' code
            for residual in made:
                residual.gate = gate
        return made

    def _branch_dropout(self, layer: int) -> nn.Module:
        dropout, config = Dropout(self.config.dropout.residual), self.config.dropout
        if not config.sublayer:
            return dropout
        # The final depth, so that growing does not change the rates of existing layers. A model may be deeper than was
        # planned, after `ziggurat grow`.
        planned = self.config.planned_decoder_layers if self.decoder else self.config.planned_encoder_layers
        rate = config.sublayer * layer / max(planned, self.stack.layers)
        return StochasticBranch(dropout, rate, config.sublayer_unit)

    def feed_forward(self) -> nn.Module:
        """Return a feed-forward network."""
        config, dropout = self.config, Dropout(self.config.dropout.activation)
        if config.activation == "swiglu":
            return GatedFeedForward(
                self.d_model,
                self.d_ff,
                dropout,
                linear=self.linear_without_bias,
                out=partial(self._normed_linear, bias=False) if self.row.inner_norm else None,
                shifted=self.row.shifted,
            )
        return FeedForward(
            self.d_model,
            self.d_ff,
            config.activation,
            dropout,
            linear=self.linear,
            out=self.normed_linear,
            shifted=self.row.shifted,
            depth=self.stack.ffn_depth,
        )

    def wiring(self, sublayers: int) -> StackWiring:
        """Return the wiring of a stack whose layers have `sublayers` sub-layers each."""
        options, row = self.config.combination, self.row
        split = options.splits(self.stack.history)
        history = HistoryOptions(
            units=self.stack.layers * (sublayers if split else 1),
            d_model=self.d_model,
            norm=self.norm,
            dropout=partial(Dropout, options.dropout),
            norm_at=self.config.history_norm(decoder=self.decoder),
            start=options.start,
            learnable=options.learnable,
            normalize_embedding=options.normalize_embedding,
            softmax=options.softmax,
            window=options.window,
            groups=options.groups,
            period=options.period_of(self.stack.history),
            dilation=options.dilation,
        )
        return StackWiring(
            history=HISTORY[self.stack.history].make(history),
            entry_norm=self.norm() if RESIDUAL[self.kinds[0]].entry_norm else None,
            final_norm=self._end(RESIDUAL[self.config.residual] if row.ends_as_model else row),
            streams=self.config.wiring.streams if row.streams == "option" else row.streams,
            end=None if row.end is None else row.end(self.norm),
            split=split,
            layer_drop=self.stack.layer_drop,
            owners=self.stack.owners(),
            solver=None if self.decoder else solver(self.config.encoder.solver, self.d_model),
        )

    def _end(self, row: ResidualRow) -> nn.Module | None:
        """Return the module that ends a stack: a norm, Fixup's shift (and, on the encoder, scale), or nothing."""
        if row.shifted:
            return ShiftScale(scaled=not self.decoder)
        if not row.final_norm:
            return None
        factor = output_factor(self.config) if self.decoder else None
        return self.norm() if factor is None else ScaledNorm(self.norm(), factor)


def memory_mixtures(config: ModelConfig, *, sources: int, readers: int) -> Transparent | None:
    """Return the module that mixes the encoder's states into the memory; None: no mixing."""
    match config.memory:
        case "top" | "hierarchical":
            return None
        case "transparent":
            return Transparent(sources, readers, config.dropout.transparent)
        case _:
            assert_never(config.memory)


def _full(parts: StackParts, layer: int) -> SelfAttention:
    residual = _value_residual(parts.config.attention.value_residual, layer)
    return SelfAttention(
        parts.d_model,
        parts.heads,
        Dropout(parts.config.dropout.attention),
        linear=parts.linear,
        scaling=_scaling(parts, residual),
        residual=residual,
        rotary=Rotary(parts.d_model // parts.heads) if parts.config.embedding.positions == "rotary" else None,
        out=parts.normed_linear,
    )


def _relative(parts: StackParts, layer: int) -> RelativeAttention:
    options = parts.config.attention
    residual = _value_residual(options.value_residual, layer)
    return RelativeAttention(
        parts.d_model,
        parts.heads,
        Dropout(parts.config.dropout.attention),
        clip=options.relative_clip,
        values=options.relative_values,
        linear=parts.linear,
        scaling=_scaling(parts, residual),
        residual=residual,
        out=parts.normed_linear,
    )


def _average(parts: StackParts, layer: int) -> AverageAttention:
    options = parts.config.attention
    ffn = parts.feed_forward() if options.average_ffn else None
    return AverageAttention(parts.d_model, gate=options.average_gate, ffn=ffn, linear=parts.linear)


def _simplified(parts: StackParts, layer: int) -> SimplifiedAverageAttention:
    return SimplifiedAverageAttention(parts.d_model, linear=parts.linear)


def _ssru(parts: StackParts, layer: int) -> Ssru:
    return Ssru(parts.d_model, linear=parts.linear, value=parts.linear_without_bias)


def _merged(parts: StackParts, layer: int) -> MergedAttention:
    cross = _cross(parts, layer, project_out=False)
    return MergedAverageAttention(cross, share_value=parts.config.attention.share_value, linear=parts.linear)


def _cross(parts: StackParts, layer: int, *, project_out: bool = True) -> CrossAttention:
    config = parts.config
    residual = _value_residual(config.attention.cross_value_residual, layer)
    return CrossAttention(
        parts.d_model,
        config.encoder_width,
        parts.heads,
        Dropout(config.dropout.attention),
        linear=parts.linear,
        scaling=_scaling(parts, residual),
        residual=residual,
        project_out=project_out,
    )


def _value_residual(kind: Literal["none"] | ValueResidualKind, layer: int) -> ValueResidual | None:
    return None if kind == "none" else ValueResidual(kind, first=layer == 1)


def _scaling(parts: StackParts, residual: ValueResidual | None) -> QueryKeyScaling | None:
    options = parts.config.attention
    value_norm = options.value_norm if residual is None or residual.projects else "none"
    if options.qk_norm == value_norm == "none" and not options.query_scale:
        return None
    return QueryKeyScaling(
        parts.d_model // parts.heads,
        norm=options.qk_norm,
        length=options.qk_length,
        per_dimension=options.query_scale,
        epsilon=parts.config.layer_norm_epsilon,
        value_norm=value_norm,
    )


@dataclass(frozen=True)
class AttentionRow:
    """One kind of attention to the target.

    Attributes:
        make: makes the module of layer number n, from 1; a MergedAttention if the kind is `merged` in
            ziggurat.config.kinds.
        reads: names of the linear maps that read only the stream; None: something else reads it too.
        writes: names of the maps whose sum is the sub-layer's output; None: its output is something else.
    """

    make: Callable[[StackParts, int], OwnAttention | MergedAttention]
    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None


ENCODER_ATTENTION: dict[EncoderAttentionKind, Callable[[StackParts, int], SelfAttention]] = {
    "full": _full,
    "relative": _relative,
}
"""Attention to the source; other facts about a kind are in its row of ATTENTION."""

ATTENTION: dict[DecoderAttentionKind, AttentionRow] = {
    "full": AttentionRow(_full, ("qkv_proj",), ("out_proj",)),
    "relative": AttentionRow(_relative, ("qkv_proj",), ("out_proj",)),
    # It averages and gates the stream itself.
    "average": AttentionRow(_average, None, None),
    "simplified_average": AttentionRow(_simplified, ("v_proj",), ("out_proj",)),
    "ssru": AttentionRow(_ssru, ("v_proj", "gate_proj"), None),
    # With `attention.share_value` there is no `v_proj`: a map that also reads the memory takes its place.
    "merged": AttentionRow(_merged, ("cross.q_proj", "v_proj"), ("out_proj",)),
    "merged_full": AttentionRow(
        lambda parts, layer: MergedAttention(_full(parts, layer), _cross(parts, layer)),
        ("own.qkv_proj", "cross.q_proj"),
        ("own.out_proj", "cross.out_proj"),
    ),
    "merged_gated": AttentionRow(
        lambda parts, layer: MergedAttention(_average(parts, layer), _cross(parts, layer)), None, None
    ),
}
"""Attention to the target: as a sub-layer, or merged with attention to the memory."""


def decoder_layer(parts: StackParts, number: int) -> AnyDecoderLayer:
    """Return decoder layer `number`, from 1."""
    kind = parts.config.decoder.attention
    attention = ATTENTION[kind].make(parts, number)
    if ATTENTIONS[kind].merged:
        assert isinstance(attention, MergedAttention), f"`{kind}` is merged by ziggurat.config.kinds, not by its module"
        return MergedDecoderLayer(attention, parts.feed_forward(), parts.residuals(number, (True, False)))
    assert isinstance(attention, OwnAttention), f"`{kind}` is merged by its module, not by ziggurat.config.kinds"
    return DecoderLayer(
        attention, _cross(parts, number), parts.feed_forward(), parts.residuals(number, (True, True, False))
    )
