"""Keys under which the same weights compute something else are reported, however they are written."""

from __future__ import annotations

from typing import Any

import pytest

from ziggurat.config.differences import differing_keys
from ziggurat.config.model import ModelConfig


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
def test_keys_that_change_what_weights_compute_are_reported(changes: dict[str, Any], keys: list[str]) -> None:
    found = differing_keys(ModelConfig(), ModelConfig.model_validate(changes))
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
    found = differing_keys(ModelConfig.model_validate(model), ModelConfig.model_validate({**model, **changes}))
    assert [line.split(":")[0] for line in found] == [f"model.{key}" for key in keys]


def test_fixed_combinations_change_what_is_computed() -> None:
    """They are not in the model's file, because they follow from the configuration."""
    encoder = {"history": "dlcl"}
    one, average = (
        ModelConfig.model_validate({"encoder": encoder, "combination": {"learnable": False, "start": start}})
        for start in ("one", "average")
    )
    assert differing_keys(one, average) == ["model.combination.start: one -> average"]
    learnt = ModelConfig.model_validate({"encoder": encoder, "combination": {"start": "one"}})
    assert differing_keys(learnt, ModelConfig.model_validate({"encoder": encoder})) == []


def test_deepnorm_weights_belong_to_the_depth_of_their_constants() -> None:
    deep = ModelConfig.model_validate({"residual": "deepnorm", "encoder": {"layers": 6}})
    kept = ModelConfig.model_validate({"residual": "deepnorm", "wiring": {"planned_encoder_layers": 3}})
    assert differing_keys(deep, kept) == ["model.wiring.planned_encoder_layers: 6 -> 3"]
