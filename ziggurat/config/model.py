"""Model section: free choices on independent axes."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import Section

__all__ = [
    "PRESETS",
    "AttentionKind",
    "DropoutConfig",
    "EmbeddingConfig",
    "Family",
    "HistoryKind",
    "InitConfig",
    "MemoryKind",
    "ModelConfig",
    "ResidualKind",
    "StackConfig",
]

Family = Literal["transformer"]
ResidualKind = Literal["post", "pre"]
HistoryKind = Literal["latest"]
MemoryKind = Literal["top"]
AttentionKind = Literal["full"]
InitKind = Literal["xavier"]
PositionKind = Literal["sinusoidal", "learned", "none"]
Sharing = Literal["none", "decoder", "all"]
Activation = Literal["relu", "gelu"]

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 128, "d_ff": 512, "heads": 4},
    "small": {"d_model": 256, "d_ff": 1024, "heads": 4},
    "base": {"d_model": 512, "d_ff": 2048, "heads": 8},
    "big": {"d_model": 1024, "d_ff": 4096, "heads": 16},
}
"""Sizes by name (base and big: Vaswani et al. 2017, table 3); a key that is written wins over its preset."""


class StackConfig(Section):
    """One stack of layers: encoder or decoder."""

    layers: int = Field(default=6, ge=1)
    """Number of layers."""
    history: HistoryKind = "latest"
    """What a layer reads: `latest` is the output of the layer below."""
    attention: AttentionKind = "full"
    """Self-attention of the stack."""


class DropoutConfig(Section):
    """Dropout probabilities; all act in training only and rescale by 1/(1-p)."""

    residual: float = Field(default=0.1, ge=0, lt=1)
    """On every sub-layer's output before it joins the residual stream."""
    attention: float = Field(default=0.0, ge=0, lt=1)
    """On attention weights."""
    activation: float = Field(default=0.0, ge=0, lt=1)
    """Inside the feed-forward network, after the activation."""
    embedding: float = Field(default=0.1, ge=0, lt=1)
    """On the sum of embedding and position."""


class EmbeddingConfig(Section):
    """Token embeddings and output projection."""

    sharing: Sharing = "all"
    """`none`: three matrices; `decoder`: target embedding = output projection; `all`: one matrix (joint vocabulary)."""
    positions: PositionKind = "sinusoidal"
    """Absolute positions added to the embeddings."""
    max_positions: int = Field(default=1024, ge=1)
    """Longest sequence `positions: learned` can hold, in tokens; sinusoids have no limit."""
    scale: bool = True
    """Multiply embeddings by sqrt(d_model) (Vaswani et al. 2017, section 3.4)."""


class InitConfig(Section):
    """Initialisation of the weights."""

    kind: InitKind = "xavier"
    """`xavier`: Glorot uniform for matrices, N(0, 1/d_model) for embeddings, zero biases."""
    qkv: Literal["fused", "separate"] = "fused"
    """Glorot bound of query, key and value maps: as one d x 3d matrix (`fused`) or three d x d matrices."""


class ModelConfig(Section):
    """A Transformer encoder-decoder as a composition of independent choices."""

    preset: Literal["tiny", "small", "base", "big"] | None = None
    """Fills `d_model`, `d_ff` and `heads` where they are not given."""
    family: Family = "transformer"
    """Architecture family."""
    d_model: int = Field(default=512, ge=2)
    """Width of the residual stream."""
    d_ff: int = Field(default=2048, ge=1)
    """Width inside the feed-forward networks."""
    heads: int = Field(default=8, ge=1)
    """Attention heads; must divide `d_model`."""
    residual: ResidualKind = "pre"
    """How a sub-layer joins the stream: `post` LN(x + f(x)), `pre` x + f(LN(x)) with a final LN per stack."""
    encoder: StackConfig = StackConfig()
    """Encoder stack."""
    decoder: StackConfig = StackConfig()
    """Decoder stack."""
    memory: MemoryKind = "top"
    """What the decoder attends to: `top` is the encoder's output."""
    activation: Activation = "relu"
    """Non-linearity of the feed-forward networks."""
    embedding: EmbeddingConfig = EmbeddingConfig()
    """Embeddings and positions."""
    dropout: DropoutConfig = DropoutConfig()
    """Dropout probabilities."""
    init: InitConfig = InitConfig()
    """Initialisation."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Epsilon inside layer normalisation."""

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(name := values.get("preset"), str) and name in PRESETS:
            return {**PRESETS[name], **values}
        return values

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.d_model % self.heads:
            raise ValueError(f"`d_model` ({self.d_model}) is not a multiple of `heads` ({self.heads})")
        if self.d_model % 2 and self.embedding.positions == "sinusoidal":
            raise ValueError(f"sinusoidal positions need an even `d_model`, not {self.d_model}")
        return self
