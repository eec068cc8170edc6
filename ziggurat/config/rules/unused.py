"""Rules on settings that mean nothing beside the others: of a model, and of the other sections."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from ziggurat.config.data import DataConfig, SubwordConfig
from ziggurat.config.decode import DecodingConfig
from ziggurat.config.kinds import ATTENTIONS, HISTORIES, INITIALISATIONS, MEMORIES, RESIDUALS, Facts
from ziggurat.config.model import PRESETS, InitConfig, ModelConfig
from ziggurat.config.train import TrainingConfig
from ziggurat.system.errors import Problem

_TABLES = (HISTORIES, RESIDUALS, ATTENTIONS, INITIALISATIONS, MEMORIES)
_OF_SOME_KINDS = frozenset(option for table in _TABLES for facts in table.values() for option in facts.options)
_PLANNED = frozenset({"wiring.planned_encoder_layers", "wiring.planned_decoder_layers"})
_CONDITIONAL = _OF_SOME_KINDS | _PLANNED | {"embedding.max_positions", "attention.qk_length", "dropout.sublayer_unit"}
"""Keys that mean something beside certain choices only."""


def unused_settings(model: ModelConfig) -> Iterator[str]:
    """Yield the keys of `model` that are set but mean nothing beside its other choices."""
    idle = set(_CONDITIONAL - _heeded(model))
    # RNMT+ has no feed-forward networks, no matrix that holds queries, keys and values, no gates, and lingvo's epsilon.
    if model.family == "rnmt":
        idle |= {"wiring.gpas"}
        presets = [PRESETS[model.preset]["d_ff"]] if model.preset else []  # which nobody wrote
        yield from _set("model", model, model.d_ff not in presets, "d_ff")
        yield from _set("model", model, True, "layer_norm_epsilon")
    for name in ("combination", "wiring", "attention", "embedding", "dropout"):
        section = getattr(model, name)
        keys = (key for key in type(section).model_fields if f"{name}.{key}" in idle)
        yield from _set(f"model.{name}", section, True, *keys)
    yield from _unused_in_inits(model)


def _unused_in_inits(model: ModelConfig) -> Iterator[str]:
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


def _heeded(model: ModelConfig) -> set[str]:
    heeded = {option for facts in _chosen(model) for option in facts.options}
    if model.embedding.positions == "learned":
        heeded.add("embedding.max_positions")
    if model.attention.qk_norm == "l2":
        heeded.add("attention.qk_length")
    if model.dropout.sublayer > 0:
        heeded.add("dropout.sublayer_unit")
    if model.depth_matters:
        heeded |= _PLANNED
    normed = (
        model.history_norm(decoder=decoder)
        for decoder, stack in ((False, model.encoder), (True, model.decoder))
        if "combination.normalize_embedding" in HISTORIES[stack.history].options
    )
    if set(normed) <= {"none"}:
        heeded.discard("combination.normalize_embedding")
    return heeded


def _chosen(model: ModelConfig) -> Iterator[Facts]:
    for residual in (*model.residuals(decoder=False), *model.residuals(decoder=True)):
        yield RESIDUALS[residual]
    for stack in (model.encoder, model.decoder):
        yield HISTORIES[stack.history]
        yield ATTENTIONS[stack.attention]
    yield MEMORIES[model.memory]


_FILES = {"existing": ("source_model", "target_model"), "vocabulary": ("source_vocabulary", "target_vocabulary")}
"""Kind of `data.subword` -> the keys of the files that it reads."""

_OF_TRAINED_PIECES = (
    *("vocabulary_size", "target_vocabulary_size", "joint"),
    *("byte_fallback", "character_coverage", "symbols", "sample_pairs"),
)

_HEEDED_BY_SCHEDULE = {
    "isqrt": {"peak", "warmup_updates", "initial", "floor"},
    "noam": {"factor", "warmup_updates"},
    "linear": {"peak", "warmup_updates", "initial", "floor", "decay_updates"},
    "cosine": {"peak", "warmup_updates", "initial", "floor", "decay_updates"},
    "constant": {"peak", "warmup_updates", "initial"},
    "gnmt+": {"warmup_updates", "base", "replicas", "decay_start", "decay_end"},
}


def unread_files(subword: SubwordConfig) -> list[Problem]:
    """Return what is wrong with each file of a vocabulary that `subword.kind` does not read."""
    return [
        Problem.of(
            f"data.subword.{key}",
            f"is read with `kind: {kind}` only, not with `kind: {subword.kind}`:",
            f"set `data.subword.kind={kind}`, or leave it out",
            named=("data.subword.kind",),
        )
        for kind, keys in _FILES.items()
        for key in keys
        if kind != subword.kind and getattr(subword, key) is not None
    ]


def unused_in_data(data: DataConfig) -> Iterator[str]:
    """Yield the keys of section `data` that are set but mean nothing beside its other choices."""
    subword = data.subword
    idle = [key for kind, keys in _FILES.items() if kind != subword.kind for key in keys]
    idle += _OF_TRAINED_PIECES if subword.kind in _FILES else ()
    yield from _set("data.subword", subword, True, *idle)
    every = [data.filters, *map(data.filters_of, data.train)]
    no_script = all(filters.source_script is None and filters.target_script is None for filters in every)
    yield from _set("data.filters", data.filters, no_script, "min_script_share")
    yield from _set("data.alignment", data.alignment, data.alignment.compute != "hmm", "symmetrise", "pairs")
    for number, corpus in enumerate(data.dev):
        yield from _set(f"data.dev.{number}", corpus, True, "weight")


def unused_in_training(training: TrainingConfig) -> Iterator[str]:
    """Yield the keys of section `training` that are set but mean nothing beside its other choices."""
    schedule, divergence, validation = training.schedule, training.divergence, training.validation
    heeded = {"kind", "start", *_HEEDED_BY_SCHEDULE[schedule.kind]}
    if schedule.start == "peak":  # the rest of these two does not depend on the warm-up, that of others does
        heeded -= {"initial"} | ({"warmup_updates"} if schedule.kind in ("linear", "cosine", "constant") else set())
    idle = [key for key in type(schedule).model_fields if key not in heeded]
    yield from _set("training.schedule", schedule, True, *idle)
    yield from _set("training.optimiser", training.optimiser, training.optimiser.kind != "muon", "momentum")
    yield from _set("training.divergence", divergence, divergence.loss_spike is None, "window")
    yield from _set("training.divergence", divergence, divergence.action == "stop", "rate_factor", "max_roll_backs")
    yield from _set("training.batch", training.batch, not training.batch.fit, "fit_limit", "fit_margin")
    of_decoding = ("beam_size", "max_length", "max_share", "max_sentences")
    yield from _set("training.validation", validation, not validation.decode, *of_decoding)
    only_scored = validation.decode and validation.metric != "loss"
    yield from _set("training.validation", validation, only_scored, "max_share")


def unused_in_decoding(decoding: DecodingConfig) -> Iterator[str]:
    """Yield the keys of section `decoding` that are set but mean nothing beside its other choices."""
    penalty = decoding.length_penalty
    yield from _set("decoding", decoding, decoding.diverse_groups == 1, "diverse_strength")
    yield from _set("decoding.length_penalty", penalty, penalty.kind == "none", "alpha")
    yield from _set("decoding.length_penalty", penalty, not penalty.coverage, "length_ratio")


def _set(path: str, section: BaseModel, idle: bool, *keys: str) -> Iterator[str]:
    """Yield the keys whose value is not the default where they are `idle`."""
    for key, field in type(section).model_fields.items():
        if idle and key in keys and getattr(section, key) != field.default:
            yield f"{path}.{key}"
