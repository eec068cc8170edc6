"""The folder of a run: made once, owned by one process at a time, opened again to resume."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from ziggurat.config import DataConfig, Experiment, dump, load_experiment
from ziggurat.config.changes import changed, shown
from ziggurat.config.train import BatchConfig
from ziggurat.data.checksums import write_checksums
from ziggurat.data.corpus import Store
from ziggurat.data.files import write_atomically
from ziggurat.data.provenance import other_files, unlike_store
from ziggurat.data.subword import copy_tokenizers
from ziggurat.data.workspace import building
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.models.device import usable_device
from ziggurat.models.run_folder import CHECKPOINTS, CONFIG_FILE, checkpoint_folders, locked, read_meta
from ziggurat.training.environment import keep_environment
from ziggurat.training.processes import Processes
from ziggurat.training.retention import clear_leftovers

__all__ = [
    "changes_since",
    "create_run",
    "elsewhere",
    "held",
    "keep_configuration",
    "owned",
    "refuse_existing",
    "refuse_idle",
    "refuse_other_store",
    "refuse_unshared",
    "reopen_run",
    "restarted",
]


_VOCABULARY_FILES = re.compile(r"vocabulary\.json|\w+\.(spm|vocab)")
"""What checksums protect in a run's own folder; checkpoints have their own, and know the configuration."""

_FIXED = ("seed", "batch", "loss", "optimiser", "precision", "exact_dropout", "growth", "start_from")
"""Keys of `training` that a resumed run cannot change."""

_TOKEN = ".shared"
_JOB = ".job"
"""File that says which job trains in a run."""


def refuse_existing(run: Path) -> None:
    """Raise ConfigError when there is a run in the folder already, DataError when one is being made there."""
    if (run / CHECKPOINTS).exists():
        raise ConfigError(
            f"{run} already holds a run; go on with it by `ziggurat train --run {run} --resume`, "
            "or choose another folder"
        )
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise ConfigError(f"{run}: exists and holds other things than a run; choose a new folder")


def refuse_other_store(experiment: Experiment, store: Store) -> None:
    """Raise ConfigError when the store was prepared with other settings than those of section `data`."""
    if unlike := unlike_store(experiment.data, store.manifest):
        shown = "; ".join(unlike[:4]) + (f"; and {len(unlike) - 4} more" if len(unlike) > 4 else "")
        raise ConfigError(
            f"{store.path} was prepared with other settings than this configuration's (store -> configuration): "
            f"{shown}. Run `ziggurat prepare` with this configuration (`--force` replaces the store), or set "
            "`data.store` to a store made with it"
        )


def refuse_idle(batch: BatchConfig, processes: Processes, *, resume: bool = False) -> None:
    """Raise ConfigError when an update has fewer batches than there are processes."""
    if batch.accumulate < processes.count:
        more = f"set it to {processes.count} or a multiple, or start fewer processes"
        raise ConfigError(
            f"{processes.count} processes share `training.batch.accumulate: {batch.accumulate}` batches per update; "
            + ("start no more processes than that: a resumed run cannot change it" if resume else more)
        )


def elsewhere(config: DataConfig, store: Store) -> list[str]:
    """Return a notice when section `data` names other files than the store was prepared from: they are not read."""
    if not (moved := other_files(config, store.manifest)):
        return []
    shown = "; ".join(moved[:4]) + (f"; and {len(moved) - 4} more" if len(moved) > 4 else "")
    return [
        f"{store.path} was prepared from other files than this configuration names (store -> configuration): {shown}. "
        "Training reads the store; to have the other files in it, run `ziggurat prepare`"
    ]


def create_run(run: Path, experiment: Experiment, store: Store) -> None:
    """Make a new run: resolved configuration and vocabularies; the folder appears whole or not at all.

    Raises ConfigError when there is something already, DataError when another process is making it.
    """
    with building(run) as folder:
        refuse_existing(run)  # here, where no other process can make it in between: `building` replaces what is there
        copy_tokenizers(store.path, folder)
        write_checksums(folder, f"copy it from the store, {store.path}", only=_VOCABULARY_FILES)
        write_atomically(folder / CONFIG_FILE, dump(experiment).encode())
        (folder / CHECKPOINTS).mkdir()


def reopen_run(run: Path, overrides: Sequence[str]) -> Experiment:
    """Return the configuration of an existing run, with overrides of how to go on (`training.stop.updates=...`).

    Raises ConfigError when there is no run, or an override would change the model or the data under way.
    """
    if not (run / CONFIG_FILE).is_file() or not (run / CHECKPOINTS).is_dir():
        raise ConfigError(f"{run}: no run to resume (leave out `--resume` to start one)")
    before = load_experiment(run / CONFIG_FILE)
    after = load_experiment(run / CONFIG_FILE, overrides)
    _refuse_edited(run, before)
    if after.model != before.model or after.data.model_copy(update={"store": before.data.store}) != before.data:
        raise ConfigError(
            f"{run}: a resumed run cannot change `model` or `data` (only `data.store`, if it was moved); "
            "start a new run for that (`training.start_from` takes the weights, `ziggurat grow` deepens them)"
        )
    for key in _FIXED:
        if getattr(after.training, key) != getattr(before.training, key):
            raise ConfigError(f"{run}: a resumed run cannot change `training.{key}`; start a new run for that")
    usable_device(after.training.device, "training.device")
    return after


def _refuse_edited(run: Path, experiment: Experiment) -> None:
    """Raise ConfigError naming the keys that were edited since the newest checkpoint that can be read, if it must not.

    Checkpoints of earlier versions do not know their configuration; they are resumed as they are.
    """
    for folder in reversed(checkpoint_folders(run)):
        try:
            kept = read_meta(folder)
        except CheckpointError:
            continue  # of a damaged one nothing is taken; the one before says the same
        if changes := changes_since(kept, folder, experiment):
            raise ConfigError(
                f"{run / CONFIG_FILE}: changed since {folder.name} was written: {shown(changes)}. A resumed run cannot "
                "change these: put the old values back, or start a new run (`training.start_from` takes the weights)"
            )
        return


def changes_since(meta: Mapping[str, Any], folder: Path, experiment: Experiment) -> list[str]:
    """Return where a run's configuration differs from that of its checkpoint in what a resumed run cannot change.

    `meta` is what `read_meta(folder)` returns. Those of earlier versions know no configuration: nothing.
    Raises CheckpointError for one of a later version.
    """
    kept = meta.get("configuration")
    if kept is None:
        return []
    return changed(_unchangeable(_complete(kept, folder)), _unchangeable(experiment))


def _complete(kept: Mapping[str, Any], folder: Path) -> Experiment:
    """Return the configuration in a checkpoint, with defaults for keys that came later."""
    try:
        return Experiment.model_validate(kept)
    except ValidationError as error:
        raise CheckpointError(
            f"{folder}: its configuration is none of this version ({error.error_count()} keys); resume with the "
            "version of ziggurat that wrote it"
        ) from None


def _unchangeable(experiment: Experiment) -> dict[str, Any]:
    """Return what a resumed run cannot change."""
    content = experiment.model_dump(mode="json")
    training = {key: content["training"][key] for key in _FIXED}
    return {
        "data": {key: value for key, value in content["data"].items() if key != "store"},
        "model": content["model"],
        "training": training,
    }


def keep_configuration(run: Path, experiment: Experiment) -> None:
    """Write down what the run goes on with; only once nothing stands against it any more."""
    if load_experiment(run / CONFIG_FILE) != experiment:
        write_atomically(run / CONFIG_FILE, dump(experiment).encode())


def refuse_unshared(run: Path, processes: Processes) -> None:
    """Raise ConfigError in the processes that do not see the folder of the run in which the first one writes.

    The others would write their parts of checkpoints where nobody looks for them.
    """
    if processes.count == 1:
        return
    word = [uuid4().hex] if processes.first else []
    token = run / _TOKEN
    processes.first_does(lambda: write_atomically(token, word[0].encode()))
    expected = processes.texts(word)[0]
    seen = token.is_file() and [token.read_text(encoding="utf-8")] == expected
    unseen = [rank for rank, said in enumerate(processes.texts(["yes"] if seen else [])) if not said]
    processes.first_does(lambda: token.unlink(missing_ok=True))
    if unseen:
        raise ConfigError(
            f"{run}: processes {', '.join(map(str, unseen))} do not see the folder that the first process writes to; "
            "put the run on a file system that all machines share, and name it by the same absolute path"
        )


def restarted(run: Path) -> bool:
    """Whether this is a new start, by torchrun after a failure or by Slurm after a requeue, of the job that made `run`.

    The same command then goes on with the run. Any other job that finds a run in its folder is refused.
    """
    try:
        before = (run / _JOB).read_text(encoding="utf-8").split()
    except OSError:
        return False
    job = _job()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # a meeting place says less than an id
        job = [name for name in job if not name.startswith("place-")]
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":  # else two commands of one Slurm job would share a run
        job = [name for name in job if not name.startswith("slurm-")]
    return any(name in before for name in job)


def _job() -> list[str]:
    """Return what identifies the job of this process: names that all its starts, on all its machines, share."""
    torchrun = os.environ.get("TORCHELASTIC_RUN_ID")
    found = {
        "torchrun": torchrun if torchrun != "none" else None,  # its own word for no id: then where they meet must do
        "place": f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if torchrun == "none" else None,
        "slurm": os.environ.get("SLURM_JOB_ID"),
    }
    return [f"{kind}-{name}" for kind, name in found.items() if name]


@contextlib.contextmanager
def owned(run: Path) -> Iterator[None]:
    """Hold the run for this job. Raises CheckpointError when another process trains in it."""
    with locked(run):
        write_atomically(run / _JOB, "\n".join(_job()).encode())
        yield


@contextlib.contextmanager
def held(run: Path, experiment: Experiment, processes: Processes) -> Iterator[None]:
    """Hold the run for all processes of this job, and write down with what configuration they go on.

    Raises CheckpointError when another job trains in it, ConfigError when a process does not see its folder or the
    configuration is not the checkpoints'.
    """
    with contextlib.ExitStack() as stack:
        processes.first_does(lambda: stack.enter_context(owned(run)))
        processes.first_does(lambda: clear_leftovers(run))
        refuse_unshared(run, processes)
        processes.first_does(lambda: _refuse_edited(run, experiment))
        processes.first_does(lambda: keep_configuration(run, experiment))
        processes.first_does(lambda: keep_environment(run, experiment.training.device, processes.count))
        yield
