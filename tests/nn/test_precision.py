"""Which precision is the fastest here, and what `auto` makes of it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.conftest import tiny_experiment
from tests.training.runs import QUIET
from ziggurat.config.load import load_experiment
from ziggurat.data.prepare import prepare
from ziggurat.nn import precision
from ziggurat.nn.packed import available
from ziggurat.nn.precision import (
    decoding_notice,
    decoding_rates,
    faster,
    precision_notice,
    settled,
    training_precision,
    training_rates,
)
from ziggurat.training.loop import train
from ziggurat.training.objective import autocast, settle_precision

CPU, WIDTHS = torch.device("cpu"), (64, 128)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Rates of a made-up CPU, in both vocabularies of precisions."""
    made_up = {"fp32": 2e9, "bf16": 1e9, "float32": 2e9, "bfloat16": 1e9}
    monkeypatch.setattr(precision, "training_rates", lambda _: {name: made_up[name] for name in ("fp32", "bf16")})
    monkeypatch.setattr(precision, "decoding_rates", lambda _: {n: made_up[n] for n in ("float32", "bfloat16")})
    return made_up


def test_rates_are_those_of_products_and_draw_no_random_number() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    training, decoding = training_rates(WIDTHS), decoding_rates(WIDTHS)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert set(training) == {"fp32", "bf16"}
    assert set(decoding) == {name for name in ("float32", "bfloat16") if available(name)}  # type: ignore[arg-type]
    for rate in (*training.values(), *decoding.values()):
        assert 1e6 < rate < 1e13, "operations per second of one thread"
    assert training_rates(WIDTHS) is training, "measured once"


@pytest.mark.parametrize(
    ("a", "b", "than", "found"),
    [(2.0, 1.0, "b", "a"), (1.1, 1.0, "b", None), (2.0, 1.0, "a", None), (2.0, 1.0, "int8", None)],
)
def test_faster_means_clearly_faster_than_a_precision_that_was_measured(
    a: float, b: float, than: str, found: str | None
) -> None:
    assert faster({"a": a, "b": b}, than) == found


def test_auto_is_the_faster_one_and_notices_name_it(rates: dict[str, float]) -> None:
    assert training_precision(CPU, WIDTHS) == "fp32"
    assert settled("auto", CPU, WIDTHS) == "float32"
    assert decoding_notice("auto", "float32", CPU, WIDTHS) == "precision: float32, chosen by `auto`"
    assert decoding_notice("float32", "float32", CPU, WIDTHS) == ""
    assert precision_notice("fp32", CPU, WIDTHS).startswith("products on this CPU: fp32 2, bf16 1 GFLOP/s")
    assert "slower in bf16 than in fp32 (fp32 2, bf16 1 GFLOP/s a thread)" in precision_notice("bf16", CPU, WIDTHS)
    assert settled("bfloat16", CPU, WIDTHS) == "bfloat16", "what the user asked for is taken"
    said = decoding_notice("bfloat16", "bfloat16", CPU, WIDTHS)
    assert "float32 products are 2.0 times as fast as bfloat16" in said
    rates |= {"bf16": 4e9, "bfloat16": 4e9}
    assert training_precision(CPU, WIDTHS) == "bf16"
    assert settled("auto", CPU, WIDTHS) == "bfloat16"
    assert "bf16 products are 2.0 times as fast" in precision_notice("fp32", CPU, WIDTHS)
    assert "`precision=bfloat16`" in decoding_notice("float32", "float32", CPU, WIDTHS)
    assert decoding_notice("int8", "int8", CPU, WIDTHS) == "", "nobody is told to change translations"


@pytest.mark.parametrize(
    ("chosen", "has_bf16", "said"), [("fp32", True, True), ("fp32", False, False), ("bf16", True, False)]
)
def test_a_gpu_is_faster_in_bf16_where_it_has_it(
    chosen: str, has_bf16: bool, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bf16)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    found = precision_notice(chosen, torch.device("cuda"), WIDTHS)
    assert ("this GPU is faster in bf16" in found) == said == bool(found)


@pytest.mark.slow
def test_a_run_keeps_what_auto_has_chosen(rates: dict[str, float], tmp_path_factory: pytest.TempPathFactory) -> None:
    """And goes on with it on a machine where the other is faster."""
    folder = tmp_path_factory.mktemp("auto")
    (folder / "data").mkdir()
    experiment = tiny_experiment(folder / "data", precision="auto", stop={"updates": 2})

    prepare(experiment.data)
    rates["bf16"] = 4e9
    train(folder / "run", experiment, console=QUIET)
    saved = load_experiment(folder / "run" / "config.yaml")
    assert saved.training.precision == "bf16"
    rates["bf16"] = 1e9
    stop = saved.training.stop.model_copy(update={"updates": 3})
    longer = saved.model_copy(update={"training": saved.training.model_copy(update={"stop": stop})})
    train(folder / "run", longer, resume=True, console=QUIET)
    assert load_experiment(folder / "run" / "config.yaml").training.precision == "bf16"
    assert "bf16" in (folder / "run" / "log.txt").read_text(encoding="utf-8")


def test_nothing_is_trained_in_a_precision_that_nobody_chose(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ValueError, match="settle_precision"):
        autocast(CPU, "auto")
    experiment = tiny_experiment(tmp_path_factory.mktemp("settled"))
    assert settle_precision(experiment, CPU) is experiment


def test_what_is_measured_stays_small_in_wide_models() -> None:
    for widths in ((16, 32), (512, 2048), (1024, 4096), (4096, 16384), (8, 10**6)):
        rows, (narrow, wide) = precision._shape(widths)
        assert rows * narrow * wide <= 1 << 28
        assert min(rows, narrow, wide) >= 1


def test_processes_that_measure_different_things_take_the_first_ones_answer(
    rates: dict[str, float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    experiment = tiny_experiment(tmp_path_factory.mktemp("agreed"), precision="auto")
    asked: list[int] = []
    for of_first in (1, 0):
        agreed = settle_precision(experiment, CPU, lambda mine, answer=of_first: asked.append(mine) or answer)  # type: ignore[misc]
        assert agreed.training.precision == ("bf16" if of_first else "fp32")
    assert asked == [0, 0], f"what this process has measured: {rates}"
