"""Settings outside the model that mean nothing beside others; those of a model are in ziggurat.config.compatibility."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from ziggurat.config.data import DataConfig, SubwordConfig
from ziggurat.config.decode import DecodingConfig
from ziggurat.config.train import TrainingConfig

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


def unread_files(subword: SubwordConfig) -> list[str]:
    """Return a sentence for each file of a vocabulary that `subword.kind` does not read."""
    return [
        f"`data.subword.{key}` is read with `kind: {kind}` only, not with `kind: {subword.kind}`: set "
        f"`data.subword.kind={kind}`, or leave it out"
        for kind, keys in _FILES.items()
        for key in keys
        if kind != subword.kind and getattr(subword, key) is not None
    ]


def unheeded_in_data(data: DataConfig) -> list[str]:
    """Return the keys of section `data` that are set but mean nothing beside its other choices."""
    subword, computed = data.subword, data.alignment.compute
    idle = {key for kind, keys in _FILES.items() if kind != subword.kind for key in keys}
    found = list(_set("data.subword", subword, idle | set(_OF_TRAINED_PIECES if subword.kind in _FILES else ())))
    every = [data.filters, *map(data.filters_of, data.train)]
    if all(filters.source_script is None and filters.target_script is None for filters in every):
        found += _set("data.filters", data.filters, {"min_script_share"})
    idle = set() if computed == "hmm" else {"pairs", "symmetrise"}
    found += _set("data.alignment", data.alignment, idle)
    for number, corpus in enumerate(data.dev):
        found += _set(f"data.dev.{number}", corpus, {"weight"})
    return found


def unheeded_in_training(training: TrainingConfig) -> list[str]:
    """Return the keys of section `training` that are set but mean nothing beside its other choices."""
    schedule, optimiser, batch = training.schedule, training.optimiser, training.batch
    divergence, validation = training.divergence, training.validation
    heeded = {"kind", "start", *_HEEDED_BY_SCHEDULE[schedule.kind]}
    if schedule.start == "peak":  # the rest of these two does not depend on the warm-up, that of others does
        heeded -= {"initial"} | ({"warmup_updates"} if schedule.kind in ("linear", "cosine", "constant") else set())
    found = list(_set("training.schedule", schedule, type(schedule).model_fields.keys() - heeded))
    found += _set("training.optimiser", optimiser, set() if optimiser.kind == "muon" else {"momentum"})
    idle = {"rate_factor", "max_roll_backs"} if divergence.action == "stop" else set()
    idle |= {"window"} if divergence.loss_spike is None else set()
    found += _set("training.divergence", divergence, idle)
    found += _set("training.batch", batch, set() if batch.fit else {"fit_limit", "fit_margin"})
    idle = set() if validation.metric == "loss" else {"max_share"}
    idle |= set() if validation.decode else {"beam_size", "max_length", "max_share", "max_sentences"}
    found += _set("training.validation", validation, idle)
    return found


def unheeded_in_decoding(decoding: DecodingConfig) -> list[str]:
    """Return the keys of section `decoding` that are set but mean nothing beside its other choices."""
    penalty = decoding.length_penalty
    found = list(_set("decoding", decoding, set() if decoding.diverse_groups > 1 else {"diverse_strength"}))
    idle = {"alpha"} if penalty.kind == "none" else set()
    found += _set("decoding.length_penalty", penalty, idle | (set() if penalty.coverage else {"length_ratio"}))
    return found


def _set(path: str, section: BaseModel, idle: set[str]) -> Iterator[str]:
    """Yield the keys among `idle` whose value is not the default."""
    for key, field in type(section).model_fields.items():
        if key in idle and getattr(section, key) != field.default:
            yield f"{path}.{key}"
