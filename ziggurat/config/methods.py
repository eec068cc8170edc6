"""Which published methods a configuration uses, each with its paper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ziggurat.config.experiment import Experiment
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


_VASWANI = "Vaswani et al. 2017"
_DLCL = "Wang et al. 2019"
_AAN = "Zhang et al. 2018"
_MATT = "Zhang et al. 2019 (DS-Init and MAtt)"
_SHAW = "Shaw et al. 2018"
_LI = "Li et al. 2020"
_BAPNA = "Bapna et al. 2018"
_ADMIN = "Liu et al. 2020 (ADMIN)"
_DEEPNET = "Wang et al. 2022"
_T_FIXUP = "Huang et al. 2020"
_FIXUP = "Zhang et al. 2019 (Fixup)"

METHODS: dict[str, dict[str, str]] = {
    "family": {"transformer": _VASWANI, "rnmt": "Chen et al. 2018"},
    "residual": {
        "post": _VASWANI,
        "pre": _DLCL,
        "lingvo": f"code of {_BAPNA}",
        "none": _BAPNA,
        "admin": _ADMIN,
        "deepnorm": _DEEPNET,
        "rezero": "Bachlechner et al. 2020",
        "layer_scale": "Touvron et al. 2021",
        "ln_scaling": "Sun et al. 2025",
        "peri": "Kim et al. 2025",
        "res_post": "Liu et al. 2022 (Swin v2)",
        "b2t": "Takase et al. 2022",
        "no_norm": _T_FIXUP,
        "fixup": _FIXUP,
        "hyper": "Zhu et al. 2024",
    },
    "history": {
        "dlcl": _DLCL,
        "dense": _DLCL,
        "average": _DLCL,
        "blocks": _LI,
        "top_only": _DLCL,
        "depth_weighted": "Pagliardini et al. 2024",
    },
    "memory": {"transparent": _BAPNA},
    "attention": {
        "relative": _SHAW,
        "average": _AAN,
        "simplified_average": _MATT,
        "merged": _MATT,
        "merged_full": _MATT,
        "merged_gated": _MATT,
    },
    "qk_norm": {"layer": "Dehghani et al. 2023", "rms": "Dehghani et al. 2023", "l2": "Henry et al. 2020"},
    "positions": {"learned": "Gehring et al. 2017", "rotary": "Su et al. 2021"},
    "activation": {
        "gelu": "Hendrycks and Gimpel 2016",
        "silu": "Ramachandran et al. 2017",
        "swiglu": "Shazeer 2020",
    },
    "norm": {"rms": "Zhang and Sennrich 2019"},
    "init": {
        "xavier": "Glorot and Bengio 2010",
        "depth_scaled": _MATT,
        "admin": _ADMIN,
        "deepnorm": _DEEPNET,
        "t_fixup": _T_FIXUP,
        "fixup": _FIXUP,
        "uniform": "Chen et al. 2018",
    },
    "optimiser": {
        "adam": "Kingma and Ba 2015",
        "adamw": "Loshchilov and Hutter 2019",
        "radam": "Liu et al. 2020 (RAdam)",
        "muon": "Jordan et al. 2024",
    },
}
"""Axis -> kind -> paper; what is missing is no method: the plain stack, the encoder's output, ordinary attention."""


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
    if training.loss.inter_sim:
        found.append(Method("training.loss.inter_sim", str(training.loss.inter_sim), f"named by {_LI}, defined here"))
    if training.growth is not None:
        depths = [*(stage.layers for stage in training.growth.stages), model.encoder.layers]
        found.append(Method("training.growth", "-".join(map(str, depths)), _LI))
    return found


def _kinds(model: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (key, axis, value) of every choice by name."""
    yield "model.family", "family", model.family
    yield "model.memory", "memory", model.memory
    yield "model.init.kind", "init", model.init.kind
    if model.family == "rnmt":
        if model.encoder.residual is not None:
            yield "model.encoder.residual", "residual", model.encoder.residual
        return
    if model.encoder_residual == model.decoder_residual:
        yield "model.residual", "residual", model.encoder_residual
    else:
        yield "model.encoder.residual", "residual", model.encoder_residual
        yield "model.decoder.residual", "residual", model.decoder_residual
    yield "model.encoder.history", "history", model.encoder.history
    yield "model.decoder.history", "history", model.decoder.history
    yield "model.encoder.attention", "attention", model.encoder.attention
    yield "model.decoder.attention", "attention", model.decoder.attention
    yield "model.attention.qk_norm", "qk_norm", model.attention.qk_norm
    yield "model.embedding.positions", "positions", model.embedding.positions
    yield "model.activation", "activation", model.activation
    yield "model.norm", "norm", model.norm
