"""Depth measures while a model trains."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.conftest import tiny_experiment
from tests.small import small_config
from tests.train.batches import batches
from tests.train.launch import run_together
from tests.train.runs import QUIET, final_bytes, outcome
from ziggurat.config import Experiment
from ziggurat.config.train import LossConfig, OptimiserConfig
from ziggurat.data.corpus import Store
from ziggurat.model.build import build_model, parameter_roles
from ziggurat.model.tensors import weights
from ziggurat.train import depth_records
from ziggurat.train.depth_records import measured
from ziggurat.train.device import Shortage
from ziggurat.train.diagnosis.measures import Snapshot
from ziggurat.train.diagnosis.probe import MEASURES
from ziggurat.train.learner import Learner
from ziggurat.train.loop import train
from ziggurat.train.objective import probe_loss
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.profiling import profile_batch
from ziggurat.train.records import Record, read_records
from ziggurat.train.update import train_update

EVERY: dict[str, Any] = {"every_updates": 2, "tokens": 100, "max_share": None}
MEASURED = set(MEASURES) - {"beta_ln", "history_weights", "transparent_weights"}
CHANGED = {"scaled_gradient_norm", "update_ratio"}


def test_training_is_the_same_bit_for_bit_and_leaves_records(tiny_folder: Path, tmp_path: Path) -> None:
    plain = tiny_experiment(tiny_folder, validation={"every_updates": 3, "decode": False})
    watched = tiny_experiment(tiny_folder, validation={"every_updates": 3, "decode": False}, diagnostics=EVERY)
    train(tmp_path / "plain", plain, console=QUIET)
    train(tmp_path / "watched", watched, console=QUIET)
    assert outcome(tmp_path / "watched") == outcome(tmp_path / "plain")
    assert final_bytes(tmp_path / "watched", 8) == final_bytes(tmp_path / "plain", 8)
    assert not (tmp_path / "plain" / "diagnostics").exists()
    records = read_records(tmp_path / "watched")
    assert [r.update for r in records] == [0, 2, 4, 6, 8]
    assert all(r.layers == {"encoder": 2, "decoder": 2} for r in records)
    assert set(records[0].values) == MEASURED
    assert all(set(r.values) == MEASURED | CHANGED for r in records[1:])
    assert records[-1].values["nll"] < records[0].values["nll"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({"training": {"precision": "bf16"}}, marks=pytest.mark.slow),
        pytest.param({"training": {"recompute": {"encoder": 1, "decoder": "segments"}}}, marks=pytest.mark.slow),
        {"model": {"encoder": {"layer_drop": 0.5}, "decoder": {"layer_drop": 0.5}}},
        {"model": {"residual": "hyper", "encoder": {"history": "dlcl"}}},
        {"training": {"growth": {"stages": [{"layers": 1, "updates": 3}], "keep_stages": False}}},
    ],
    ids=str,
)
def test_training_stays_the_same_under(choices: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    found = []
    for name, watching in (("plain", {"every_updates": None}), ("watched", EVERY)):
        training = {"stop": {"updates": 6}, "diagnostics": watching, **choices.get("training", {})}
        train(tmp_path / name, tiny_experiment(tiny_folder, choices.get("model"), **training), console=QUIET)
        found.append(final_bytes(tmp_path / name, 6))
    assert found[0] == found[1]
    records = read_records(tmp_path / "watched")
    depths = [1, 1, 2, 2] if "growth" in choices.get("training", {}) else [2] * 4
    assert [(r.update, r.layers["encoder"]) for r in records] == list(zip([0, 2, 4, 6], depths, strict=True))
    assert all(len(r.values["gradient_norm"]["encoder"]) == r.layers["encoder"] for r in records)
    assert all(math.isfinite(v) for r in records for v in r.values["gradient_norm"]["encoder"])


def test_measuring_stays_within_its_share(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by one second for measurements and by ten for updates, and not otherwise."""
    now = [0.0]
    monkeypatch.setattr(depth_records.time, "perf_counter", lambda: now[0])
    real = depth_records.measure

    def slow(*arguments: Any) -> dict[str, Any]:
        now[0] += 1.0
        return real(*arguments)

    monkeypatch.setattr(depth_records, "measure", slow)
    experiment = tiny_experiment(
        tiny_folder, stop={"updates": 12}, diagnostics={"every_updates": 1, "tokens": 50, "max_share": 0.03}
    )
    original = train_update

    def timed(*arguments: Any, **named: Any) -> Any:
        now[0] += 10.0
        return original(*arguments, **named)

    monkeypatch.setattr("ziggurat.train.loop.train_update", timed)
    train(tmp_path / "run", experiment, console=QUIET)
    # Two measurements are 3 % of 66.7 s, three of 100 s: 1 + 70 s have passed before update 8, 2 + 100 s before update
    # 11.
    assert [r.update for r in read_records(tmp_path / "run")] == [0, 8, 11]


def test_measures_too_large_for_memory_are_reported_once(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth_records, "within_memory", lambda work, device: Shortage(1 << 20, 1 << 30))
    said = io.StringIO()
    experiment = tiny_experiment(tiny_folder, diagnostics=EVERY)
    train(tmp_path / "run", experiment, console=Console(file=said, width=400))
    assert said.getvalue().count("depth not measured for lack of memory") == 1
    assert read_records(tmp_path / "run") == []


def test_a_full_disk_does_not_end_a_run(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(record: Record) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Record, "line", full)
    said = io.StringIO()
    result = train(
        tmp_path / "run", tiny_experiment(tiny_folder, diagnostics=EVERY), console=Console(file=said, width=400)
    )
    assert result.update == 8
    assert said.getvalue().count("depth.jsonl cannot be written: No space left on device") == 1


def test_the_change_of_an_update_by_layer() -> None:
    model = build_model(small_config(2, 2, embedding={"sharing": "none"}), 20, 20)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    snapshot = Snapshot(weights(model))
    optimiser = Optimiser(model, parameter_roles(model), OptimiserConfig(kind="adamw", weight_decay=0.1))
    train_update(Parallel(model, LossConfig()), batches([3, 4]), optimiser, rate=0.03, clip_norm=0.1)
    values = snapshot.changes(model, weights(model), 0.03)
    after = dict(model.named_parameters())

    def norm(prefix: tuple[str, ...], old: float, new: float) -> float:
        numbers = [
            old * a + new * b
            for name in before
            if name.startswith(prefix)
            for a, b in zip(before[name].flatten().tolist(), after[name].flatten().tolist(), strict=True)
        ]
        return math.sqrt(math.fsum(v * v for v in numbers))

    groups = {
        "embeddings": ("source_embedding.", "target_embedding."),
        "output": ("output.",),
        **{f"{stack} {n}": (f"{stack}.layers.{n}.",) for stack in ("encoder", "decoder") for n in range(2)},
    }
    for place, prefix in groups.items():
        stack, _, number = place.partition(" ")
        scaled, ratio = (values[name][stack] for name in ("scaled_gradient_norm", "update_ratio"))
        scaled, ratio = (scaled[int(number)], ratio[int(number)]) if number else (scaled, ratio)
        assert scaled == pytest.approx(norm(prefix, -1, 1) / 0.03, rel=1e-4)
        assert ratio == pytest.approx(norm(prefix, -1, 1) / norm(prefix, 1, 0), rel=1e-4)
    assert all(math.isnan(v) for v in snapshot.changes(model, weights(model), 0.0)["scaled_gradient_norm"]["encoder"])


def train_here(run: str, document: str) -> None:
    """Train in one of several processes."""
    train(Path(run), Experiment.model_validate_json(document), console=QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_several_processes_leave_the_same_records_as_one(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    def experiment(watching: dict[str, Any]) -> Experiment:
        return tiny_experiment(
            tiny_folder,
            stop={"updates": 4},
            batch={"max_tokens": 200, "accumulate": 2},
            distributed={"kind": kind},
            diagnostics=watching,
        )

    train(tmp_path / "one", experiment(EVERY), console=QUIET)
    for name, watching in (("two", EVERY), ("plain", {"every_updates": None})):
        run, document = str(tmp_path / name), experiment(watching).model_dump_json()
        run_together("tests.train.test_diagnostics", "train_here", 2, run, document)
    assert final_bytes(tmp_path / "two", 4) == final_bytes(tmp_path / "plain", 4)
    one, two = (read_records(tmp_path / name) for name in ("one", "two"))
    assert [r.update for r in one] == [r.update for r in two] == [0, 2, 4]
    for mine, theirs in zip(one, two, strict=True):
        assert mine.values.keys() == theirs.values.keys()
        assert theirs.values["nll"] == pytest.approx(mine.values["nll"], rel=1e-3)
        for name in ("gradient_norm", "update_ratio"):
            if name in mine.values:
                assert theirs.values[name]["encoder"] == pytest.approx(mine.values[name]["encoder"], rel=2e-2)


@pytest.mark.slow
def test_compiled_layers_are_measured_without_further_compilation(tiny_folder: Path) -> None:
    experiment = tiny_experiment(tiny_folder)
    store = Store.open(experiment.data.store)
    learner, model = (Learner(experiment, store, torch.device("cpu")) for _ in range(2))
    graphs = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for layer in learner.model.encoder.layers:  # type: ignore[union-attr]
        torch.nn.Module.compile(layer, backend=backend, dynamic=True)
    batch, loss = profile_batch(store, 100, seed=1), probe_loss(LossConfig(), "fp32")
    learner.model(batch.source, batch.source_mask, batch.target_in)
    compiled = len(graphs)
    assert compiled
    assert measured(learner.model, [batch], loss) == measured(model.model, [batch], loss)
    learner.model(batch.source, batch.source_mask, batch.target_in)
    assert len(graphs) == compiled
