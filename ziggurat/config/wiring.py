"""Options of the model's axes: attention, combinations of layers, residual wiring, initialisation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ziggurat.config.base import Count, Layers, Real, Section, Size, Width

__all__ = ["AttentionConfig", "CombinationConfig", "InitConfig", "InitKind", "WiringConfig"]

InitKind = Literal["xavier", "depth_scaled", "admin", "deepnorm", "t_fixup", "fixup", "uniform"]


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
    """`merged`: one value map for encoder and decoder states (needed for the published parameter counts)."""
    qk_norm: Literal["none", "layer", "rms", "l2"] = "none"
    """Normalise queries and keys per head: LN or RMSNorm with a learned gain (Dehghani et al. 2023), or to unit
    length with one learned factor of the logits (Henry et al. 2020)."""
    qk_length: Width = Field(default=100, ge=2)
    """`qk_norm: l2`: sentence length L (97.5th percentile) in the factor's initial value log2(L^2 - L)."""
    query_scale: bool = False
    """Multiply queries by a learned softplus(a)/softplus(0) per dimension, shared by the heads (lingvo)."""


class CombinationConfig(Section):
    """How the histories `dlcl`, `dense`, `average`, `blocks`, `top_only` and `depth_weighted` combine layers."""

    start: Literal["average", "one", "last"] = "average"
    """Initial weights of `dlcl`, `blocks` and `top_only`: 1/n for the n outputs combined, 1, or 1 for the last layer
    and 0 for others."""
    learnable: bool = True
    """Train the weights (`dlcl`, `blocks`, `top_only`, `depth_weighted`); false: they keep their initial values."""
    norm: Literal["auto", "sources", "consumers", "none"] = "auto"
    """LN of each layer's output (`sources`), of each combination (`consumers`), or neither; `auto` goes by the
    residual kind: sources for pre-norm kinds, consumers for post-norm kinds, none where nothing is normalised."""
    normalize_embedding: bool = False
    """Also normalise the embedding (sources), or the first combination, which is of the embedding alone."""
    softmax: bool = False
    """Weights are the softmax of each row's parameters."""
    window: Count | None = Field(default=None, ge=1)
    """Combine only the newest so many outputs; null: all."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the combination."""
    groups: Width = Field(default=1, ge=1)
    """Weights per source: 1 is a scalar, d_model one per channel, g one per group of d_model/g channels."""
    unit: Literal["layer", "sublayer"] = "layer"
    """What is combined: outputs of whole layers (the paper) or of every sub-layer."""
    period: Count | None = Field(default=None, ge=1)
    """`blocks`: layers per block, by default 6; `depth_weighted`: a combination after every period-th layer, by
    default every one."""
    dilation: Count = Field(default=1, ge=1)
    """`depth_weighted`: of the layers below, only every dilation-th is combined."""

    def period_of(self, history: str) -> int:
        """Return the period of a stack with that kind of history."""
        return self.period or (1 if history == "depth_weighted" else 6)


class WiringConfig(Section):
    """Options of the residual kinds."""

    omega_trainable: bool = True
    """`admin`: train omega (the released code) or keep its initial values (the paper; folds exactly)."""
    layer_scale: Real | None = Field(default=None, gt=0)
    """`layer_scale`: initial lambda; null: 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond (Touvron et al. 2021)."""
    streams: Width = Field(default=4, ge=1)
    """`hyper`: parallel residual streams n (Zhu et al. 2024)."""
    dynamic: bool = False
    """`hyper`: weights that also depend on the stream (dynamic hyper-connections)."""
    planned_encoder_layers: Layers | None = Field(default=None, ge=1)
    """Depth for which constants such as DeepNorm's alpha and beta are computed; null: `encoder.layers`. Set it to
    the final depth where a model will be grown."""


class InitConfig(Section):
    """Initialisation of the weights."""

    kind: InitKind = "xavier"
    """`xavier`: Glorot uniform for matrices, N(0, 1/d_model) for embeddings, zero biases. `depth_scaled`: DS-Init,
    the bounds of layer l times alpha l^-exponent (Zhang et al. 2019). `admin`: xavier, and `omega` sets the skip
    vectors of `residual: admin` (Liu et al. 2020). `deepnorm`: Xavier normal with gain beta (Wang et al. 2022).
    `t_fixup`: Huang et al. 2020. `fixup`: Zhang et al. 2019 as zero has it. `uniform`: U(-0.04, 0.04) as in RNMT+."""
    qkv: Literal["fused", "separate", "fused_self"] = "fused"
    """Glorot bound of query, key and value maps: as one d x 3d matrix (`fused`), three d x d matrices, or one matrix
    in self-attention and three in cross-attention (`fused_self`, zero). `deepnorm` always takes three."""
    alpha: float = Field(default=1.0, gt=0, le=1)
    """`depth_scaled`: alpha of DS-Init."""
    exponent: float = Field(default=0.25, gt=0, le=10)
    """`depth_scaled`: 0.25 is what the published runs used, 0.5 what the paper's equation says (docs/depth.md)."""
    omega: Literal["profiled", "log", "linear", "one"] = "profiled"
    """`admin`: `profiled` on one batch before the first update; for n sub-layers of a stack `log` is
    sqrt((n+1)/ln(n+1) - 1), `linear` sqrt(n), `one` 1 (admin-torch)."""
    profile_tokens: Size = Field(default=8192, ge=1)
    """`admin`: tokens of the batch that omega is profiled on: on the longer sides, padding not counted."""
    uniform: Real = Field(default=0.04, gt=0)
    """`uniform`: bound."""
