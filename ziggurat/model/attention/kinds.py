"""The table of attention kinds, and the decoder layer that each makes; ziggurat.config.kinds has the facts of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ziggurat.config.kinds import ATTENTIONS, DecoderAttentionKind, EncoderAttentionKind
from ziggurat.model.attention.average_and_merged import (
    AverageAttention,
    MergedAttention,
    MergedAverageAttention,
    SimplifiedAverageAttention,
    Ssru,
)
from ziggurat.model.attention.multihead import (
    CrossAttention,
    OwnAttention,
    SelfAttention,
    ValueResidual,
    ValueResidualKind,
)
from ziggurat.model.attention.relative import RelativeAttention
from ziggurat.model.attention.scaling import QueryKeyScaling
from ziggurat.model.dropout import Dropout
from ziggurat.model.embedding import Rotary
from ziggurat.model.kinds import StackParts
from ziggurat.model.transformer import AnyDecoderLayer, DecoderLayer, MergedDecoderLayer


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
        make: makes the module of layer number n, from 1; of a kind that is `merged` in ziggurat.config.kinds a
            MergedAttention.
        reads: names of the linear maps that read the stream and nothing else; None: other things read it too.
        writes: names of the maps whose sum is the sub-layer's output; None: its output is something else.
    """

    make: Callable[[StackParts, int], OwnAttention | MergedAttention]
    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None


ENCODER_ATTENTION: dict[EncoderAttentionKind, Callable[[StackParts, int], SelfAttention]] = {
    "full": _full,
    "relative": _relative,
}
"""Attention to the source; what else must be known of a kind is on its row in ATTENTION."""

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
