"""Attention kinds of the configuration -> modules and decoder layers."""

from __future__ import annotations

from collections.abc import Callable

from ziggurat.config.model import DecoderAttentionKind
from ziggurat.models.layers import AnyDecoderLayer, DecoderLayer, MergedDecoderLayer
from ziggurat.models.parts import StackParts
from ziggurat.nn.attention import (
    AverageAttention,
    CrossAttention,
    MergedAttention,
    MergedAverageAttention,
    OwnAttention,
    QueryKeyScaling,
    RelativeAttention,
    Rotary,
    SelfAttention,
    SimplifiedAverageAttention,
)

__all__ = ["MERGED", "OWN", "decoder_layer", "encoder_attention"]


def _full(parts: StackParts) -> SelfAttention:
    return SelfAttention(
        parts.d_model,
        parts.heads,
        parts.dropout(parts.config.dropout.attention),
        linear=parts.linear,
        scaling=_scaling(parts),
        rotary=_rotary(parts),
    )


def _relative(parts: StackParts) -> RelativeAttention:
    options = parts.config.attention
    return RelativeAttention(
        parts.d_model,
        parts.heads,
        parts.dropout(parts.config.dropout.attention),
        clip=options.relative_clip,
        values=options.relative_values,
        linear=parts.linear,
        scaling=_scaling(parts),
    )


def _average(parts: StackParts) -> AverageAttention:
    options = parts.config.attention
    ffn = parts.feed_forward() if options.average_ffn else None
    return AverageAttention(parts.d_model, gate=options.average_gate, ffn=ffn, linear=parts.linear)


def _simplified(parts: StackParts) -> SimplifiedAverageAttention:
    return SimplifiedAverageAttention(parts.d_model, linear=parts.linear)


OWN: dict[DecoderAttentionKind, Callable[[StackParts], OwnAttention]] = {
    "full": _full,
    "relative": _relative,
    "average": _average,
    "simplified_average": _simplified,
}
"""Attention to the target as a sub-layer of its own."""


def _merged(parts: StackParts) -> MergedAttention:
    cross = _cross(parts, project_out=False)
    return MergedAverageAttention(cross, share_value=parts.config.attention.share_value, linear=parts.linear)


MERGED: dict[DecoderAttentionKind, Callable[[StackParts], MergedAttention]] = {
    "merged": _merged,
    "merged_full": lambda parts: MergedAttention(_full(parts), _cross(parts)),
    "merged_gated": lambda parts: MergedAttention(_average(parts), _cross(parts)),
}
"""Attention to the target and to the memory in one sub-layer."""


def encoder_attention(parts: StackParts) -> SelfAttention:
    """Return the self-attention of one encoder layer."""
    return _relative(parts) if parts.config.encoder.attention == "relative" else _full(parts)


def decoder_layer(parts: StackParts, number: int) -> AnyDecoderLayer:
    """Return decoder layer `number`, from 1."""
    kind = parts.config.decoder.attention
    if kind in MERGED:
        return MergedDecoderLayer(MERGED[kind](parts), parts.feed_forward(), parts.residuals(number, (True, False)))
    residuals = parts.residuals(number, (True, True, False))
    return DecoderLayer(OWN[kind](parts), _cross(parts), parts.feed_forward(), residuals)


def _cross(parts: StackParts, *, project_out: bool = True) -> CrossAttention:
    config = parts.config
    dropout = parts.dropout(config.dropout.attention)
    return CrossAttention(
        parts.d_model,
        config.encoder_width,
        parts.heads,
        dropout,
        linear=parts.linear,
        scaling=_scaling(parts),
        project_out=project_out,
    )


def _scaling(parts: StackParts) -> QueryKeyScaling | None:
    options = parts.config.attention
    if options.qk_norm == "none" and not options.query_scale:
        return None
    return QueryKeyScaling(
        parts.d_model // parts.heads,
        norm=options.qk_norm,
        length=options.qk_length,
        per_dimension=options.query_scale,
        epsilon=parts.config.layer_norm_epsilon,
    )


def _rotary(parts: StackParts) -> Rotary | None:
    return Rotary(parts.d_model // parts.heads) if parts.config.embedding.positions == "rotary" else None
