"""The published methods that a configuration uses, each with its paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ziggurat.config.experiment import Experiment
from ziggurat.config.kinds import ATTENTIONS, HISTORIES, INITIALISATIONS, MEMORIES, RESIDUALS, Facts
from ziggurat.config.model import ModelConfig

__all__ = ["METHODS", "Method", "methods_in_use"]


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
    "optimiser": {
        "adam": "Kingma and Ba 2015",
        "adamw": "Loshchilov and Hutter 2019",
        "radam": "Liu et al. 2020 (RAdam)",
        "muon": "Jordan et al. 2024",
    },
}
"""Axis -> kind -> paper. The plain case of an axis is no method, and is missing."""

_DEEPENING = "Li et al. 2020"


def methods_in_use(experiment: Experiment) -> list[Method]:
    """Return the methods that the configuration chooses, those of the model first."""
    model, training = experiment.model, experiment.training
    found = [
        Method(key, value, METHODS[axis][value])
        for key, axis, value in (*_kinds(model), ("training.optimiser.kind", "optimiser", training.optimiser.kind))
        if value in METHODS[axis]
    ]
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack.layer_drop:
            found.append(Method(f"model.{side}.layer_drop", str(stack.layer_drop), "Fan et al. 2019"))
    if model.dropout.sublayer:
        found.append(Method("model.dropout.sublayer", str(model.dropout.sublayer), "Pham et al. 2019"))
    if model.wiring.gpas:
        found.append(Method("model.wiring.gpas", "true", "Chen et al. 2025 (GPAS)"))
    if model.attention.value_norm != "none":
        found.append(Method("model.attention.value_norm", model.attention.value_norm, "Zhuo et al. 2025 (HybridNorm)"))
    for key in ("value_residual", "cross_value_residual"):
        if (kind := getattr(model.attention, key)) != "none":
            found.append(Method(f"model.attention.{key}", kind, "Zhou et al. 2024 (ResFormer)"))
    if model.transfer is not None:
        found.append(Method("model.transfer", str(model.transfer.exponent), "Dey et al. 2025 (CompleteP)"))
    if training.loss.inter_sim:
        found.append(
            Method("training.loss.inter_sim", str(training.loss.inter_sim), f"named by {_DEEPENING}, defined here")
        )
    if training.growth is not None:
        final = model.encoder.layers, model.decoder.layers
        depths = [*(stage.depths(final[1]) for stage in training.growth.stages), final]
        both = len({decoder for _, decoder in depths}) > 1
        named = ", ".join(f"{n}-{m}" for n, m in depths) if both else "-".join(str(n) for n, _ in depths)
        found.append(Method("training.growth", named, _DEEPENING))
    return found


def _kinds(model: ModelConfig) -> Iterator[tuple[str, str, str]]:
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
