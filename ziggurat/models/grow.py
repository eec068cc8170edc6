"""Growing the encoder of a trained model (shallow-to-deep training, Li et al. 2020, section 4)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import assert_never, cast

import torch
from torch import Tensor

from ziggurat.config.growth import CopyStrategy, unreachable
from ziggurat.config.model import ModelConfig
from ziggurat.errors import ConfigError
from ziggurat.models.layers import EncoderLayer
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.models.transformer import Encoder

__all__ = ["added_layers", "at_depth", "grow_moments", "grow_weights", "layer_sources"]

_LAYER = re.compile(r"encoder\.layers\.(\d+)\.(.+)")
_ACROSS = ("encoder.history.", "encoder.transparent.")
"""Parts of the encoder whose tensors belong to several layers; their modules extend them (`extend`)."""


def layer_sources(strategy: CopyStrategy, old: int, new: int) -> list[int | None]:
    """Return for each of `new` encoder layers which of the `old` ones it starts as, from 0; None: its own weights.

    With g = new - old added layers: `g_top` copies the g top-most ones, `top_only` the last one g times,
    `copy_all` the whole stack on top of itself, `interpolate` every layer in place; `random` copies none. Raises
    ConfigError when the strategy cannot reach that depth.
    """
    if reason := unreachable(strategy, old, new):
        raise ConfigError(reason)
    added = new - old
    kept: list[int | None] = list(range(old))
    match strategy:
        case "g_top":
            return kept + kept[old - added :]
        case "top_only":
            return kept + [old - 1] * added
        case "random":
            return kept + [None] * added
        case "copy_all" | "interpolate":
            return kept + kept if strategy == "copy_all" else [layer for layer in kept for _ in range(2)]
        case _:
            assert_never(strategy)


def added_layers(sources: Sequence[int | None]) -> list[int]:
    """Return the layers of a grown encoder, from 0, that were added: random ones and second copies."""
    return [layer for layer, source in enumerate(sources) if source is None or source in sources[:layer]]


def at_depth(config: ModelConfig, layers: int) -> ModelConfig:
    """Return the architecture with an encoder of `layers` layers instead.

    Constants that depend on depth, such as DeepNorm's, stay those of `config`, so that layers compute the same in
    both: in a run with stages of growth they are those of the final depth from the start.
    """
    planned = config.planned_encoder_layers
    return config.model_copy(
        update={
            "encoder": config.encoder.model_copy(update={"layers": layers}),
            "wiring": config.wiring.model_copy(update={"planned_encoder_layers": planned}),
        }
    )


@torch.no_grad()
def grow_weights(model: Seq2Seq, old: Mapping[str, Tensor], old_layers: int, sources: Sequence[int | None]) -> None:
    """Copy the weights `old` of a shallow model into `model`, which was built with the new depth.

    Args:
        model: keeps its own weights in layers whose source is None.
        old: parameters of the shallow model by name.
        old_layers: its encoder depth.
        sources: which old layer each new one starts as (layer_sources).

    Everything outside the encoder's layers is copied; histories and mixtures extend as their kind says. Raises
    ConfigError when the models differ in more than the depth of the encoder.
    """
    across = _extended(model, old, old_layers)
    for name, parameter in model.named_parameters():
        source = _source_name(name, sources)
        values = across.get(name) if name.startswith(_ACROSS) else None if source is None else old.get(source)
        if values is None and source is None:
            continue
        if values is None or values.shape != parameter.shape:
            raise ConfigError(f"{name}: the shallow model has no such parameter; it differs in more than its depth")
        parameter.copy_(values)
    model.output.rule_out(old.get("output.bias"))


def grow_moments(
    parameters: Mapping[str, Tensor], old: Mapping[str, Tensor], sources: Sequence[int | None]
) -> dict[str, Tensor]:
    """Return an optimiser state for the grown model: each layer takes the moments of the layer that it copies.

    Args:
        parameters: of the grown model, by name.
        old: state of the shallow model's optimiser, `<parameter>/<moment>` (ziggurat.training.optim).
        sources: see grow_weights.

    Where nothing of that shape was trained before, the moments are zero and the step count too.
    """
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in old.items():
        name, _, moment = key.rpartition("/")
        by_name.setdefault(name, {})[moment] = value
    state = {}
    for name, parameter in parameters.items():
        source = _source_name(name, sources)
        before = by_name.get(source) if source is not None else None
        if before is None or any(v.dim() and v.shape != parameter.shape for v in before.values()):
            # Zeros, the count of steps included: so bias correction treats a new layer's first step as a first step.
            kinds = next(iter(by_name.values()), {})
            before = {kind: torch.zeros_like(parameter if v.dim() else v, dtype=v.dtype) for kind, v in kinds.items()}
        state.update({f"{name}/{moment}": value.clone() for moment, value in before.items()})
    return state


def _source_name(name: str, sources: Sequence[int | None]) -> str | None:
    """Return the shallow model's name of the parameter that `name` starts as; None: it keeps its initial values."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    source = sources[int(found[1])]
    return None if source is None else f"encoder.layers.{source}.{found[2]}"


def _extended(model: Seq2Seq, old: Mapping[str, Tensor], old_layers: int) -> dict[str, Tensor]:
    """Return the tensors of the encoder's combinations of layers, by name, extended to the new depth."""
    extended = {}
    encoder = cast(Encoder, model.encoder)
    per_layer = len(cast(EncoderLayer, encoder.layers[0]).sublayers()) if encoder.split else 1
    for part, module, units in (
        ("encoder.history.", encoder.history, old_layers * per_layer),
        ("encoder.transparent.", encoder.transparent, old_layers),
    ):
        if module is not None:
            before = {name.removeprefix(part): values for name, values in old.items() if name.startswith(part)}
            extended.update({part + name: values for name, values in module.extend(before, units).items()})
    return extended
