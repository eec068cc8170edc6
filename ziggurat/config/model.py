"""Model section: free choices on independent axes."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import Layers, Real, Section, Width
from ziggurat.config.compatibility import refused
from ziggurat.config.wiring import AttentionConfig, CombinationConfig, InitConfig, WiringConfig

__all__ = [
    "PRESETS",
    "DecoderAttentionKind",
    "DecoderConfig",
    "DropoutConfig",
    "EmbeddingConfig",
    "EncoderAttentionKind",
    "EncoderConfig",
    "Family",
    "HistoryKind",
    "MemoryKind",
    "ModelConfig",
    "ResidualKind",
    "StackConfig",
]

Family = Literal["transformer", "rnmt"]
ResidualKind = Literal[
    "post",
    "pre",
    "lingvo",
    "none",
    "admin",
    "deepnorm",
    "rezero",
    "layer_scale",
    "ln_scaling",
    "peri",
    "res_post",
    "b2t",
    "no_norm",
    "fixup",
    "hyper",
]
HistoryKind = Literal["latest", "dlcl", "dense", "average", "blocks", "top_only", "depth_weighted"]
MemoryKind = Literal["top", "transparent"]
EncoderAttentionKind = Literal["full", "relative"]
DecoderAttentionKind = Literal[
    "full", "relative", "average", "simplified_average", "merged", "merged_full", "merged_gated"
]
PositionKind = Literal["sinusoidal", "learned", "rotary", "none"]
Sharing = Literal["none", "decoder", "all"]
Activation = Literal["relu", "gelu", "silu", "swiglu"]
NormKind = Literal["layer", "rms"]

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 128, "d_ff": 512, "heads": 4},
    "small": {"d_model": 256, "d_ff": 1024, "heads": 4},
    "base": {"d_model": 512, "d_ff": 2048, "heads": 8},
    "big": {"d_model": 1024, "d_ff": 4096, "heads": 16},
}
"""Sizes by name (base and big: Vaswani et al. 2017, table 3); a key that is written wins over its preset."""


class StackConfig(Section):
    """One stack of layers: encoder or decoder."""

    layers: Layers = Field(default=6, ge=1)
    """Number of layers."""
    history: HistoryKind = "latest"
    """What a layer reads. `latest`: the layer below. `dlcl`: a learned combination of all below (Wang et al. 2019);
    `dense`, `average`: the same with fixed weights 1 or 1/(l+1). `blocks`: combinations between blocks of
    `combination.period` layers (Li et al. 2020). `top_only`: only the stack's output combines all layers.
    `depth_weighted`: DenseFormer (Pagliardini et al. 2024)."""
    residual: ResidualKind | None = None
    """How sub-layers of this stack join the stream; null: as `model.residual`."""
    layer_drop: float = Field(default=0.0, ge=0, lt=1)
    """Probability of skipping a whole layer in training (LayerDrop, Fan et al. 2019); nothing is rescaled."""
    layer_norm_epsilon: Real | None = Field(default=None, gt=0)
    """Epsilon inside the normalisation of this stack's stream; null: as `model.layer_norm_epsilon`."""


class EncoderConfig(StackConfig):
    """Encoder stack."""

    attention: EncoderAttentionKind = "full"
    """`full`; `relative`: relative positions (Shaw et al. 2018)."""
    d_model: Width | None = Field(default=None, ge=2)
    """Width of the encoder; null: as `model.d_model`, which is the decoder's (Wang et al. 2019: wide encoder)."""
    d_ff: Width | None = Field(default=None, ge=1)
    """Inner width of the encoder's feed-forward networks; null: as `model.d_ff`."""
    heads: Width | None = Field(default=None, ge=1)
    """Heads of the encoder's self-attention; null: as `model.heads`."""


class DecoderConfig(StackConfig):
    """Decoder stack."""

    attention: DecoderAttentionKind = "full"
    """`full`, `relative`; `average`: average attention (AAN, Zhang et al. 2018); `simplified_average`: SAAN;
    `merged`: SAAN and cross-attention in one sub-layer (MAtt, Zhang et al. 2019); `merged_full`: self-attention
    and cross-attention in one sub-layer; `merged_gated`: AAN and cross-attention in one sub-layer."""


class DropoutConfig(Section):
    """Dropout probabilities; all act in training only and, where not said otherwise, rescale by 1/(1-p)."""

    residual: float = Field(default=0.1, ge=0, lt=1)
    """On every sub-layer's output before it joins the residual stream (rnmt: on every LSTM layer's output)."""
    attention: float = Field(default=0.0, ge=0, lt=1)
    """On attention weights."""
    activation: float = Field(default=0.0, ge=0, lt=1)
    """Inside the feed-forward network, after the activation."""
    embedding: float = Field(default=0.1, ge=0, lt=1)
    """On the sum of embedding and position."""
    transparent: float = Field(default=0.1, ge=0, lt=1)
    """On the N + 1 logits of each transparent merge (Bapna et al. 2018)."""
    sublayer: float = Field(default=0.0, ge=0, lt=1)
    """Stochastic sub-layers (Pham et al. 2019): the top layer's branches are dropped with this probability, layer
    l of L with l/L of it."""
    sublayer_unit: Literal["batch", "sample"] = "batch"
    """What a dropped branch is dropped for: the whole batch (Pham et al. 2019) or single sentences (DropPath)."""


class EmbeddingConfig(Section):
    """Token embeddings and output projection."""

    sharing: Sharing = "all"
    """`none`: three matrices; `decoder`: target embedding = output projection; `all`: one matrix (joint vocabulary)."""
    positions: PositionKind = "sinusoidal"
    """`sinusoidal`, `learned`: absolute positions added to the embeddings; `rotary`: queries and keys of
    self-attention are rotated (Su et al. 2021); `none`."""
    max_positions: Width = Field(default=1024, ge=1)
    """Longest sequence `positions: learned` can hold, in tokens; the others have no limit."""
    scale: bool = True
    """Multiply embeddings by sqrt(d_model) (Vaswani et al. 2017, section 3.4)."""
    shared_bias: bool = False
    """Add one trained vector, the same on both sides, to every embedding (zero)."""
    zero_start: bool = False
    """The decoder's first input is a zero vector plus its position, not an embedding (zero)."""
    output_bias: bool = False
    """Add a trained bias to the output logits (lingvo)."""


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
    """How a sub-layer f joins the stream x: `post` LN(x + f(x)), `pre` x + f(LN(x)) with a final LN per stack,
    `lingvo` LN(x) + f(LN(x)) for attention, `none` f(LN(x)), `admin` LN(omega x + f(x)), `deepnorm` LN(alpha x + f(x)),
    `rezero` x + a f(x), `layer_scale` x + lambda f(LN(x)),
    `ln_scaling` x + f(LN(x) / sqrt(layer)), `peri` x + LN(f(LN(x))), `res_post` x + LN(f(x)), `b2t`
    post-norm with a bypass to the last LN of the layer, `no_norm` x + f(x), `fixup` x + m f(x) with scalar shifts,
    `hyper` hyper-connections (docs/depth.md)."""
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
        if reasons := refused(self):
            raise ValueError("; ".join(reasons))
        return self

    @property
    def planned_encoder_layers(self) -> int:
        """Encoder layers for which constants of depth are computed."""
        return self.wiring.planned_encoder_layers or self.encoder.layers

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
