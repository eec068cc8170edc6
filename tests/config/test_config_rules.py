"""Rules: settings that have no effect next to others, choices that are hardly intended, and impossible combinations."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.composition import refusal
from tests.config.update_golden import load_once
from ziggurat.config.experiment import Experiment
from ziggurat.config.kinds import INITIALISATIONS
from ziggurat.config.model import ModelConfig
from ziggurat.config.notices import notices, unused_in_data, unused_in_decoding, unused_in_training, unused_settings
from ziggurat.config.recipes import recipe_names
from ziggurat.system.errors import ConfigError, Problem
from ziggurat.train.schedule import learning_rate

DATA = {
    "store": "store",
    "source_language": "de",
    "target_language": "en",
    "train": [{"source": "a", "target": "b"}],
}

METHODS = {"deepnorm": "deepnorm", "no_norm": "t_fixup", "fixup": "fixup"}
"""METHODS maps a residual to the initialisation that goes with it."""


def model_notices(model: dict[str, Any]) -> list[Problem]:
    return notices(Experiment.model_validate({"data": DATA, "model": model}))


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
def test_settings_without_effect_are_reported(values: dict[str, Any], keys: list[str]) -> None:
    assert list(unused_settings(ModelConfig.model_validate(values))) == keys


EXISTING = {"kind": "existing", "source_model": "a.spm"}


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"data.subword": {"vocabulary_size": 99, "joint": True, "sample_pairs": 9}}, []),
        ({"data.subword": {**EXISTING, "vocabulary_size": 99, "byte_fallback": False, "character_coverage": 0.9}},
         ["subword.vocabulary_size", "subword.byte_fallback", "subword.character_coverage"]),
        ({"data.subword": {**EXISTING, "symbols": ["<>"], "target_vocabulary_size": 99}},  # settings of a run
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
def test_settings_without_effect_in_other_sections_are_reported(settings: dict[str, Any], keys: list[str]) -> None:
    changes: dict[str, Any] = {"data": DATA}
    for path, values in settings.items():
        section, _, key = path.partition(".")
        changes[section] = {**changes.get(section, {}), **({key: values} if key else values)}
    section = next(iter(settings)).partition(".")[0]
    found = notices(Experiment.model_validate(changes))
    assert [(problem.key, problem.severity) for problem in found] == [(f"{section}.{key}", "warning") for key in keys]


@pytest.mark.slow
def test_recipes_set_nothing_that_has_no_effect() -> None:
    """Return the sections other than the model; the model is that of a paper's table."""
    for name in recipe_names():
        experiment = load_once(name)
        unused = [*unused_in_data(experiment.data), *unused_in_training(experiment.training)]
        assert [*unused, *unused_in_decoding(experiment.decoding)] == [], name


@pytest.mark.parametrize(
    ("stacks", "sides"),
    [
        ({"decoder": {"residual": "layer_scale"}}, ["decoder"]),
        ({"encoder": {"ranges": [{"layers": 2, "residual": "keel"}]}}, ["encoder"]),
        ({"encoder": {"ranges": [{"layers": 2, "residual": "post"}]}}, []),
    ],
)
def test_layers_without_gates_are_noted(stacks: dict[str, Any], sides: list[str]) -> None:
    found = model_notices({**stacks, "wiring": {"gpas": True}})
    assert [(problem.key, problem.severity) for problem in found] == [("model.wiring.gpas", "note")] * len(sides)
    assert all(f"of the {side} with" in str(problem) for side, problem in zip(sides, found, strict=True))


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
def test_a_training_that_ends_within_its_warm_up_is_reported(
    schedule: dict[str, Any], updates: int | None, reached: str | None
) -> None:
    training = {"schedule": schedule, "stop": {"updates": updates, "epochs": 9}}
    found = notices(Experiment.model_validate({"data": DATA, "training": training}))
    keys = [("training.schedule.warmup_updates", "training.stop.updates")]
    assert [(problem.key, *problem.named) for problem in found] == ([] if reached is None else keys)
    assert reached is None or reached in str(found[0])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("ends", "last", "floor", "told"),
    [
        (40, 80, 1e-9, True),
        (40, 41, 0.0, True),
        (40, 40, 0.0, False),
        (80, 40, 0.0, False),
        (None, 80, 0.0, False),
        (40, 80, 1e-3, False),
    ],
)
def test_updates_after_the_end_of_a_schedule_are_reported(
    kind: str, ends: int | None, last: int, floor: float, told: bool
) -> None:
    schedule = {"kind": kind, "peak": 1e-2, "warmup_updates": 4, "decay_updates": ends, "floor": floor}
    found = notices(
        Experiment.model_validate({"data": DATA, "training": {"schedule": schedule, "stop": {"updates": last}}})
    )
    assert ("training.schedule.decay_updates" in [problem.key for problem in found]) == told


def test_initial_weights_at_the_highest_rate_are_reported() -> None:
    found = notices(Experiment.model_validate({"data": DATA, "training": {"schedule": {"start": "peak"}}}))
    assert [problem.key for problem in found] == ["training.schedule.start"]


@pytest.mark.parametrize(
    ("model", "key"),
    [
        *(({"encoder": {"init": {"kind": kind}}}, "encoder.init.kind")
          for kind, facts in INITIALISATIONS.items() if facts.outside),
        ({"residual": "admin", "encoder": {"residual": "pre", "init": {"kind": "admin"}}}, "encoder.init.kind"),
        ({"encoder": {"residual": "admin", "init": {"kind": "xavier"}}, "init": {"kind": "admin"}}, "init.kind"),
        ({"residual": "admin", "encoder": {"init": {"kind": "admin", "profile_tokens": 9}},
          "decoder": {"init": {"kind": "admin"}}}, "init.profile_tokens"),
        ({**RNMT, "encoder": {"init": {"kind": "xavier"}}}, "encoder.init"),
        ({"transfer": {"width": 64, "encoder_layers": 2, "decoder_layers": 2}, "init": {"kind": "xavier"},
          "decoder": {"init": {"kind": "depth_scaled"}}}, "transfer"),
    ],
)  # fmt: skip
def test_initialisations_that_one_stack_cannot_have(model: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as error:
        ModelConfig.model_validate(model)
    rule = error.value.errors()[0]["ctx"]["error"]
    assert isinstance(rule, ConfigError)
    assert rule.problems[0].key == key


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ({"encoder": {"layer_drop": 0.2}}, ["model.encoder.layer_drop"]),
        ({"dropout": {"sublayer": 0.1}}, ["model.dropout.sublayer"]),
        ({"dropout": {"sublayer": 0.1, "sublayer_unit": "sample"}}, []),
    ],
)
def test_r_drop_does_not_see_what_both_passes_drop(model: dict[str, Any], keys: list[str]) -> None:
    for strength, expected in ((5.0, keys), (0.0, [])):
        training = {"loss": {"r_drop": strength}}
        found = notices(Experiment.model_validate({"data": DATA, "model": model, "training": training}))
        assert [problem.key for problem in found if "r_drop" in str(problem)] == expected


def test_notices_are_about_unlikely_intentions() -> None:
    setting, omega = model_notices(
        {"residual": "post", "encoder": {"residual": "admin"}, "combination": {"softmax": True}}
    )
    assert setting.key == "model.combination.softmax"
    assert str(omega) == "`residual: admin` without `init.kind: admin` starts as plain post-norm, omega 1"
    training = {"schedule": {"kind": "noam", "peak": 0.1, "factor": 2.0}, "optimiser": {"momentum": 0.5}}
    found = notices(Experiment.model_validate({"data": DATA, "training": training}))
    assert [problem.key for problem in found] == ["training.schedule.peak", "training.optimiser.momentum"]
    halves = model_notices({"init": {"kind": "t_fixup"}})
    assert list(map(str, halves)) == ["`init.kind: t_fixup` was designed for `residual: no_norm`; here it is `pre`"]
    assert model_notices({"residual": "admin", "init": {"kind": "admin"}}) == []


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        *(({"residual": residual, "init": {"kind": kind}}, []) for residual, kind in METHODS.items()),
        *(({"encoder": {"residual": residual}, "init": {"kind": kind}},
           ["model.decoder.init.kind"])
          for residual, kind in METHODS.items()),
        *(({"residual": "post", "decoder": {"residual": residual}, "init": {"kind": kind}},
           ["model.encoder.init.kind"]) for residual, kind in METHODS.items()),
        ({"encoder": {"residual": "admin"}, "init": {"kind": "admin"}}, []),
        ({"encoder": {"residual": "deepnorm"}, "decoder": {"residual": "no_norm"}, "init": {"kind": "deepnorm"}},
         ["model.decoder.init.kind", "model.residual"]),
        ({"residual": "post", "encoder": {"residual": "pre"}, "init": {"kind": "fixup"}},
         ["model.init.kind"]),
        ({"residual": "deepnorm", "init": {"kind": "deepnorm"}, "decoder": {"attention": "merged_full"}},
         ["model.decoder.attention"]),
        ({"residual": "no_norm", "init": {"kind": "t_fixup"}, "decoder": {"attention": "merged"}},
         ["model.decoder.attention"]),
        ({"residual": "fixup", "init": {"kind": "fixup"}, "decoder": {"attention": "merged"}}, []),
        ({"residual": "deepnorm", "init": {"kind": "deepnorm"},
          "decoder": {"ranges": [{"layers": 1, "residual": "pre"}, {"layers": 2, "residual": "deepnorm"}]}},
         ["model.decoder.ranges"]),
        ({"residual": "admin", "init": {"kind": "admin"}, "encoder": {"ranges": [{"layers": 1, "residual": "pre"}]}},
         []),
        ({"encoder": {"residual": "ln_scaling"}, "init": {"kind": "depth_scaled"}}, ["model.init.kind"]),
        ({"encoder": {"residual": "ln_scaling"}, "decoder": {"init": {"kind": "depth_scaled"}}}, []),
        *(({"encoder": {"residual": residual, "init": {"kind": kind}}}, [])
          for residual, kind in METHODS.items() if kind in ("deepnorm", "magneto")),
        ({"residual": "deepnorm", "init": {"kind": "deepnorm"}, "decoder": {"init": {"kind": "xavier"}}},
         ["model.residual"]),
        ({"residual": "ln_scaling"}, []),
        ({"init": {"kind": "uniform"}}, ["model.init.kind"]),
        ({**RNMT, "init": {"kind": "uniform"}}, []),
    ],
)  # fmt: skip
def test_half_chosen_methods_and_those_that_work_against_each_other_are_reported(
    model: dict[str, Any], keys: list[str]
) -> None:
    found = model_notices(model)
    assert [problem.key for problem in found] == keys
    assert {problem.severity for problem in found} <= {"note" if "decoder.attention" in "".join(keys) else "warning"}


@pytest.mark.parametrize("replicas", [1, 8])
def test_a_schedule_of_one_replica_has_no_warm_up_and_that_is_reported(replicas: int) -> None:
    training = {"schedule": {"kind": "gnmt+", "replicas": replicas, "warmup_updates": 500}}
    experiment = Experiment.model_validate({"data": DATA, "training": training})
    rates = [learning_rate(experiment.training.schedule, update, d_model=8) for update in (1, 100)]
    assert (rates[0] == rates[1]) == (replicas == 1)
    assert [problem.key for problem in notices(experiment)] == ["training.schedule.kind"] * (replicas == 1)


@pytest.mark.parametrize(
    ("choices", "key"),
    [
        ({"d_model": 15}, "d_model"),
        ({"encoder.d_model": 20}, "embedding.sharing"),
        ({"encoder.d_model": 20, "embedding.sharing": "decoder", "encoder.heads": 3}, "encoder.d_model"),
        ({"encoder.d_model": 20, "embedding.sharing": "none", "embedding.shared_bias": True}, "embedding.shared_bias"),
        ({"d_model": 14, "embedding.positions": "rotary"}, "embedding.positions"),
        ({"heads": 1, "d_model": 15}, "embedding.positions"),
        ({"encoder.history": "dlcl", "combination.groups": 3}, "combination.groups"),
        ({"residual": "b2t", "encoder.history": "dlcl", "combination.unit": "sublayer"}, "residual"),
        ({"family": "rnmt"}, "embedding.positions"),
        ({"family": "rnmt", "residual": "post"}, "residual"),
        ({"family": "rnmt", "embedding.positions": "none"}, "embedding.sharing"),
        ({"family": "rnmt", "init.kind": "deepnorm"}, "init.kind"),
    ],
)
def test_impossible_settings_are_refused_at_their_key(choices: dict[str, Any], key: str) -> None:
    refused = refusal(choices)
    assert refused is not None
    assert key in [problem.key for problem in refused.problems]
    assert {problem.severity for problem in refused.problems} == {"error"}


def test_a_wide_encoder_is_allowed() -> None:
    assert refusal({"encoder.d_model": 20, "embedding.sharing": "decoder"}) is None
