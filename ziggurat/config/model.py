"""The model section: free choices on independent axes, and the few that cannot work together in principle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import Real, Section, Width
from ziggurat.config.kinds import (
    ATTENTIONS,
    INITIALISATIONS,
    RESIDUALS,
    Activation,
    Family,
    MemoryKind,
    NormKind,
    ResidualKind,
)
from ziggurat.config.model_sections import (
    AttentionConfig,
    CombinationConfig,
    DecoderConfig,
    DropoutConfig,
    EmbeddingConfig,
    EncoderConfig,
    InitConfig,
    TransferConfig,
    WiringConfig,
)

__all__ = ["PRESETS", "ModelConfig"]

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 128, "d_ff": 512, "heads": 4},
    "small": {"d_model": 256, "d_ff": 1024, "heads": 4},
    "base": {"d_model": 512, "d_ff": 2048, "heads": 8},
    "big": {"d_model": 1024, "d_ff": 4096, "heads": 16},
}
"""Sizes by name (base and big: Vaswani et al. 2017, table 3); a key that is written wins over its preset."""


class ModelConfig(Section):
    """An encoder-decoder as a composition of independent choices."""

    preset: Literal["tiny", "small", "base", "big"] | None = None
    """Fills `d_model`, `d_ff` and `heads` where they are not given: `tiny` 128, 512, 4; `small` 256, 1024, 4; `base`
    512, 2048, 8; `big` 1024, 4096, 16 (the last two: Vaswani et al. 2017)."""
    family: Family = "transformer"
    """`transformer`, or `rnmt`: RNMT+ (Chen et al. 2018), whose cell size is `d_model` and whose attention has
    `heads` heads."""
    d_model: Width = Field(default=512, ge=2)
    """Width of the residual stream."""
    d_ff: Width = Field(default=2048, ge=1)
    """Width inside the feed-forward networks (swiglu: two thirds of it, for the same number of parameters)."""
    heads: Width = Field(default=8, ge=1)
    """Attention heads; must divide `d_model`."""
    residual: ResidualKind = "pre"
    """The way a sub-layer f joins the stream x: `post` LN(x + f(x)), `pre` x + f(LN(x)) with a final LN per stack,
    `lingvo` LN(x) + f(LN(x)) for attention, `none` f(LN(x)), `admin` LN(omega x + f(x)), `deepnorm` LN(alpha x + f(x)),
    `rezero` x + a f(x), `layer_scale` x + lambda f(LN(x)), `ln_scaling` x + f(LN(x) / sqrt(layer)), `peri` x +
    LN(f(LN(x))) with an LN on the embedding, `sandwich` the same without it, `res_post` x + LN(f(x)), `b2t` post-norm
    with a bypass to the last LN of the layer, `no_norm` x + f(x), `fixup` x + m f(x) with scalar shifts,
    `hyper` hyper-connections, `manifold_hyper` with doubly stochastic mixing, `siamese` a post- and a pre-norm stream
    with one branch, `keel` LN(alpha x + f(LN(x))), `hybrid` x + f(x) for attention and u + f(u) with u = LN(x) for
    feed-forward networks, `sub_ln` pre-norm with a second LN before the last map of a sub-layer (docs/depth.md)."""
    encoder: EncoderConfig = EncoderConfig()
    """Encoder stack."""
    decoder: DecoderConfig = DecoderConfig()
    """Decoder stack."""
    memory: MemoryKind = "top"
    """What the decoder attends to: `top`, the encoder's output, or `transparent`, a learned mixture of all
    encoder layers for each decoder layer (Bapna et al. 2018)."""
    activation: Activation = "relu"
    """Non-linearity of the feed-forward networks; `silu` is also called swish (Ramachandran et al. 2017), `swiglu` has
    a gate and no biases (Shazeer 2020)."""
    norm: NormKind = "layer"
    """`layer`: layer normalisation; `rms`: root mean square normalisation (Zhang and Sennrich 2019)."""
    layer_norm_epsilon: Real = Field(default=1e-5, gt=0)
    """Epsilon inside normalisation (rnmt: always 1e-8)."""
    attention: AttentionConfig = AttentionConfig()
    """Options of the attention kinds."""
    combination: CombinationConfig = CombinationConfig()
    """Options of the history kinds."""
    wiring: WiringConfig = WiringConfig()
    """Options of the residual kinds."""
    embedding: EmbeddingConfig = EmbeddingConfig()
    """Embeddings and positions."""
    dropout: DropoutConfig = DropoutConfig()
    """Dropout probabilities."""
    transfer: TransferConfig | None = None
    """Take over the learning rate of a smaller model, the base; null: none. Branches, rates, epsilon and logits are
    then scaled by the ratios of width and depth (CompleteP, Dey et al. 2025)."""
    init: InitConfig = InitConfig()
    """Initialisation."""

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(name := values.get("preset"), str) and name in PRESETS:
            return {**PRESETS[name], **values}
        return values

    @model_validator(mode="after")
    def _choices_fit(self) -> Self:
        if reasons := _refused(self):
            raise ValueError("; ".join(reasons))
        return self

    @property
    def planned_encoder_layers(self) -> int:
        """Encoder layers for which constants of depth are computed."""
        return self.wiring.planned_encoder_layers or self.encoder.layers

    @property
    def planned_decoder_layers(self) -> int:
        """Decoder layers for which constants of depth are computed."""
        return self.wiring.planned_decoder_layers or self.decoder.layers

    def residuals(self, *, decoder: bool) -> tuple[ResidualKind, ...]:
        """Return the residual kind of each layer of a stack, bottom first."""
        stack, above = (self.decoder, self.decoder_residual) if decoder else (self.encoder, self.encoder_residual)
        kinds = [part.residual for part in stack.ranges for _ in range(part.layers)]
        return (*kinds, *[above] * (stack.layers - len(kinds)))

    def value_residuals(self, *, decoder: bool) -> dict[str, str]:
        """Return the value residuals of a stack's attention: key -> kind."""
        options = self.attention
        found: dict[str, str] = {}
        # Every encoder has self-attention of several heads; of decoders those with queries and keys have it.
        if options.value_residual != "none" and (not decoder or ATTENTIONS[self.decoder.attention].rotary):
            found["attention.value_residual"] = options.value_residual
        if options.cross_value_residual != "none" and decoder:
            found["attention.cross_value_residual"] = options.cross_value_residual
        return found

    @property
    def encoder_width(self) -> int:
        """d_model of the encoder."""
        return self.encoder.d_model or self.d_model

    @property
    def encoder_d_ff(self) -> int:
        """Inner width of the encoder's feed-forward networks."""
        return self.encoder.d_ff or self.d_ff

    @property
    def encoder_heads(self) -> int:
        """Heads of the encoder's self-attention."""
        return self.encoder.heads or self.heads

    @property
    def encoder_residual(self) -> ResidualKind:
        """Residual kind of the encoder."""
        return self.encoder.residual or self.residual

    @property
    def decoder_residual(self) -> ResidualKind:
        """Residual kind of the decoder."""
        return self.decoder.residual or self.residual


# Choices that cannot work together, each with its reason --------------------------------------------------------------


def _refused(model: ModelConfig) -> list[str]:
    """Return why `model` cannot be built; nothing when it can."""
    return [*_sizes(model), *(_rnmt(model) if model.family == "rnmt" else _transformer(model))]


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
    residuals = (*model.residuals(decoder=False), *model.residuals(decoder=True))
    stacks = (model.encoder, model.decoder)
    if model.embedding.positions == "rotary":
        if "relative" in (model.encoder.attention, model.decoder.attention):
            yield "`embedding.positions: rotary` and `attention: relative` both put positions into the same logits"
        if not ATTENTIONS[model.decoder.attention].rotary:
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
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for key in model.value_residuals(decoder=side == "decoder"):
            if stack.layer_drop:
                yield f"`{side}.layer_drop`: `{key}` needs the values of the first layer, which may be left out"
    if model.decoder.attention == "merged" and model.attention.cross_value_residual == "single":
        yield (
            "`attention.cross_value_residual: single` leaves no value map above the first layer, and "
            "`decoder.attention: merged` has one for encoder and decoder states"
        )
    split = any(model.combination.splits(stack.history) for stack in stacks)
    for residual in dict.fromkeys(residuals):
        if RESIDUALS[residual].layer_input and split:
            yield (
                f"`residual: {residual}` adds the layer's input to its last sub-layer; with `combination.unit: "
                "sublayer` a layer has no input of its own"
            )
    if "hybrid" in model.residuals(decoder=True) and not ATTENTIONS[model.decoder.attention].rotary:
        yield (
            f"`residual: hybrid` has its norms on queries, keys and values, which `decoder.attention: "
            f"{model.decoder.attention}` lacks: nothing would be normalised"
        )
    if model.memory == "transparent" and "siamese" in residuals[: model.encoder.layers]:
        yield "`memory: transparent` mixes the states of all layers; `residual: siamese` has one only at the end"
    if "manifold_hyper" in residuals and model.wiring.mixing == "permutations" and model.wiring.streams > 6:
        yield f"`wiring.mixing: permutations` of {model.wiring.streams} streams: 6 have 720 already; use `sinkhorn`"
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack.layer_drop and "attention_residuals" in stack.history:
            yield f"`{side}.layer_drop`: a layer that is left out gives nothing for `{stack.history}` to attend to"
    if model.transfer is not None:
        needed: list[tuple[str, object, object]] = [
            *(("residual", residual, "pre") for residual in dict.fromkeys(residuals)),
            ("init.kind", model.init.kind, "xavier"),
            ("embedding.scale", model.embedding.scale, True),
            ("embedding.positions: learned", model.embedding.positions == "learned", False),
            ("wiring.gpas", model.wiring.gpas, False),
            ("attention.value_residual", model.attention.value_residual, "none"),
            ("attention.cross_value_residual", model.attention.cross_value_residual, "none"),
            ("encoder.d_model", model.encoder_width, model.d_model),
        ]
        for key, value, allowed in needed:
            if value != allowed:
                yield f"`transfer` is not worked out for `{key}: {value}`; it needs `{allowed}`"
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if (lower := sum(part.layers for part in stack.ranges)) >= stack.layers:
            yield f"`{side}.ranges` has {lower} layers, which leaves none of {stack.layers} above them"
        for residual in set(model.residuals(decoder=side == "decoder")) if stack.ranges else ():
            if RESIDUALS[residual].alone:
                yield f"`{side}.ranges`: `{residual}` mixes with no other kind: {RESIDUALS[residual].alone}"
    for side, width in (("encoder", model.encoder_width), ("decoder", model.d_model)):
        if width % model.combination.groups:
            yield f"`combination.groups` ({model.combination.groups}) does not divide the {side}'s width {width}"


def _rnmt(model: ModelConfig) -> Iterator[str]:
    transformer_only: list[tuple[str, object, set[object]]] = [
        ("transfer", str(model.transfer), {"None"}),
        ("decoder.residual", model.decoder.residual, {None}),
        ("encoder.residual", model.encoder.residual, {None, "none"}),
        ("residual", model.residual, {"pre"}),
        ("encoder.ranges", str(model.encoder.ranges), {"[]"}),
        ("decoder.ranges", str(model.decoder.ranges), {"[]"}),
        ("encoder.history", model.encoder.history, {"latest"}),
        ("decoder.history", model.decoder.history, {"latest"}),
        ("encoder.attention", model.encoder.attention, {"full"}),
        ("decoder.attention", model.decoder.attention, {"full"}),
        ("encoder.d_model", model.encoder.d_model, {None}),
        ("encoder.d_ff", model.encoder.d_ff, {None}),
        ("encoder.heads", model.encoder.heads, {None}),
        ("activation", model.activation, {"relu"}),
        ("attention.qk_norm", model.attention.qk_norm, {"none"}),
        ("attention.value_norm", model.attention.value_norm, {"none"}),
        ("attention.value_residual", model.attention.value_residual, {"none"}),
        ("attention.cross_value_residual", model.attention.cross_value_residual, {"none"}),
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
    if not INITIALISATIONS[model.init.kind].rnmt:
        others = " and ".join(sorted(f"`{kind}`" for kind, facts in INITIALISATIONS.items() if facts.rnmt))
        yield f"`init.kind: {model.init.kind}` is for `family: transformer`; RNMT+ has {others}"
