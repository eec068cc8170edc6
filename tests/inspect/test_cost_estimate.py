"""Batches, speed and the whole estimate."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_experiment
from tests.inspect.test_cost_flops import experiment
from ziggurat.config.load import change_section
from ziggurat.data.corpus import Store
from ziggurat.data.loader import LoaderState
from ziggurat.inspect import machine
from ziggurat.inspect.cost import ASSUMED_LENGTH, Batches, estimate_cost, expected_batches, time_cost
from ziggurat.inspect.ledger import OperatorWork, Product
from ziggurat.inspect.machine import BatchShape, Measured, SimulatedUpdate, Speed, Timer, measure_speed
from ziggurat.model.build import assemble
from ziggurat.model.fast.int8 import quantised_linear
from ziggurat.model.linear import Linear
from ziggurat.model.low_rank import is_update
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import weights
from ziggurat.train.device import loader_of
from ziggurat.train.objective import as_trained
from ziggurat.train.parallel import Parallel
from ziggurat.train.setup import largest_batches

PLAIN = Product(torch.float32, batched=False)
BATCHED = Product(torch.float32, batched=True)


def test_batches_of_a_store_are_those_of_training(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_experiment(tiny_folder, batch={"max_tokens": 300, "length_multiple": 4})
    store = Store.open(tiny_folder / "store")
    loader = loader_of(config, store)
    largest = largest_batches(loader, 4, LoaderState())
    found = expected_batches(config)
    assert found.largest == tuple(BatchShape(*b.source.shape, b.target_in.shape[1]) for b in largest)
    places = [LoaderState(0, number) for number in range(len(loader.plan(LoaderState())))]
    batches = [batch for at in places for batch in loader.load(at)]
    assert found.source_tokens == pytest.approx(sum(b.source.numel() for b in batches) / len(batches))
    assert found.target_tokens == pytest.approx(sum(b.target_in.numel() for b in batches) / len(batches))
    assert found.real_target_tokens == pytest.approx(sum(b.target_tokens for b in batches) / len(batches))
    assert found.source_length == pytest.approx(sum(b.source_tokens for b in batches) / len(store.train))
    assert found.target_length == pytest.approx(sum(b.target_tokens for b in batches) / len(store.train))
    assert found.origin == str(tiny_folder / "store")
    monkeypatch.setattr("ziggurat.inspect.cost._SAMPLE", 100)
    monkeypatch.setattr("ziggurat.inspect.cost._LONGEST", 60)
    sampled = expected_batches(config)
    assert sampled.origin == f"{tiny_folder / 'store'}, one pair in 3"
    assert max(shape.tokens for shape in sampled.largest) == pytest.approx(found.largest[0].tokens, rel=0.15)


def test_lengths_are_assumed_without_a_store(tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny_experiment(tiny_folder, batch={"max_tokens": 1000, "length_multiple": 8})
    nothing = config.data.train[0].model_copy(update={"source": str(tmp_path / "a"), "target": str(tmp_path / "b")})
    other = config.model_copy(
        update={"data": config.data.model_copy(update={"store": str(tmp_path), "train": [nothing]})}
    )
    found = expected_batches(other)
    assert found.origin == f"assumed: there is no store {tmp_path}"
    longest = config.data.filters.max_pieces
    assert longest == 250
    assert found.largest == (BatchShape(31, 32, 32), BatchShape(3, 256, 256))  # 30 and 251 tokens, rounded up
    assert (found.source_length, found.target_tokens) == (ASSUMED_LENGTH, 31 * 32)
    assert found.real_target_tokens == 31 * 30
    (tmp_path / "a").write_text("Kurz.\n\u00e4\n" * 20)  # 5 and 2 bytes
    (tmp_path / "b").write_text("A line of 24 characters.\nOne line of 16..\n" * 20)
    found = expected_batches(other)
    assert found.origin == f"estimated from the size of the text: there is no store {tmp_path}"
    assert (found.source_length, found.target_length) == (6, 6)  # 20 bytes on the longer side, plus end-of-sentence
    assert found.largest == (BatchShape(125, 8, 8), BatchShape(3, 256, 256))
    changed = change_section(config, {"data": {"subword": {"vocabulary_size": 300}}}, "")
    assert "prepared with other settings" in expected_batches(changed).origin


def test_seconds_come_from_products_memory_and_calls() -> None:
    work = OperatorWork(operations={PLAIN: 600, BATCHED: 50}, moved=400, calls=30)  # type: ignore[arg-type]
    speed = Speed({PLAIN: 300.0, BATCHED: 100.0}, moved=200.0, calls=10.0, waits=True)
    assert speed.seconds(work) == 2 + 0.5 + 2 + 3
    # A GPU works while the CPU makes the next calls.
    assert Speed(speed.products, 200.0, 10.0, waits=False).seconds(work) == 4.5
    assert Speed(speed.products, 200.0, 5.0, waits=False).seconds(work) == 6


def test_each_part_of_an_update_takes_the_time_of_the_tokens_of_its_side() -> None:
    seconds = {
        "encoder": 10,
        "encoder backward": 20,
        "decoder": 100,
        "decoder backward": 200,
        "loss": 400,
        "step": 5000,
    }
    update = SimulatedUpdate(0, {}, {phase: OperatorWork(moved=count) for phase, count in seconds.items()}, 0)
    batches = Batches((), 30, 30, 1500, 500, 450, "made up")
    speed = Speed({}, moved=1.0, calls=1.0, waits=True)
    found = time_cost(update, BatchShape(10, 100, 100), batches, speed, 2.0, accumulate=3)
    assert found.target_tokens_per_second == 3 * 450 / found.seconds
    assert found.parts == pytest.approx({"layers": 3 * 2 * (1.5 * 30 + 0.5 * 300), "loss": 3 * 200, "step": 5000})


def test_measured_speeds_are_of_this_machine() -> None:
    threads = torch.get_num_threads()
    speed = measure_speed([PLAIN, BATCHED], (64, 128), torch.device("cpu"), threads=1)
    assert set(speed.products) == {PLAIN, BATCHED}
    assert all(1e7 < rate < 1e14 for rate in (*speed.products.values(), speed.moved))
    assert 1e3 < speed.calls < 1e8
    assert torch.get_num_threads() == threads


CPU = torch.device("cpu")


@pytest.mark.slow
def test_time_of_other_programs_is_not_counted() -> None:
    def disturbed() -> None:
        time.sleep(0.05)  # the processor is a different one

    by_wall, by_own = Timer(CPU), Timer(CPU, own=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert by_wall.fastest(disturbed) >= 0.05
        assert by_own.fastest(lambda: (disturbed(), sum(range(200_000)))) < 0.04
    finally:
        torch.set_num_threads(threads)
    assert by_own.passed > 2 * by_own.worked


@pytest.mark.parametrize(("crowded", "timers"), [(False, [False]), (True, [False, True])])
def test_a_busy_machine_is_measured_again_in_cpu_time(
    crowded: bool, timers: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[bool] = []

    def speed(kinds: object, widths: object, device: object, threads: object, timer: Timer) -> Speed:
        seen.append(timer.own)
        timer.passed, timer.worked = 3.0, 1.0
        return Speed({}, moved=1.0, calls=1.0, waits=True)

    monkeypatch.setattr(machine, "measure_speed", speed)
    monkeypatch.setattr(machine, "slowness", lambda *args: 1.0 + len(seen))
    monkeypatch.setattr(machine.SystemLoad, "look", lambda self, threads: (0.6, crowded))
    found = machine.measure_machine(experiment("training.threads=2", f"data.store={tmp_path}"), [PLAIN], CPU)
    assert seen == timers
    assert (found.slowness, found.others) == (1.0 + len(timers), 0.6)
    assert found.delay == (3.0 if crowded else 1.0)
    alone = machine.measure_machine(experiment("training.threads=1", f"data.store={tmp_path}"), [PLAIN], CPU)
    assert len(seen) == len(timers) + 1, "one thread is timed by its own time anyway"
    assert alone.delay == found.delay


@pytest.mark.parametrize(
    "trained",
    [
        ["training.start_from=elsewhere", "training.lora={rank: 2}"],
        ["training.quantise=int8"],
        [],
    ],
)
def test_the_simulated_and_timed_model_is_the_trained_one(
    trained: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[tuple[set[str], set[bool]]] = []

    class Watched(Parallel):
        def __init__(self, model: Seq2Seq, *settings: Any) -> None:
            super().__init__(model, *settings)
            parameters = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
            maps = [module for module in model.modules() if isinstance(module, Linear)]
            found.append((parameters, {module.multiply is quantised_linear for module in maps}))

    class Still(Timer):
        def fastest(self, work: Callable[[], object]) -> float:
            return 1.0

    monkeypatch.setattr(machine, "Parallel", Watched)
    config = experiment(*trained, f"data.store={tmp_path}")
    machine.slowness(config, Speed({PLAIN: 1.0, BATCHED: 1.0}, 1.0, 1.0, waits=True), CPU, Still(CPU))
    simulated, timed = found
    assert simulated == timed
    parameters, quantised = timed
    assert all(map(is_update, parameters)) == (config.training.lora is not None)
    assert quantised == {config.training.quantise is not None}


@pytest.fixture
def _known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Speed(dict.fromkeys([PLAIN, BATCHED], 1e9), moved=1e9, calls=1e6, waits=True)
    monkeypatch.setattr("ziggurat.inspect.cost.measure_machine", lambda *args: Measured(rates, 2.0))


@pytest.mark.slow
@pytest.mark.usefixtures("_known_speed")
def test_the_estimate_scales_with_the_batches_of_an_update(tmp_path: Path) -> None:
    store = f"data.store={tmp_path}"
    small = ["training.batch.max_tokens=30", "model.encoder.layers=1", store]
    one, four = (estimate_cost(experiment(*small, f"training.batch.accumulate={n}"), (50, 50)) for n in (1, 4))
    assert one.memory.batch == BatchShape(1, 30, 30)
    assert one.time.seconds == pytest.approx(sum(one.time.parts.values()))
    passes = one.time.seconds - one.time.parts["step"]
    assert four.time.seconds == pytest.approx(4 * passes + one.time.parts["step"], rel=0.1)  # gradients are added up
    assert four.time.target_tokens_per_second == pytest.approx(4 * 30 / four.time.seconds)
    per_token = 30 * (one.training.source + one.training.target)
    assert one.time.flops == pytest.approx(per_token, rel=0.01)
    assert four.memory.parts["gradients"] == four.memory.parts["weights"]
    assert one.memory.checkpoint == one.memory.parts["weights"] + one.memory.parts["moments"]
    synchronous = estimate_cost(experiment(*small, "training.checkpoint.asynchronous=false"), (50, 50))
    assert synchronous.memory.checkpoint == 0


@pytest.mark.usefixtures("_known_speed")
def test_a_checkpoint_of_low_rank_updates_takes_only_their_memory(tmp_path: Path) -> None:
    small = ["model.encoder.layers=1", "model.decoder.layers=1", f"data.store={tmp_path}"]
    config = experiment(*small, "training.batch.max_tokens=30", "training.start_from=a", "training.lora={rank: 2}")
    found = estimate_cost(config, (50, 50)).memory
    model = assemble(config.model, 50, 50)
    as_trained(model, config.training)
    updates = sum(tensor.nbytes for name, tensor in weights(model).items() if is_update(name))
    assert found.checkpoint == updates + found.parts["moments"]


@pytest.mark.slow
@pytest.mark.usefixtures("_known_speed")
def test_the_most_expensive_batch_is_found_and_omissions_are_reported(tmp_path: Path) -> None:
    small = [
        "model.encoder.layers=1",
        "model.decoder.layers=1",
        "training.batch.max_tokens=502",
        f"data.store={tmp_path}",
    ]
    stages = "[{mix: {a: 1}, until: {corpus: a, epochs: 1}}, {mix: {a: 1}, until: {corpus: a, epochs: 1}}]"
    config = experiment(*small, "training.compile=layers", f"data.stages={stages}")
    found = estimate_cost(config, (50, 50))
    assert found.memory.batch == BatchShape(2, 251, 251)  # at width 16 attention to long sentences dominates
    assert all(any(key in note for note in found.notes) for key in ("training.compile", "data.stages"))
    absent = estimate_cost(experiment(*small, "training.device=cuda:77"), (50, 50))
    assert absent.device == "cpu"
    assert "no `cuda:77` here" in absent.notes[0]


@pytest.mark.slow
@pytest.mark.usefixtures("_known_speed")
def test_stages_of_growth_cost_as_much_as_runs_of_their_depth(tmp_path: Path) -> None:
    def seconds(encoder: int, decoder: int) -> float:
        return estimate_cost(experiment(*small, *depth(encoder, decoder)), (50, 50)).time.seconds

    def depth(encoder: int, decoder: int) -> tuple[str, str]:
        return f"model.encoder.layers={encoder}", f"model.decoder.layers={decoder}"

    small = ["training.batch.max_tokens=30", "training.stop.updates=100", f"data.store={tmp_path}"]
    stages = "{layers: 1, decoder_layers: 1, updates: 50}, {layers: 2, updates: 70}"
    growing = experiment(*small, *depth(4, 2), f"training.growth={{stages: [{stages}]}}")
    [note] = [note for note in estimate_cost(growing, (50, 50)).notes if "training.growth" in note]
    first, second, last = seconds(1, 1), seconds(2, 2), seconds(4, 2)
    assert f"an update takes {first:.3g} s at 1-1, {second:.3g} s at 2-2" in note
    assert f"all 100 take {(50 * first + 20 * second + 30 * last) / (100 * last):.0%} of the time" in note
    by_epochs = experiment(*small, *depth(4, 2), "training.growth={stages: [{layers: 2, epochs: 1}]}")
    [note] = [note for note in estimate_cost(by_epochs, (50, 50)).notes if "training.growth" in note]
    assert note.endswith(f"an update takes {second:.3g} s at 2-2")
