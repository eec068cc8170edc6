"""Differences between models that change what the same weights compute."""

from __future__ import annotations

from ziggurat.config.kinds import HISTORIES, RESIDUALS
from ziggurat.config.model import ModelConfig
from ziggurat.config.notices import unused_settings

_INITIAL_OR_TRAINING = (
    "preset",
    "attention.qk_length",
    "init.",
    "encoder.init",
    "decoder.init",
    "dropout.",
    "encoder.layer_drop",
    "decoder.layer_drop",
    "combination.start",
    "combination.dropout",
    "wiring.branch_updates",
    "wiring.layer_scale",
    "wiring.omega_trainable",
    "wiring.stream_start",
    "wiring.planned_encoder_layers",
    "wiring.planned_decoder_layers",
)
"""_INITIAL_OR_TRAINING are prefixes of keys for initialisation and training, not for what weights compute."""


def differing_keys(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Return `key: value -> value` for every key that makes the same weights compute something else in `other`."""
    mine, theirs = _computing(one), _computing(other)
    both = [key for key in mine if key in theirs]  # a key with no effect in one of them cannot differ
    return [f"model.{key}: {mine[key]} -> {theirs[key]}" for key in both if mine[key] != theirs[key]]


def _computing(model: ModelConfig) -> dict[str, object]:
    """Return the keys that determine what the weights of `model` compute, with values and defaults resolved."""
    ignored = {key.removeprefix("model.") for key in unused_settings(model)}
    flat: dict[str, object] = {}
    for key, value in model.model_dump().items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        flat.update({f"{key}.{name}".rstrip("."): v for name, v in inner})
    ignored |= {"layer_norm_epsilon", "encoder.layer_norm_epsilon", "decoder.layer_norm_epsilon"}
    ignored |= {"combination.norm", "combination.period"}
    flat = {k: v for k, v in flat.items() if k not in ignored and not k.startswith(_INITIAL_OR_TRAINING)}
    flat |= {"encoder.residual": model.encoder_residual, "decoder.residual": model.decoder_residual}
    flat |= {"encoder.d_model": model.encoder_width, "encoder.heads": model.encoder_heads}
    flat |= {"encoder.d_ff": model.encoder_d_ff}
    flat.pop("residual")
    flat |= _of_norms(model) | _of_combinations(model)
    # Layer by layer, because different ranges may describe the same computation.
    for name in ("encoder", "decoder"):
        kinds = model.residuals(decoder=name == "decoder")
        flat[f"{name}.ranges"] = kinds if len(set(kinds)) > 1 else None
        owners = getattr(model, name).owners()
        flat[f"{name}.tied_layers"] = owners if owners != sorted(set(owners)) else None
    if not model.combination.learnable:  # fixed weights follow from this key and are not in the model's file
        flat["combination.start"] = model.combination.start
    # As one value, because its keys may exist in only one of the models.
    flat = {k: v for k, v in flat.items() if not k.startswith("transfer")}
    flat["transfer"] = None if model.transfer is None else model.transfer.model_dump()
    every = {*model.residuals(decoder=False), *model.residuals(decoder=True)}
    if model.transfer is not None or any(RESIDUALS[kind].depth_constants for kind in every):
        flat["wiring.planned_encoder_layers"] = model.planned_encoder_layers
        flat["wiring.planned_decoder_layers"] = model.planned_decoder_layers
    return flat


def _of_norms(model: ModelConfig) -> dict[str, object]:
    if model.family == "rnmt":
        return {}  # always lingvo's
    own = {"encoder": model.encoder.layer_norm_epsilon, "decoder": model.decoder.layer_norm_epsilon}
    found: dict[str, object] = {
        f"{name}.layer_norm_epsilon": epsilon or model.layer_norm_epsilon for name, epsilon in own.items()
    }
    if (model.attention.qk_norm, model.attention.value_norm) != ("none", "none"):
        found["layer_norm_epsilon"] = model.layer_norm_epsilon
    return found


def _of_combinations(model: ModelConfig) -> dict[str, object]:
    """Return norm and period of the stacks whose histories use them: one value, or two if the stacks differ."""
    found: dict[str, dict[object, None]] = {}
    for decoder, history in ((False, model.encoder.history), (True, model.decoder.history)):
        resolved = {
            "combination.norm": model.history_norm(decoder=decoder),
            "combination.period": model.combination.period_of(history),
        }
        for key in resolved.keys() & HISTORIES[history].options:
            found.setdefault(key, {})[resolved[key]] = None
    return {key: next(iter(values)) if len(values) == 1 else tuple(values) for key, values in found.items()}
