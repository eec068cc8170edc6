"""Kinds of the model: their names, and one row of facts for each that a configuration goes by.

A row says what can be known without PyTorch: the paper, the options that mean something with the kind, and what the
checks of a configuration ask. What a kind is built by is on its row in ziggurat.models.kinds, ziggurat.models.attention
or ziggurat.init.schemes. No fact is told twice, and tests/test_kinds.py names every row that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "ATTENTIONS",
    "HISTORIES",
    "INITIALISATIONS",
    "MEMORIES",
    "RESIDUALS",
    "Activation",
    "DecoderAttentionKind",
    "EncoderAttentionKind",
    "Facts",
    "Family",
    "HistoryKind",
    "HistoryNorm",
    "InitKind",
    "MemoryKind",
    "NormKind",
    "PositionKind",
    "ResidualKind",
    "Sharing",
]

# Names -----------------------------------------------------------------------------------------------------------

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
    "manifold_hyper",
    "siamese",
    "keel",
    "hybrid",
    "sub_ln",
    "sandwich",
]
HistoryKind = Literal[
    "latest",
    "dlcl",
    "dense",
    "average",
    "blocks",
    "top_only",
    "depth_weighted",
    "attention_residuals",
    "block_attention_residuals",
    "mudd",
]
MemoryKind = Literal["top", "transparent"]
EncoderAttentionKind = Literal["full", "relative"]
DecoderAttentionKind = Literal[
    "full", "relative", "average", "simplified_average", "ssru", "merged", "merged_full", "merged_gated"
]
InitKind = Literal["xavier", "depth_scaled", "admin", "deepnorm", "magneto", "t_fixup", "fixup", "uniform"]
PositionKind = Literal["sinusoidal", "learned", "rotary", "none"]
Sharing = Literal["none", "decoder", "all"]
Activation = Literal["relu", "gelu", "silu", "swiglu"]
NormKind = Literal["layer", "rms"]
HistoryNorm = Literal["sources", "consumers", "none"]

# Rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """One kind of any axis.

    Attributes:
        paper: authors and year; None: the plain case, which is no method.
        options: keys under `model` that mean something with this kind; set beside other kinds they earn a notice.
    """

    paper: str | None
    options: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ResidualFacts(Facts):
    """One residual kind.

    Attributes:
        init: the initialisation that is the other half of the method; None: the residual stands alone.
        without_init: what a stack does that has this residual and another initialisation.
        depth_constants: it computes with constants of depth, so trained weights belong to that depth.
        layer_input: it reads the input of its layer, so layers must be called as wholes.
        first_differs: its first layer has other parts than those above, so that none of these can be a copy of it.
        layer_constants: it computes with the number of the layer.
        alone: why no layer of another kind can stand above or below one of this kind; "": any can.
        history_norm: where combinations of layers normalise (`combination.norm: auto`).
    """

    init: InitKind | None = None
    without_init: str = ""
    depth_constants: bool = False
    layer_input: bool = False
    first_differs: bool = False
    layer_constants: bool = False
    alone: str = ""
    history_norm: HistoryNorm = "sources"


@dataclass(frozen=True)
class HistoryFacts(Facts):
    """One history kind.

    Attributes:
        period: what `combination.period` is where it is null; means nothing where `options` lacks that key.
    """

    period: int = 1


@dataclass(frozen=True)
class AttentionFacts(Facts):
    """One kind of attention to the target (decoder) or to the source (encoder).

    Attributes:
        merged: attention to the memory is part of the same sub-layer, so a decoder layer has two sub-layers, not three.
        rotary: it has queries and keys that rotary positions can turn.
    """

    merged: bool = False
    rotary: bool = False


@dataclass(frozen=True)
class InitFacts(Facts):
    """One initialisation.

    Attributes:
        elsewhere: what it does to a stack whose residual it was not made for; "": what any stack can have.
        three_branches: the method's name, where its constants count three branches to every decoder layer.
        rnmt: RNMT+ can have it.
        depth: weights start by the depth of the stacks, not by the numbers of their layers alone.
        outside: what it does outside of the stacks, so that it cannot be that of one of them; "": nothing.
    """

    elsewhere: str = ""
    three_branches: str = ""
    rnmt: bool = False
    depth: bool = False
    outside: str = ""


_VASWANI = "Vaswani et al. 2017"
_DLCL = "Wang et al. 2019"
_BAPNA = "Bapna et al. 2018"
_ADMIN = "Liu et al. 2020 (ADMIN)"
_DEEPNET = "Wang et al. 2022"
_AAN = "Zhang et al. 2018"
_MATT = "Zhang et al. 2019 (DS-Init and MAtt)"
_T_FIXUP = "Huang et al. 2020"
_MAGNETO = "Wang et al. 2022 (Magneto)"
_FIXUP = "Zhang et al. 2019 (Fixup)"

_GPAS = frozenset({"wiring.gpas"})
_STREAMS = "it has several streams"
_UNNORMALISED = "has neither normalisation nor the initialisation that replaces it"

RESIDUALS: dict[ResidualKind, ResidualFacts] = {
    "post": ResidualFacts(_VASWANI, _GPAS, history_norm="consumers"),
    "pre": ResidualFacts(_DLCL, _GPAS),
    "lingvo": ResidualFacts(f"code of {_BAPNA}"),
    "none": ResidualFacts(_BAPNA),
    "admin": ResidualFacts(
        _ADMIN,
        frozenset({"wiring.omega_trainable"}),
        init="admin",
        without_init="starts as plain post-norm, omega 1",
        history_norm="consumers",
    ),
    "deepnorm": ResidualFacts(
        _DEEPNET,
        _GPAS,
        init="deepnorm",
        without_init="has the paper's constant on the stream, but not the smaller weights that go with it",
        depth_constants=True,
        history_norm="consumers",
    ),
    "rezero": ResidualFacts("Bachlechner et al. 2020", history_norm="none"),
    "layer_scale": ResidualFacts("Touvron et al. 2021", frozenset({"wiring.layer_scale"})),
    "ln_scaling": ResidualFacts("Sun et al. 2025", _GPAS, layer_constants=True),
    "peri": ResidualFacts("Kim et al. 2025", _GPAS),
    "res_post": ResidualFacts("Liu et al. 2022 (Swin v2)", _GPAS),
    "b2t": ResidualFacts("Takase et al. 2022", layer_input=True, history_norm="consumers"),
    "no_norm": ResidualFacts(_T_FIXUP, init="t_fixup", without_init=_UNNORMALISED, history_norm="none"),
    "fixup": ResidualFacts(
        _FIXUP,
        init="fixup",
        without_init=_UNNORMALISED,
        alone="all linear maps of its stack have shifts for biases",
        history_norm="none",
    ),
    "hyper": ResidualFacts("Zhu et al. 2024", frozenset({"wiring.streams", "wiring.dynamic"}), alone=_STREAMS),
    "manifold_hyper": ResidualFacts(
        "Xie et al. 2025", frozenset({"wiring.streams", "wiring.mixing", "wiring.stream_start"}), alone=_STREAMS
    ),
    "siamese": ResidualFacts("Li et al. 2026 (SiameseNorm)", layer_constants=True, alone=_STREAMS),
    "keel": ResidualFacts("Chen and Wei 2026", depth_constants=True, first_differs=True, history_norm="none"),
    "hybrid": ResidualFacts("Zhuo et al. 2025 (HybridNorm)"),
    "sandwich": ResidualFacts("Ding et al. 2021 (CogView)", _GPAS),
    "sub_ln": ResidualFacts(
        _MAGNETO,
        init="magneto",
        without_init="has norms inside its sub-layers, but not the larger weights that go with them",
        alone="its linear maps have norms before them",
    ),
}

_ANY_COMBINATION = frozenset({"combination.dropout", "combination.groups", "combination.unit"})
_OVER_LAYERS = _ANY_COMBINATION | {"combination.norm", "combination.normalize_embedding", "combination.window"}
_ATTENTIVE = frozenset({"combination.unit"})
_LEARNED = _OVER_LAYERS | {"combination.learnable", "combination.start", "combination.softmax"}

HISTORIES: dict[HistoryKind, HistoryFacts] = {
    "latest": HistoryFacts(None),
    "dlcl": HistoryFacts(_DLCL, _LEARNED),
    "dense": HistoryFacts(_DLCL, _OVER_LAYERS),
    "average": HistoryFacts(_DLCL, _OVER_LAYERS),
    "blocks": HistoryFacts("Li et al. 2020", _LEARNED | {"combination.period"}, period=6),
    "top_only": HistoryFacts(_DLCL, _LEARNED),
    "depth_weighted": HistoryFacts(
        "Pagliardini et al. 2024",
        _ANY_COMBINATION | {"combination.learnable", "combination.period", "combination.dilation"},
    ),
    "attention_residuals": HistoryFacts("Kimi Team 2026", _ATTENTIVE),
    "block_attention_residuals": HistoryFacts("Kimi Team 2026", _ATTENTIVE | {"combination.period"}, period=6),
    "mudd": HistoryFacts("Xiao et al. 2025 (MUDDFormer)"),
}

MEMORIES: dict[MemoryKind, Facts] = {
    "top": Facts(None),
    "transparent": Facts(_BAPNA, frozenset({"dropout.transparent"})),
}

_AVERAGE = frozenset({"attention.average_ffn", "attention.average_gate"})

ATTENTIONS: dict[DecoderAttentionKind, AttentionFacts] = {
    "full": AttentionFacts(None, rotary=True),
    "relative": AttentionFacts(
        "Shaw et al. 2018", frozenset({"attention.relative_clip", "attention.relative_values"}), rotary=True
    ),
    "average": AttentionFacts(_AAN, _AVERAGE),
    "simplified_average": AttentionFacts(_MATT),
    "ssru": AttentionFacts("Kim et al. 2019"),
    "merged": AttentionFacts(_MATT, frozenset({"attention.share_value"}), merged=True),
    "merged_full": AttentionFacts(_MATT, merged=True, rotary=True),
    "merged_gated": AttentionFacts(_MATT, _AVERAGE, merged=True),
}
"""Kinds of both stacks: every kind of the encoder is one of the decoder too."""

_QKV = frozenset({"init.qkv"})
_SMALLER_BRANCHES = "makes value, output and feed-forward weights smaller by depth"

INITIALISATIONS: dict[InitKind, InitFacts] = {
    "xavier": InitFacts("Glorot and Bengio 2010", _QKV, rnmt=True),
    "depth_scaled": InitFacts(_MATT, _QKV | {"init.alpha", "init.exponent"}),
    "admin": InitFacts(_ADMIN, _QKV | {"init.omega", "init.profile_tokens"}),  # elsewhere it is Glorot's
    "deepnorm": InitFacts(_DEEPNET, elsewhere=_SMALLER_BRANCHES, three_branches="DeepNorm", depth=True),
    "magneto": InitFacts(
        _MAGNETO,
        _QKV,
        elsewhere="makes value, output and feed-forward weights larger by depth",
        three_branches="Magneto",
        depth=True,
    ),
    "t_fixup": InitFacts(
        _T_FIXUP,
        _QKV,
        elsewhere=_SMALLER_BRANCHES,
        three_branches="T-Fixup",
        depth=True,
        outside="makes the embeddings smaller",
    ),
    "fixup": InitFacts(
        _FIXUP,
        _QKV,
        elsewhere="starts all branches at zero",
        depth=True,
        outside="starts the output projection at zero",
    ),
    "uniform": InitFacts(
        "Chen et al. 2018",
        _QKV | {"init.uniform"},
        rnmt=True,
        outside="sets embeddings and output projection",
    ),
}
