"""Rules on choices that are allowed, but probably mistakes. Keys are those of an experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from ziggurat.config.data import DataConfig
from ziggurat.config.experiment import Experiment
from ziggurat.config.growth import cut_short
from ziggurat.config.kinds import ATTENTIONS, INITIALISATIONS, RESIDUALS
from ziggurat.config.languages import language_doubt
from ziggurat.config.model import ModelConfig
from ziggurat.config.rules.unused import unused_in_data, unused_in_decoding, unused_in_training, unused_settings
from ziggurat.config.train import TrainingConfig
from ziggurat.system.errors import Problem

_warning = partial(Problem, severity="warning")
_note = partial(Problem, severity="note")


def notices(experiment: Experiment) -> list[Problem]:
    """Return a problem for every choice of `experiment` that is allowed, but probably a mistake."""
    return [
        *data_notices(experiment.data),
        *_unused(experiment),
        *_recomputing(experiment),
        *_halves(experiment.model),
        *_training(experiment.training),
    ]


def data_notices(data: DataConfig) -> list[Problem]:
    """Return a warning for each side, of all corpora or of one, whose language is given by anything but a code."""
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
        yield _warning(key, f"`{key}` is set, but has no effect beside the other choices")


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
    """Yield a problem for each method of which the model, or one of its stacks, has half."""
    residuals = {"encoder": model.residuals(decoder=False), "decoder": model.residuals(decoder=True)}
    yield from _residual_with_init(model, residuals)
    if model.init.kind == "uniform" and model.family != "rnmt":
        yield _warning(
            "model.init.kind",
            "`init.kind: uniform` is RNMT+'s: of a Transformer it sets embeddings and output projection alone, and the "
            "maps in its layers start as in `xavier`",
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
                f"`{side}.history: {stack.history}` takes the place of residual connections in its paper: `residual: "
                "none` and `combination.unit: sublayer`; here it mixes streams that hold what is below them already",
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
            "`residual: ln_scaling` beside `init.kind: depth_scaled`: both damp deep layers, and the authors of "
            "LayerNorm Scaling leave scaled initialisation out because it cancels the gain (Sun et al. 2025)",
        )


def _residual_with_init(model: ModelConfig, residuals: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
    """Yield where a residual kind and the initialisation that its paper has with it are not in the same stacks."""
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
                "model.init.kind", f"`init.kind: {kind}` was made for `residual: {residual}`; here it is {here}"
            )
        for other in [side for side in by_kind if side not in chosen] if chosen and elsewhere else ():
            yield _warning(
                f"model.{other}.init.kind",
                f"`init.kind: {kind}` {elsewhere} in the {other} too, whose `residual: {residuals[other][-1]}` was not "
                "made for that",
                f"choose `residual: {residual}` for both, or `model.{other}.init.kind: xavier`",
            )
        for side in [side for side in chosen if side in by_kind] if elsewhere else ():
            if others := list(dict.fromkeys(its for its in residuals[side] if its != residual)):
                these = " and ".join(f"`residual: {its}`" for its in others)
                yield _warning(
                    f"model.{side}.ranges",
                    f"`init.kind: {kind}` is for all layers: it {elsewhere} in those of the {side} with {these} "
                    f"too, which were not made for that (`model.{side}.ranges`)",
                )


def _three_branches(model: ModelConfig) -> Iterator[Problem]:
    """Yield a note for each method whose constants count three branches where a merged decoder layer has two."""
    if not ATTENTIONS[model.decoder.attention].merged:
        return
    decoder = RESIDUALS[model.decoder_residual]
    for kind, facts in INITIALISATIONS.items():
        in_residual = decoder.init == kind and decoder.depth_constants
        if facts.three_branches and (model.stack_init(decoder=True).kind == kind or in_residual):
            yield _note(
                "model.decoder.attention",
                f"the constants of {facts.three_branches} count three branches to a decoder layer, as its paper has; "
                f"with `decoder.attention: {model.decoder.attention}` there are two, so the decoder's first updates "
                "are smaller than they need be",
            )


def _training(training: TrainingConfig) -> Iterator[Problem]:
    schedule = training.schedule
    if schedule.kind == "gnmt+" and schedule.replicas == 1:
        yield _warning(
            "training.schedule.kind",
            "`training.schedule.kind: gnmt+` with `replicas: 1` has no warm-up: its rate rises from `base` to "
            "replicas * `base`, so it begins at its highest",
            "set `replicas` to the number of batches in an update",
        )
    if schedule.start == "peak" and training.start_from is None:
        yield _warning(
            "training.schedule.start",
            "`training.schedule.start: peak` is for a model that is trained already (`training.start_from`): initial "
            "weights begin at the highest rate, without a warm-up",
        )
    if training.freeze and training.start_from is None:
        yield _warning(
            "training.freeze",
            "`training.freeze` without `training.start_from`: initial weights, which are random, stay as they are",
        )
    if cold := warm_up_notice(training):
        yield cold
    if training.growth is not None and (cut := cut_short(training.growth, training.stop)):
        yield cut


def warm_up_notice(training: TrainingConfig) -> Problem | None:
    """Return a warning where training ends before its learning rate has risen to its peak."""
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
        f"{last}`: the learning rate still rises when training ends, at {reached}, so little is learnt",
        "lower `warmup_updates`, to a tenth to a third of the updates, or train longer",
        named=("training.stop.updates",),
    )
