"""Notices on a configuration: settings without effect, and allowed choices that are probably mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from pydantic import BaseModel

from ziggurat.config.data import DataConfig, SubwordConfig
from ziggurat.config.decode import DecodingConfig
from ziggurat.config.depth import cut_short
from ziggurat.config.experiment import Experiment
from ziggurat.config.kinds import ATTENTIONS, HISTORIES, INITIALISATIONS, MEMORIES, RESIDUALS, Facts
from ziggurat.config.languages import language_doubt
from ziggurat.config.model import PRESETS, InitConfig, ModelConfig
from ziggurat.config.train import TrainingConfig
from ziggurat.system.errors import Problem

_TABLES = (HISTORIES, RESIDUALS, ATTENTIONS, INITIALISATIONS, MEMORIES)
_OF_SOME_KINDS = frozenset(option for table in _TABLES for facts in table.values() for option in facts.options)
_PLANNED = frozenset({"wiring.planned_encoder_layers", "wiring.planned_decoder_layers"})
_CONDITIONAL = _OF_SOME_KINDS | _PLANNED | {"embedding.max_positions", "attention.qk_length", "dropout.sublayer_unit"}
"""_CONDITIONAL are the keys that have an effect only with certain choices."""


def unused_settings(model: ModelConfig) -> Iterator[str]:
    """Yield the keys of `model` that are set but have no effect with its other choices."""
    idle = set(_CONDITIONAL - _heeded(model))
    # RNMT+ has no feed-forward networks, no fused query-key-value matrix and no gates, and uses lingvo's epsilon.
    if model.family == "rnmt":
        idle |= {"wiring.gpas"}
        presets = [PRESETS[model.preset]["d_ff"]] if model.preset else []  # not set by the user
        yield from _set("model", model, model.d_ff not in presets, "d_ff")
        yield from _set("model", model, True, "layer_norm_epsilon")
    for name in ("combination", "wiring", "attention", "embedding", "dropout"):
        section = getattr(model, name)
        keys = (key for key in type(section).model_fields if f"{name}.{key}" in idle)
        yield from _set(f"model.{name}", section, True, *keys)
    yield from _unused_in_inits(model)


def _unused_in_inits(model: ModelConfig) -> Iterator[str]:
    """Yield the keys without effect in `init` and in each stack's own `init`.

    A stack's `init` takes its missing keys from `init`: keys that matter there count as used in `init`, and those that
    do not are reported once.
    """
    inits, said = model.inits, InitConfig()
    if len(inits) == 3 and model.init.kind != said.kind and not INITIALISATIONS[model.init.kind].outside:
        yield "model.init.kind"  # both stacks have their own, and it has no effect outside them
    for name, init in inits.items():
        heeded = {option for one in (inits.values() if name == "init" else (init,)) for option in _heeded_in(one)}
        heeded -= {"init.qkv"} if model.family == "rnmt" else set()
        for key in InitConfig.model_fields:
            idle = (option := f"init.{key}") in _CONDITIONAL and option not in heeded
            if idle and getattr(init, key) != getattr(said, key):
                yield f"model.{name}.{key}"
        said = model.init


def _heeded_in(init: InitConfig) -> set[str]:
    """Return the conditional keys that matter for an initialisation's kind, such as `init.alpha`."""
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
"""_FILES maps a kind of `data.subword` to the keys of the files that it reads."""

_OF_TRAINED_PIECES = (
    *("vocabulary_size", "target_vocabulary_size", "joint"),
    *("byte_fallback", "character_coverage", "symbols", "sample_pairs"),
)

_HEEDED_BY_SCHEDULE = {
    "isqrt": {"peak", "warmup_updates", "initial", "floor"},
    "noam": {"factor", "warmup_updates"},
    "linear": {"peak", "warmup_updates", "initial", "floor", "decay_updates"},
    "cosine": {"peak", "warmup_updates", "initial", "floor", "decay_updates"},
    "wsd": {"peak", "warmup_updates", "initial", "floor", "decay_updates", "decay_share"},
    "constant": {"peak", "warmup_updates", "initial"},
    "gnmt+": {"warmup_updates", "base", "replicas", "decay_start", "decay_end"},
}


def unread_files(subword: SubwordConfig) -> list[Problem]:
    """Return a problem for each vocabulary file that is set but not read with this `subword.kind`."""
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
    """Yield the keys of section `data` that are set but have no effect with its other choices."""
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
    """Yield the keys of section `training` that are set but have no effect with its other choices."""
    schedule, divergence, validation = training.schedule, training.divergence, training.validation
    heeded = {"kind", "start", *_HEEDED_BY_SCHEDULE[schedule.kind]}
    if schedule.start == "peak":  # after warm-up, these two schedules do not depend on its length; others do
        heeded -= {"initial"} | (
            {"warmup_updates"} if schedule.kind in ("linear", "cosine", "wsd", "constant") else set()
        )
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
    """Yield the keys of section `decoding` that are set but have no effect with its other choices."""
    penalty = decoding.length_penalty
    yield from _set("decoding", decoding, decoding.diverse_groups == 1, "diverse_strength")
    yield from _set("decoding.length_penalty", penalty, penalty.kind == "none", "alpha")
    yield from _set("decoding.length_penalty", penalty, not penalty.coverage, "length_ratio")


def _set(path: str, section: BaseModel, idle: bool, *keys: str) -> Iterator[str]:
    """Yield the keys set to something other than the default, if they are `idle`."""
    for key, field in type(section).model_fields.items():
        if idle and key in keys and getattr(section, key) != field.default:
            yield f"{path}.{key}"


_warning = partial(Problem, severity="warning")
_note = partial(Problem, severity="note")


def notices(experiment: Experiment) -> list[Problem]:
    """Return a problem for every choice in `experiment` that is allowed but probably a mistake."""
    return [
        *data_notices(experiment.data),
        *_unused(experiment),
        *_recomputing(experiment),
        *_halves(experiment.model),
        *_training(experiment.training),
        *_same_in_both_passes(experiment),
    ]


def data_notices(data: DataConfig) -> list[Problem]:
    """Return a warning for each language, of `data` or of one corpus, that is not given as a code."""
    sides = {"data.source_language": data.source_language, "data.target_language": data.target_language}
    sides |= {
        f"{corpus_key}.{key}": code
        for _, corpus_key, corpus in data.corpora()
        for key in ("source_language", "target_language")
        if (code := getattr(corpus, key)) is not None
    }
    return [doubt for key, code in sides.items() if (doubt := language_doubt(code, key))]


def _unused(experiment: Experiment) -> Iterator[Problem]:
    training = experiment.training
    unused = [*unused_in_data(experiment.data), *unused_settings(experiment.model), *unused_in_training(training)]
    unused += unused_in_decoding(experiment.decoding)
    one_direction = len(set(map(experiment.data.languages_of, experiment.data.dev))) <= 1
    if one_direction and training.checkpoint.keep_best_per_direction:
        unused.append("training.checkpoint.keep_best_per_direction")
    for key in unused:
        yield _warning(key, f"`{key}` is set but has no effect with the other choices")


def _recomputing(experiment: Experiment) -> Iterator[Problem]:
    model, training = experiment.model, experiment.training
    if training.compile == "layers" and model.combination.unit == "sublayer":
        yield _warning(
            "training.compile",
            "`training.compile: layers` compiles nothing: with `combination.unit: sublayer` no layer is called",
        )
    for side, every, layers in (
        ("encoder", training.recompute.encoder, model.encoder.layers),
        ("decoder", training.recompute.decoder, model.decoder.layers),
    ):
        if isinstance(every, int) and every > layers:
            key = f"training.recompute.{side}"
            yield _warning(key, f"`{key}: {every}` recomputes nothing: the {side} has {layers} layers")


def _halves(model: ModelConfig) -> Iterator[Problem]:
    """Yield a problem for each method that the model, or one of its stacks, uses only half of."""
    residuals = {"encoder": model.residuals(decoder=False), "decoder": model.residuals(decoder=True)}
    yield from _residual_with_init(model, residuals)
    if model.init.kind == "uniform" and model.family != "rnmt":
        yield _warning(
            "model.init.kind",
            "`init.kind: uniform` is for RNMT+: in a Transformer it sets only embeddings and output projection, while "
            "the maps in its layers start as with `xavier`",
        )
    if model.wiring.gpas and "model.wiring.gpas" not in unused_settings(model):
        for side, its in residuals.items():
            if without := [kind for kind in dict.fromkeys(its) if "wiring.gpas" not in RESIDUALS[kind].options]:
                these = " and ".join(f"`residual: {kind}`" for kind in without)
                yield _note(
                    "model.wiring.gpas",
                    f"`wiring.gpas` gives no gates to the layers of the {side} with {these}, only to the others",
                )
    yield from _three_branches(model)
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        paper = residuals[side] == ("none",) * stack.layers and model.combination.unit == "sublayer"
        if stack.history in ("attention_residuals", "block_attention_residuals") and not paper:
            yield _warning(
                f"model.{side}.history",
                f"`{side}.history: {stack.history}` replaces residual connections in its paper (`residual: "
                "none` and `combination.unit: sublayer`); here it mixes streams that already include the layers below",
            )
    if "sub_ln" in residuals["decoder"] and model.decoder.attention not in ("full", "relative", "merged_full"):
        yield _warning(
            "model.decoder.attention",
            f"`residual: sub_ln` has no second norm inside `decoder.attention: {model.decoder.attention}`, only in "
            "feed-forward networks",
        )
    every = (*residuals["encoder"], *residuals["decoder"])
    if "hybrid" in every and "none" in (model.attention.qk_norm, model.attention.value_norm):
        yield _warning(
            "model.residual",
            "`residual: hybrid` leaves the normalisation of attention to attention itself:",
            "set `attention.qk_norm: rms` and `attention.value_norm: rms`",
        )
    if any(
        "ln_scaling" in its and model.stack_init(decoder=side == "decoder").kind == "depth_scaled"
        for side, its in residuals.items()
    ):
        yield _warning(
            "model.init.kind",
            "`residual: ln_scaling` with `init.kind: depth_scaled`: both damp deep layers, and the authors of "
            "LayerNorm Scaling leave out scaled initialisation because it cancels the gain (Sun et al. 2025)",
        )


def _residual_with_init(model: ModelConfig, residuals: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
    """Yield a warning if a residual kind and the initialisation of its paper are not in the same stacks."""
    every = dict.fromkeys((*residuals["encoder"], *residuals["decoder"]))
    for residual, facts in RESIDUALS.items():
        if facts.init is None:
            continue
        kind, elsewhere = facts.init, INITIALISATIONS[facts.init].elsewhere
        chosen = [side for side, its in residuals.items() if residual in its]
        by_kind = [side for side in residuals if model.stack_init(decoder=side == "decoder").kind == kind]
        if without := [side for side in chosen if side not in by_kind]:
            where = "" if without == chosen else f" in the {without[0]}"
            yield _warning(
                "model.residual", f"`residual: {residual}` without `init.kind: {kind}`{where} {facts.without_init}"
            )
        if by_kind and not chosen:
            here = " and ".join(f"`{its}`" for its in every)
            yield _warning(
                "model.init.kind", f"`init.kind: {kind}` was designed for `residual: {residual}`; here it is {here}"
            )
        for other in [side for side in by_kind if side not in chosen] if chosen and elsewhere else ():
            yield _warning(
                f"model.{other}.init.kind",
                f"`init.kind: {kind}` also {elsewhere} in the {other}, whose `residual: {residuals[other][-1]}` was "
                "not designed for that",
                f"choose `residual: {residual}` for both, or `model.{other}.init.kind: xavier`",
            )
        for side in [side for side in chosen if side in by_kind] if elsewhere else ():
            if others := list(dict.fromkeys(its for its in residuals[side] if its != residual)):
                these = " and ".join(f"`residual: {its}`" for its in others)
                yield _warning(
                    f"model.{side}.ranges",
                    f"`init.kind: {kind}` applies to all layers and {elsewhere} in those of the {side} with {these}, "
                    f"which were not designed for that (`model.{side}.ranges`)",
                )


def _three_branches(model: ModelConfig) -> Iterator[Problem]:
    """Yield a note for each method whose constants assume three branches if merged decoder layers have two."""
    if not ATTENTIONS[model.decoder.attention].merged:
        return
    decoder = RESIDUALS[model.decoder_residual]
    for kind, facts in INITIALISATIONS.items():
        in_residual = decoder.init == kind and decoder.depth_constants
        if facts.three_branches and (model.stack_init(decoder=True).kind == kind or in_residual):
            yield _note(
                "model.decoder.attention",
                f"the constants of {facts.three_branches} assume three branches per decoder layer, as in its paper; "
                f"with `decoder.attention: {model.decoder.attention}` there are two, so the decoder's first updates "
                "are smaller than necessary",
            )


def _training(training: TrainingConfig) -> Iterator[Problem]:
    schedule = training.schedule
    if schedule.kind == "gnmt+" and schedule.replicas == 1:
        yield _warning(
            "training.schedule.kind",
            "`training.schedule.kind: gnmt+` with `replicas: 1` has no warm-up: its rate rises from `base` to "
            "replicas * `base`, so it begins at its highest value",
            "set `replicas` to the number of batches in an update",
        )
    if schedule.start == "peak" and training.start_from is None:
        yield _warning(
            "training.schedule.start",
            "`training.schedule.start: peak` is for a trained model (`training.start_from`): here untrained weights "
            "start at the highest rate, without a warm-up",
        )
    if training.freeze and training.start_from is None:
        yield _warning(
            "training.freeze",
            "`training.freeze` without `training.start_from` freezes random initial weights",
        )
    if cold := warm_up_notice(training):
        yield cold
    ends, last = schedule.decay_updates, training.stop.updates
    if schedule.kind in ("linear", "cosine") and ends and last and last > ends and schedule.floor < schedule.peak / 100:
        yield _warning(
            "training.schedule.decay_updates",
            f"`training.schedule` ends at update {ends:,} (`decay_updates`), training at {last:,} (`stop.updates`): "
            f"the {last - ends:,} updates in between have a learning rate of {schedule.floor:.3g} and change little",
            "leave `decay_updates` out, or set `floor` to the rate for those updates",
        )
    if training.growth is not None and (cut := cut_short(training.growth, training.stop)):
        yield cut


def _same_in_both_passes(experiment: Experiment) -> Iterator[Problem]:
    """Yield a problem for each kind of dropout that R-Drop, which compares two passes, does not see."""
    model = experiment.model
    if not experiment.training.loss.r_drop:
        return
    shared = {f"model.{side}.layer_drop": getattr(model, side).layer_drop for side in ("encoder", "decoder")}
    shared["model.dropout.sublayer"] = model.dropout.sublayer if model.dropout.sublayer_unit == "batch" else 0.0
    for key in (key for key, share in shared.items() if share):
        yield _warning(
            key,
            f"`training.loss.r_drop` compares two passes that differ by dropout, but `{key}` drops the same in both",
            "set `model.dropout.sublayer_unit: sample`" if key.endswith("sublayer") else "",
        )


def warm_up_notice(training: TrainingConfig) -> Problem | None:
    """Return a warning if training ends before its learning rate has risen to its peak."""
    schedule, last = training.schedule, training.stop.updates
    steps = schedule.warmup_end
    one_replica = schedule.kind == "gnmt+" and schedule.replicas == 1
    if schedule.start == "peak" or one_replica or last is None or steps <= last:
        return None
    done = last / steps
    if schedule.kind in ("noam", "gnmt+"):
        reached = f"{done:.0%} of the way to its peak"
    else:
        reached = f"{schedule.initial + (schedule.peak - schedule.initial) * done:.3g} of `peak: {schedule.peak:.3g}`"
    times = f" (times `replicas: {schedule.replicas}`)" if schedule.kind == "gnmt+" else ""
    return _warning(
        "training.schedule.warmup_updates",
        f"`training.schedule.warmup_updates: {schedule.warmup_updates}`{times} is more than `training.stop.updates: "
        f"{last}`: the learning rate is still rising when training ends, at {reached}, so little is learnt",
        "lower `warmup_updates`, to a tenth to a third of the updates, or train longer",
        named=("training.stop.updates",),
    )
