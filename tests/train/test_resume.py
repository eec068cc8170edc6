"""A run that is interrupted at any moment and resumed ends with the same weights, bit for bit."""

from __future__ import annotations

import io
import os
import random
import shutil
import time
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.conftest import forkserver, tiny_experiment
from tests.train.runs import QUIET, Case, assert_resumed_equals_whole, final_bytes, records, same_records, train_part
from ziggurat.config import Experiment
from ziggurat.config.lifecycle import MlflowConfig
from ziggurat.config.load import change_section
from ziggurat.data.corpus import Store
from ziggurat.model.build import build_model
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, TrainingError
from ziggurat.train import setup
from ziggurat.train.checkpoint import load_checkpoint
from ziggurat.train.loop import TrainingResult, train
from ziggurat.train.run import create_run, reopen_run
from ziggurat.train.trackers import keep
from ziggurat.train.update import train_update

MATRIX = [Case(*cell) for cell in product(("fp32", "bf16"), (False, True), (1, 2), ("none", "layers"))]
PAIRWISE = [
    Case("fp32", growth=True, accumulate=2),
    Case("bf16"),
]
"""PAIRWISE is the quick suite's part: every value except compiled layers, whose first batch a test below checks."""
UPDATES = 30
SETTINGS: dict[str, Any] = {
    "threads": 1,  # processes that are killed must add up in the same order as this one
    "stop": {"updates": UPDATES},
    "checkpoint": {"every_updates": 7, "keep_last": 2},
    "validation": {"every_updates": 10, "max_sentences": 2},
    "batch": {"max_tokens": 150, "accumulate": 2},
    "log_every_updates": 5,
}


def train_run(run: Path, experiment: Experiment, *, resume: bool = False) -> TrainingResult:
    return train(run, experiment, resume=resume, console=QUIET)


@pytest.fixture(scope="module")
def experiment(tiny_folder: Path) -> Experiment:
    return tiny_experiment(tiny_folder, **SETTINGS)


@pytest.fixture(scope="module")
def uninterrupted(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], Path]:
    run = tmp_path_factory.mktemp("whole") / "run"
    train_run(run, experiment)
    return final_bytes(run, UPDATES), run


def restarted(run: str, document: str, resume: str) -> None:
    """Train; a resumed run has to compile again, as in a separate process."""
    if resume:
        torch.compiler.reset()
    train_part(run, document, resume)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=() if c in PAIRWISE else pytest.mark.slow) for c in MATRIX]
)
def test_eight_updates_and_eight_more_equal_sixteen(case: Case, tiny_folder: Path, tmp_path: Path) -> None:
    """This covers every precision, with and without growth, accumulation and compiled layers."""
    assert_resumed_equals_whole(case, tiny_folder, tmp_path, restarted)


LATER: dict[str, dict[str, Any]] = {
    "branch-norm": {"residual": "branch_norm", "norm": "scale", "wiring": {"branch_updates": 5}},
    "streams-values": {
        "residual": "manifold_hyper",
        "wiring": {"streams": 3, "mixing": "permutations", "stream_start": "normal"},
        "attention": {"value_residual": "learned", "cross_value_residual": "single"},
    },
    "mudd-gpas-ranges": {
        "residual": "pre",
        "encoder": {"history": "mudd"},
        "decoder": {"layers": 3, "ranges": [{"layers": 1, "residual": "post"}]},
        "wiring": {"gpas": True},
    },
    "siamese-keel": {
        "encoder": {"residual": "siamese"},
        "decoder": {"residual": "keel"},
        "attention": {"qk_norm": "rms", "value_norm": "rms"},
    },
    "attention-residuals": {
        "residual": "none",
        "encoder": {"history": "attention_residuals"},
        "decoder": {"history": "block_attention_residuals"},
        "combination": {"unit": "sublayer"},
    },
    "sub-ln-hybrid": {
        "encoder": {"residual": "sub_ln"},
        "decoder": {"residual": "hybrid"},
        "init": {"kind": "magneto"},
    },
    "transfer": {"residual": "pre", "transfer": {"width": 8, "encoder_layers": 1, "decoder_layers": 1}},
    "tied-solver": {
        "encoder": {"layers": 4, "tied_layers": [1, 2], "solver": "rk2_gated"},
        "decoder": {"layers": 4, "tied_layers": [1, 2, 2, 1]},
    },
    "depth-growing-fix-norm": {
        "encoder": {"layers": 3, "history": "cross_module"},
        "decoder": {"layers": 3, "history": "cross_module"},
        "memory": "hierarchical",
        "combination": {"period": 2},
        "norm": "scale",
        "embedding": {"unit_length": True},
        "init": {"kind": "lipschitz"},
    },
    "rnmt": {
        "family": "rnmt",
        "memory": "transparent",
        "embedding": {"positions": "none", "sharing": "none"},
        "dropout": {"activation": 0.0},
    },
}


@pytest.mark.parametrize(
    "choices",
    [pytest.param(c, id=n, marks=() if i < 3 else pytest.mark.slow) for i, (n, c) in enumerate(LATER.items())],
)
def test_three_updates_and_three_more_equal_six_with_later_kinds(
    choices: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """A checkpoint has all their parameters, moments and factors."""
    checkpoint = {"every_updates": 3, "keep_last": 2}
    six = tiny_experiment(tiny_folder, choices, threads=1, stop={"updates": 6}, checkpoint=checkpoint)
    train_run(tmp_path / "whole", six)
    train_run(tmp_path / "halves", change_section(six, {"training": {"stop": {"updates": 3}}}, ""))
    train_run(tmp_path / "halves", six, resume=True)
    assert final_bytes(tmp_path / "halves", 6) == final_bytes(tmp_path / "whole", 6)


MODULES: dict[str, Any] = {"history": "cross_module", "layers": 4}
GROWN: dict[str, tuple[dict[str, Any], str]] = {
    **{kind: ({"encoder": {"layers": 4}, "decoder": {"layers": 4}}, kind) for kind in ("midas", "lidas")},
    "tied": ({side: {"layers": 4, "tied_layers": [1, 2]} for side in ("encoder", "decoder")}, "g_top"),
    "depth-growing": (
        {"encoder": MODULES, "decoder": MODULES, "memory": "hierarchical", "combination": {"period": 2}},
        "random",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 3, 4])
@pytest.mark.parametrize("name", GROWN)
def test_a_growing_run_with_means_of_weights_resumes_before_and_after(
    name: str, stop: int, tiny_folder: Path, tmp_path: Path
) -> None:
    choices, strategy = GROWN[name]
    stages = [{"layers": 2, "decoder_layers": 2, "updates": 3}]
    training = {
        "optimiser": {"weight_smoothing": 0.1},
        "loss": {"r_drop": 5.0},
        "schedule": {"kind": "wsd", "peak": 3e-3, "warmup_updates": 1, "decay_updates": 6},
    }
    growth = {"stages": stages, "copy_strategy": strategy, "moments": "copy"}
    six = tiny_experiment(tiny_folder, threads=1, stop={"updates": 6}, checkpoint={"every_updates": 1}, **training)
    six = change_section(six, {"model": choices, "training": {"growth": growth}}, "")
    train_run(tmp_path / "whole", six)
    train_run(tmp_path / "parts", change_section(six, {"training": {"stop": {"updates": stop}}}, ""))
    train_run(tmp_path / "parts", six, resume=True)
    assert final_bytes(tmp_path / "parts", 6) == final_bytes(tmp_path / "whole", 6)


@pytest.mark.slow
def test_a_run_resumed_before_layer_drop_has_used_every_layer(tiny_folder: Path, tmp_path: Path) -> None:
    drop = {"encoder": {"layers": 6, "layer_drop": 0.8}}
    runs = {}
    for stop in (2, 4):
        validation = {"every_updates": 9, "decode": False}
        runs[stop] = tiny_experiment(tiny_folder, drop, stop={"updates": stop}, validation=validation)
    train_run(tmp_path / "whole", runs[4])
    train_run(tmp_path / "parts", runs[2])
    saved = load_checkpoint(tmp_path / "parts" / "last")
    trained = {key.rpartition("/")[0] for key in saved.optimiser}
    assert trained < saved.weights.keys(), "a layer has had no update yet, so the test can fail"
    train_run(tmp_path / "parts", runs[4], resume=True)
    assert final_bytes(tmp_path / "parts", 4) == final_bytes(tmp_path / "whole", 4)


@pytest.mark.slow
@pytest.mark.parametrize("fit", [False, True])
def test_compiled_layers_see_the_same_batch_first_in_a_resumed_run(
    fit: bool, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs, and thus the last bits of their results, depend on it; nothing is compiled here."""
    seen: list[tuple[int, ...]] = []

    def build(*arguments: Any, **options: Any) -> Any:
        model = build_model(*arguments, **options)
        model.register_forward_pre_hook(lambda _, inputs: seen.append((*inputs[0].shape, inputs[2].shape[1])))
        return model

    monkeypatch.setattr("ziggurat.train.learner.build_model", build)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    monkeypatch.setattr(torch.compiler, "reset", seen.clear)
    batch = {"max_tokens": 150, "accumulate": 2, "fit": fit, "fit_limit": 512}
    started = tiny_experiment(tiny_folder, compile="layers", stop={"updates": 3}, batch=batch)
    train_run(tmp_path / "run", started)
    first = seen[0]
    seen.clear()
    train_run(tmp_path / "run", reopen_run(tmp_path / "run", ["training.stop.updates=4"]), resume=True)
    assert seen[0] == first
    assert first not in seen[-2:], "the update itself has other batches, so the test can fail"


def _child(run: str, document: str, resume: bool) -> None:
    train_run(Path(run), Experiment.model_validate_json(document), resume=resume)


def killed_after(seconds: float, run: Path, experiment: Experiment) -> bool:
    """Train in a separate process and kill it; return False if it had already ended."""
    context = forkserver()
    child = context.Process(target=_child, args=(str(run), experiment.model_dump_json(), run.exists()))
    child.start()
    child.join(seconds)
    alive = child.is_alive()
    child.kill()
    child.join()
    return alive


@pytest.mark.slow  # recorded moments are in test_kills.py
@pytest.mark.parametrize("wanted", [1, 20])
def test_sigkill_at_random_moments(
    wanted: int, experiment: Experiment, uninterrupted: tuple[dict[str, bytes], Path], tmp_path: Path
) -> None:
    forkserver()  # takes seconds to start
    began = time.perf_counter()
    assert not killed_after(300, tmp_path / "timed", experiment)
    length = time.perf_counter() - began
    seed = random.SystemRandom().randrange(10**6)  # different moments every time; test_kills.py has recorded ones
    moments = random.Random(seed)
    kills = 0
    for number in range(4 * wanted + 20):
        run = tmp_path / f"run-{number}"
        moment = moments.uniform(0.0, 0.9 * length)
        if killed_after(moment, run, experiment):
            kills += 1
        else:
            length *= 0.7  # the timed run was slower than this one; sooner or later every moment comes in time
        has_run = (run / "checkpoints").is_dir()
        train_run(run, experiment, resume=has_run)
        assert final_bytes(run, UPDATES) == uninterrupted[0], f"seed {seed}, kill {number} after {moment:.3f} s"
        same_records(uninterrupted[1], run)
        if kills == wanted:
            return
    pytest.fail(f"only {kills} of {4 * wanted + 20} processes were alive when they were killed")


def test_a_run_is_not_overwritten_and_not_shared(
    experiment: Experiment, uninterrupted: tuple[dict[str, bytes], Path]
) -> None:
    from ziggurat.train.run import run_lock

    run = uninterrupted[1]
    with pytest.raises(ConfigError, match=r"already holds a run; resume it: `ziggurat train --run .* --resume`"):
        train_run(run, experiment)
    with run_lock(run), pytest.raises(CheckpointError, match="another process is training in this folder"):
        train_run(run, experiment, resume=True)
    with pytest.raises(ConfigError, match="no run to resume"):
        reopen_run(run / "nothing", [])


def _child_at(barrier: Any, run: str, document: str) -> None:
    barrier.wait(60)
    _child(run, document, False)


@pytest.mark.slow
def test_one_of_two_processes_that_start_the_same_run_at_once_is_refused(
    experiment: Experiment, uninterrupted: tuple[dict[str, bytes], Path], tmp_path: Path
) -> None:
    context = forkserver()
    run, barrier = tmp_path / "run", context.Barrier(2)
    arguments = (barrier, str(run), experiment.model_dump_json())
    children = [context.Process(target=_child_at, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert sorted(child.exitcode or 0 for child in children) == [0, 1]
    assert final_bytes(run, UPDATES) == uninterrupted[0]
    assert [r["update"] for r in records(run, "train")] == list(range(5, UPDATES + 1, 5))
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_run_made_by_another_process_in_the_meantime_is_left_alone(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds at any moment; here it happens after the last look at the folder, before it is locked."""
    from ziggurat.train import run as module

    building, run = module.building, tmp_path / "run"

    def late(folder: Path) -> Any:
        (folder / "checkpoints" / "step-00000007").mkdir(parents=True)
        return building(folder)

    monkeypatch.setattr(module, "building", late)
    with pytest.raises(ConfigError, match="already holds a run"):
        train_run(run, experiment)
    assert (run / "checkpoints" / "step-00000007").is_dir()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def before_update(number: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `act` once in a run, before update `number`."""
    updates = count(1)

    def update(*arguments: Any, **options: Any) -> Any:
        if next(updates) == number:
            act()
        return train_update(*arguments, **options)

    monkeypatch.setattr("ziggurat.train.loop.train_update", update)


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_a_store_replaced_under_a_live_run(
    experiment: Experiment,
    uninterrupted: tuple[dict[str, bytes], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    early: bool,
) -> None:
    """The run has mapped the old data and ends normally, with a warning; it cannot be resumed on the new data.

    A replacement before the first update is noticed, too, because preparations can take minutes.
    """
    from ziggurat.data.prepare import prepare

    mine = tiny_experiment(tmp_path, **SETTINGS)
    prepare(mine.data)

    def replace() -> None:
        file = tmp_path / "train.qlo"
        file.write_text(file.read_text().replace("a", "e"))
        prepare(mine.data, force=True)

    if early:
        usual = setup.create_run
        monkeypatch.setattr(setup, "create_run", lambda *arguments: (replace(), usual(*arguments)))
    else:
        before_update(12, replace, monkeypatch)
    output = io.StringIO()
    run = tmp_path / "run"
    train(run, mine, console=Console(file=output, width=500))
    assert output.getvalue().count("THE STORE WAS REPLACED") == 1
    assert final_bytes(run, UPDATES) == uninterrupted[0]
    with pytest.raises(CheckpointError, match="is not the one this run was trained on"):
        train_run(run, mine, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("keeps_time", [False, True])
def test_a_store_changed_in_place_ends_the_run(
    keeps_time: bool,
    experiment: Experiment,
    uninterrupted: tuple[dict[str, bytes], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run stops before it makes a checkpoint from damaged data; with the data restored, it ends normally."""
    mine = tiny_experiment(tmp_path, **SETTINGS)
    shutil.copytree(experiment.data.store, mine.data.store)
    file = next(Path(mine.data.store).glob("train-*.arrow"))
    whole = file.read_bytes()

    def change() -> None:
        times = file.stat()
        with file.open("r+b") as handle:
            handle.seek(-9, os.SEEK_END)
            handle.write(b"\xff")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns if keeps_time else times.st_mtime_ns + 1))

    before_update(12, change, monkeypatch)
    run = tmp_path / "run"
    with pytest.raises(DataError, match=f"{file.name}: changed while it was being read"):
        train_run(run, mine)
    assert checkpoint_folders(run)[-1].name == "step-00000010"
    with file.open("r+b") as handle:
        handle.write(whole)
    train_run(run, mine, resume=True)
    assert final_bytes(run, UPDATES) == uninterrupted[0]


def test_a_resumed_run_keeps_its_model_and_data(uninterrupted: tuple[dict[str, bytes], Path]) -> None:
    run = uninterrupted[1]
    training = ("training.seed=5", "training.batch.max_tokens=99", "training.quantise=int8")
    for override in ("model.d_model=32", "data.unicode=nfc", *training):
        with pytest.raises(ConfigError, match="a resumed run cannot change"):
            reopen_run(run, [override])
    with pytest.raises(ConfigError, match=r"start a new run for that \(`training.start_from`"):
        reopen_run(run, ["model.encoder.layers=3"])
    assert reopen_run(run, []).training.stop.updates == UPDATES


def test_a_resumed_run_stays_in_its_experiment_at_mlflow(tiny_folder: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", ["training.mlflow.experiment=new"]
    experiment = tiny_experiment(tiny_folder, mlflow={"experiment": "old"})
    create_run(run, experiment, Store.open(experiment.data.store))
    assert reopen_run(run, other).training.mlflow == MlflowConfig(experiment="new")  # it has not started there
    keep(run, "mlflow", "abc")
    with pytest.raises(ConfigError, match=r"stays in the experiment old: .*remove .*tracking/mlflow\.id to "):
        reopen_run(run, other)
    assert reopen_run(run, ["training.mlflow=null"]).training.mlflow is None


@pytest.mark.parametrize(
    ("begun", "changed", "error", "message"),
    [
        (True, {}, CheckpointError, "is not the one this run was trained on"),
        (
            False,
            {},
            ConfigError,
            r"run: its source vocabulary is not that of the store .*; restore that store, or remove",
        ),
        (False, {"kind": "unigram"}, ConfigError, r"data\.subword\.kind \(\"unigram\" -> \"bpe\"\)"),
    ],
)
def test_another_store_is_refused(
    begun: bool,
    changed: dict[str, str],
    error: type[Exception],
    message: str,
    experiment: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This includes a run that was killed before its first checkpoint, which has the vocabularies of its own store."""
    from ziggurat.data.prepare import prepare

    run = tmp_path / "run"
    short = change_section(experiment, {"training": {"stop": {"updates": 2}}}, "")
    if begun:
        train_run(run, short)
    else:
        with monkeypatch.context() as patch:
            patch.setattr("ziggurat.train.loop.starting_point", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train_run(run, short)
    other = tiny_experiment(tmp_path).data
    file = tmp_path / "train.qlo"
    file.write_text(file.read_text().replace("a", "e"))
    prepare(other.model_copy(update={"subword": other.subword.model_copy(update=changed)}))
    moved = short.model_copy(update={"data": short.data.model_copy(update={"store": other.store})})
    with pytest.raises(error, match=message):
        train_run(run, moved, resume=True)


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_has_the_weights_that_it_began_with(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds although the run in `start_from` has been continued since."""
    short: dict[str, Any] = {"validation": {"every_updates": 9, "decode": False}, "stop": {"updates": 2}}
    train_run(tmp_path / "other", tiny_experiment(tiny_folder, **short))
    mine = tiny_experiment(tiny_folder, **short, start_from=str(tmp_path / "other"))
    train_run(tmp_path / "whole", mine)
    assert [folder.name for folder in checkpoint_folders(tmp_path / "whole")] == ["step-00000002"]
    with monkeypatch.context() as patch:
        before_update(2, interrupted, patch)
        with pytest.raises(KeyboardInterrupt):
            train_run(tmp_path / "run", mine)
    train_run(tmp_path / "other", reopen_run(tmp_path / "other", ["training.stop.updates=3"]), resume=True)
    train_run(tmp_path / "run", mine, resume=True)
    assert final_bytes(tmp_path / "run", 2) == final_bytes(tmp_path / "whole", 2)


SHORT = {**SETTINGS, "stop": {"updates": 4}, "checkpoint": {"every_updates": 2}}


@pytest.fixture(scope="module")
def short_run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates at a rate that falls by an inverse square root."""
    run = tmp_path_factory.mktemp("short") / "run"
    schedule = {"kind": "isqrt", "warmup_updates": 1, "peak": 0.002}
    train_run(run, tiny_experiment(tiny_folder, **SHORT, schedule=schedule))
    return run


def resumed(before: Path, run: Path, *changes: str, environment: str | None = None) -> list[str]:
    """Resume a copy of a run with changes; return the lines that this adds to its log."""
    shutil.copytree(before, run, symlinks=True)
    if environment is not None:
        file = run / "environment.json"
        file.write_text(file.read_text().replace('"instructions": "', f'"instructions": "{environment}, '))
    train_run(run, reopen_run(run, changes), resume=True)
    begun = len((before / "log.txt").read_text().splitlines())
    return [line.partition("  ")[2] for line in (run / "log.txt").read_text().splitlines()[begun:]]


@pytest.mark.parametrize(
    ("change", "jumps"),
    [
        ("training.schedule.peak=0.004", True),
        ("training.schedule.kind=cosine", True),
        ("training.clip_norm=0.5", False),
        ("training.log_every_updates=1", False),
    ],
)
def test_changed_settings_and_jumps_of_the_rate_are_reported_on_resuming(
    change: str, jumps: bool, short_run: Path, tmp_path: Path
) -> None:
    said = resumed(short_run, tmp_path / "run", "training.stop.updates=5", change)
    (line,) = [line for line in said if line.startswith("changed since that checkpoint: ")]
    assert "training.stop.updates: 4 -> 5" in line
    key, _, value = change.partition("=")
    assert f"{key}: " in line
    assert f"-> {value}" in line.replace('"', "")
    told = [line for line in said if "the learning rate of the next update" in line]
    assert bool(told) == jumps
    (rate,) = [r["learning_rate"] for r in records(tmp_path / "run", "train") if r["update"] == 5]
    assert not jumps or f"{rate:.2e}" in told[0]


def test_an_unchanged_resume_reports_no_changes(short_run: Path, tmp_path: Path) -> None:
    message = resumed(short_run, tmp_path / "run")
    assert "resumed after update 4" in message
    assert not [line for line in message if line.startswith(("changed since", "another environment"))]


def test_a_changed_environment_is_reported_on_resuming(short_run: Path, tmp_path: Path) -> None:
    said = resumed(short_run, tmp_path / "run", "training.stop.updates=5", environment="other")
    (line,) = [line for line in said if line.startswith("another environment: ")]
    assert line.startswith('another environment: instructions: "other, ')


@pytest.mark.parametrize("what", ["moved", "removed", "replaced"])
def test_a_run_whose_folder_was_replaced_ends(
    what: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock belongs to a file, not to a name, so the next run in that folder must not get this one's checkpoints."""
    checkpoint = {"every_updates": 2, "asynchronous": False}
    run, mine = tmp_path / "run", tiny_experiment(tiny_folder, **{**SHORT, "checkpoint": checkpoint})

    def change() -> None:
        if what == "removed":
            shutil.rmtree(run)
        else:
            run.rename(tmp_path / "elsewhere")
        if what == "replaced":
            shutil.copytree(tmp_path / "elsewhere", run)

    before_update(4, change, monkeypatch)
    with pytest.raises(TrainingError, match="was moved, removed or replaced"):
        train_run(run, mine)
    assert not list(run.glob("checkpoints/step-00000004"))
    assert run.exists() == (what == "replaced")
