"""Which choices of a model cannot work together in principle, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ziggurat.config.model import ModelConfig

__all__ = ["refused", "unheeded", "unlike"]


def refused(model: ModelConfig) -> list[str]:
    """Return why `model` cannot be built; nothing when it can."""
    return [*_sizes(model), *(_rnmt(model) if model.family == "rnmt" else _transformer(model))]


def unheeded(model: ModelConfig) -> list[str]:
    """Return which keys of `model` are set, but mean nothing beside its other choices."""
    histories = {model.encoder.history, model.decoder.history} - {"latest"}
    residuals = {model.encoder_residual, model.decoder_residual}
    attentions = {model.encoder.attention, model.decoder.attention}
    weighed = histories & {"dlcl", "blocks", "top_only"}
    heeded: dict[str, dict[str, bool]] = {
        "combination": {
            "start": bool(weighed),
            "learnable": bool(histories - {"dense", "average"}),
            "norm": bool(histories - {"depth_weighted"}),
            "normalize_embedding": bool(histories - {"depth_weighted"}),
            "softmax": bool(weighed),
            "window": bool(histories - {"depth_weighted"}),
            "dropout": bool(histories),
            "groups": bool(histories),
            "unit": bool(histories),
            "period": bool(histories & {"blocks", "depth_weighted"}),
            "dilation": "depth_weighted" in histories,
        },
        "wiring": {
            "omega_trainable": "admin" in residuals,
            "layer_scale": "layer_scale" in residuals,
            "streams": "hyper" in residuals,
            "dynamic": "hyper" in residuals,
        },
        "attention": {
            "relative_clip": "relative" in attentions,
            "relative_values": "relative" in attentions,
            "average_ffn": bool(attentions & {"average", "merged_gated"}),
            "average_gate": bool(attentions & {"average", "merged_gated"}),
            "share_value": "merged" in attentions,
            "qk_length": model.attention.qk_norm == "l2",
        },
        "embedding": {"max_positions": model.embedding.positions == "learned"},
        "init": {
            "qkv": model.init.kind != "deepnorm",
            "alpha": model.init.kind == "depth_scaled",
            "exponent": model.init.kind == "depth_scaled",
            "omega": model.init.kind == "admin",
            "profile_tokens": model.init.kind == "admin" and model.init.omega == "profiled",
            "uniform": model.init.kind == "uniform",
        },
        "dropout": {
            "transparent": model.memory == "transparent",
            "sublayer_unit": model.dropout.sublayer > 0,
        },
    }
    if model.family == "rnmt":
        heeded["init"]["qkv"] = False
    changed = model.layer_norm_epsilon != type(model).model_fields["layer_norm_epsilon"].default
    alone = ["model.layer_norm_epsilon"] if model.family == "rnmt" and changed else []
    return alone + [
        f"model.{section}.{key}"
        for section, keys in heeded.items()
        for key, means_something in keys.items()
        if not means_something
        and getattr(getattr(model, section), key) != type(getattr(model, section)).model_fields[key].default
    ]


_INITIAL_OR_TRAINING = (
    "preset",
    "init.",
    "dropout.",
    "encoder.layer_drop",
    "decoder.layer_drop",
    "combination.start",
    "combination.dropout",
    "wiring.layer_scale",
    "wiring.omega_trainable",
    "wiring.planned_encoder_layers",
)
"""Keys that say how weights begin or are trained, not what they compute."""


def unlike(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Return the keys by which the same weights would compute something else in `other`: `key: value -> value`."""
    mine, theirs = _computing(one), _computing(other)
    both = [key for key in mine if key in theirs]  # a key that means nothing in one of them cannot differ
    return [f"model.{key}: {mine[key]} -> {theirs[key]}" for key in both if mine[key] != theirs[key]]


def _computing(model: ModelConfig) -> dict[str, object]:
    """Return what weights of `model` compute, as values by dotted key, defaults resolved."""
    ignored = {key.removeprefix("model.") for key in unheeded(model)}
    flat: dict[str, object] = {}
    for key, value in model.model_dump().items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        flat.update({f"{key}.{name}".rstrip("."): v for name, v in inner})
    flat = {k: v for k, v in flat.items() if k not in ignored and not k.startswith(_INITIAL_OR_TRAINING)}
    flat |= {"encoder.residual": model.encoder_residual, "decoder.residual": model.decoder_residual}
    flat |= {"encoder.d_model": model.encoder_width, "encoder.heads": model.encoder_heads}
    flat |= {"encoder.d_ff": model.encoder_d_ff}
    flat.pop("residual")
    if not model.combination.learnable:  # then it is no start, but what stays
        flat["combination.start"] = model.combination.start
    if "deepnorm" in (model.encoder_residual, model.decoder_residual):
        flat["wiring.planned_encoder_layers"] = model.planned_encoder_layers
    return flat


def _sizes(model: ModelConfig) -> Iterator[str]:
    sides = [("", model.d_model, model.heads)]
    if model.encoder.d_model or model.encoder.heads:
        sides.append(("encoder.", model.encoder_width, model.encoder_heads))
    for prefix, width, heads in sides:
        if width % heads:
            yield f"`{prefix}d_model` ({width}) is not a multiple of `{prefix}heads` ({heads})"
        elif model.embedding.positions == "rotary" and width // heads % 2:
            yield f"rotary positions turn pairs of channels: {width} / {heads} heads is odd"
        if width % 2 and model.embedding.positions == "sinusoidal":
            yield f"sinusoidal positions need an even `{prefix}d_model`, not {width}"
    if model.encoder_width != model.d_model:
        if model.embedding.sharing == "all":
            yield "`embedding.sharing: all` needs equal widths of encoder and decoder; use `decoder` or `none`"
        if model.embedding.shared_bias:
            yield "`embedding.shared_bias` needs equal widths of encoder and decoder"


def _transformer(model: ModelConfig) -> Iterator[str]:
    residuals = (model.encoder_residual, model.decoder_residual)
    histories = (model.encoder.history, model.decoder.history)
    if model.embedding.positions == "rotary":
        if "relative" in (model.encoder.attention, model.decoder.attention):
            yield "`embedding.positions: rotary` and `attention: relative` both put positions into the same logits"
        if model.decoder.attention not in ("full", "merged_full", "relative"):
            yield (
                f"`decoder.attention: {model.decoder.attention}` has no queries and keys to rotate, so with "
                "`embedding.positions: rotary` the decoder would not know positions at all"
            )
    if model.decoder.attention == "merged" and model.attention.share_value and model.encoder_width != model.d_model:
        yield (
            "`attention.share_value` has one matrix project the states of encoder and decoder, so both must be equally "
            "wide; set it to false"
        )
    if model.init.kind == "admin" and "admin" not in residuals:
        yield "`init.kind: admin` sets the skip vectors of `residual: admin`; choose that residual or another init"
    if "b2t" in residuals and model.combination.unit == "sublayer" and set(histories) != {"latest"}:
        yield (
            "`residual: b2t` adds the layer's input to its last sub-layer; with `combination.unit: sublayer` a layer "
            "has no input of its own"
        )
    for side, width in (("encoder", model.encoder_width), ("decoder", model.d_model)):
        if width % model.combination.groups:
            yield f"`combination.groups` ({model.combination.groups}) does not divide the {side}'s width {width}"


def _rnmt(model: ModelConfig) -> Iterator[str]:
    transformer_only: list[tuple[str, object, set[object]]] = [
        ("decoder.residual", model.decoder.residual, {None}),
        ("encoder.residual", model.encoder.residual, {None, "none"}),
        ("residual", model.residual, {"pre"}),
        ("encoder.history", model.encoder.history, {"latest"}),
        ("decoder.history", model.decoder.history, {"latest"}),
        ("encoder.attention", model.encoder.attention, {"full"}),
        ("decoder.attention", model.decoder.attention, {"full"}),
        ("encoder.d_model", model.encoder.d_model, {None}),
        ("encoder.d_ff", model.encoder.d_ff, {None}),
        ("encoder.heads", model.encoder.heads, {None}),
        ("activation", model.activation, {"relu"}),
        ("attention.qk_norm", model.attention.qk_norm, {"none"}),
        ("attention.query_scale", model.attention.query_scale, {False}),
        ("norm", model.norm, {"layer"}),
        ("encoder.layer_drop", model.encoder.layer_drop, {0.0}),
        ("decoder.layer_drop", model.decoder.layer_drop, {0.0}),
        ("encoder.layer_norm_epsilon", model.encoder.layer_norm_epsilon, {None}),
        ("decoder.layer_norm_epsilon", model.decoder.layer_norm_epsilon, {None}),
        ("dropout.activation", model.dropout.activation, {0.0}),
        ("dropout.sublayer", model.dropout.sublayer, {0.0}),
        ("embedding.shared_bias", model.embedding.shared_bias, {False}),
        ("embedding.zero_start", model.embedding.zero_start, {False}),
    ]
    for key, value, allowed in transformer_only:
        if value not in allowed:
            yield f"`{key}: {value}` is for `family: transformer`; RNMT+ has LSTM layers joined as its paper says"
    if model.embedding.positions != "none":
        yield "RNMT+ reads positions from its recurrence: set `embedding.positions: none`"
    if model.embedding.sharing in ("decoder", "all"):
        yield "RNMT+ projects states of 2 d_model, so no embedding fits its output: set `embedding.sharing: none`"
    if model.init.kind not in ("uniform", "xavier"):
        yield f"`init.kind: {model.init.kind}` is for `family: transformer`; RNMT+ has `uniform` and `xavier`"
