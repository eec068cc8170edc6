"""Kinds of the model: their names, and one row of facts for each.

A row holds what is known without PyTorch: the paper, the options that matter for the kind, and the facts that
configuration checks need. The code that builds a kind is in its row of ziggurat.model.kinds or ziggurat.model.init. No
fact is stated twice, and tests/test_kinds.py reports every missing row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Names -----------------------------------------------------------------------------------------------------------

Family = Literal["transformer", "rnmt"]
ResidualKind = Literal[
    "post",
    "pre",
    "lingvo",
    "none",
    "admin",
    "deepnorm",
    "branch_norm",
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
    "cross_module",
]
MemoryKind = Literal["top", "transparent", "hierarchical"]
EncoderAttentionKind = Literal["full", "relative"]
DecoderAttentionKind = Literal[
    "full", "relative", "average", "simplified_average", "ssru", "merged", "merged_full", "merged_gated"
]
InitKind = Literal["xavier", "depth_scaled", "admin", "deepnorm", "magneto", "lipschitz", "t_fixup", "fixup", "uniform"]
Solver = Literal["euler", "rk2", "rk2_gated", "rk4"]
PositionKind = Literal["sinusoidal", "learned", "rotary", "none"]
Sharing = Literal["none", "decoder", "all"]
Activation = Literal["relu", "gelu", "silu", "swiglu"]
NormKind = Literal["layer", "rms", "scale"]
HistoryNorm = Literal["sources", "consumers", "none"]

# Rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """One kind of any axis."""

    what: str
    """The equation or a sentence, as in docs/depth.md, which explains the symbols."""
    paper: str | None
    """Authors and year; None: the plain case, which is not a method."""
    options: frozenset[str] = frozenset()
    """Keys under `model` that have an effect with this kind; setting them with other kinds gives a notice."""
    place: str = field(default="", kw_only=True)
    """The part of the paper that defines it, such as "equation 3"; "": unknown."""


@dataclass(frozen=True)
class ResidualFacts(Facts):
    """One residual kind."""

    init: InitKind | None = None
    """The initialisation that is the other half of the method; None: the residual stands alone."""
    without_init: str = ""
    """The effect on a stack that has this residual with another initialisation."""
    depth_constants: bool = False
    """It computes with constants that depend on depth, so trained weights belong to that depth."""
    layer_input: bool = False
    """It reads its layer's input, so layers must be called as a whole."""
    first_differs: bool = False
    """Its first layer has different parts from those above, so no layer can be a copy of it."""
    layer_constants: bool = False
    """It computes with the number of the layer."""
    alone: str = ""
    """Why a stack cannot mix this kind with others; "": it can."""
    history_norm: HistoryNorm = "sources"
    """Where combinations of layers normalise (`combination.norm: auto`)."""


@dataclass(frozen=True)
class HistoryFacts(Facts):
    """One history kind."""

    period: int = 1
    """Value of `combination.period` if that is null; unused if `options` lacks that key."""


@dataclass(frozen=True)
class AttentionFacts(Facts):
    """One kind of attention to the target (decoder) or to the source (encoder)."""

    merged: bool = False
    """Attention to the memory is part of the same sub-layer, so a decoder layer has two sub-layers, not three."""
    rotary: bool = False
    """It has queries and keys that rotary positions can rotate."""


@dataclass(frozen=True)
class InitFacts(Facts):
    """One initialisation."""

    elsewhere: str = ""
    """Its effect on a stack whose residual it was not made for; "": harmless in any stack."""
    three_branches: str = ""
    """The method's name, if its constants count three branches per decoder layer; "": they do not."""
    rnmt: bool = False
    """RNMT+ supports it."""
    depth: bool = False
    """Initial weights depend on the depth of the stacks, not only on the numbers of their layers."""
    outside: str = ""
    """Its effect outside the stacks, which prevents it from belonging to a single stack; "": none."""


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
_SDT = "Li et al. 2020"
_GROWING = "Wu et al. 2019 (Depth Growing)"

RECIPES_OF: Mapping[str, str] = {_BAPNA: "transparent", _MATT: "ds-init", _DLCL: "dlcl", _ADMIN: "admin", _SDT: "sdt"}
"""RECIPES_OF maps a paper, as in the rows, to the key of its recipes (ziggurat/recipes/papers)."""

_GPAS = frozenset({"wiring.gpas"})
_STREAMS = "it has several streams"
_UNNORMALISED = "has neither normalisation nor the initialisation that replaces it"

RESIDUALS: dict[ResidualKind, ResidualFacts] = {
    "post": ResidualFacts("LN(x + f(x))", _VASWANI, _GPAS, history_norm="consumers", place="section 3.1"),
    "pre": ResidualFacts("x + f(LN(x)); a final LN ends the stack", _DLCL, _GPAS, place="equation 3"),
    "lingvo": ResidualFacts(
        "attention: LN(x) + f(LN(x)); feed-forward: x + f(LN(x)); no final LN", f"code of {_BAPNA}"
    ),
    "none": ResidualFacts(
        "f(LN(x)): no residual; the stack ends as `model.residual` does", _BAPNA, place="tables 1 and 2"
    ),
    "admin": ResidualFacts(
        "LN(omega * x + f(x)), omega a vector",
        _ADMIN,
        frozenset({"wiring.omega_trainable"}),
        place="section 4",
        init="admin",
        without_init="starts as plain post-norm, omega 1",
        history_norm="consumers",
    ),
    "deepnorm": ResidualFacts(
        "LN(alpha x + f(x)), alpha from N and M",
        _DEEPNET,
        _GPAS,
        place="section 2 and figure 2",
        init="deepnorm",
        without_init="has the paper's constant on the stream, but not the smaller weights that go with it",
        depth_constants=True,
        history_norm="consumers",
    ),
    "branch_norm": ResidualFacts(
        "LN(x + a f(x)), a = min(1, t / `wiring.branch_updates`) at update t; `post` outside training",
        "Liu et al. 2023 (BranchNorm)",
        frozenset({"wiring.branch_updates"}),
        history_norm="consumers",
    ),
    "rezero": ResidualFacts(
        "x + a f(x), one scalar a per layer, 0 at first; nothing is normalised",
        "Bachlechner et al. 2020",
        history_norm="none",
        place="section 3",
    ),
    "layer_scale": ResidualFacts(
        "x + lambda * f(LN(x)), lambda a vector; a final LN",
        "Touvron et al. 2021",
        frozenset({"wiring.layer_scale"}),
        place="section 2",
    ),
    "ln_scaling": ResidualFacts(
        "x + f(LN(x) / sqrt(l)) in layer l; a final LN", "Sun et al. 2025", _GPAS, layer_constants=True
    ),
    "peri": ResidualFacts("x + LN(f(LN(x))); LN on the embedding and at the end", "Kim et al. 2025", _GPAS),
    "res_post": ResidualFacts("x + LN(f(x)); a final LN", "Liu et al. 2022 (Swin v2)", _GPAS, place="section 3.2"),
    "b2t": ResidualFacts(
        "`post`, but the layer's last LN also sees the layer's input",
        "Takase et al. 2022",
        layer_input=True,
        history_norm="consumers",
    ),
    "no_norm": ResidualFacts(
        "x + f(x), for `init.kind: t_fixup`",
        _T_FIXUP,
        init="t_fixup",
        without_init=_UNNORMALISED,
        history_norm="none",
        place="section 3.2",
    ),
    "fixup": ResidualFacts(
        "x + m f(x) with scalar shifts instead of biases",
        _FIXUP,
        place="section 3",
        init="fixup",
        without_init=_UNNORMALISED,
        alone="all linear maps of its stack have shifts instead of biases",
        history_norm="none",
    ),
    "hyper": ResidualFacts(
        "n streams H: f reads LN(A_m' H), then A_r' H + B f; `wiring.dynamic` makes A and B depend on H",
        "Zhu et al. 2024",
        frozenset({"wiring.streams", "wiring.dynamic"}),
        alone=_STREAMS,
        place="equations 2 to 5",
    ),
    "manifold_hyper": ResidualFacts(
        "n streams H: f reads LN(q H), then R H + p f, all three made from H, R doubly stochastic (`wiring.mixing`)",
        "Xie et al. 2025",
        frozenset({"wiring.streams", "wiring.mixing", "wiring.stream_start"}),
        alone=_STREAMS,
    ),
    "siamese": ResidualFacts(
        "two streams: u = LN(x), z = f(LN(u + LN(y))); then u + z / sqrt(s l) and y + z in layer l of s sub-layers; at "
        "the end LN(LN(x) + LN(y))",
        "Li et al. 2026 (SiameseNorm)",
        layer_constants=True,
        alone=_STREAMS,
    ),
    "keel": ResidualFacts(
        "LN(alpha x + f(LN(x))), alpha the sub-layers of the stack; the first layer has alpha 1 and begins with `pre`; "
        "a final LN",
        "Chen and Wei 2026",
        depth_constants=True,
        first_differs=True,
        history_norm="none",
    ),
    "hybrid": ResidualFacts(
        "attention: x + f(x), with norms inside (`attention.qk_norm`, `value_norm`); feed-forward: u + f(u), u = "
        "LN(x); a final LN",
        "Zhuo et al. 2025 (HybridNorm)",
    ),
    "sandwich": ResidualFacts("x + LN(f(LN(x))); a final LN", "Ding et al. 2021 (CogView)", _GPAS),
    "sub_ln": ResidualFacts(
        "x + W LN(g(LN(x))): `pre` with a second LN before the last map of self-attention and feed-forward networks, "
        "for `init.kind: magneto`; a final LN",
        _MAGNETO,
        place="section 3.2",
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
    "latest": HistoryFacts("y_l", None),
    "dlcl": HistoryFacts(
        "sum over k <= l of W[l, k] LN_k(y_k) (pre-norm kinds) or LN_l(sum of W[l, k] y_k) (post-norm kinds)",
        _DLCL,
        _LEARNED,
        place="section 4",
    ),
    "dense": HistoryFacts("`dlcl` with W fixed to 1", _DLCL, _OVER_LAYERS, place="figure 2b"),
    "average": HistoryFacts("`dlcl` with W fixed to 1/(l+1)", _DLCL, _OVER_LAYERS, place="table 6"),
    "blocks": HistoryFacts(
        "`dlcl` over the embedding and the outputs of blocks of `period` layers; plain inside a block",
        _SDT,
        _LEARNED | {"combination.period"},
        period=6,
    ),
    "top_only": HistoryFacts(
        "y_l; only the stack's output is a learned combination", _DLCL, _LEARNED, place="figure 2c"
    ),
    "depth_weighted": HistoryFacts(
        "after every `period`-th layer a learned combination of every `dilation`-th one below",
        "Pagliardini et al. 2024",
        _ANY_COMBINATION | {"combination.learnable", "combination.period", "combination.dilation"},
    ),
    "attention_residuals": HistoryFacts(
        "sum of a_k y_k, a = softmax of w_l . RMSNorm_l(y_k): weights that depend on the content",
        "Kimi Team 2026",
        _ATTENTIVE,
        place="section 3",
    ),
    "block_attention_residuals": HistoryFacts(
        "`attention_residuals` over the embedding, the sums of blocks of `period` layers, and that of the block so far",
        "Kimi Team 2026",
        _ATTENTIVE | {"combination.period"},
        period=6,
        place="equations 5 and 6",
    ),
    "mudd": HistoryFacts(
        "four mixtures of all y_k, for queries, keys, values and the stream: A = W_2 GELU(W_1 RMSNorm(y_l)) + a, the "
        "plain stack at first",
        "Xiao et al. 2025 (MUDDFormer)",
    ),
    "cross_module": HistoryFacts(
        "y_l, but in a stack of more than p = `period` layers y_p + LN(y_0) for layer p + 1, the first of its upper "
        "module",
        _GROWING,
        frozenset({"combination.period", "combination.unit"}),
        period=6,
    ),
}

MEMORIES: dict[MemoryKind, Facts] = {
    "top": Facts("the encoder's output", None),
    "transparent": Facts(
        "for each decoder layer its own learned mixture of the embedding and all encoder layers: softmax weights, "
        "uniform at first",
        _BAPNA,
        frozenset({"dropout.transparent"}),
        place="equations 1 and 2",
    ),
    "hierarchical": Facts(
        "for the lowest p = `combination.period` decoder layers the output of encoder layer p, for those above it the "
        "encoder's output",
        _GROWING,
        frozenset({"combination.period"}),
    ),
}

_AVERAGE = frozenset({"attention.average_ffn", "attention.average_gate"})

ATTENTIONS: dict[DecoderAttentionKind, AttentionFacts] = {
    "full": AttentionFacts("multi-head attention", None, rotary=True),
    "relative": AttentionFacts(
        "`full`, with a table of clipped distances added to the keys; `attention.relative_values`: to the values too",
        "Shaw et al. 2018",
        frozenset({"attention.relative_clip", "attention.relative_values"}),
        rotary=True,
        place="equations 3 and 4",
    ),
    "average": AttentionFacts(
        "AAN: the mean of the positions so far, through `average_ffn` and `average_gate`",
        _AAN,
        _AVERAGE,
        place="equations 2 and 3",
    ),
    "simplified_average": AttentionFacts("SAAN: W_o of the mean of the values", _MATT, place="equations 16 and 17"),
    "ssru": AttentionFacts(
        "a recurrent unit: ReLU of cells c_j = f_j c_{j-1} + (1 - f_j) W x_j, f_j = sigmoid(W_f x_j + b)",
        "Kim et al. 2019",
    ),
    "merged": AttentionFacts(
        "MAtt: one sub-layer, W_o of (cross-attention + mean of the values), one value map for both",
        _MATT,
        frozenset({"attention.share_value"}),
        merged=True,
        place="equations 16 and 17",
    ),
    "merged_full": AttentionFacts(
        "self-attention and cross-attention in one sub-layer", _MATT, merged=True, rotary=True
    ),
    "merged_gated": AttentionFacts("AAN and cross-attention in one sub-layer", _MATT, _AVERAGE, merged=True),
}
"""ATTENTIONS are the attention kinds of both stacks; the decoder has every encoder kind."""

_QKV = frozenset({"init.qkv"})
_SMALLER_BRANCHES = "makes value, output and feed-forward weights smaller by depth"

INITIALISATIONS: dict[InitKind, InitFacts] = {
    "xavier": InitFacts(
        "Glorot uniform for matrices, N(0, 1/d_model) for embeddings, biases 0",
        "Glorot and Bengio 2010",
        _QKV,
        rnmt=True,
    ),
    "depth_scaled": InitFacts(
        "DS-Init: Glorot's bounds of layer l times alpha l^-exponent, both stacks counted from 1",
        _MATT,
        _QKV | {"init.alpha", "init.exponent"},
        place="equation 15",
    ),
    "admin": InitFacts(
        "`xavier`; omega of `residual: admin` by `init.omega`",
        _ADMIN,
        _QKV | {"init.omega", "init.profile_tokens"},
        place="section 4",  # elsewhere it is Glorot's
    ),
    "deepnorm": InitFacts(
        "Xavier normal, gain beta on values, outputs and feed-forward",
        _DEEPNET,
        elsewhere=_SMALLER_BRANCHES,
        three_branches="DeepNorm",
        depth=True,
        place="section 4 and figure 2",
    ),
    "magneto": InitFacts(
        "Glorot, values, outputs and feed-forward larger by sqrt(ln(3M) ln(2N) / 3) and sqrt(ln 3M); not attention to "
        "the memory",
        _MAGNETO,
        _QKV,
        place="section 3.2",
        elsewhere="makes value, output and feed-forward weights larger by depth",
        three_branches="Magneto",
        depth=True,
    ),
    "lipschitz": InitFacts(
        "matrices U(-sqrt(1 / fan_in), sqrt(1 / fan_in)), embeddings of V tokens U(-b, b) with b = sqrt(2 / (V + "
        "d_model)), so that no post-norm shrinks its skip at first",
        "Xu et al. 2020",
        outside="sets embeddings and output projection",
    ),
    "t_fixup": InitFacts(
        "Glorot, embeddings and branches scaled down with N and M",
        _T_FIXUP,
        _QKV,
        elsewhere=_SMALLER_BRANCHES,
        three_branches="T-Fixup",
        depth=True,
        place="section 3.2",
        outside="makes the embeddings smaller",
    ),
    "fixup": InitFacts(
        "input maps scaled down, output maps zero",
        _FIXUP,
        _QKV,
        elsewhere="starts all branches at zero",
        depth=True,
        place="section 3",
        outside="starts the output projection at zero",
    ),
    "uniform": InitFacts(
        "U(-0.04, 0.04) for LSTM and projection matrices and embeddings, the rest `xavier`",
        "Chen et al. 2018",
        _QKV | {"init.uniform"},
        rnmt=True,
        outside="sets embeddings and output projection",
    ),
}


def listed_kinds(kinds: Iterable[Any], rows: Mapping[Any, Facts]) -> str:
    """Return the meaning and paper of some kinds, for the description of the key that selects one."""
    papers = {kind: f" ({rows[kind].paper})" if rows[kind].paper else "" for kind in kinds}
    return " ".join(f"`{kind}`: {rows[kind].what}{paper}." for kind, paper in papers.items())
