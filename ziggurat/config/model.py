"""The model section: free choices on independent axes.

The sections of the two stacks and the options of every axis come first, then `ModelConfig`, which holds them all. The
names of kinds and the facts about them are in ziggurat.config.kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from ziggurat.config.kinds import (
    ATTENTIONS,
    HISTORIES,
    INITIALISATIONS,
    MEMORIES,
    RESIDUALS,
    Activation,
    DecoderAttentionKind,
    EncoderAttentionKind,
    Family,
    HistoryKind,
    HistoryNorm,
    InitKind,
    MemoryKind,
    NormKind,
    PositionKind,
    ResidualKind,
    Sharing,
    Solver,
    listed_kinds,
)
from ziggurat.config.model_rules import contradictions
from ziggurat.config.section import Count, Layers, Real, Section, Size, Width
from ziggurat.system.errors import ConfigError


class InitConfig(Section):
    """Initialisation of the weights."""

    kind: InitKind = Field(
        default="xavier",
        description="Initial weights of N encoder and M decoder layers (docs/depth.md): "
        + listed_kinds(INITIALISATIONS, INITIALISATIONS),
    )
    qkv: Literal["fused", "separate", "fused_self"] = "fused"
    """Glorot bound of the query, key and value projections: the bound of one d x 3d matrix (`fused`), of three d x d
    matrices (`separate`), or of one matrix in self-attention and three in cross-attention (`fused_self`, zero).
    `deepnorm` always uses three."""
    alpha: float = Field(default=1.0, gt=0, le=1)
    """`depth_scaled`: alpha of DS-Init."""
    exponent: float = Field(default=0.25, gt=0, le=10)
    """`depth_scaled`: the published runs used 0.25, the paper's equation has 0.5 (docs/depth.md)."""
    omega: Literal["profiled", "log", "linear", "one"] = "profiled"
    """`admin`: `profiled` on one batch before the first update; for n sub-layers of a stack `log` is
    sqrt((n+1)/ln(n+1) - 1), `linear` sqrt(n), `one` 1 (admin-torch)."""
    profile_tokens: Size = Field(default=8192, ge=1)
    """`admin`: size of the batch used to profile omega, in tokens of the longer sides without padding."""
    uniform: Real = Field(default=0.04, gt=0)
    """`uniform`: bound of the distribution."""


class ResidualRange(Section):
    """Some layers of a stack with their own residual kind."""

    layers: Layers = Field(ge=1)
    """Number of layers."""
    residual: ResidualKind
    """Residual kind of these layers, as in `model.residual`."""


class StackConfig(Section):
    """One stack of layers: encoder or decoder."""

    layers: Layers = Field(default=6, ge=1)
    """Number of layers."""
    history: HistoryKind = Field(
        default="latest",
        description="The input of layer l + 1, y_0 being the embedding and y_l the output of layer l (docs/depth.md): "
        + listed_kinds(HISTORIES, HISTORIES),
    )
    residual: ResidualKind | None = None
    """Residual kind of this stack; null: as in `model.residual`."""
    ranges: list[ResidualRange] = Field(default_factory=list, max_length=64)
    """Kinds of the lowest layers, from the bottom up; layers above all ranges have `residual`. `post` in the lowest
    quarter and `pre` above is Mix-LN (Li et al. 2025)."""
    tied_layers: list[Annotated[Layers, Field(ge=1)]] = Field(default_factory=list, max_length=4096)
    """Layers with equal numbers here, bottom first, share their parameters, except factors of residual connections and
    weights of histories; layers above the list repeat it. `[1]`: all share one set (Universal Transformer, Dehghani et
    al. 2019); `[1, 2, 3]`: three layers in a loop (Li and Li 2021); `[1, 1, 2, 2]`: groups of two."""
    layer_drop: float = Field(default=0.0, ge=0, lt=1)
    """Probability of skipping a whole layer in training (LayerDrop, Fan et al. 2019); nothing is rescaled."""
    ffn_depth: Layers = Field(default=2, ge=2)
    """Number of linear maps in each feed-forward network, with activations in between; inner maps are square."""
    layer_norm_epsilon: Real | None = Field(default=None, gt=0)
    """Epsilon inside the normalisation of this stack's stream; null: as in `model.layer_norm_epsilon`."""
    init: InitConfig | None = None
    """Initialisation of this stack's layers; null: as in `model.init`, which also supplies missing keys. Embeddings
    and output projection are always initialised by `model.init`."""

    def owners(self, layers: int | None = None) -> list[int]:
        """Return, for each of `layers` layers (default: all), the lowest layer with the same parameters, from 0."""
        count, labels = layers or self.layers, self.tied_layers
        repeated = [labels[number % len(labels)] if labels else number for number in range(count)]
        return [repeated.index(label) for label in repeated]


class EncoderConfig(StackConfig):
    """Encoder stack."""

    attention: EncoderAttentionKind = Field(
        default="full",
        description="What attention computes: " + listed_kinds(get_args(EncoderAttentionKind), ATTENTIONS),
    )
    solver: Solver = "euler"
    """Step of the stream y through a layer F. `euler`: F(y). `rk2`: y + (F1 + F2) / 2, F1 = F(y), F2 = F(y + F1).
    `rk2_gated`: y + g F1 + (1 - g) F2, g = sigmoid(w [F1; F2] + b). `rk4`: the fourth-order method, F four times.
    (ODE Transformer, Li et al. 2022, whose systems also have `history: dlcl`)"""
    d_model: Width | None = Field(default=None, ge=2)
    """Width of the encoder; null: as in `model.d_model`, the decoder's (Wang et al. 2019: wide encoder)."""
    d_ff: Width | None = Field(default=None, ge=1)
    """Inner width of the encoder's feed-forward networks; null: as in `model.d_ff`."""
    heads: Width | None = Field(default=None, ge=1)
    """Heads of the encoder's self-attention; null: as in `model.heads`."""


class DecoderConfig(StackConfig):
    """Decoder stack."""

    attention: DecoderAttentionKind = Field(
        default="full", description="What attention computes: " + listed_kinds(ATTENTIONS, ATTENTIONS)
    )


class DropoutConfig(Section):
    """Dropout probabilities; all act only in training and, unless stated otherwise, rescale by 1/(1-p)."""

    residual: float = Field(default=0.1, ge=0, lt=1)
    """Dropout on every sub-layer's output before it joins the residual stream (rnmt: on every LSTM layer's output
    except that of the decoder's first, as in lingvo)."""
    attention: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on attention weights."""
    activation: float = Field(default=0.0, ge=0, lt=1)
    """Dropout inside the feed-forward network, after the activation."""
    embedding: float = Field(default=0.1, ge=0, lt=1)
    """Dropout on the sum of embedding and position."""
    transparent: float = Field(default=0.1, ge=0, lt=1)
    """Dropout on the N + 1 logits of each transparent merge (Bapna et al. 2018)."""
    sublayer: float = Field(default=0.0, ge=0, lt=1)
    """Stochastic sub-layers (Pham et al. 2019): the top layer's branches are dropped with this probability, those of
    layer l of L with l/L of it. L is the number of layers, or the planned number (`wiring`) if that is larger."""
    sublayer_unit: Literal["batch", "sample"] = "batch"
    """Unit for which a branch is dropped: the whole batch (Pham et al. 2019) or single sentences (DropPath)."""


class EmbeddingConfig(Section):
    """Token embeddings and output projection."""

    sharing: Sharing = "all"
    """`none`: three matrices; `decoder`: target embedding = output projection; `all`: one matrix (joint vocabulary)."""
    positions: PositionKind = "sinusoidal"
    """`sinusoidal`, `learned`: absolute positions added to the embeddings; `rotary`: queries and keys of
    self-attention are rotated (Su et al. 2021); `none`."""
    max_positions: Width = Field(default=1024, ge=1)
    """Longest sequence for `positions: learned`, in tokens; the other kinds have no limit."""
    scale: bool = True
    """Multiply embeddings by sqrt(d_model) (Vaswani et al. 2017, section 3.4)."""
    unit_length: bool = False
    """Divide every embedding, and every row of the output projection, by its length (FixNorm, Nguyen and Salazar
    2019); their initial values, U(-0.01, 0.01), are `init: {kind: uniform, uniform: 0.01}`."""
    shared_bias: bool = False
    """Add one trained vector, the same on both sides, to every embedding (zero)."""
    zero_start: bool = False
    """The decoder's first input is a zero vector plus its position, not an embedding (zero)."""
    output_bias: bool = False
    """Add a trained bias to the output logits (lingvo)."""

    @property
    def limit(self) -> int | None:
        """Longest sequence that the model can read, in tokens; None: no limit."""
        return self.max_positions if self.positions == "learned" else None


class AttentionConfig(Section):
    """Options of the attention kinds."""

    relative_clip: Width = Field(default=8, ge=1)
    """`relative`: distances are clipped to this (Shaw et al. 2018)."""
    relative_values: bool = False
    """`relative`: also add a table to the values (the full form of Shaw et al. 2018); false: keys only."""
    average_ffn: bool = False
    """`average`, `merged_gated`: a feed-forward network on the averages (Zhang et al. 2018, equation 2)."""
    average_gate: bool = True
    """`average`, `merged_gated`: gates between input and average (Zhang et al. 2018, equation 3)."""
    share_value: bool = True
    """`merged`: one value projection for encoder and decoder states (needed for the published parameter counts)."""
    qk_norm: Literal["none", "layer", "rms", "l2"] = "none"
    """Normalise queries and keys per head: LN or RMSNorm with a learned gain (Dehghani et al. 2023), or to unit
    length with one learned factor of the logits (Henry et al. 2020)."""
    qk_length: Width = Field(default=100, ge=2)
    """`qk_norm: l2`: sentence length L (97.5th percentile) in the factor's initial value log2(L^2 - L)."""
    value_norm: Literal["none", "layer", "rms"] = "none"
    """Normalise values per head, with a learned gain (HybridNorm, Zhuo et al. 2025)."""
    value_residual: Literal["none", "half", "learned", "single"] = "none"
    """Values of self-attention above the first layer: `half`, the mean of the first layer's and the layer's own;
    `learned`, a sum of both with trained weights; `single`, only the first layer's, so that layers above have no value
    map (ResFormer and SVFormer, Zhou et al. 2024). Average attention has no such values and is unchanged."""
    cross_value_residual: Literal["none", "half", "learned", "single"] = "none"
    """The same for the values of attention to the memory."""
    query_scale: bool = False
    """Multiply queries by a learned softplus(a)/softplus(0) per dimension, shared by the heads (lingvo)."""


class CombinationConfig(Section):
    """Combination of layers, for every history except `latest`."""

    start: Literal["average", "one", "last"] = "average"
    """Initial weights of `dlcl`, `blocks` and `top_only`. `average`: 1/n for the n outputs combined; `one`: 1; `last`:
    1 for the last layer and 0 for the others."""
    learnable: bool = True
    """Train the weights (`dlcl`, `blocks`, `top_only`, `depth_weighted`); false: they keep their initial values."""
    norm: Literal["auto", "sources", "consumers", "none"] = "auto"
    """LN of each layer's output (`sources`), of each combination (`consumers`), or neither (`none`). `auto` depends on
    the residual kind: `sources` for pre-norm kinds, `consumers` for post-norm kinds, and `none` for `rezero`,
    `no_norm`, `fixup` and `keel`."""
    normalize_embedding: bool = False
    """Also normalise the embedding (`norm: sources`), or the first combination, which contains only the embedding
    (`consumers`)."""
    softmax: bool = False
    """Use the softmax of each row's parameters as its weights."""
    window: Count | None = Field(default=None, ge=1)
    """Combine only this many of the latest outputs; null: all."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the combination."""
    groups: Width = Field(default=1, ge=1)
    """Learned weights per source: 1 is a scalar, d_model one per channel, g one per group of d_model/g channels."""
    unit: Literal["layer", "sublayer"] = "layer"
    """Combine the outputs of whole layers (the paper) or of every sub-layer."""
    period: Count | None = Field(default=None, ge=1)
    """`blocks`, `block_attention_residuals`: layers (or sub-layers) per block, by default 6. `depth_weighted`: a
    combination follows every period-th layer, by default every layer. `cross_module`, `memory: hierarchical`: layers
    of the lower module, by default 6."""
    dilation: Count = Field(default=1, ge=1)
    """`depth_weighted`: combine only every dilation-th of the layers below."""

    def period_of(self, history: HistoryKind) -> int:
        """Return the period of a stack with a kind of history."""
        return self.period or HISTORIES[history].period

    @property
    def module(self) -> int:
        """Layers of the lower module of both stacks (`memory: hierarchical`)."""
        return self.period_of("cross_module")

    def splits(self, history: HistoryKind) -> bool:
        """Return whether a stack with a kind of history combines after every sub-layer, not after whole layers."""
        return self.unit == "sublayer" and "combination.unit" in HISTORIES[history].options


class WiringConfig(Section):
    """Options of the residual kinds."""

    omega_trainable: bool = True
    """`admin`: train omega (the released code) or keep its initial values (the paper; folds exactly)."""
    branch_updates: Count = Field(default=4000, ge=1)
    """`branch_norm`: updates over which the factor of the branches grows to 1. In a run that starts from trained
    weights (`training.start_from`) it is 1."""
    layer_scale: Real | None = Field(default=None, gt=0)
    """`layer_scale`: initial lambda; null: 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond (Touvron et al. 2021)."""
    streams: Width = Field(default=4, ge=1)
    """`hyper`, `manifold_hyper`: parallel residual streams n (Zhu et al. 2024)."""
    dynamic: bool = False
    """`hyper`: weights that also depend on the stream (dynamic hyper-connections)."""
    mixing: Literal["sinkhorn", "permutations"] = "sinkhorn"
    """`manifold_hyper`: how the matrix that mixes streams is made doubly stochastic. `sinkhorn`: 20 rounds of dividing
    columns and rows by their sums (Xie et al. 2025); `permutations`: a weighted mean of all n! permutations, exact
    (mHC-lite, Yang and Gao 2026)."""
    stream_start: Literal["streams", "normal"] = "streams"
    """`manifold_hyper`: initial values, which the paper does not specify. `streams`: each sub-layer reads one stream in
    turn and mixes none, as hyper-connections start; `normal`: maps N(0, 0.02^2), as in transformers."""
    gpas: bool = False
    """`post`, `pre`, `deepnorm`, `ln_scaling`, `peri`, `sandwich`, `res_post`: a trained gate in each layer that scales
    the stream down without scaling down its gradient (Chen et al. 2025)."""
    planned_encoder_layers: Layers | None = Field(default=None, ge=1)
    """Encoder depth used to compute constants such as DeepNorm's alpha and beta; null: `encoder.layers`. Set it to
    the final depth if a model with such constants will be grown."""
    planned_decoder_layers: Layers | None = Field(default=None, ge=1)
    """The same for the decoder; null: `decoder.layers`."""


class TransferConfig(Section):
    """The small model whose learning rate this model uses: CompleteP (Dey et al. 2025)."""

    exponent: float = Field(default=1.0, ge=0.5, le=1.0)
    """Exponent a of depth: 1 is CompleteP, 0.5 depth-muP."""
    width: Width = Field(ge=2)
    """d_model of the base; its heads must be as wide as those of this model."""
    encoder_layers: Layers = Field(ge=1)
    """Encoder layers of the base."""
    decoder_layers: Layers = Field(ge=1)
    """Decoder layers of the base."""


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 128, "d_ff": 512, "heads": 4},
    "small": {"d_model": 256, "d_ff": 1024, "heads": 4},
    "base": {"d_model": 512, "d_ff": 2048, "heads": 8},
    "big": {"d_model": 1024, "d_ff": 4096, "heads": 16},
}
"""PRESETS are sizes by name (base and big: Vaswani et al. 2017, table 3); an explicit key overrides its preset."""


def without_sizes(below: Mapping[str, Any], preset: Any) -> dict[str, Any]:
    """Return settings without the sizes that `preset` replaces; a saved model lists its sizes explicitly."""
    sizes = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    return {key: value for key, value in below.items() if key not in sizes}


class ModelConfig(Section):
    """An encoder-decoder as a composition of independent choices."""

    preset: Literal["tiny", "small", "base", "big"] | None = None
    """Default `d_model`, `d_ff` and `heads`: `tiny` 128, 512, 4; `small` 256, 1024, 4; `base` 512, 2048, 8; `big` 1024,
    4096, 16 (the last two: Vaswani et al. 2017). Explicit values win. As an override, or on top of a pipeline's
    recipe, it replaces the sizes there."""
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
        description="How a sub-layer f changes the stream x (docs/depth.md): " + listed_kinds(RESIDUALS, RESIDUALS),
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
    """`layer`: layer normalisation; `rms`: root mean square normalisation (Zhang and Sennrich 2019); `scale`: scaling
    to a trained length g, initially sqrt(d_model), without per-channel gains (ScaleNorm, Nguyen and Salazar 2019)."""
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
    """Transfer of the learning rate from a smaller model, the base; null: none. Branches, rates, epsilon and logits are
    scaled by the ratios of width and depth (CompleteP, Dey et al. 2025)."""
    init: InitConfig = InitConfig()
    """Initialisation of the weights, except in stacks that have their own (`encoder.init`, `decoder.init`)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(name := values.get("preset"), str) and name in PRESETS:
            return {**PRESETS[name], **values}
        return values

    @model_validator(mode="before")
    @classmethod
    def _fill_init_of_stacks(cls, values: Any) -> Any:
        """Fill missing keys in the `init` of a stack from `model.init`."""
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
        if problems := contradictions(self):
            raise ConfigError(*problems)
        return self

    @property
    def depth_matters(self) -> bool:
        """True if the model's weights or constants depend on its planned depth, which growth and pruning preserve."""
        every = {*self.residuals(decoder=False), *self.residuals(decoder=True)}
        return (
            self.transfer is not None
            or self.dropout.sublayer > 0
            or any(RESIDUALS[kind].depth_constants for kind in every)
            or ("layer_scale" in every and self.wiring.layer_scale is None)
            or any(INITIALISATIONS[init.kind].depth for init in self.inits.values())
            or any(init.kind == "admin" and init.omega in ("log", "linear") for init in self.inits.values())
        )

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

    def methods(self) -> list[str]:
        """Return the depth methods by the names of their kinds, such as `pre` and `dlcl`, without the plain ones."""
        if self.family != "transformer":
            return [self.family]
        chosen: list[str] = [kind for decoder in (False, True) for kind in self.residuals(decoder=decoder)]
        usual = ModelConfig()
        for section, default in ((self.encoder, usual.encoder), (self.decoder, usual.decoder)):
            for key in ("history", "attention"):
                chosen += [getattr(section, key)] if getattr(section, key) != getattr(default, key) else []
        chosen += [self.memory] if self.memory != usual.memory else []
        chosen += [init.kind for init in self.inits.values() if init.kind != usual.init.kind]
        return list(dict.fromkeys(chosen))

    def history_norm(self, *, decoder: bool) -> HistoryNorm:
        """Return where a stack normalises its combinations of layers, if its history makes any."""
        chosen = self.combination.norm
        return RESIDUALS[self.residuals(decoder=decoder)[-1]].history_norm if chosen == "auto" else chosen

    def value_residuals(self, *, decoder: bool) -> dict[str, str]:
        """Return the value residuals of a stack's attention: key -> kind."""
        options = self.attention
        found: dict[str, str] = {}
        # Every encoder has multi-head self-attention; a decoder has it if its attention has queries and keys.
        if options.value_residual != "none" and (not decoder or ATTENTIONS[self.decoder.attention].rotary):
            found["attention.value_residual"] = options.value_residual
        if options.cross_value_residual != "none" and decoder:
            found["attention.cross_value_residual"] = options.cross_value_residual
        return found

    def first_unlike(self, *, decoder: bool) -> str | None:
        """Return the choice that makes the first layer of a stack different from the others, or None."""
        kind = self.residuals(decoder=decoder)[-1]
        if RESIDUALS[kind].first_differs:
            return f"residual: {kind}"
        residuals = self.value_residuals(decoder=decoder)
        return next((f"{key}: {kind}" for key, kind in residuals.items() if kind != "half"), None)

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
