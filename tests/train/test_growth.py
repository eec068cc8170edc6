"""Shallow-to-deep runs: stages, rates, moments, resume within and across them, stage models."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ziggurat
from tests.composition import model as small_model
from tests.conftest import tiny_experiment
from tests.small import small_config
from tests.train.runs import records
from ziggurat.config import Experiment
from ziggurat.config.depth import CopyStrategy, GrowthConfig, cut_short, growth_refused, saved_passes
from ziggurat.config.lifecycle import StopConfig
from ziggurat.config.load import change_section
from ziggurat.config.model import ModelConfig
from ziggurat.config.train import OptimiserConfig, ScheduleConfig, TrainingConfig
from ziggurat.data.corpus import Store
from ziggurat.model.build import build_model, parameter_roles, stack_residuals
from ziggurat.model.depth import at_depth
from ziggurat.model.directory import open_model, write_model_directory
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import read_tensors, weights
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.train.average import regular_checkpoints
from ziggurat.train.checkpoint import RunProgress, load_checkpoint
from ziggurat.train.growth import after_growth, carry_moments, carry_weights, grow_model, stage_ended
from ziggurat.train.learner import Learner
from ziggurat.train.limits import finished
from ziggurat.train.loop import train
from ziggurat.train.optim import Optimiser
from ziggurat.train.run import reopen_run
from ziggurat.train.saving import StoreCheck
from ziggurat.train.schedule import initial_progress, learning_rate, next_rate

STAGES = {"stages": [{"layers": 1, "updates": 3}, {"layers": 2, "updates": 6}]}


def growing(folder: Path, growth: dict[str, Any] | None = None, **training: Any) -> Experiment:
    """The tiny experiment: 1, 2, then 4 encoder layers, 9 updates."""
    values: dict[str, Any] = {
        "growth": {**STAGES, **(growth or {})},
        "stop": {"updates": 9},
        "checkpoint": {"every_updates": 2, "keep_last": 9},
        "validation": {"every_updates": 100, "decode": False},
        **training,
    }
    model = {"encoder": {"layers": 4, "history": "blocks"}, "combination": {"period": 1}}
    return tiny_experiment(folder, model, **values)


BOTH = {
    "stages": [{"layers": 1, "decoder_layers": 1, "updates": 3}, {"layers": 1, "decoder_layers": 2, "updates": 6}],
    "copy_strategy": "top_only",
}
"""BOTH are stages up to the 4 encoder and 2 decoder layers of `growing`; the decoder reaches its depth before the
encoder.
"""


def rates(run: Path) -> list[float]:
    return [r["learning_rate"] for r in records(run, "train")]


@pytest.mark.slow
def test_a_growing_run_reaches_its_depth_and_keeps_each_stage(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    experiment = growing(tiny_folder, checkpoint={"every_updates": 2, "keep_last": 9, "average_last": 2})
    train(run, experiment)
    assert [f.name for f in checkpoint_folders(run)] == [f"step-{u:08d}" for u in (2, 4, 6, 8, 9)]
    averaged = regular_checkpoints(run, experiment.training)
    assert [f.name for f in averaged] == ["step-00000008", "step-00000009"], "averages stay within a stage"
    assert open_model(run, which="last").experiment.model.encoder.layers == 4
    assert [p.name for p in sorted((run / "stages").iterdir())] == ["001-layers", "002-layers"]
    for folder, layers in (("001-layers", 1), ("002-layers", 2)):
        translator = ziggurat.load(run / "stages" / folder, device="cpu")
        assert len(translator.model.encoder.layers) == layers  # type: ignore[arg-type]
        assert len(translator.translate(["a b"])) == 1
    # A checkpoint in the middle of an early stage opens at its own depth.
    assert open_model(run, which="2").experiment.model.encoder.layers == 1
    assert open_model(run, which="6").experiment.model.encoder.layers == 2  # written before growing
    assert open_model(run, which="averaged").experiment.model.encoder.layers == 4


@pytest.mark.slow
def test_a_decoder_grows_in_its_own_stages(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, growing(tiny_folder, BOTH))
    assert [p.name for p in sorted((run / "stages").iterdir())] == ["001-001-layers", "001-002-layers"]
    for which, depth in (("2", (1, 1)), ("6", (1, 2)), ("last", (4, 2))):
        model = open_model(run, which=which).experiment.model
        assert (model.encoder.layers, model.decoder.layers) == depth
    kept = open_model(run / "stages" / "001-001-layers")
    assert len(kept.model.decoder.layers) == 1  # type: ignore[arg-type]
    message = (run / "log.txt").read_text("utf-8")
    assert " 1-1, width" in message
    assert "the model grows, the decoder from 1 to 2 layers:" in message
    assert "the model grows, the encoder from 1 to 4 layers:" in message


def test_a_model_that_has_grown_leaves_memory_at_once(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds although its compiled layers refer to themselves; Python rarely looks for such cycles, and here
    never.
    """
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **_: setattr(self, "_compiled_call_impl", self._call_impl)
    )
    experiment = growing(tiny_folder, compile="layers")
    learner = Learner(experiment, Store.open(experiment.data.store), torch.device("cpu"))
    before = weakref.ref(learner.model.encoder.layers[0])  # type: ignore[index]
    gc.disable()
    try:
        learner.grow()
    finally:
        gc.enable()
    assert before() is None


@pytest.mark.slow
def test_stages_that_are_not_to_be_kept_leave_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    growth = {"stages": [{"layers": 2, "updates": 1}], "keep_stages": False}
    train(tmp_path / "run", growing(tiny_folder, growth, stop={"updates": 2}))
    assert open_model(tmp_path / "run", which="last").experiment.model.encoder.layers == 4
    assert not (tmp_path / "run" / "stages").exists()


def test_nothing_is_kept_of_a_stage_trained_on_a_damaged_store(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(_: StoreCheck) -> None:
        raise DataError("damaged")

    monkeypatch.setattr(StoreCheck, "poll", lambda _: None)
    monkeypatch.setattr(StoreCheck, "confirm", damaged)  # found only on request
    growth = {"stages": [{"layers": 2, "updates": 1}], "keep_stages": True}
    with pytest.raises(DataError, match="damaged"):
        train(tmp_path / "run", growing(tiny_folder, growth, stop={"updates": 2}))
    assert not (tmp_path / "run" / "stages").exists()


@pytest.mark.slow
@pytest.mark.parametrize("restart", [True, False])
def test_the_rate_restarts_at_its_peak_or_continues(restart: bool, tiny_folder: Path, tmp_path: Path) -> None:
    schedule = {"kind": "isqrt", "peak": 1e-3, "warmup_updates": 2, "initial": 0.0}
    run = tmp_path / "run"
    train(run, growing(tiny_folder, {"restart_rate": restart}, schedule=schedule, log_every_updates=1))
    # The first update after growing is at the end of the warm-up.
    places = [1, 2, 3, 2, 3, 4, 2, 3, 4] if restart else range(1, 10)
    config = ScheduleConfig.model_validate(schedule)
    assert rates(run) == pytest.approx([learning_rate(config, t, d_model=16) for t in places])
    assert max(rates(run)) == 1e-3


def test_growing_during_the_warm_up_does_not_reset_the_counter() -> None:
    config = TrainingConfig.model_validate(
        {"growth": STAGES, "schedule": {"kind": "isqrt", "warmup_updates": 10, "peak": 1.0, "initial": 0.0}}
    )
    progress = RunProgress(update=4, schedule_update=4, losses=[3.0, 2.0])
    after_growth(progress, config)
    assert (progress.stage, progress.schedule_update) == (1, 4)
    assert progress.losses == []  # otherwise the deeper model's first losses would count as spikes and be skipped
    progress = RunProgress(update=40, schedule_update=40)
    after_growth(progress, config)
    assert learning_rate(config.schedule, progress.schedule_update + 1, d_model=8) == 1.0


def test_patience_counts_only_at_the_final_depth() -> None:
    config = TrainingConfig.model_validate({"growth": STAGES, "stop": {"patience": 2}})
    progress = RunProgress(update=2)
    for stage in range(3):
        assert (progress.stage, progress.validations_since_best) == (stage, 0)
        progress.validations_since_best = 2
        assert (finished(progress, config) is not None) == (stage == 2)
        if stage < 2:
            after_growth(progress, config)


@pytest.mark.slow
def test_moments_are_zero_after_growing_or_copied(tiny_folder: Path, tmp_path: Path) -> None:
    for moments in ("reset", "copy"):
        run = tmp_path / moments
        # One update after growing: with reset moments Adam's first moment is (1 - beta1) times the gradient, step 1.
        train(run, growing(tiny_folder, {"moments": moments}, stop={"updates": 4}))
        state = load_checkpoint(checkpoint_folders(run)[-1]).optimiser
        steps = {float(v) for k, v in state.items() if k.endswith("/step")}
        added = {float(v) for k, v in state.items() if k.startswith("encoder.history.") and k.endswith("/step")}
        assert steps == ({1.0} if moments == "reset" else {1.0, 4.0})
        assert added >= {1.0}  # moments whose shape has changed restart
        assert float(state["encoder.layers.1.ffn.in_proj.weight/step"]) == (1.0 if moments == "reset" else 4.0)


def learner(layers: int, seed: int, optimiser: str = "adam") -> tuple[Seq2Seq, Optimiser]:
    model = build_model(small_config(layers, 1), 7, 7, seed=seed)
    return model, Optimiser(model, parameter_roles(model), OptimiserConfig.model_validate({"kind": optimiser}))


GROWN: list[tuple[str, int, list[int | None]]] = [
    ("g_top", 3, [0, 1, 2, 1, 2]),
    ("g_top", 2, [0, 1, 1]),
    ("top_only", 2, [0, 1, 1, 1, 1]),
    ("copy_all", 2, [0, 1, 0, 1]),
    ("interpolate", 2, [0, 0, 1, 1]),
    ("g_interpolate", 3, [0, 1, 1, 2, 2]),
    ("random", 2, [0, 1, None]),
]


@pytest.mark.parametrize("optimiser", ["adam", "adamw", "radam", "muon"])
@pytest.mark.parametrize(("strategy", "old", "sources"), GROWN)
def test_copied_moments_are_those_of_the_layer_that_was_copied(
    strategy: str, old: int, sources: list[int | None], optimiser: str
) -> None:
    (shallow, theirs), (deep, ours) = learner(old, 1, optimiser), learner(len(sources), 2, optimiser)
    generator = torch.Generator().manual_seed(3)
    theirs.set_rate(1e-2)
    for _ in range(3):
        for p in theirs.parameters:
            p.grad = torch.randn(p.shape, generator=generator)  # so no two layers have the same moments
        theirs.step()
    fresh = {name: p.detach().clone() for name, p in deep.named_parameters()}
    growth = GrowthConfig.model_validate({**STAGES, "copy_strategy": strategy, "moments": "copy"})
    depths = small_config(old, 1), small_config(len(sources), 1)
    carry_weights(growth, dict(shallow.named_parameters()), depths, deep)
    carry_moments(growth, theirs.state(), depths, ours)
    before, after, weights = theirs.state(), ours.state(), dict(shallow.named_parameters())
    moments = {key.rpartition("/")[2] for key in before} - {"step"}
    assert moments == {"exp_avg", "exp_avg_sq"} | ({"momentum_buffer"} if optimiser == "muon" else set())
    for name, parameter in deep.named_parameters():
        source: str | None = name
        if name.startswith("encoder.layers."):
            _, _, number, rest = name.split(".", 3)
            taken = sources[int(number)]
            source = None if taken is None else f"encoder.layers.{taken}.{rest}"
        assert torch.equal(parameter, fresh[name] if source is None else weights[source])
        mine = {key.rpartition("/")[2]: value for key, value in after.items() if key.rpartition("/")[0] == name}
        if source is None:
            assert not mine, "none at all, since only the optimiser that owns a parameter knows its kinds"
            continue
        assert mine.keys() == {key.rpartition("/")[2] for key in before if key.rpartition("/")[0] == source}
        assert all(torch.equal(value, before[f"{source}/{moment}"]) for moment, value in mine.items())
        assert all(value.any() for value in mine.values())
    for p in ours.parameters:
        p.grad = torch.ones_like(p)
    ours.step()
    kept = [{key.rpartition("/")[0] for key in optimiser.state()} for optimiser in (theirs, ours)]
    assert kept == [set(weights), set(fresh)]


def test_moments_restart_unless_they_are_copied() -> None:
    (shallow, theirs), (deep, ours) = learner(1, 1), learner(2, 2)
    for p in theirs.parameters:
        p.grad = torch.ones_like(p)
    theirs.step()
    growth = GrowthConfig.model_validate(STAGES)
    depths = small_config(1, 1), small_config(2, 1)
    carry_weights(growth, dict(shallow.named_parameters()), depths, deep)
    carry_moments(growth, theirs.state(), depths, ours)
    assert theirs.state()
    assert not ours.state()


def test_stages_may_end_by_epochs() -> None:
    config = TrainingConfig.model_validate({"growth": {"stages": [{"layers": 1, "epochs": 2}]}})
    assert not stage_ended(RunProgress(epoch=1, update=99), config)
    assert stage_ended(RunProgress(epoch=2), config)
    assert not stage_ended(RunProgress(epoch=9, stage=1), config)


@pytest.mark.parametrize(
    ("growth", "word"),
    [
        ({"stages": [{"layers": 1}]}, "either `updates` or `epochs`"),
        ({"stages": [{"layers": 2, "updates": 3}, {"layers": 2, "updates": 4}]}, "must grow"),
        ({"stages": [{"layers": 1, "updates": 3}, {"layers": 2, "updates": 3}]}, "count from the start"),
        (
            {"stages": [{"layers": 1, "updates": 3}, {"layers": 2, "decoder_layers": 1, "updates": 4}]},
            "2 layers and 1 decoder layers follow 1 layers",
        ),
    ],
)
def test_senseless_stages_are_refused(growth: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        TrainingConfig.model_validate({"growth": growth})


@pytest.mark.parametrize(
    ("stages", "stop", "layers", "saved"),
    [
        # 100 updates with 2 layers, 100 with 4 and 200 with 8, instead of 400 with 8.
        ([{"layers": 2, "updates": 100}, {"layers": 4, "updates": 200}], {"updates": 400}, (8, 2), 10 / 32),
        ([{"layers": 2, "epochs": 1}], {"epochs": 4}, (4, 2), 1 / 8),
        # Both stacks grow, so the layers of both count.
        ([{"layers": 2, "decoder_layers": 1, "updates": 10}], {"updates": 20}, (4, 2), 1 / 4),
        # Training ends within the first stage.
        ([{"layers": 2, "updates": 30}], {"updates": 20}, (4, 2), 1 / 2),
        ([{"layers": 2, "epochs": 1}], {"updates": 20}, (4, 2), None),
    ],
)
def test_saved_passes_are_those_of_missing_layers(
    stages: list[dict[str, int]], stop: dict[str, int], layers: tuple[int, int], saved: float | None
) -> None:
    model = small_model({"encoder.layers": layers[0], "decoder.layers": layers[1]})
    found = saved_passes(GrowthConfig.model_validate({"stages": stages}), model, StopConfig.model_validate(stop))
    assert found == (None if saved is None else pytest.approx(saved))


@pytest.mark.parametrize(
    ("growth", "stop", "word"),
    [
        ({"stages": [{"layers": 1, "updates": 3}]}, {"updates": 9}, "first grow to at most 2"),
        ({"stages": [{"layers": 5, "updates": 3}]}, {"updates": 9}, "must be larger"),
        ({"stages": [{"layers": 4, "updates": 3}]}, {"updates": 9}, "already has the depth of `model`"),
        ({"stages": [{"layers": 4, "decoder_layers": 3, "updates": 3}]}, {"updates": 9}, "2 decoder layers: .* larger"),
    ],
)
def test_growth_that_cannot_happen_is_refused_with_the_configuration(
    tiny_folder: Path, growth: dict[str, Any], stop: dict[str, Any], word: str
) -> None:
    content = growing(tiny_folder).model_dump()
    content["training"] |= {"growth": growth, "stop": stop}
    with pytest.raises(ValueError, match=word):
        Experiment.model_validate(content)


@pytest.mark.parametrize(
    ("strategy", "history", "refused"),
    [
        ("interpolate", "latest", False),
        ("interpolate", "blocks", True),
        ("interpolate", "dlcl", True),
        ("g_interpolate", "latest", False),
        ("g_interpolate", "blocks", False),
        ("g_interpolate", "dlcl", True),
    ],
)
def test_layers_are_inserted_only_where_trained_weights_keep_their_layers(
    tiny_folder: Path, strategy: str, history: str, refused: bool
) -> None:
    content = growing(tiny_folder).model_dump()
    content["model"]["encoder"]["history"] = history
    content["model"]["combination"]["period"] = 2
    content["training"]["growth"] |= {"stages": [{"layers": 2, "updates": 3}], "copy_strategy": strategy}
    reasons = growth_refused(
        GrowthConfig.model_validate(content["training"]["growth"]), ModelConfig.model_validate(content["model"])
    )
    assert bool(reasons) == refused
    assert not refused or reasons[0].key == "training.growth.copy_strategy"


@pytest.mark.slow
def test_a_run_too_short_for_its_stages_is_reported(tiny_folder: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", growing(tiny_folder, stop={"updates": 3}))
    message = (tmp_path / "run" / "log.txt").read_text("utf-8")
    assert "comes before the end of the stage of 1 layers (3): the model will not grow beyond it" in message
    config = TrainingConfig.model_validate({"growth": {"stages": [{"layers": 2, "epochs": 2}]}, "stop": {"epochs": 3}})
    assert config.growth is not None
    assert cut_short(config.growth, config.stop) is None


@pytest.mark.parametrize(
    ("schedule", "highest"),
    [
        ({"kind": "gnmt+", "replicas": 8, "warmup_updates": 500, "base": 1e-4}, 8e-4),
        ({"kind": "noam", "warmup_updates": 50}, 512**-0.5 * 50**-0.5),
        ({"kind": "isqrt", "warmup_updates": 50, "peak": 2e-3}, 2e-3),
    ],
)
def test_every_schedule_restarts_at_its_highest_rate(schedule: dict[str, Any], highest: float) -> None:
    config = TrainingConfig.model_validate({"growth": STAGES, "schedule": schedule})
    progress = RunProgress(update=100_000, schedule_update=100_000)
    after_growth(progress, config)
    assert learning_rate(config.schedule, progress.schedule_update + 1, d_model=512) == pytest.approx(highest)


STARTS: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "isqrt": ({"peak": 2e-3, "warmup_updates": 50}, lambda n: 2e-3 * math.sqrt(50 / (49 + n))),
    "noam": ({"factor": 2.0, "warmup_updates": 50}, lambda n: 2 / math.sqrt(512 * (49 + n))),
    "constant": ({"peak": 2e-3, "warmup_updates": 50}, lambda n: 2e-3),
    "linear": ({"peak": 2e-3, "warmup_updates": 50, "floor": 0.0}, lambda n: 2e-3 * (9 - n) / 8),
    "cosine": (
        {"peak": 2e-3, "warmup_updates": 50, "floor": 0.0},
        lambda n: 1e-3 * (1 + math.cos(math.pi * (n - 1) / 8)),
    ),
    "wsd": (
        {"peak": 2e-3, "warmup_updates": 50, "floor": 0.0, "decay_share": 0.5},
        lambda n: 2e-3 * (1 - math.sqrt(max(0.0, n - 4.5) / 4.5)),
    ),
    "gnmt+": (  # 8 * 16^-((8 t - 40000) / 80000) from update 5000 of the schedule on
        {"replicas": 8, "warmup_updates": 500, "base": 1e-4, "decay_start": 40_000, "decay_end": 120_000},
        lambda n: 8e-4 * 16 ** -(max(0, 8 * (3999 + n) - 40_000) / 80_000),
    ),
}
"""STARTS are schedules, and their rates at update n of a run of 9 that starts at the peak."""


@pytest.mark.parametrize("kind", STARTS)
def test_a_run_that_starts_at_the_peak(kind: str) -> None:
    given, rate = STARTS[kind]
    values = {"start_from": "grown", "schedule": {"kind": kind, "start": "peak", **given}, "stop": {"updates": 9}}
    config = TrainingConfig.model_validate(values)
    progress, found = initial_progress(config.schedule), []
    for _ in range(9):
        found.append(next_rate(progress, config, 512))
        progress.advance(1, progress.position)
    assert found == pytest.approx([rate(n) for n in range(1, 10)], rel=1e-12)
    assert progress.update == 9


@pytest.mark.slow
def test_a_trained_model_grows_in_stages_starting_at_the_peak(tiny_folder: Path, tmp_path: Path) -> None:
    """It has the layers of the first stage. Stopped and resumed, it has the rates of an uninterrupted run."""
    trained, run = tmp_path / "trained", tmp_path / "run"
    shallow = growing(tiny_folder).model_dump()
    shallow["model"]["encoder"]["layers"], shallow["training"]["growth"] = 1, None
    train(trained, Experiment.model_validate(shallow))
    schedule = {"kind": "isqrt", "peak": 1e-3, "warmup_updates": 50, "start": "peak"}
    stages = [{"layers": 1, "updates": 1}, {"layers": 2, "updates": 4}]
    more: dict[str, Any] = {"schedule": schedule, "start_from": str(trained), "log_every_updates": 1}
    more["growth"] = {"stages": stages}
    train(run, growing(tiny_folder, **more, stop={"updates": 3}))
    train(run, reopen_run(run, ["training.stop.updates=6"]), resume=True)
    after = [1e-3 * math.sqrt(50 / t) for t in (50, 51, 52)]
    assert rates(run) == pytest.approx([1e-3, *after, *after[:2]])
    first = read_tensors(run / "stages" / "001-layers" / "model.safetensors")
    before = read_tensors(trained / "last" / "model.safetensors")
    for name, values in first.items():  # one update later
        torch.testing.assert_close(values, before[name], atol=1.1e-3, rtol=0, msg=name)


@pytest.mark.parametrize("end", [None, 9, 7, 3])
@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_a_decay_ends_at_its_update_of_the_run(kind: str, end: int | None) -> None:
    schedule = {"kind": kind, "peak": 1.0, "warmup_updates": 3, "floor": 0.1, "decay_updates": end}
    config = TrainingConfig.model_validate({"growth": STAGES, "schedule": schedule, "stop": {"updates": 9}})
    progress, found = RunProgress(), []
    for _ in range(9):
        while stage_ended(progress, config):
            after_growth(progress, config)
        found.append(next_rate(progress, config, 8))
        progress.advance(1, progress.position)
    last = end or 9
    assert found[last - 1 :] == pytest.approx([0.1] * (10 - last))
    assert min(found[1 : last - 1]) > 0.1  # update 1 is the warm-up


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["g_top", "random"])
def test_added_layers_get_their_own_omega(tiny_folder: Path, tmp_path: Path, strategy: str) -> None:
    """Omega follows from the variance below it; copied from a lower layer it would be too small."""
    content = growing(tiny_folder).model_dump()
    content["model"] |= {"residual": "admin", "init": {"kind": "admin", "profile_tokens": 200}}
    content["model"]["encoder"] |= {"layers": 4, "history": "latest"}
    content["model"]["wiring"]["omega_trainable"] = False
    content["training"] |= {"growth": {"stages": [{"layers": 2, "updates": 2}], "copy_strategy": strategy}}
    content["training"] |= {"stop": {"updates": 4}, "checkpoint": {"every_updates": 2, "keep_last": 9}}
    run = tmp_path / "run"
    train(run, Experiment.model_validate(content))

    def omegas(which: str) -> list[float]:
        encoder = open_model(run, which=which).model.encoder
        skips = [residual.skip for residual in stack_residuals(encoder)]
        return [float(skip.detach().mean()) for skip in skips]  # type: ignore[union-attr]

    shallow, grown = omegas("2"), omegas("4")
    assert grown[:4] == shallow
    assert all(above > below for below, above in pairwise(grown))


@pytest.mark.slow
def test_a_compiled_run_grows_without_compiling_more(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs are run unchanged, because testing the compiler is torch's job."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compiled(self, backend=keep, **how))
    torch.compiler.reset()
    plain = growing(tiny_folder, {"stages": [{"layers": 2, "updates": 3}]}, stop={"updates": 6})
    train(tmp_path / "plain", plain)
    assert graphs == []
    run = tmp_path / "compiled"
    training = plain.training.model_copy(update={"compile": "layers", "stop": StopConfig(updates=3)})
    train(run, plain.model_copy(update={"training": training}))
    before = len(graphs)
    assert before > 0
    train(run, reopen_run(run, ["training.stop.updates=6"]), resume=True)  # grows, then continues
    assert len(graphs) == before
    one, other = (read_tensors(folder / "last" / "model.safetensors") for folder in (tmp_path / "plain", run))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_constants_of_a_growing_run_are_those_of_its_final_depth() -> None:
    values = {"residual": "admin", "init": {"kind": "admin", "omega": "linear"}, "dropout": {"sublayer": 0.6}}
    deep = ModelConfig.model_validate({"d_model": 16, "heads": 2, "encoder": {"layers": 6}, **values})
    shallow = build_model(at_depth(deep, 2), 9, 9)
    residuals = stack_residuals(shallow.encoder)
    assert [float(r.skip[0]) for r in residuals] == pytest.approx([12**0.5] * 4)  # type: ignore[index]
    assert [float(r.dropout.p) for r in residuals] == pytest.approx([0.1, 0.1, 0.2, 0.2])  # type: ignore[arg-type]
    above = stack_residuals(build_model(at_depth(deep, 2, 2), 9, 9).decoder)  # 6 layers in the end
    assert [float(r.skip[0]) for r in above] == pytest.approx([18**0.5] * 6)  # type: ignore[index]
    assert [float(r.dropout.p) for r in above] == pytest.approx([0.1] * 3 + [0.2] * 3)  # type: ignore[arg-type]


def test_growing_a_trained_model_and_training_on(tiny_folder: Path, tmp_path: Path) -> None:
    shallow = tmp_path / "shallow"
    plain = tiny_experiment(tiny_folder, validation={"every_updates": 100, "decode": False})
    train(shallow, plain)
    grow_model(shallow, tmp_path / "grown", layers=3, strategy="g_top")
    grown = open_model(tmp_path / "grown")
    assert grown.experiment.model.encoder.layers == 3
    before = read_tensors(shallow / "last" / "model.safetensors")
    after = dict(grown.model.named_parameters())
    assert torch.equal(after["encoder.layers.2.ffn.in_proj.weight"], before["encoder.layers.1.ffn.in_proj.weight"])

    def started(layers: int) -> Experiment:
        training = {"start_from": str(tmp_path / "grown"), "stop": {"updates": 1}, "schedule": {"peak": 1e-12}}
        model = change_section(plain.model, {"encoder": {"layers": layers}}, "model")
        changed = change_section(plain.training, training, "training")
        return plain.model_copy(update={"model": model, "training": changed})

    train(tmp_path / "on", started(3))
    on = read_tensors(tmp_path / "on" / "last" / "model.safetensors")
    for name, values in on.items():
        torch.testing.assert_close(values, after[name].detach(), atol=1e-6, rtol=0)
    with pytest.raises(ConfigError, match=r"model\.encoder\.layers: 3 -> 4.*ziggurat grow"):
        train(tmp_path / "off", started(4))
    # The run that is trained further may have been grown itself.
    growing = {"growth": {"stages": [{"layers": 1, "updates": 1}], "copy_strategy": "top_only"}}
    grows = change_section(started(3), {"training": growing}, "")
    with pytest.raises(ConfigError, match=r"model\.encoder\.layers: 3 -> 1; set `training\.growth=null`"):
        train(tmp_path / "off", grows)
    assert not (tmp_path / "off").exists()
    with pytest.raises(ConfigError, match="holds something other"):
        grow_model(shallow, tiny_folder, layers=3, strategy="g_top", force=True)
    with pytest.raises(ConfigError, match="already holds a model; `--force` replaces it"):
        grow_model(shallow, tmp_path / "grown", layers=4, strategy="g_top")
    assert open_model(tmp_path / "grown").experiment.model.encoder.layers == 3
    grow_model(shallow, tmp_path / "grown", layers=4, strategy="g_top", force=True)
    assert open_model(tmp_path / "grown").experiment.model.encoder.layers == 4


@pytest.mark.parametrize(
    ("strategy", "layer", "number"), [("interpolate", 2, 3), ("top_only", 2, 2), ("interpolate", None, None)]
)
def test_the_layer_that_guided_alignment_taught_gets_its_new_number(
    strategy: CopyStrategy, layer: int | None, number: int | None, tiny_folder: Path, tmp_path: Path
) -> None:
    experiment = tiny_experiment(tiny_folder, loss={"alignment": {"layer": layer}})
    config = change_section(experiment.model, {"decoder": {"layers": 2}}, "model")
    experiment, store = experiment.model_copy(update={"model": config}), Store.open(experiment.data.store)
    shallow = build_model(config, store.source.size, store.target.size)
    write_model_directory(tmp_path / "shallow", weights(shallow), experiment, store.path)
    grow_model(tmp_path / "shallow", tmp_path / "grown", decoder_layers=4, strategy=strategy)
    opened = open_model(tmp_path / "grown")
    guided = opened.experiment.training.loss.alignment
    assert guided is not None
    assert guided.layer == number
    if number is not None:
        taught, before = (
            weights(model)[f"decoder.layers.{place - 1}.cross_attn.q_proj.weight"]
            for model, place in ((opened.model, number), (shallow, 2))
        )
        assert torch.equal(taught, before)
