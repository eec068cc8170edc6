"""The model section: free choices on independent axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import Real, Section, Width
from ziggurat.config.kinds import (
    ATTENTIONS,
    MEMORIES,
    RESIDUALS,
    Activation,
    Family,
    HistoryNorm,
    MemoryKind,
    NormKind,
    ResidualKind,
    listed_kinds,
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
from ziggurat.config.refusals import refused

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 128, "d_ff": 512, "heads": 4},
    "small": {"d_model": 256, "d_ff": 1024, "heads": 4},
    "base": {"d_model": 512, "d_ff": 2048, "heads": 8},
    "big": {"d_model": 1024, "d_ff": 4096, "heads": 16},
}
"""Sizes by name (base and big: Vaswani et al. 2017, table 3); a key that is written beside it wins over its preset."""


def without_sizes(below: Mapping[str, Any], preset: Any) -> dict[str, Any]:
    """Return settings of a model without those that `preset`, which is written over them, brings with it.

    Otherwise it would have no effect on a model that says its sizes, as each saved configuration does.
    """
    sizes = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    return {key: value for key, value in below.items() if key not in sizes}


class ModelConfig(Section):
    """An encoder-decoder as a composition of independent choices."""

    preset: Literal["tiny", "small", "base", "big"] | None = None
    """Fills `d_model`, `d_ff` and `heads` where they are not given beside it: `tiny` 128, 512, 4; `small` 256, 1024, 4;
    `base` 512, 2048, 8; `big` 1024, 4096, 16 (the last two: Vaswani et al. 2017). As an override, or over a pipeline's
    recipe, it takes the place of the sizes there."""
    family: Family = "transformer"
    """`transformer`, or `rnmt`: RNMT+ (Chen et al. 2018), whose cell size is `d_model` and whose attention has
    `heads` heads."""
    d_model: Width = Field(default=512, ge=2)
    """Width of the residual stream."""
    d_ff: Width = Field(default=2048, ge=1)
    """Width inside the feed-forward networks (swiglu: two thirds of it, for the same number of parameters;
    rnmt has none)."""
    heads: Width = Field(default=8, ge=1)
    """Attention heads; must divide `d_model`."""
    residual: ResidualKind = Field(
        default="pre",
        description="The stream x after a sub-layer f (docs/depth.md): " + listed_kinds(RESIDUALS, RESIDUALS),
    )
    encoder: EncoderConfig = EncoderConfig()
    """Encoder stack."""
    decoder: DecoderConfig = DecoderConfig()
    """Decoder stack."""
    memory: MemoryKind = Field(
        default="top", description="What the decoder attends to: " + listed_kinds(MEMORIES, MEMORIES)
    )
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
    """Initialisation of the weights, but for stacks that have their own (`encoder.init`, `decoder.init`)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(name := values.get("preset"), str) and name in PRESETS:
            return {**PRESETS[name], **values}
        return values

    @model_validator(mode="before")
    @classmethod
    def _fill_init_of_stacks(cls, values: Any) -> Any:
        """Give the `init` of a stack what is not written there from `model.init`."""
        if not isinstance(values, dict) or not isinstance(shared := values.get("init"), dict):
            return values
        stacks = {name: stack for name in ("encoder", "decoder") if isinstance(stack := values.get(name), dict)}
        own = {
            name: {**stack, "init": {**shared, **init}}
            for name, stack in stacks.items()
            if isinstance(init := stack.get("init"), dict)
        }
        return {**values, **own}

    @model_validator(mode="after")
    def _choices_fit(self) -> Self:
        if reasons := refused(self):
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

    def stack_init(self, *, decoder: bool) -> InitConfig:
        """Return the initialisation of a stack's layers."""
        return (self.decoder if decoder else self.encoder).init or self.init

    @property
    def inits(self) -> dict[str, InitConfig]:
        """The initialisations of the model by key: `init`, and those of single stacks."""
        own = {"encoder.init": self.encoder.init, "decoder.init": self.decoder.init}
        return {"init": self.init, **{key: init for key, init in own.items() if init is not None}}

    def residuals(self, *, decoder: bool) -> tuple[ResidualKind, ...]:
        """Return the residual kind of each layer of a stack, bottom first."""
        stack, above = (self.decoder, self.decoder_residual) if decoder else (self.encoder, self.encoder_residual)
        kinds = [part.residual for part in stack.ranges for _ in range(part.layers)]
        return (*kinds, *[above] * (stack.layers - len(kinds)))

    def history_norm(self, *, decoder: bool) -> HistoryNorm:
        """Return where a stack's combinations of layers normalise, if its history has any."""
        chosen = self.combination.norm
        return RESIDUALS[self.residuals(decoder=decoder)[-1]].history_norm if chosen == "auto" else chosen

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
