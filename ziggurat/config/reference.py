"""Reference of all configuration keys, generated from the field descriptions, and the methods with their papers.

`ziggurat explain` and the site show it; ziggurat.config.choices has the keys of a pipeline.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ziggurat.config.depth import CopyStrategy
from ziggurat.config.experiment import Experiment
from ziggurat.config.kinds import ATTENTIONS, HISTORIES, INITIALISATIONS, MEMORIES, RESIDUALS, Facts
from ziggurat.config.model import ModelConfig, StackConfig
from ziggurat.config.section import inner_section


class KeyDescription(NamedTuple):
    """Description of one key: dotted path, type and default as text, meaning."""

    path: str
    type: str
    default: str
    meaning: str


def entries(
    section: type[BaseModel] = Experiment, prefix: str = "", told: dict[type[BaseModel], str] | None = None
) -> list[KeyDescription]:
    """Return the keys of a section and of all sections inside it, in order; `[]` marks list items.

    `told` maps a section class to the path where its keys are already described; these are not repeated, and sections
    described here are added to it.
    """
    found: list[KeyDescription] = []
    for name, field in section.model_fields.items():
        path = prefix + name
        meaning = " ".join((field.description or "").split())
        inner, is_list = inner_section(field.annotation)
        if inner is not None and told is not None:
            if inner in told:
                meaning, inner = f"{meaning} Keys: as in {told[inner]}.", None
            else:
                told[inner] = f"`{path}{'[]' * is_list}`"
        if inner is not None and not is_list and type(None) not in get_args(field.annotation):
            found += [KeyDescription(path, "section", "", meaning), *entries(inner, f"{path}.", told)]
            continue
        default = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else _shown(default)
        found.append(KeyDescription(path, _type_text(field.annotation), shown, meaning))
        if inner is not None:
            found += entries(inner, f"{path}[]." if is_list else f"{path}.", told)
    return found


def nearest(key: str, section: type[BaseModel] = Experiment) -> list[str]:
    """Return up to three keys of a section that resemble `key`."""
    paths = [e.path for e in entries(section)]
    last = key.rsplit(".", 1)[-1]
    same = [p for p in paths if p.rsplit(".", 1)[-1] == last]
    return same[:3] or difflib.get_close_matches(key, paths, n=3, cutoff=0.3) or paths[:3]


def markdown() -> str:
    """Return the site's page on experiment keys, in Markdown; each section is described once."""
    lines = [
        "# Configuration",
        "",
        "One YAML file describes one experiment. Every key can be overridden on the command line as",
        "`path.to.key=value` (list items by number: `data.train.0.weight=2`); an unknown key or a wrong type is an",
        "error. `ziggurat explain KEY` prints these entries. Relative paths start from the current folder, `~/` from",
        "your home folder; variables such as `$HOME` are rejected.",
    ]
    return "\n".join([*lines, *listed(entries(told={}))]) + "\n"


def listed(found: list[KeyDescription]) -> list[str]:
    """Return entries as lines of a page, with a heading for each section."""
    lines = []
    for e in found:
        if e.type == "section":
            lines += ["", f"{'#' * (2 + e.path.count('.'))} `{e.path}`", "", e.meaning, ""]
        else:
            lines.append(f"- `{e.path}` ({e.type}; default: {e.default}): {e.meaning}")
    return lines


def _type_text(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{a}`" for a in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _type_text(get_args(annotation)[0])
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and not get_args(annotation):
        return "section" if issubclass(annotation, BaseModel) else _NAMES.get(annotation, annotation.__name__)
    origin = get_origin(annotation)
    inner = [_type_text(a) for a in get_args(annotation)]
    if origin is list:
        return f"list of {inner[0]}"
    if origin is tuple:
        return f"[{', '.join(inner)}]"
    return " or ".join(inner)


_NAMES: dict[type, str] = {str: "text", int: "integer", float: "number", bool: "true or false"}


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


@dataclass(frozen=True)
class Method:
    """One choice of a configuration: the key that selects it, its value, and the paper's authors and year."""

    key: str
    value: str
    paper: str


def _papers(rows: Mapping[Any, Facts]) -> dict[str, str]:
    return {kind: facts.paper for kind, facts in rows.items() if facts.paper is not None}


_DEEPENING = "Li et al. 2020"
_TEARS = "Nguyen and Salazar 2019"
_TIED = "Dehghani et al. 2019; Takase and Kiyono 2021"
_HYBRID = "Zhuo et al. 2025 (HybridNorm)"
_RESFORMER = "Zhou et al. 2024 (ResFormer)"

METHODS: dict[str, dict[str, str]] = {
    "family": {"transformer": "Vaswani et al. 2017", "rnmt": "Chen et al. 2018"},
    "residual": _papers(RESIDUALS),
    "history": _papers(HISTORIES),
    "memory": _papers(MEMORIES),
    "attention": _papers(ATTENTIONS),
    "init": _papers(INITIALISATIONS),
    "solver": dict.fromkeys(("rk2", "rk2_gated", "rk4"), "Li et al. 2022 (ODE Transformer)"),
    "qk_norm": {"layer": "Dehghani et al. 2023", "rms": "Dehghani et al. 2023", "l2": "Henry et al. 2020"},
    "positions": {"learned": "Gehring et al. 2017", "rotary": "Su et al. 2021"},
    "activation": {
        "gelu": "Hendrycks and Gimpel 2016",
        "silu": "Ramachandran et al. 2017",
        "swiglu": "Shazeer 2020",
    },
    "norm": {"rms": "Zhang and Sennrich 2019", "scale": _TEARS},
    "value_norm": dict.fromkeys(("layer", "rms"), _HYBRID),
    "value_residual": dict.fromkeys(("half", "learned", "single"), _RESFORMER),
    "cross_value_residual": dict.fromkeys(("half", "learned", "single"), _RESFORMER),
    "mixing": {"sinkhorn": "Xie et al. 2025", "permutations": "Yang and Gao 2026 (mHC-lite)"},
    "omega": {
        "profiled": "Liu et al. 2020 (ADMIN)",
        **dict.fromkeys(("log", "linear", "one"), "code of Liu et al. 2020 (ADMIN), admin-torch"),
    },
    "optimiser": {
        "adam": "Kingma and Ba 2015",
        "adamw": "Loshchilov and Hutter 2019",
        "radam": "Liu et al. 2020 (RAdam)",
        "muon": "Jordan et al. 2024",
    },
    "schedule": {
        "isqrt": "Vaswani et al. 2017, as in fairseq",
        "noam": "Vaswani et al. 2017",
        "cosine": "Loshchilov and Hutter 2017",
        "wsd": "Hu et al. 2024 (MiniCPM), with the decay of Haegele et al. 2024",
        "gnmt+": "Chen et al. 2018",
    },
    "smoothing": {"uniform": "Szegedy et al. 2016", "others": "Szegedy et al. 2016, as in tensor2tensor"},
    "copy_strategy": {
        **dict.fromkeys(get_args(CopyStrategy), _DEEPENING),
        "midas": "Saunshi et al. 2024 (MIDAS)",
        "lidas": "Kapl et al. 2025 (LIDAS)",
    },
    "recompute": {"segments": "Chen et al. 2016"},
    "length_penalty": {"gnmt": "Wu et al. 2016", "lingvo": "Wu et al. 2016, as in lingvo"},
    "subword": {"bpe": "Sennrich et al. 2016", "unigram": "Kudo 2018"},
    "compute": {"hmm": "Vogel et al. 1996"},
    "symmetrise": {
        **dict.fromkeys(("grow-diag-final-and", "grow-diag-final", "grow-diag"), "Koehn et al. 2003"),
        **dict.fromkeys(("intersection", "union"), "Och and Ney 2003"),
    },
    "method": dict.fromkeys(("sample", "top-k", "beam", "noised-beam"), "Edunov et al. 2018"),
}
"""METHODS maps axis -> kind -> paper. The plain case of an axis is not a method and is absent.

An axis is named after its key, or after the section around it if the key is `kind` or a stack (`axis_of`)."""

KEYS: Mapping[str, str] = {
    "model.encoder.layer_drop": "Fan et al. 2019",
    "model.decoder.layer_drop": "Fan et al. 2019",
    "model.encoder.tied_layers": _TIED,
    "model.decoder.tied_layers": _TIED,
    "model.encoder.ranges": "Li et al. 2025 (Mix-LN)",
    "model.decoder.ranges": "Li et al. 2025 (Mix-LN)",
    "model.dropout.sublayer": "Pham et al. 2019",
    "model.wiring.gpas": "Chen et al. 2025 (GPAS)",
    "model.embedding.unit_length": _TEARS,
    "model.transfer": "Dey et al. 2025 (CompleteP)",
    "training.loss.inter_sim": f"named by {_DEEPENING}, defined here",
    "training.loss.r_drop": "Liang et al. 2021 (R-Drop)",
    "training.growth": _DEEPENING,
    "training.loss.label_smoothing": "Szegedy et al. 2016",
    "training.loss.alignment": "Chen et al. 2016; Garg et al. 2019",
    "training.lora": "Hu et al. 2021",
    "training.optimiser.weight_smoothing": "Polyak and Juditsky 1992, as in Marian",
    "training.adaptive_clip": "Chen et al. 2018",
    "data.subword.regularisation": "Kudo 2018; Provilkov et al. 2020",
    "decoding.diverse_groups": "Vijayakumar et al. 2016",
    "decoding.epsilon": "Hewitt et al. 2022",
    "decoding.top_p": "Holtzman et al. 2020",
    "decoding.top_k": "Fan et al. 2018",
    "decoding.mbr": "Eikema and Aziz 2020",
}
"""KEYS maps keys that are a method, whatever their value, to the paper."""


ALIASES: Mapping[str, str] = {
    "model.family=transformer": "Transformer",
    "model.family=rnmt": "RNMT+",
    "model.residual=post": "post-norm, post-LN",
    "model.residual=pre": "pre-norm, pre-LN",
    "model.residual=none": "no residuals",
    "model.residual=deepnorm": "DeepNet",
    "model.residual=branch_norm": "BranchNorm",
    "model.residual=layer_scale": "CaiT",
    "model.residual=ln_scaling": "LayerNorm Scaling, LNS",
    "model.residual=peri": "Peri-LN, Peri-norm",
    "model.residual=res_post": "Swin v2, res-post-norm",
    "model.residual=b2t": "B2T connection, bottom-to-top connection",
    "model.residual=hyper": "hyper-connections, HC",
    "model.residual=manifold_hyper": "mHC, manifold-constrained hyper-connections",
    "model.residual=siamese": "SiameseNorm",
    "model.residual=hybrid": "HybridNorm",
    "model.residual=sandwich": "CogView, sandwich-LN, sandwich norm",
    "model.residual=sub_ln": "Magneto",
    "model.residual=no_norm": "T-Fixup",
    "model.encoder.ranges": "Mix-LN",
    "model.encoder.history=dlcl": "dynamic linear combination of layers, deep dynamic linear combination",
    "model.encoder.history=dense": "dense residual connections",
    "model.encoder.history=blocks": "sparse connections, sparse blocks",
    "model.encoder.history=top_only": "multi-layer representation fusion, multi-layer fusion, representation fusion",
    "model.encoder.history=depth_weighted": "DenseFormer, DWA, depth-weighted average",
    "model.encoder.history=attention_residuals": "AttnRes",
    "model.encoder.history=block_attention_residuals": "block AttnRes",
    "model.encoder.history=mudd": "MUDDFormer",
    "model.memory=transparent": "transparent attention",
    "model.memory=hierarchical": "hierarchical attention, depth growing",
    "model.encoder.history=cross_module": "depth growing, cross-module residual",
    "model.decoder.attention=relative": "RPR, relative positions, relative position representations",
    "model.decoder.attention=average": "AAN, average attention, average attention network",
    "model.decoder.attention=simplified_average": "SAAN, simplified average attention, simplified AAN",
    "model.decoder.attention=ssru": "simpler simple recurrent unit",
    "model.decoder.attention=merged": "MAtt, merged attention",
    "model.init.kind=xavier": "Glorot",
    "model.init.kind=depth_scaled": "DS-Init, depth-scaled initialisation, depth-scaled initialization",
    "model.init.kind=magneto": "Sub-LN",
    "model.init.kind=lipschitz": "Lipschitz initialisation, Lipschitz initialization",
    "model.activation=silu": "swish",
    "model.norm=layer": "LayerNorm, layer normalisation, layer normalization",
    "model.norm=rms": "RMSNorm",
    "model.norm=scale": "ScaleNorm",
    "model.embedding.unit_length": "FixNorm",
    "model.attention.qk_norm=layer": "QK-norm",
    "model.attention.qk_norm=rms": "QK-norm",
    "model.attention.qk_norm=l2": "QK-norm, QKNorm",
    "model.attention.value_residual=half": "ResFormer, value residual",
    "model.attention.value_residual=learned": "ResFormer, value residual",
    "model.attention.value_residual=single": "SVFormer",
    "model.embedding.positions=rotary": "RoPE, rotary positions",
    "model.wiring.mixing=permutations": "mHC-lite",
    "model.wiring.gpas": "GPAS",
    "model.dropout.sublayer": "stochastic sub-layers, stochastic layers, stochastic depth, DropPath",
    "model.encoder.layer_drop": "LayerDrop",
    "model.encoder.solver=rk2": "ODE Transformer, Runge-Kutta",
    "model.encoder.solver=rk2_gated": "ODE Transformer",
    "model.encoder.solver=rk4": "ODE Transformer, Runge-Kutta",
    "model.encoder.tied_layers": "Universal Transformer, looped Transformer, tied layers, RMSL, parameter sharing",
    "model.transfer": "CompleteP, \N{GREEK SMALL LETTER MU}P, muP, muTransfer, depth-muP",
    "training.growth": "SDT, shallow-to-deep, shallow-to-deep training, progressive stacking",
    "training.growth.copy_strategy=midas": "middle gradual stacking, middle growth",
    "training.growth.copy_strategy=lidas": "layer-wise middle growth",
    "training.loss.inter_sim": "inter-sim, Reg",
    "training.loss.r_drop": "R-Drop",
    "training.loss.label_smoothing": "label smoothing",
    "training.loss.alignment": "guided alignment",
    "training.lora": "LoRA, low-rank adaptation",
    "training.optimiser.weight_smoothing": "EMA, exponential moving average, exponential smoothing",
    "training.adaptive_clip": "adaptive clipping",
    "training.schedule.kind=isqrt": "inverse square root",
    "training.schedule.kind=wsd": "warm-up stable decay, trapezoidal schedule",
    "training.recompute.encoder=segments": "activation checkpointing, gradient checkpointing",
    "data.subword.regularisation": "subword regularisation, subword regularization, BPE-dropout",
    "decoding.search=beam": "beam search",
    "decoding.search=sample": "sampling",
    "decoding.diverse_groups": "diverse beam search",
    "decoding.epsilon": "epsilon sampling",
    "decoding.top_p": "nucleus sampling",
    "decoding.mbr": "minimum Bayes risk",
}
"""ALIASES maps a key or key=value to its names in papers and elsewhere. A name may mean several things."""


def spelled(name: str) -> str:
    """Return a name in look-up form: without case, spaces or punctuation except `+`."""
    return "".join(c for c in unicodedata.normalize("NFKC", name).casefold() if c.isalnum() or c == "+")


def axis_of(key: str) -> str:
    """Return the axis of a key that selects by name, such as `residual` for `model.encoder.residual`."""
    if key.startswith("model.combination."):
        return key  # there, `norm` and the like are options of histories
    return next(name for name in reversed(key.split(".")) if name not in ("kind", "encoder", "decoder"))


def other_names_of(value: str, key: str) -> tuple[str, str]:
    """Return what an invalid `value` of `key` may mean, as a name in ALIASES and as a value of another key.

    Each is a value of `key`, or `another.key=value`, or "" if it has no meaning.
    """
    by_name = by_value = ""
    for target, names in ALIASES.items():
        other, _, own = target.partition("=")
        meant = own if own and axis_of(other) == axis_of(key) else target
        if spelled(value) in map(spelled, names.split(", ")):
            by_name = by_name or meant
        elif own and value == own:
            by_value = by_value or meant
    return by_name, by_value


def methods_in_use(experiment: Experiment) -> list[Method]:
    """Return the methods that the configuration uses, starting with the model's."""
    model, training = experiment.model, experiment.training
    chosen = [*kinds_in_use(model), ("training.optimiser.kind", "optimiser", training.optimiser.kind)]
    found = [Method(key, value, METHODS[axis][value]) for key, axis, value in chosen if value in METHODS[axis]]
    growth = ""
    if training.growth is not None:
        final = model.encoder.layers, model.decoder.layers
        depths = [*(stage.depths(final[1]) for stage in training.growth.stages), final]
        both = len({decoder for _, decoder in depths}) > 1
        growth = ", ".join(f"{n}-{m}" for n, m in depths) if both else "-".join(str(n) for n, _ in depths)
    attention, transfer = model.attention, model.transfer
    for key, paper, value in (
        *((f"model.{side}.layer_drop", "", getattr(model, side).layer_drop) for side in ("encoder", "decoder")),
        *((f"model.{side}.tied_layers", "", _numbers(getattr(model, side))) for side in ("encoder", "decoder")),
        ("model.dropout.sublayer", "", model.dropout.sublayer),
        ("model.wiring.gpas", "", "true" if model.wiring.gpas else ""),
        ("model.embedding.unit_length", "", "true" if model.embedding.unit_length else ""),
        ("model.attention.value_norm", _HYBRID, attention.value_norm),
        ("model.attention.value_residual", _RESFORMER, attention.value_residual),
        ("model.attention.cross_value_residual", _RESFORMER, attention.cross_value_residual),
        ("model.transfer", "", "" if transfer is None else transfer.exponent),
        ("training.loss.inter_sim", "", training.loss.inter_sim),
        ("training.loss.r_drop", "", training.loss.r_drop),
        ("training.optimiser.weight_smoothing", "", training.optimiser.weight_smoothing),
        ("training.growth", "", growth),
    ):
        if value and value != "none":
            found.append(Method(key, str(value), paper or KEYS[key]))
    return found


def _numbers(stack: StackConfig) -> str:
    return ", ".join(map(str, stack.tied_layers))


def kinds_in_use(model: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (key, axis, value) of every choice by name."""
    yield "model.family", "family", model.family
    yield "model.memory", "memory", model.memory
    for key, init in model.inits.items():
        yield f"model.{key}.kind", "init", init.kind
    if model.family == "rnmt":
        if model.encoder.residual is not None:
            yield "model.encoder.residual", "residual", model.encoder.residual
        return
    if model.encoder_residual == model.decoder_residual:
        yield "model.residual", "residual", model.encoder_residual
    else:
        yield "model.encoder.residual", "residual", model.encoder_residual
        yield "model.decoder.residual", "residual", model.decoder_residual
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for part in stack.ranges:
            yield f"model.{side}.ranges", "residual", part.residual
    yield "model.encoder.history", "history", model.encoder.history
    yield "model.decoder.history", "history", model.decoder.history
    yield "model.encoder.attention", "attention", model.encoder.attention
    yield "model.decoder.attention", "attention", model.decoder.attention
    yield "model.encoder.solver", "solver", model.encoder.solver
    yield "model.attention.qk_norm", "qk_norm", model.attention.qk_norm
    yield "model.embedding.positions", "positions", model.embedding.positions
    yield "model.activation", "activation", model.activation
    yield "model.norm", "norm", model.norm
