"""Settings that mean nothing beside the others are named; refused sizes and families say why."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from tests.composition import refusal
from tests.config.update_golden import load_once
from ziggurat.config.compatibility import unheeded, unlike
from ziggurat.config.experiment import Experiment
from ziggurat.config.kinds import INITIALISATIONS
from ziggurat.config.model import ModelConfig
from ziggurat.config.notices import notices, unheeded_in_data, unheeded_in_decoding, unheeded_in_training
from ziggurat.config.recipes import recipe_names
from ziggurat.train.schedule import learning_rate

DATA = {
    "store": "store",
    "source_language": "de",
    "target_language": "en",
    "train": [{"source": "a", "target": "b"}],
}

METHODS = {"deepnorm": "deepnorm", "no_norm": "t_fixup", "fixup": "fixup"}
"""Residual -> the initialisation that goes with it."""


RNMT = {"family": "rnmt", "embedding": {"positions": "none", "sharing": "none"}}
PLANNED = {"wiring": {"planned_encoder_layers": 30}}


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({}, []),
        ({"combination": {"softmax": True}}, ["model.combination.softmax"]),
        ({"encoder": {"history": "dlcl"}, "combination": {"softmax": True}}, []),
        ({"encoder": {"history": "depth_weighted"}, "combination": {"window": 2}}, ["model.combination.window"]),
        ({"encoder": {"history": "depth_weighted"}, "combination": {"period": 2}}, []),
        ({"wiring": {"omega_trainable": False}}, ["model.wiring.omega_trainable"]),
        ({"decoder": {"residual": "admin"}, "wiring": {"omega_trainable": False}}, []),
        ({"init": {"exponent": 0.5}}, ["model.init.exponent"]),
        ({"init": {"kind": "depth_scaled", "exponent": 0.5}}, []),
        ({"init": {"exponent": 0.5}, "encoder": {"init": {"kind": "depth_scaled"}}}, []),
        ({"encoder": {"init": {"exponent": 0.5}}}, ["model.encoder.init.exponent"]),
        ({"init": {"exponent": 0.5}, "decoder": {"init": {"qkv": "separate"}}}, ["model.init.exponent"]),
        ({"init": {"kind": "depth_scaled"}, "encoder": {"init": {"kind": "xavier"}}}, []),
        ({"init": {"kind": "depth_scaled"}, "encoder": {"init": {"kind": "xavier"}},
          "decoder": {"init": {"kind": "xavier"}}}, ["model.init.kind"]),
        ({"residual": "no_norm", "init": {"kind": "t_fixup"}, "encoder": {"init": {"kind": "xavier"}},
          "decoder": {"init": {"kind": "xavier"}}}, []),
        ({**RNMT, "layer_norm_epsilon": 1e-3, "init": {"qkv": "separate"}},
         ["model.layer_norm_epsilon", "model.init.qkv"]),
        ({**RNMT, "d_ff": 99, "wiring": {"gpas": True}}, ["model.d_ff", "model.wiring.gpas"]),
        ({"residual": "layer_scale", "wiring": {"gpas": True}}, ["model.wiring.gpas"]),
        ({**RNMT, "preset": "big"}, []),
        ({"attention": {"share_value": False}, "dropout": {"transparent": 0.2}},
         ["model.attention.share_value", "model.dropout.transparent"]),
        ({"encoder": {"history": "dlcl"}, "combination": {"norm": "none", "normalize_embedding": True}},
         ["model.combination.normalize_embedding"]),
        ({"encoder": {"history": "dlcl", "residual": "pre"}, "decoder": {"history": "dlcl"}, "residual": "rezero",
          "combination": {"normalize_embedding": True}}, []),
        (PLANNED, ["model.wiring.planned_encoder_layers"]),
        ({**PLANNED, "dropout": {"sublayer": 0.1}}, []),
    ],
)  # fmt: skip
def test_settings_without_meaning_are_named(values: dict[str, Any], keys: list[str]) -> None:
    assert unheeded(ModelConfig.model_validate(values)) == keys


EXISTING = {"kind": "existing", "source_model": "a.spm"}


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"data.subword": {"vocabulary_size": 99, "joint": True, "sample_pairs": 9}}, []),
        ({"data.subword": {**EXISTING, "vocabulary_size": 99, "byte_fallback": False, "character_coverage": 0.9}},
         ["subword.vocabulary_size", "subword.byte_fallback", "subword.character_coverage"]),
        ({"data.subword": {**EXISTING, "symbols": ["<>"], "target_vocabulary_size": 99}},  # of a run
         ["subword.target_vocabulary_size", "subword.symbols"]),
        ({"data.subword": {"kind": "vocabulary", "source_vocabulary": "a", "joint": False, "sample_pairs": 9}},
         ["subword.joint", "subword.sample_pairs"]),
        ({"data.subword": {"source_model": "a.spm"}}, ["subword.source_model"]),
        ({"data.dev": [{"path": "a.tsv"}, {"path": "b.tsv", "weight": 2}]}, ["dev.1.weight"]),
        ({"data.filters": {"min_script_share": 0.9}}, ["filters.min_script_share"]),
        ({"data.filters": {"min_script_share": 0.9, "target_script": "Latin"}}, []),
        ({"data.filters": {"min_script_share": 0.9},
          "data.train": [{"path": "a.tsv", "filters": {"source_script": "Latin"}}]}, []),
        ({"data.alignment": {"symmetrise": "union", "pairs": 9}}, ["alignment.symmetrise", "alignment.pairs"]),
        ({"data.alignment": {"compute": "hmm", "symmetrise": "union", "pairs": 9}}, []),
        ({"training.validation": {"beam_size": 2, "max_sentences": 9, "max_length": None, "max_share": 0.5}}, []),
        ({"training.validation": {"decode": False, "beam_size": 2, "max_sentences": 9, "max_length": None}},
         ["validation.beam_size", "validation.max_length", "validation.max_sentences"]),
        ({"training.validation": {"metric": "bleu", "max_share": 0.5}}, ["validation.max_share"]),
        ({"training": {"start_from": "m", "schedule": {"start": "peak", "initial": 0.0}}}, ["schedule.initial"]),
        ({"training": {"start_from": "m", "schedule": {"start": "peak"}, "stop": {"updates": 5}}}, []),
        ({"training": {"start_from": "m", "schedule": {"start": "peak", "warmup_updates": 9, "kind": "constant"}}},
         ["schedule.warmup_updates"]),
        ({"training.checkpoint": {"keep_best_per_direction": 2}, "data.dev": [{"path": "a.tsv"}, {"path": "b.tsv"}]},
         ["checkpoint.keep_best_per_direction"]),
        ({"training.checkpoint": {"keep_best_per_direction": 2},
          "data.dev": [{"path": "a.tsv"}, {"path": "b.tsv", "source_language": "fr"}]}, []),
        ({"decoding": {"diverse_strength": 0.9}}, ["diverse_strength"]),
        ({"decoding": {"diverse_strength": 0.9, "diverse_groups": 2}}, []),
        ({"decoding.length_penalty": {"kind": "none", "alpha": 1.0}}, ["length_penalty.alpha"]),
        ({"decoding.length_penalty": {"kind": "gnmt", "alpha": 1.0, "length_ratio": 1.1}},
         ["length_penalty.length_ratio"]),
        ({"decoding.length_penalty": {"kind": "lingvo", "coverage": 0.1, "length_ratio": 1.1}}, []),
    ],
)  # fmt: skip
def test_settings_without_meaning_in_other_sections_are_told(settings: dict[str, Any], keys: list[str]) -> None:
    changes: dict[str, Any] = {"data": DATA}
    for path, values in settings.items():
        section, _, key = path.partition(".")
        changes[section] = {**changes.get(section, {}), **({key: values} if key else values)}
    section = next(iter(settings)).partition(".")[0]
    said = notices(Experiment.model_validate(changes))
    assert said == [f"`{section}.{key}` is set, but has no effect beside the other choices" for key in keys]


@pytest.mark.slow
def test_recipes_set_nothing_that_has_no_effect() -> None:
    """Sections outside the model, which is that of a paper's table."""
    for name in recipe_names():
        experiment = load_once(name)
        unheeded = unheeded_in_data(experiment.data), unheeded_in_training(experiment.training)
        assert (*unheeded, unheeded_in_decoding(experiment.decoding)) == ([], [], []), name


@pytest.mark.parametrize(
    ("stacks", "said"),
    [
        ({"decoder": {"residual": "layer_scale"}}, ["of the decoder with `residual: layer_scale`"]),
        ({"encoder": {"ranges": [{"layers": 2, "residual": "keel"}]}}, ["of the encoder with `residual: keel`"]),
        ({"encoder": {"ranges": [{"layers": 2, "residual": "post"}]}}, []),
    ],
)
def test_layers_without_gates_are_told(stacks: dict[str, Any], said: list[str]) -> None:
    model = {**stacks, "wiring": {"gpas": True}}
    found = notices(Experiment.model_validate({"data": DATA, "model": model}))
    assert found == [f"`wiring.gpas` gives no gates to the layers {which}, only to the others" for which in said]


@pytest.mark.parametrize(
    ("schedule", "updates", "reached"),
    [
        ({"warmup_updates": 1000, "initial": 0.0}, 300, "at 0.0003 of `peak: 0.001`, so"),
        ({"kind": "noam", "warmup_updates": 1000}, 300, "at 30% of the way to its peak, so"),
        ({"kind": "gnmt+", "warmup_updates": 100, "replicas": 8}, 400, "at 50% of the way to its peak, so"),
        ({"warmup_updates": 300}, 300, None),
        ({"warmup_updates": 4000}, None, None),
        ({"kind": "gnmt+", "warmup_updates": 100, "replicas": 4}, 400, None),
    ],
)
def test_a_training_that_ends_within_its_warm_up_is_told(
    schedule: dict[str, Any], updates: int | None, reached: str | None
) -> None:
    training = {"schedule": schedule, "stop": {"updates": updates, "epochs": 9}}
    said = notices(Experiment.model_validate({"data": DATA, "training": training}))
    if reached is None:
        assert said == []
        return
    (sentence,) = said
    assert sentence.startswith(f"`training.schedule.warmup_updates: {schedule['warmup_updates']}`")
    assert f"is more than `training.stop.updates: {updates}`: the learning rate still rises" in sentence
    assert reached in sentence


def test_initial_weights_at_the_highest_rate_are_told() -> None:
    said = notices(Experiment.model_validate({"data": DATA, "training": {"schedule": {"start": "peak"}}}))
    assert [sentence.split("`")[1] for sentence in said] == ["training.schedule.start: peak"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        *(({"encoder": {"init": {"kind": kind}}}, rf"`encoder\.init\.kind: {kind}` also .* set `init\.kind: {kind}`")
          for kind, facts in INITIALISATIONS.items() if facts.outside),
        ({"residual": "admin", "encoder": {"residual": "pre", "init": {"kind": "admin"}}},
         r"`encoder\.init\.kind: admin` .* in the encoder"),
        ({"encoder": {"residual": "admin", "init": {"kind": "xavier"}}, "init": {"kind": "admin"}},
         r"`init\.kind: admin` sets the skip vectors"),
        ({"residual": "admin", "encoder": {"init": {"kind": "admin", "profile_tokens": 9}},
          "decoder": {"init": {"kind": "admin"}}}, "`profile_tokens` differ"),
        ({**RNMT, "encoder": {"init": {"kind": "xavier"}}}, r"`encoder\.init` is for `family: transformer"),
        ({"transfer": {"width": 64, "encoder_layers": 2, "decoder_layers": 2}, "init": {"kind": "xavier"},
          "decoder": {"init": {"kind": "depth_scaled"}}}, r"not worked out for `decoder\.init\.kind: depth_scaled`"),
    ],
)  # fmt: skip
def test_initialisations_that_one_stack_cannot_have(model: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ModelConfig.model_validate(model)


def test_notices_are_sentences_about_what_is_hardly_meant() -> None:
    model = {"residual": "post", "encoder": {"residual": "admin"}, "combination": {"softmax": True}}
    setting, omega = notices(Experiment.model_validate({"data": DATA, "model": model}))
    assert setting.startswith("`model.combination.softmax` is set")
    assert omega == "`residual: admin` without `init.kind: admin` starts as plain post-norm, omega 1"
    training = {"schedule": {"kind": "noam", "peak": 0.1, "factor": 2.0}, "optimiser": {"momentum": 0.5}}
    said = notices(Experiment.model_validate({"data": DATA, "training": training}))
    assert [sentence.split("`")[1] for sentence in said] == ["training.schedule.peak", "training.optimiser.momentum"]
    halves = notices(Experiment.model_validate({"data": DATA, "model": {"init": {"kind": "t_fixup"}}}))
    assert halves == ["`init.kind: t_fixup` was made for `residual: no_norm`; here it is `pre`"]
    model = {"residual": "admin", "init": {"kind": "admin"}}
    assert notices(Experiment.model_validate({"data": DATA, "model": model})) == []


@pytest.mark.parametrize(
    ("model", "said"),
    [
        *(({"residual": residual, "init": {"kind": kind}}, []) for residual, kind in METHODS.items()),
        *(({"encoder": {"residual": residual}, "init": {"kind": kind}},
           [rf"`init\.kind: {kind}` .* in the decoder too, whose `residual: pre`.*`model\.decoder\.init"])
          for residual, kind in METHODS.items()),
        *(({"residual": "post", "decoder": {"residual": residual}, "init": {"kind": kind}},
           ["in the encoder too, whose `residual: post`"]) for residual, kind in METHODS.items()),
        ({"encoder": {"residual": "admin"}, "init": {"kind": "admin"}}, []),
        ({"encoder": {"residual": "deepnorm"}, "decoder": {"residual": "no_norm"}, "init": {"kind": "deepnorm"}},
         [r"decoder too, whose `residual: no_norm`", r"`residual: no_norm` without `init\.kind: t_fixup`"]),
        ({"residual": "post", "encoder": {"residual": "pre"}, "init": {"kind": "fixup"}},
         ["here it is `pre` and `post`"]),
        ({"residual": "deepnorm", "init": {"kind": "deepnorm"}, "decoder": {"attention": "merged_full"}},
         [r"constants of DeepNorm count three branches.*`decoder\.attention: merged_full`"]),
        ({"residual": "no_norm", "init": {"kind": "t_fixup"}, "decoder": {"attention": "merged"}},
         ["constants of T-Fixup count three"]),
        ({"residual": "fixup", "init": {"kind": "fixup"}, "decoder": {"attention": "merged"}}, []),
        ({"residual": "deepnorm", "init": {"kind": "deepnorm"},
          "decoder": {"ranges": [{"layers": 1, "residual": "pre"}, {"layers": 2, "residual": "deepnorm"}]}},
         [r"in those of the decoder with `residual: pre` too.*`model\.decoder\.ranges`"]),
        ({"residual": "admin", "init": {"kind": "admin"}, "encoder": {"ranges": [{"layers": 1, "residual": "pre"}]}},
         []),
        ({"encoder": {"residual": "ln_scaling"}, "init": {"kind": "depth_scaled"}}, ["cancels the gain"]),
        ({"encoder": {"residual": "ln_scaling"}, "decoder": {"init": {"kind": "depth_scaled"}}}, []),
        *(({"encoder": {"residual": residual, "init": {"kind": kind}}}, [])
          for residual, kind in METHODS.items() if kind in ("deepnorm", "magneto")),
        ({"residual": "deepnorm", "init": {"kind": "deepnorm"}, "decoder": {"init": {"kind": "xavier"}}},
         [r"`residual: deepnorm` without `init\.kind: deepnorm` in the decoder has the paper's constant"]),
        ({"residual": "ln_scaling"}, []),
        ({"init": {"kind": "uniform"}}, [r"is RNMT\+'s: of a Transformer it sets embeddings"]),
        ({**RNMT, "init": {"kind": "uniform"}}, []),
    ],
)  # fmt: skip
def test_half_chosen_methods_and_those_that_work_against_each_other_are_told(
    model: dict[str, Any], said: list[str]
) -> None:
    found = notices(Experiment.model_validate({"data": DATA, "model": model}))
    assert len(found) == len(said)
    assert all(re.search(pattern, sentence) for pattern, sentence in zip(said, found, strict=True))


@pytest.mark.parametrize("replicas", [1, 8])
def test_a_schedule_of_one_replica_has_no_warm_up_and_that_is_told(replicas: int) -> None:
    training = {"schedule": {"kind": "gnmt+", "replicas": replicas, "warmup_updates": 500}}
    experiment = Experiment.model_validate({"data": DATA, "training": training})
    rates = [learning_rate(experiment.training.schedule, update, d_model=8) for update in (1, 100)]
    assert (rates[0] == rates[1]) == (replicas == 1)
    assert [s for s in notices(experiment) if "no warm-up" in s] == notices(experiment)
    assert len(notices(experiment)) == (replicas == 1)


@pytest.mark.parametrize(
    ("choices", "word"),
    [
        ({"d_model": 15}, "multiple of `heads`"),
        ({"encoder.d_model": 20}, "needs equal widths"),
        ({"encoder.d_model": 20, "embedding.sharing": "decoder", "encoder.heads": 3}, r"encoder\.heads"),
        ({"encoder.d_model": 20, "embedding.sharing": "none", "embedding.shared_bias": True}, "equal widths"),
        ({"d_model": 14, "embedding.positions": "rotary"}, "is odd"),
        ({"heads": 1, "d_model": 15}, "even `d_model`"),
        ({"encoder.history": "dlcl", "combination.groups": 3}, "does not divide"),
        ({"residual": "b2t", "encoder.history": "dlcl", "combination.unit": "sublayer"}, "no input of its own"),
        ({"family": "rnmt"}, r"embedding\.positions: none"),
        ({"family": "rnmt", "residual": "post"}, "for `family: transformer`"),
        ({"family": "rnmt", "embedding.positions": "none"}, r"embedding\.sharing: none"),
        ({"family": "rnmt", "init.kind": "deepnorm"}, "RNMT"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(choices: dict[str, Any], word: str) -> None:
    reason = refusal(choices)
    assert reason is not None
    assert re.search(word, reason)


def test_a_wide_encoder_is_allowed() -> None:
    assert refusal({"encoder.d_model": 20, "embedding.sharing": "decoder"}) is None


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"dropout": {"residual": 0.3}, "init": {"kind": "depth_scaled"}, "encoder": {"layer_drop": 0.1}}, []),
        ({"preset": "base", "encoder": {"d_model": 512, "residual": "pre"}}, []),
        ({"attention": {"relative_clip": 3}, "wiring": {"planned_encoder_layers": 9}}, []),
        ({"heads": 4}, ["heads", "encoder.heads"]),
        ({"residual": "b2t"}, ["encoder.residual", "decoder.residual"]),
        ({"encoder": {"layers": 7}}, ["encoder.layers"]),
        ({"embedding": {"positions": "rotary"}}, ["embedding.positions"]),
        ({"encoder": {"layer_norm_epsilon": 1e-5}}, []),
        ({"encoder": {"layer_norm_epsilon": 1e-6}}, ["encoder.layer_norm_epsilon"]),
        ({"layer_norm_epsilon": 1e-6, "encoder": {"layer_norm_epsilon": 1e-5}}, ["decoder.layer_norm_epsilon"]),
    ],
)
def test_what_makes_weights_compute_something_else_is_named(changes: dict[str, Any], keys: list[str]) -> None:
    found = unlike(ModelConfig(), ModelConfig.model_validate(changes))
    assert sorted(line.split(":")[0] for line in found) == sorted(f"model.{key}" for key in keys)


@pytest.mark.parametrize(
    ("model", "changes", "keys"),
    [
        ({"encoder": {"history": "dlcl"}}, {"combination": {"norm": "sources"}}, []),
        ({"encoder": {"history": "dlcl"}}, {"combination": {"norm": "consumers"}}, ["combination.norm"]),
        ({"decoder": {"history": "dlcl"}, "residual": "post"}, {"combination": {"norm": "consumers"}}, []),
        ({"encoder": {"history": "dlcl", "residual": "post"}, "decoder": {"history": "dlcl"}},
         {"combination": {"norm": "consumers"}}, ["combination.norm"]),
        ({"encoder": {"history": "blocks"}}, {"combination": {"period": 6}}, []),
        ({"encoder": {"history": "blocks"}}, {"combination": {"period": 3}}, ["combination.period"]),
        ({"decoder": {"history": "depth_weighted"}}, {"combination": {"period": 1}}, []),
        ({"attention": {"qk_norm": "l2"}}, {"attention": {"qk_norm": "l2", "qk_length": 50}}, []),
        ({"attention": {"qk_norm": "rms"}},
         {"layer_norm_epsilon": 1e-6, **{stack: {"layer_norm_epsilon": 1e-5} for stack in ("encoder", "decoder")}},
         ["layer_norm_epsilon"]),
        ({"family": "rnmt", "embedding": {"positions": "none", "sharing": "none"}}, {"layer_norm_epsilon": 1e-6}, []),
    ],
)  # fmt: skip
def test_a_default_that_is_written_out_changes_nothing(
    model: dict[str, Any], changes: dict[str, Any], keys: list[str]
) -> None:
    found = unlike(ModelConfig.model_validate(model), ModelConfig.model_validate({**model, **changes}))
    assert [line.split(":")[0] for line in found] == [f"model.{key}" for key in keys]


def test_fixed_combinations_are_part_of_what_is_computed() -> None:
    """They are not in the model's file: they follow from the configuration."""
    encoder = {"history": "dlcl"}
    one, average = (
        ModelConfig.model_validate({"encoder": encoder, "combination": {"learnable": False, "start": start}})
        for start in ("one", "average")
    )
    assert unlike(one, average) == ["model.combination.start: one -> average"]
    learned = ModelConfig.model_validate({"encoder": encoder, "combination": {"start": "one"}})
    assert unlike(learned, ModelConfig.model_validate({"encoder": encoder})) == []


def test_deepnorm_weights_belong_to_the_depth_of_their_constants() -> None:
    deep = ModelConfig.model_validate({"residual": "deepnorm", "encoder": {"layers": 6}})
    kept = ModelConfig.model_validate({"residual": "deepnorm", "wiring": {"planned_encoder_layers": 3}})
    assert unlike(deep, kept) == ["model.wiring.planned_encoder_layers: 6 -> 3"]
