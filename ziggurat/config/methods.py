"""The published methods that a configuration uses, each with its paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ziggurat.config.experiment import Experiment
from ziggurat.config.growth import CopyStrategy
from ziggurat.config.kinds import ATTENTIONS, HISTORIES, INITIALISATIONS, MEMORIES, RESIDUALS, Facts
from ziggurat.config.model import ModelConfig


@dataclass(frozen=True)
class Method:
    """One choice of a configuration.

    Attributes:
        key: dotted path of the key that chooses it.
        value: what it is set to.
        paper: authors and year.
    """

    key: str
    value: str
    paper: str


def _papers(rows: Mapping[Any, Facts]) -> dict[str, str]:
    return {kind: facts.paper for kind, facts in rows.items() if facts.paper is not None}


_DEEPENING = "Li et al. 2020"
_HYBRID = "Zhuo et al. 2025 (HybridNorm)"
_RESFORMER = "Zhou et al. 2024 (ResFormer)"

METHODS: dict[str, dict[str, str]] = {
    "family": {"transformer": "Vaswani et al. 2017", "rnmt": "Chen et al. 2018"},
    "residual": _papers(RESIDUALS),
    "history": _papers(HISTORIES),
    "memory": _papers(MEMORIES),
    "attention": _papers(ATTENTIONS),
    "init": _papers(INITIALISATIONS),
    "qk_norm": {"layer": "Dehghani et al. 2023", "rms": "Dehghani et al. 2023", "l2": "Henry et al. 2020"},
    "positions": {"learned": "Gehring et al. 2017", "rotary": "Su et al. 2021"},
    "activation": {
        "gelu": "Hendrycks and Gimpel 2016",
        "silu": "Ramachandran et al. 2017",
        "swiglu": "Shazeer 2020",
    },
    "norm": {"rms": "Zhang and Sennrich 2019"},
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
        "isqrt": "Vaswani et al. 2017, as fairseq has it",
        "noam": "Vaswani et al. 2017",
        "cosine": "Loshchilov and Hutter 2017",
        "gnmt+": "Chen et al. 2018",
    },
    "smoothing": {"uniform": "Szegedy et al. 2016", "others": "Szegedy et al. 2016, as tensor2tensor has it"},
    "copy_strategy": dict.fromkeys(get_args(CopyStrategy), _DEEPENING),
    "recompute": {"segments": "Chen et al. 2016"},
    "length_penalty": {"gnmt": "Wu et al. 2016", "lingvo": "Wu et al. 2016, as lingvo has it"},
    "subword": {"bpe": "Sennrich et al. 2016", "unigram": "Kudo 2018"},
    "compute": {"hmm": "Vogel et al. 1996"},
    "symmetrise": {
        **dict.fromkeys(("grow-diag-final-and", "grow-diag-final", "grow-diag"), "Koehn et al. 2003"),
        **dict.fromkeys(("intersection", "union"), "Och and Ney 2003"),
    },
    "method": dict.fromkeys(("sample", "top-k", "beam", "noised-beam"), "Edunov et al. 2018"),
}
"""Axis -> kind -> paper. The plain case of an axis is no method, and is missing.

An axis has the name of its key, or where that is `kind` or a stack of the section around it (`axis_of`)."""

KEYS: Mapping[str, str] = {
    "model.encoder.layer_drop": "Fan et al. 2019",
    "model.decoder.layer_drop": "Fan et al. 2019",
    "model.encoder.ranges": "Li et al. 2025 (Mix-LN)",
    "model.decoder.ranges": "Li et al. 2025 (Mix-LN)",
    "model.dropout.sublayer": "Pham et al. 2019",
    "model.wiring.gpas": "Chen et al. 2025 (GPAS)",
    "model.transfer": "Dey et al. 2025 (CompleteP)",
    "training.loss.inter_sim": f"named by {_DEEPENING}, defined here",
    "training.growth": _DEEPENING,
    "training.loss.label_smoothing": "Szegedy et al. 2016",
    "training.loss.alignment": "Chen et al. 2016; Garg et al. 2019",
    "training.lora": "Hu et al. 2021",
    "training.adaptive_clip": "Chen et al. 2018",
    "data.subword.regularisation": "Kudo 2018; Provilkov et al. 2020",
    "decoding.diverse_groups": "Vijayakumar et al. 2016",
    "decoding.epsilon": "Hewitt et al. 2022",
    "decoding.top_p": "Holtzman et al. 2020",
    "decoding.top_k": "Fan et al. 2018",
    "decoding.mbr": "Eikema and Aziz 2020",
}
"""Key -> paper, where it is the key that makes the method, whatever its value."""


def axis_of(key: str) -> str:
    """Return the axis of a key that chooses by name, such as `residual` of `model.encoder.residual`."""
    if key.startswith("model.combination."):
        return key  # `norm` and the like are options of histories there
    return next(name for name in reversed(key.split(".")) if name not in ("kind", "encoder", "decoder"))


def methods_in_use(experiment: Experiment) -> list[Method]:
    """Return the methods that the configuration chooses, those of the model first."""
    model, training = experiment.model, experiment.training
    found = [
        Method(key, value, METHODS[axis][value])
        for key, axis, value in (
            *kinds_in_use(model),
            ("training.optimiser.kind", "optimiser", training.optimiser.kind),
        )
        if value in METHODS[axis]
    ]
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack.layer_drop:
            found.append(Method(f"model.{side}.layer_drop", str(stack.layer_drop), KEYS[f"model.{side}.layer_drop"]))
    if model.dropout.sublayer:
        found.append(Method("model.dropout.sublayer", str(model.dropout.sublayer), KEYS["model.dropout.sublayer"]))
    if model.wiring.gpas:
        found.append(Method("model.wiring.gpas", "true", KEYS["model.wiring.gpas"]))
    if model.attention.value_norm != "none":
        found.append(Method("model.attention.value_norm", model.attention.value_norm, _HYBRID))
    for key in ("value_residual", "cross_value_residual"):
        if (kind := getattr(model.attention, key)) != "none":
            found.append(Method(f"model.attention.{key}", kind, _RESFORMER))
    if model.transfer is not None:
        found.append(Method("model.transfer", str(model.transfer.exponent), KEYS["model.transfer"]))
    if training.loss.inter_sim:
        inter_sim = str(training.loss.inter_sim)
        found.append(Method("training.loss.inter_sim", inter_sim, KEYS["training.loss.inter_sim"]))
    if training.growth is not None:
        final = model.encoder.layers, model.decoder.layers
        depths = [*(stage.depths(final[1]) for stage in training.growth.stages), final]
        both = len({decoder for _, decoder in depths}) > 1
        named = ", ".join(f"{n}-{m}" for n, m in depths) if both else "-".join(str(n) for n, _ in depths)
        found.append(Method("training.growth", named, KEYS["training.growth"]))
    return found


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
    yield "model.attention.qk_norm", "qk_norm", model.attention.qk_norm
    yield "model.embedding.positions", "positions", model.embedding.positions
    yield "model.activation", "activation", model.activation
    yield "model.norm", "norm", model.norm
