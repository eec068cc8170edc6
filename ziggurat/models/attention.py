"""The table of attention kinds, and the decoder layer that each makes.

What a configuration must know of a kind is on its row in ziggurat.config.kinds: also whether attention to the memory is
part of the same sub-layer (`merged`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ziggurat.config.kinds import ATTENTIONS, DecoderAttentionKind, EncoderAttentionKind
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

__all__ = ["ATTENTION", "ENCODER_ATTENTION", "AttentionRow", "decoder_layer"]


def _full(parts: StackParts) -> SelfAttention:
    return SelfAttention(
        parts.d_model,
        parts.heads,
        parts.dropout(parts.config.dropout.attention),
        linear=parts.linear,
        scaling=_scaling(parts),
        rotary=Rotary(parts.d_model // parts.heads) if parts.config.embedding.positions == "rotary" else None,
        out=parts.normed_linear,
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
        out=parts.normed_linear,
    )


def _average(parts: StackParts) -> AverageAttention:
    options = parts.config.attention
    ffn = parts.feed_forward() if options.average_ffn else None
    return AverageAttention(parts.d_model, gate=options.average_gate, ffn=ffn, linear=parts.linear)


def _simplified(parts: StackParts) -> SimplifiedAverageAttention:
    return SimplifiedAverageAttention(parts.d_model, linear=parts.linear)


def _merged(parts: StackParts) -> MergedAttention:
    cross = _cross(parts, project_out=False)
    return MergedAverageAttention(cross, share_value=parts.config.attention.share_value, linear=parts.linear)


def _cross(parts: StackParts, *, project_out: bool = True) -> CrossAttention:
    config = parts.config
    return CrossAttention(
        parts.d_model,
        config.encoder_width,
        parts.heads,
        parts.dropout(config.dropout.attention),
        linear=parts.linear,
        scaling=_scaling(parts),
        project_out=project_out,
    )


def _scaling(parts: StackParts) -> QueryKeyScaling | None:
    options = parts.config.attention
    if options.qk_norm == options.value_norm == "none" and not options.query_scale:
        return None
    return QueryKeyScaling(
        parts.d_model // parts.heads,
        norm=options.qk_norm,
        length=options.qk_length,
        per_dimension=options.query_scale,
        epsilon=parts.config.layer_norm_epsilon,
        value_norm=options.value_norm,
    )


@dataclass(frozen=True)
class AttentionRow:
    """One kind of attention to the target.

    Attributes:
        make: makes the sub-layer's module; of a kind that is `merged` in ziggurat.config.kinds a MergedAttention.
        reads: names of the linear maps that read the stream and nothing else; None: other things read it too.
        writes: names of the maps whose sum is the sub-layer's output; None: its output is something else.
    """

    make: Callable[[StackParts], OwnAttention | MergedAttention]
    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None


ENCODER_ATTENTION: dict[EncoderAttentionKind, Callable[[StackParts], SelfAttention]] = {
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
    # With `attention.share_value` there is no `v_proj`: a map that also reads the memory takes its place.
    "merged": AttentionRow(_merged, ("cross.q_proj", "v_proj"), ("out_proj",)),
    "merged_full": AttentionRow(
        lambda parts: MergedAttention(_full(parts), _cross(parts)),
        ("own.qkv_proj", "cross.q_proj"),
        ("own.out_proj", "cross.out_proj"),
    ),
    "merged_gated": AttentionRow(lambda parts: MergedAttention(_average(parts), _cross(parts)), None, None),
}
"""Attention to the target: as a sub-layer, or merged with attention to the memory."""


def decoder_layer(parts: StackParts, number: int) -> AnyDecoderLayer:
    """Return decoder layer `number`, from 1."""
    kind = parts.config.decoder.attention
    attention = ATTENTION[kind].make(parts)
    if ATTENTIONS[kind].merged:
        assert isinstance(attention, MergedAttention), f"`{kind}` is merged by ziggurat.config.kinds, not by its module"
        return MergedDecoderLayer(attention, parts.feed_forward(), parts.residuals(number, (True, False)))
    assert isinstance(attention, OwnAttention), f"`{kind}` is merged by its module, not by ziggurat.config.kinds"
    return DecoderLayer(attention, _cross(parts), parts.feed_forward(), parts.residuals(number, (True, True, False)))
