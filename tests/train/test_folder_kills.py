"""Writers of folders, killed at every file operation and run again, end with the same tree as undisturbed ones.

The quick suite tries some of the operations, the slow suite all of them.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_experiment
from tests.killing import run_and_kill, tree
from tests.train.runs import QUIET
from ziggurat.config import Experiment
from ziggurat.data.corpus import Store
from ziggurat.exchange.exporter import export_model
from ziggurat.model.directory import open_model
from ziggurat.train.average import CheckpointSelection, average_run
from ziggurat.train.checkpoint import Checkpoint, RunProgress, save_checkpoint
from ziggurat.train.growth import grow_model
from ziggurat.train.loop import train
from ziggurat.train.run import create_run
from ziggurat.train.saving import clear_leftovers, prune

Work = Callable[[Path], object]


@pytest.fixture(scope="module")
def experiment(tiny_folder: Path) -> Experiment:
    return tiny_experiment(tiny_folder, stop={"updates": 6}, checkpoint={"every_updates": 2, "keep_last": 3})


@pytest.fixture(scope="module")
def run(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six updates with checkpoints at updates 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("done") / "run"
    train(folder, experiment, console=QUIET)
    return folder


def saved(folder: Path, update: int) -> None:
    """Write a checkpoint in a run that keeps only one, and delete the others."""
    run = folder / "run"
    run.mkdir(exist_ok=True)
    clear_leftovers(run)
    kept = tiny_experiment(folder, checkpoint={"every_updates": 1, "keep_last": 1, "keep_best": 1}).training.checkpoint
    progress = RunProgress(update=update, scores={f"step-{n:08d}": n % 3 for n in range(1, update + 1)})
    moments = {"w/exp_avg": torch.ones(3)}
    save_checkpoint(run, Checkpoint(progress, {"w": torch.full((3,), float(update))}, moments, "store"), (2, 2))
    prune(run, progress, kept, smaller_is_better=False)


def left(folder: Path) -> dict[str, object]:
    """Return the tree, without what depends on when and where it was written."""
    found = tree(folder)
    found.pop("out/export.json", None)
    return found


def killed_everywhere(work: Work, folder: Path, begin: Work, look: Work, every: int) -> int:
    """Kill `work` at every `every`-th file operation and repeat it; return the number of kills."""

    def fresh() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        begin(folder)
        return folder

    work(fresh())
    whole, kills, operation = left(folder), 0, 1
    assert whole
    while run_and_kill(lambda: work(folder), str(fresh()), operation):
        look(folder)
        work(folder)
        assert left(folder) == whole, f"killed at operation {operation}"
        kills, operation = kills + 1, operation + every
    return kills


def nothing(folder: Path) -> None:
    """Do nothing: nothing has to be prepared, or checked."""


def opens(folder: Path) -> None:
    """Check that the final path holds something whole."""
    if (folder / "out").exists():
        open_model(folder / "out")


def an_older_one(run: Path) -> Work:
    return lambda folder: average_run(run, CheckpointSelection("last", 1), out=folder / "out")


EVERY = [pytest.param(29, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _forks_have_one_thread() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads; the child uses one
        yield


@pytest.mark.slow
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(
    "replacing", [pytest.param(False, id="new", marks=pytest.mark.slow), pytest.param(True, id="replacing")]
)
def test_average(run: Path, tmp_path: Path, replacing: bool, every: int) -> None:
    begin = an_older_one(run) if replacing else nothing

    def average(folder: Path) -> None:
        # Whatever has this name is whole; after a kill between two renames the next writer restores the older folder.
        force = replacing or (folder / "out").exists()
        average_run(run, CheckpointSelection("last", 3), out=folder / "out", force=force)

    assert killed_everywhere(average, tmp_path / "trial", begin, opens, every) >= 40 / every


@pytest.mark.slow
@pytest.mark.parametrize("every", EVERY)
def test_grow(run: Path, tmp_path: Path, every: int) -> None:
    def grow(folder: Path) -> None:
        force = (folder / "out").exists()  # whole, since nothing else has this name
        grow_model(run, folder / "out", layers=4, strategy="g_top", force=force)

    assert killed_everywhere(grow, tmp_path / "trial", nothing, opens, every) >= 40 / every


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.slow
def test_export(run: Path, tmp_path: Path, every: int) -> None:
    text = tmp_path / "text"
    text.write_text("Su divusim ne gokun.\n")

    def export(folder: Path) -> None:
        export_model(run, "plain", folder / "out", verify=text, force=(folder / "out").exists())

    every = 70 if every > 1 else 1  # each takes half a second
    assert killed_everywhere(export, tmp_path / "trial", nothing, opens, every) >= 40 / every


@pytest.mark.parametrize("every", EVERY)
def test_a_new_run(experiment: Experiment, tmp_path: Path, every: int) -> None:
    store = Store.open(experiment.data.store)

    def create(folder: Path) -> None:
        if not (folder / "run" / "checkpoints").exists():
            create_run(folder / "run", experiment, store)
        clear_leftovers(folder / "run")  # like `train` and `train --resume`

    assert killed_everywhere(create, tmp_path / "trial", nothing, nothing, every) >= 40 / every


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(
    "again",
    [pytest.param(False, id="new"), pytest.param(True, id="the same update again", marks=pytest.mark.slow)],
)
def test_a_checkpoint(tmp_path: Path, again: bool, every: int) -> None:
    def begin(folder: Path) -> None:
        for update in (1, 2, 3, 4) if again else (1, 2, 3):
            saved(folder, update)

    def look(folder: Path) -> None:
        for link in ("last", "best"):
            assert (folder / "run" / link / "meta.json").is_file() or again

    assert killed_everywhere(lambda f: saved(f, 4), tmp_path / "trial", begin, look, every) >= 40 / every
