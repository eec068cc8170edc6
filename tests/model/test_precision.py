"""Which precision is fastest here, and what `auto` chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.conftest import tiny_experiment
from tests.train.runs import QUIET
from ziggurat.config.load import load_experiment
from ziggurat.data.prepare import prepare
from ziggurat.model.fast import precision
from ziggurat.model.fast.compiled import Precision
from ziggurat.model.fast.packed import available
from ziggurat.model.fast.precision import (
    decoding_notice,
    decoding_rates,
    faster,
    precision_notice,
    settled,
    training_precision,
    training_rates,
    wrong_maps,
    wrong_packed,
)
from ziggurat.system.errors import ConfigError
from ziggurat.train.loop import train
from ziggurat.train.objective import autocast, settle_precision

CPU, WIDTHS = torch.device("cpu"), (64, 128)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Rates of an imaginary CPU, under both sets of names for precisions."""
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


@pytest.mark.parametrize("widths", [(256, 1104), (1104, 256), (592, 256), (48, 80), (16, 7), (1, 3)], ids=str)
def test_products_in_bf16_are_right_on_this_cpu(widths: tuple[int, int]) -> None:
    state = torch.get_rng_state()
    assert wrong_maps([widths]) == []
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_packed_products_are_right_on_this_cpu(kind: Precision) -> None:
    if not available(kind):
        pytest.skip(f"this CPU has no fast products in {kind}")
    assert wrong_packed([(256, 1104), (1104, 256), (592, 256), (48, 80), (16, 7), (1, 3)], kind) == []


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_nothing_is_translated_in_a_precision_that_is_wrong(
    kind: Precision, rates: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that ignores the remainder of the inner dimension beyond a multiple of 32."""

    def faulty(weight: Tensor, bias: Tensor, narrow: Precision) -> Callable[[Tensor], Tensor]:
        whole = weight.shape[1] // 32 * 32
        return lambda x: F.linear(x[:, :whole], weight[:, :whole], bias)

    monkeypatch.setattr(precision, "packed", faulty)
    monkeypatch.setattr(precision, "available", lambda asked: True)
    rates["bfloat16"] = 4e9
    precision._packed_error.cache_clear()
    try:
        assert settled("auto", CPU, WIDTHS, [(64, 48)]) == "bfloat16"
        assert settled("auto", CPU, WIDTHS, [(64, 48), (40, 48)]) == "float32"
        assert settled("float32", CPU, WIDTHS, [(40, 48)]) == "float32"
        assert settled(kind, CPU, WIDTHS, [(64, 48)]) == kind
        with pytest.raises(ConfigError, match=rf"`decoding.precision: {kind}`.*: 40 to 48 \(off by 4\d%\)"):
            settled(kind, CPU, WIDTHS, [(64, 48), (40, 48)])
    finally:
        precision._packed_error.cache_clear()


@pytest.mark.parametrize("fault", ["forward", "into the input", "into the weight", "not a number"])
def test_wrong_kernels_are_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that ignores the remainder of the inner dimension beyond a multiple of 32, as faulty ones did."""

    class Faulty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            whole = x.shape[1] // 32 * 32 if fault == "forward" else x.shape[1]
            y = x[:, :whole] @ weight[:, :whole].t() + bias
            return y.fill_(float("nan")) if fault == "not a number" else y

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
            (g,), (x, weight) = gradients, ctx.saved_tensors
            whole = {name: size // 32 * 32 if fault == f"into the {name}" else size for name, size in zip(
                ("input", "weight"), (g.shape[1], g.shape[0]), strict=True)}  # fmt: skip
            into_x = g[:, : whole["input"]] @ weight[: whole["input"]]
            into_weight = g[: whole["weight"]].t() @ x[: whole["weight"]]
            return into_x, into_weight, g.sum(0)

    def faulty(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            return F.linear(x, weight, bias)
        return Faulty.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]

    monkeypatch.setattr(precision, "linear", faulty)
    precision._error.cache_clear()
    try:
        (message,) = wrong_maps([(40, 48), (40, 48)])
        assert message.startswith("40 to 48 (off by ")
        wide = {"forward": (4112, 16), "into the input": (16, 32001)}.get(fault, (16, 48))
        assert [text.split(" (")[0] for text in wrong_maps([wide])] == [f"{wide[0]} to {wide[1]}"]
        made_up = {"fp32": 1e9, "bf16": 2e9}
        monkeypatch.setattr(precision, "training_rates", lambda _: made_up)
        assert training_precision(CPU, (64, 64), lambda: [(40, 48)]) == "fp32"
        right = fault in ("forward", "into the input")  # right at these widths; the others are wrong at all
        assert training_precision(CPU, (64, 64), lambda: [(32, 32)]) == ("bf16" if right else "fp32")
        monkeypatch.setattr(precision, "wrong_maps", lambda maps: [])
        assert training_precision(CPU, (64, 64), lambda: [(40, 48)]) == "bf16"
    finally:
        precision._error.cache_clear()


@pytest.mark.cpu("of kernels that only they have")
def test_training_is_refused_where_bf16_is_wrong(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def wrong(maps: Iterable[tuple[int, int]]) -> list[str]:
        asked.extend(maps)
        return ["16 to 24 (off by 41%)"]

    monkeypatch.setattr("ziggurat.train.learner.wrong_maps", wrong)
    settings = tiny_experiment(tiny_folder, precision="bf16")
    with pytest.raises(ConfigError, match=r"16 to 24 \(off by 41%\).*`training.precision=fp32`"):
        train(tmp_path / "run", settings, console=QUIET)
    model = settings.model
    assert {(model.d_model, model.d_ff), (model.d_ff, model.d_model)} <= set(asked)


@pytest.mark.parametrize(
    ("a", "b", "than", "found"),
    [(2.0, 1.0, "b", "a"), (1.1, 1.0, "b", None), (2.0, 1.0, "a", None), (2.0, 1.0, "int8", None)],
)
def test_faster_means_clearly_faster_than_a_precision_that_was_measured(
    a: float, b: float, than: str, found: str | None
) -> None:
    assert faster({"a": a, "b": b}, than) == found


def test_auto_is_the_faster_one_and_notices_name_it(rates: dict[str, float]) -> None:
    assert training_precision(CPU, WIDTHS, list) == "fp32"
    assert settled("auto", CPU, WIDTHS, []) == "float32"
    assert decoding_notice("auto", "float32", CPU, WIDTHS) == "precision: float32, chosen by `auto`"
    assert decoding_notice("float32", "float32", CPU, WIDTHS) == ""
    assert precision_notice("fp32", CPU, WIDTHS).startswith("products on this CPU: fp32 2, bf16 1 GFLOP/s")
    assert "slower in bf16 than in fp32 (fp32 2, bf16 1 GFLOP/s per thread)" in precision_notice("bf16", CPU, WIDTHS)
    assert settled("bfloat16", CPU, WIDTHS, []) == "bfloat16", "the user's choice stays"
    message = decoding_notice("bfloat16", "bfloat16", CPU, WIDTHS)
    assert "float32 products are 2.0 times as fast as bfloat16" in message
    rates |= {"bf16": 4e9, "bfloat16": 4e9}
    assert training_precision(CPU, WIDTHS, list) == "bf16"
    assert settled("auto", CPU, WIDTHS, []) == "bfloat16"
    assert "bf16 products are 2.0 times as fast" in precision_notice("fp32", CPU, WIDTHS)
    assert "`precision=bfloat16`" in decoding_notice("float32", "float32", CPU, WIDTHS)
    assert decoding_notice("int8", "int8", CPU, WIDTHS) == "", "nobody is advised to change translations"


@pytest.mark.parametrize(
    ("chosen", "has_bf16", "said"), [("fp32", True, True), ("fp32", False, False), ("bf16", True, False)]
)
def test_a_gpu_with_bf16_is_faster_in_bf16(
    chosen: str, has_bf16: bool, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bf16)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    found = precision_notice(chosen, torch.device("cuda"), WIDTHS)
    assert ("this GPU is faster in bf16" in found) == said == bool(found)


@pytest.mark.slow
def test_a_run_keeps_the_choice_of_auto(rates: dict[str, float], tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run keeps its precision on a machine where the other one is faster."""
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


def test_training_needs_a_chosen_precision(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ValueError, match="settle_precision"):
        autocast(CPU, "auto")
    experiment = tiny_experiment(tmp_path_factory.mktemp("settled"))
    assert settle_precision(experiment, CPU, (50, 60)) is experiment


def test_auto_asks_for_all_maps_of_the_model(
    rates: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Otherwise an unattended run would be refused although fp32 could be chosen."""
    monkeypatch.setattr(precision, "wrong_maps", lambda maps: [str(each) for each in maps if each == (16, 50)])
    rates["bf16"] = 4e9
    experiment = tiny_experiment(tmp_path_factory.mktemp("maps"), precision="auto")
    assert experiment.model.d_model == 16
    chosen = [settle_precision(experiment, CPU, sizes).training.precision for sizes in ((50, 50), (60, 60))]
    assert chosen == ["fp32", "bf16"]


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
        agreed = settle_precision(experiment, CPU, (50, 60), lambda mine, answer=of_first: asked.append(mine) or answer)  # type: ignore[misc]
        assert agreed.training.precision == ("bf16" if of_first else "fp32")
    assert asked == [0, 0], f"what this process has measured: {rates}"
