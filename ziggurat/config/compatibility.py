"""Keys of a model that mean nothing beside its other choices, and keys by which weights compute something else."""

from __future__ import annotations

from collections.abc import Iterator

from ziggurat.config.kinds import ATTENTIONS, HISTORIES, INITIALISATIONS, MEMORIES, RESIDUALS, Facts
from ziggurat.config.model import PRESETS, InitConfig, ModelConfig

_TABLES = (HISTORIES, RESIDUALS, ATTENTIONS, INITIALISATIONS, MEMORIES)
_OF_SOME_KINDS = frozenset(option for table in _TABLES for facts in table.values() for option in facts.options)
_PLANNED = frozenset({"wiring.planned_encoder_layers", "wiring.planned_decoder_layers"})
_CONDITIONAL = _OF_SOME_KINDS | _PLANNED | {"embedding.max_positions", "attention.qk_length", "dropout.sublayer_unit"}
"""Keys that mean something beside certain choices only."""


def unheeded(model: ModelConfig) -> list[str]:
    """Return the keys of `model` that are set but mean nothing beside its other choices."""
    heeded = _heeded(model)
    found = []
    # RNMT+ has no feed-forward networks, no matrix that holds queries, keys and values, no gates, and lingvo's epsilon.
    if model.family == "rnmt":
        heeded -= {"wiring.gpas"}
        if model.d_ff not in _unsaid_d_ff(model):
            found.append("model.d_ff")
        if model.layer_norm_epsilon != ModelConfig.model_fields["layer_norm_epsilon"].default:
            found.append("model.layer_norm_epsilon")
    for name in ("combination", "wiring", "attention", "embedding", "dropout"):
        section = getattr(model, name)
        for key, field in type(section).model_fields.items():
            option = f"{name}.{key}"
            if option in _CONDITIONAL and option not in heeded and getattr(section, key) != field.default:
                found.append(f"model.{option}")
    return [*found, *_unheeded_in_inits(model)]


def _unheeded_in_inits(model: ModelConfig) -> Iterator[str]:
    """Yield the idle keys of `init` and of those of single stacks.

    A stack's own takes from `init` what it does not say: keys that mean something there are no idle ones of `init`, and
    those that mean nothing are named once.
    """
    inits, said = model.inits, InitConfig()
    if len(inits) == 3 and model.init.kind != said.kind and not INITIALISATIONS[model.init.kind].outside:
        yield "model.init.kind"  # both stacks have their own, and it does nothing outside of them
    for name, init in inits.items():
        heeded = {option for one in (inits.values() if name == "init" else (init,)) for option in _heeded_in(one)}
        heeded -= {"init.qkv"} if model.family == "rnmt" else set()
        for key in InitConfig.model_fields:
            idle = (option := f"init.{key}") in _CONDITIONAL and option not in heeded
            if idle and getattr(init, key) != getattr(said, key):
                yield f"model.{name}.{key}"
        said = model.init


def _heeded_in(init: InitConfig) -> set[str]:
    """Return the conditional keys of an initialisation that mean something beside its kind, as `init.alpha`."""
    idle = set() if init.omega == "profiled" else {"init.profile_tokens"}
    return set(INITIALISATIONS[init.kind].options - idle)


def _unsaid_d_ff(model: ModelConfig) -> set[int]:
    """Return the values of `d_ff` that nobody wrote: the default, and that of the preset."""
    presets = [PRESETS[model.preset]] if model.preset else []
    return {ModelConfig.model_fields["d_ff"].default, *(preset["d_ff"] for preset in presets)}


def _heeded(model: ModelConfig) -> set[str]:
    """Return the conditional keys that mean something beside the choices of `model`."""
    heeded = {option for facts in _chosen(model) for option in facts.options}
    if model.embedding.positions == "learned":
        heeded.add("embedding.max_positions")
    if model.attention.qk_norm == "l2":
        heeded.add("attention.qk_length")
    if model.dropout.sublayer > 0:
        heeded.add("dropout.sublayer_unit")
    if depth_matters(model):
        heeded |= _PLANNED
    normed = (
        model.history_norm(decoder=decoder)
        for decoder, stack in ((False, model.encoder), (True, model.decoder))
        if "combination.normalize_embedding" in HISTORIES[stack.history].options
    )
    if set(normed) <= {"none"}:
        heeded.discard("combination.normalize_embedding")
    return heeded


def depth_matters(model: ModelConfig) -> bool:
    """Return whether `model` starts or computes by the depth of its stacks, which growth and pruning keep as it was."""
    every = {*model.residuals(decoder=False), *model.residuals(decoder=True)}
    return (
        model.transfer is not None
        or model.dropout.sublayer > 0
        or any(RESIDUALS[kind].depth_constants for kind in every)
        or ("layer_scale" in every and model.wiring.layer_scale is None)
        or any(INITIALISATIONS[init.kind].depth for init in model.inits.values())
        or any(init.kind == "admin" and init.omega in ("log", "linear") for init in model.inits.values())
    )


def _chosen(model: ModelConfig) -> Iterator[Facts]:
    """Yield the rows of the kinds that `model` has."""
    for residual in (*model.residuals(decoder=False), *model.residuals(decoder=True)):
        yield RESIDUALS[residual]
    for stack in (model.encoder, model.decoder):
        yield HISTORIES[stack.history]
        yield ATTENTIONS[stack.attention]
    yield MEMORIES[model.memory]


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
    "wiring.layer_scale",
    "wiring.omega_trainable",
    "wiring.stream_start",
    "wiring.planned_encoder_layers",
    "wiring.planned_decoder_layers",
)
"""Beginnings of the keys that say how weights start or are trained, not what they compute."""


def unlike(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Return `key: value -> value` for every key by which the same weights would compute something else in `other`."""
    mine, theirs = _computing(one), _computing(other)
    both = [key for key in mine if key in theirs]  # a key that means nothing in one of them cannot differ
    return [f"model.{key}: {mine[key]} -> {theirs[key]}" for key in both if mine[key] != theirs[key]]


def _computing(model: ModelConfig) -> dict[str, object]:
    """Return the keys that say what weights of `model` compute, with their values, defaults resolved."""
    ignored = {key.removeprefix("model.") for key in unheeded(model)}
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
    # By layer: ranges may say in two ways what computes the same.
    for name in ("encoder", "decoder"):
        kinds = model.residuals(decoder=name == "decoder")
        flat[f"{name}.ranges"] = kinds if len(set(kinds)) > 1 else None
    if not model.combination.learnable:  # fixed weights are not in the model's file: they follow from this key
        flat["combination.start"] = model.combination.start
    # As one value: its keys may be there in one of two models only.
    flat = {k: v for k, v in flat.items() if not k.startswith("transfer")}
    flat["transfer"] = None if model.transfer is None else model.transfer.model_dump()
    every = {*model.residuals(decoder=False), *model.residuals(decoder=True)}
    if model.transfer is not None or any(RESIDUALS[kind].depth_constants for kind in every):
        flat["wiring.planned_encoder_layers"] = model.planned_encoder_layers
        flat["wiring.planned_decoder_layers"] = model.planned_decoder_layers
    return flat


def _of_norms(model: ModelConfig) -> dict[str, object]:
    """Return the epsilons that the model has: of each stack, and of the norms on queries, keys and values."""
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
    """Return norm and period of the stacks whose histories heed them: one value, or two where these differ."""
    found: dict[str, dict[object, None]] = {}
    for decoder, history in ((False, model.encoder.history), (True, model.decoder.history)):
        resolved = {
            "combination.norm": model.history_norm(decoder=decoder),
            "combination.period": model.combination.period_of(history),
        }
        for key in resolved.keys() & HISTORIES[history].options:
            found.setdefault(key, {})[resolved[key]] = None
    return {key: next(iter(values)) if len(values) == 1 else tuple(values) for key, values in found.items()}
