"""Health bands, with hand-made records at the edge, inside and outside of each band."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inspect import hand_made
from ziggurat.config import ModelConfig, TrainingConfig
from ziggurat.config.load import parse_experiment
from ziggurat.config.reference import entries
from ziggurat.train.diagnosis.health import (
    ENTROPY,
    FADING,
    FLAT_R,
    LATE_WARMUPS,
    LEAST_UPDATE,
    MOST_UPDATE,
    SOURCE,
    VARIANCE,
    VARIANCE_GROWTH,
    HealthReading,
    in_use,
    readings,
)
from ziggurat.train.records import Record

LATE = LATE_WARMUPS * 100


def record(update: int = 1, **values: Any) -> Record:
    return Record(update, float(update), {"encoder": 2, "decoder": 2}, values)


def judged(record_: Record, *before: Record) -> dict[str, HealthReading]:
    found = readings(record_, before, warmup_updates=100)
    assert len({r.measure for r in found}) == len(found)
    return {r.measure: r for r in found}


def unhealthy(record_: Record, *before: Record) -> set[str]:
    return {name for name, r in judged(record_, *before).items() if not r.healthy}


def norms(encoder: list[Any], decoder: list[Any]) -> dict[str, Any]:
    return {"embeddings": 1.0, "encoder": encoder, "decoder": decoder, "output": 1.0}


@pytest.mark.parametrize(
    ("values", "measure", "healthy"),
    [
        ({"gradient_norm": norms([FADING, 5.0, 1.0], [1.0])}, "gradient_ratio.encoder", True),
        ({"gradient_norm": norms([0.99 * FADING, 5.0, 1.0], [1.0])}, "gradient_ratio.encoder", False),
        ({"gradient_norm": norms([1.0], [2e-5, 0.3])}, "gradient_ratio.decoder", False),
        ({"gradient_norm": norms([1.0], [7.0, 0.3])}, "gradient_ratio.decoder", True),
        ({"gradient_norm": norms([0.0, 1.0], [1.0])}, "gradient_ratio.encoder", False),
        ({"variance": {"decoder.ffn": [1.0, VARIANCE]}}, "variance.decoder.ffn", True),
        ({"variance": {"decoder.ffn": [1.01 * VARIANCE, 1.0]}}, "variance.decoder.ffn", False),
        ({"update_ratio": norms([1e-3, MOST_UPDATE], [1e-3])}, "update_ratio.largest", True),
        ({"update_ratio": norms([2e-3, 2e-3], [1.01 * MOST_UPDATE])}, "update_ratio.largest", False),
        ({"update_ratio": norms([1e-3, 1e-3, LEAST_UPDATE * 1e-3], [1e-3])}, "update_ratio.encoder", True),
        ({"update_ratio": norms([1e-3, 1e-3], [0.9 * LEAST_UPDATE * 1e-3, 1e-3])}, "update_ratio.decoder", False),
        ({"attention_entropy": {"decoder.cross_attn": [1.0, ENTROPY]}}, "attention_entropy.decoder.cross_attn", True),
        ({"attention_entropy": {"decoder.cross_attn": [1.0, 0.01]}}, "attention_entropy.decoder.cross_attn", False),
        ({"nll": 3.0}, "finite.nll", True),
        ({"nll": None}, "finite.nll", False),
        ({"gradient_norm": norms([1.0, None], [1.0])}, "finite.gradient_norm", False),
        ({"variance": {"encoder.ffn": [None, 1.0]}}, "variance.encoder.ffn", True),  # a position without a sub-layer
    ],
)
def test_bands(values: dict[str, Any], measure: str, healthy: bool) -> None:
    reading = judged(record(**values))[measure]
    assert reading.healthy is healthy
    others = {m for m, r in judged(record(**values)).items() if not r.healthy} - {measure}
    assert not others, "one cause, one warning"


def test_a_reading_has_its_number_band_and_advice() -> None:
    reading = judged(record(gradient_norm=norms([1.0], [2e-5, 0.4])))["gradient_ratio.decoder"]
    assert (reading.value, reading.low, reading.high) == (pytest.approx(5e-5), FADING, None)
    for said in ("5.0e-05", "first decoder layer", "at least 0.001", "model.residual"):
        assert said in reading.message
    reading = judged(record(gradient_norm=norms([1.0, None], [1.0, 1.0])))["finite.gradient_norm"]
    assert "encoder layer 2" in reading.message
    assert reading.value is None
    reading = judged(record(update_ratio=norms([1e-3, 1e-3], [1e-3, 1e-9])))["update_ratio.decoder"]
    assert "decoder layer 2" in reading.message


def test_advice_names_existing_keys() -> None:
    found = judged(
        record(
            LATE,
            nll=1.0,
            gradient_norm=norms([1.0, 1.0], [1.0]),
            r={"encoder": 1.0},
            variance={"encoder.ffn": [1.0]},
            update_ratio=norms([1e-3], [1e-3]),
            attention_entropy={"encoder.self_attn": [1.0]},
            source_dependence=1.0,
        )
    )
    checks = {"finite", "gradient_ratio", "r", "variance", "update_ratio", "attention_entropy", "source_dependence"}
    assert {measure.partition(".")[0] for measure in found} == checks
    keys = {entry.path for entry in entries()}
    quoted = {text for reading in found.values() for text in re.findall("`(.+?)`", reading.message)}
    assert len(quoted) > 8
    for text in quoted:
        key, _, value = (text if "." in text else f"model.residual: {text}").partition(": ")
        assert key in keys
        if value:
            parse_experiment("data: {source_language: de, target_language: en, store: a}", "", [f"{key}={value}"])


def test_missing_measures_are_not_judged() -> None:
    assert judged(record()) == {}
    assert judged(record(gradient_norm=norms([1.0], [1.0]))).keys() == {
        "finite.gradient_norm"
    }  # one layer has no ratio
    assert judged(record(gradient_norm=norms([1.0, 0.0], [None, 1.0]))).keys() == {"finite.gradient_norm"}
    assert judged(record(r={"encoder": None})) == {}
    assert "update_ratio.encoder" not in judged(record(update_ratio=norms([0.0, 0.0], [0.0])))  # RAdam's first updates


@pytest.mark.parametrize(
    ("course", "healthy"),
    [
        ([0.001, 0.001], True),  # too short to judge
        ([2.4, 0.01, 0.01], True),
        ([0.01, 0.01, 0.01], False),
        ([0.01, 0.005, 0.002], False),
        ([0.001, 0.002, 0.004], True),  # rising
        ([0.01, 0.01, FLAT_R], True),
        ([0.01, None, 0.01], True),
        ([5.0, 0.01, 0.01, 0.01], False),
    ],
)
def test_r_must_be_small_and_flat_to_be_unhealthy(course: list[float | None], healthy: bool) -> None:
    records = [record(update, r={"encoder": r, "decoder": 1.0}) for update, r in enumerate(course)]
    assert judged(records[-1], *records[:-1])["r.encoder"].healthy is healthy


@pytest.mark.parametrize(
    ("first", "course", "healthy"),
    [
        (LATE, [0.0, 0.0], True),  # too short to judge
        (LATE, [0.0, 0.0, 0.0], False),
        (LATE - 1, [0.0, 0.0, 0.0], True),
        (LATE, [0.0, 0.0, SOURCE], True),
        (LATE, [0.0, SOURCE, 0.0], True),
        (LATE, [1.0, 0.0, 0.99 * SOURCE, -0.5], False),  # a source that does harm is no better than none
        (LATE, [0.0, None, 0.0], True),
    ],
)
def test_the_source_must_matter_once_the_warm_up_is_well_over(
    first: int, course: list[float | None], healthy: bool
) -> None:
    records = [record(first + i, source_dependence=value) for i, value in enumerate(course)]
    assert judged(records[-1], *records[:-1])["source_dependence"].healthy is healthy


def test_variance_may_not_leap() -> None:
    before = [record(1, variance={"encoder.ffn": [20.0, 3.0], "decoder.ffn": [0.01]}), record(2, nll=1.0)]
    assert not unhealthy(record(3, variance={"encoder.ffn": [20 * VARIANCE_GROWTH]}), *before)
    assert unhealthy(record(3, variance={"encoder.ffn": [20.1 * VARIANCE_GROWTH]}), *before) == {"variance.encoder.ffn"}
    small = record(3, variance={"decoder.ffn": [VARIANCE_GROWTH]})
    assert not unhealthy(small, *before), "what is small may grow"


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_a_healthy_deep_model_gets_no_warning(stack: str) -> None:
    """18-18 pre-norm as measured at update 140 of experiments/health-bands."""
    values = {
        "nll": 4.76,
        "source_dependence": 0.003,
        "gradient_norm": norms([0.02, 0.009], [0.3, 0.045]),
        "r": {"encoder": 3.4, "decoder": 3.7},
        "variance": {f"{stack}.ffn": [20.0, 800.0]},
        "update_ratio": norms([8e-4, 1e-3], [2e-3, 4e-3]),
    }
    assert all(math.isfinite(r.value or 0.0) for r in judged(record(LATE, **values)).values())
    assert not unhealthy(record(LATE, **values))


@given(
    residual=st.sampled_from(["pre", "post", "admin", "deepnorm"]),
    depth_scaled=st.booleans(),
    history=st.sampled_from(["latest", "dlcl"]),
    transparent=st.booleans(),
    qk_norm=st.booleans(),
    training=st.fixed_dictionaries(
        {}, optional={"clip_norm": st.just(1.0), "precision": st.sampled_from(["fp32", "bf16"])}
    ),
)
def test_advice_names_nothing_that_the_run_has(
    residual: str, depth_scaled: bool, history: str, transparent: bool, qk_norm: bool, training: dict[str, Any]
) -> None:
    model: dict[str, Any] = {"residual": residual, "encoder": {"history": history}}
    model |= {"init": {"kind": "depth_scaled"}} if depth_scaled else {}
    model |= {"memory": "transparent"} if transparent else {}
    model |= {"attention": {"qk_norm": "layer"}} if qk_norm else {}
    experiment = hand_made.EXPERIMENT.model_copy(
        update={"model": ModelConfig.model_validate(model), "training": TrainingConfig.model_validate(training)}
    )
    weak = [record(LATE + n, r={"encoder": 1e-9}, source_dependence=0.0) for n in range(2)]
    last = record(
        LATE + 2,
        nll=None,
        gradient_norm=norms([1e-9, 1.0], [1.0]),
        r={"encoder": 1e-9},
        attention_entropy={"encoder.self_attn": [0.0]},
        source_dependence=0.0,
    )
    found = readings(last, weak, warmup_updates=100, used=in_use(experiment))
    said = " ".join(reading.message for reading in found if not reading.healthy)
    assert len(found) - sum(reading.healthy for reading in found) == 5
    has = {
        f"`model.residual: {residual}`": True,
        "`model.init.kind: depth_scaled`": depth_scaled,
        "`model.encoder.history: dlcl`": history == "dlcl",
        "`model.memory: transparent`": transparent,
        "`model.attention.qk_norm`": qk_norm,
        "`training.clip_norm`": "clip_norm" in training,
        "`training.precision: fp32`": training.get("precision", "fp32") == "fp32",
    }
    for setting, used in has.items():
        assert (setting in said) is (not used and setting != "`model.residual: post`")


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("isqrt", "peak"),
        ("noam", "factor"),
        ("linear", "peak"),
        ("wsd", "peak"),
        ("constant", "peak"),
        ("gnmt+", "base"),
    ],
)
@pytest.mark.parametrize("family", ["transformer", "rnmt"])
def test_advice_names_settings_that_the_run_can_have(family: str, kind: str, key: str) -> None:
    model = ModelConfig.model_construct(**{**dict(ModelConfig()), "family": family})
    training = TrainingConfig.model_validate({"schedule": {"kind": kind}, "stop": {"updates": 9}})
    experiment = hand_made.EXPERIMENT.model_copy(update={"model": model, "training": training})
    last = record(
        LATE,
        nll=None,
        gradient_norm=norms([1e-9, 1.0], [1.0]),
        variance={"encoder.ffn": [1e9]},
        update_ratio=norms([0.5, 1e-6], [0.5]),
        attention_entropy={"encoder.self_attn": [0.0]},
    )
    bad = [each for each in readings(last, [], warmup_updates=100, used=in_use(experiment)) if not each.healthy]
    said = " ".join(each.message for each in bad)
    assert len(bad) == 6
    assert {each for each in ("peak", "factor", "base") if f"training.schedule.{each}`" in said} == {key}
    assert ("`model." in said) is (family == "transformer")
