"""The folder of a run: created with its configuration, reopened to resume, and locked for one job."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from pydantic import RootModel, ValidationError
from torch import Tensor

from ziggurat import __version__
from ziggurat.config import DataConfig, Experiment, dump, load_experiment
from ziggurat.config.experiment import without_lora
from ziggurat.config.train import BatchConfig
from ziggurat.data.corpus import Store
from ziggurat.data.store_checks import other_files, unlike_store
from ziggurat.data.subword import copy_tokenizers
from ziggurat.model.accelerator import device_name, usable_device
from ziggurat.model.directory import fill_model_directory
from ziggurat.model.run_folder import (
    BASE,
    CHECKPOINTS,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    META_FILE,
    checkpoint_folders,
    locked,
    read_meta,
)
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, Remedy, ZigguratError
from ziggurat.system.files import write_atomically, write_checksums
from ziggurat.system.small_files import read_json
from ziggurat.system.staging import building
from ziggurat.system.yaml_text import changed, keys_of, shown
from ziggurat.train.distributed import Processes
from ziggurat.train.saving import clear_leftovers
from ziggurat.train.trackers import refuse_other_experiment

_VOCABULARY_FILES = re.compile(r"vocabulary\.json|\w+\.(spm|vocab)")
"""The files in a run's folder that checksums protect. Checkpoints have separate checksums and contain the
configuration."""

_FIXED = (
    "seed",
    "batch",
    "loss",
    "optimiser",
    "precision",
    "quantise",
    "exact_dropout",
    "growth",
    "start_from",
    "lora",
    "freeze",
)
"""_FIXED are the keys of `training` that a resumed run cannot change."""


def refuse_existing(run: Path) -> None:
    """Raise ConfigError when the folder already holds a run, or anything else."""
    if (run / CHECKPOINTS).exists():
        raise ConfigError(
            f"{run} already holds a run; resume it: `ziggurat train --run {run} --resume`, or choose another folder"
        )
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise ConfigError(f"{run}: exists and holds something other than a run; choose a new folder")


def refuse_other_store(experiment: Experiment, store: Store) -> None:
    """Raise ConfigError when the store was prepared with settings that differ from section `data`."""
    if unlike := unlike_store(experiment.data, store.manifest):
        raise ConfigError(
            f"{store.path} was prepared with settings other than this configuration's (store -> configuration): "
            f"{shown(unlike, 4)}. Run `ziggurat prepare` with this configuration (`--force` replaces the store), or "
            "set `data.store` to a store made with it",
            key="data.store",
            named=keys_of(unlike),
        )


def refuse_idle(batch: BatchConfig, processes: Processes, *, resume: bool = False) -> None:
    """Raise ConfigError when an update has fewer batches than there are processes."""
    if batch.accumulate < processes.count:
        more = f"set it to {processes.count} or a multiple, or start fewer processes"
        raise ConfigError(
            f"{processes.count} processes share `training.batch.accumulate: {batch.accumulate}` batches per update; "
            + ("start no more processes than that: a resumed run cannot change it" if resume else more),
            key="training.batch.accumulate",
        )


def other_files_notice(config: DataConfig, store: Store) -> list[str]:
    """Return a notice if section `data` names files that are not in the store; training will not read them."""
    if not (moved := other_files(config, store.manifest)):
        return []
    return [
        f"{store.path} was prepared from files other than those named here (store -> configuration): "
        f"{shown(moved, 4)}. Training reads the store; to use the other files, run `ziggurat prepare`"
    ]


def create_run(run: Path, experiment: Experiment, store: Store, base: Mapping[str, Tensor] | None = None) -> None:
    """Create a run, with its resolved configuration and vocabularies; the folder appears whole or not at all.

    `base` are the weights to which low-rank updates apply; None: the run trains all weights.
    Raises ConfigError when the folder already holds something, DataError when another process is creating it.
    """
    with building(run) as folder:
        # Checked here, under the lock of `building`, which at its end replaces whatever is in the folder.
        refuse_existing(run)
        copy_tokenizers(store.path, folder)
        write_checksums(folder, f"copy it from the store, {store.path}", only=_VOCABULARY_FILES)
        write_atomically(folder / CONFIG_FILE, dump(experiment).encode())
        (folder / CHECKPOINTS).mkdir()
        if base is not None:
            (folder / BASE).mkdir()
            again = f"copy it from where the run {run} was, or train it again"
            fill_model_directory(folder / BASE, base, without_lora(experiment), store.path, again=again)


def reopen_run(run: Path, overrides: Sequence[str]) -> Experiment:
    """Return the configuration of an existing run with overrides, such as `training.stop.updates=...`.

    Raises ConfigError when there is no run, or an override would change the model, the data, or the MLflow experiment
    of an existing run.
    """
    has_config, has_checkpoints = (run / CONFIG_FILE).is_file(), (run / CHECKPOINTS).is_dir()
    if not has_config and not has_checkpoints:
        raise ConfigError(f"{run}: no run to resume (leave out `--resume` to start one)", named=[Remedy.RESUME])
    if not has_config:
        raise ConfigError(
            f"{run / CONFIG_FILE}: missing, but needed to resume; restore it, for example from the key "
            f"`configuration` of a checkpoint's {META_FILE}"
        )
    if not has_checkpoints:
        raise ConfigError(f"{run / CHECKPOINTS}: no such folder; restore it, or start a new run in another folder")
    before = load_experiment(run / CONFIG_FILE)
    after = load_experiment(run / CONFIG_FILE, overrides)
    _refuse_edited(run, before)
    if after.model != before.model or after.data.model_copy(update={"store": before.data.store}) != before.data:
        raise ConfigError(
            f"{run}: a resumed run cannot change `model` or `data` (only `data.store`, if it was moved); "
            "start a new run for that (`training.start_from` takes the weights, `ziggurat grow` deepens them)",
            key="data.store",
            named=["training.start_from"],
        )
    for key in _FIXED:
        if getattr(after.training, key) != getattr(before.training, key):
            raise ConfigError(
                f"{run}: a resumed run cannot change `training.{key}`; start a new run for that", key=f"training.{key}"
            )
    refuse_other_experiment(run, before.training.mlflow, after.training.mlflow)
    return after


def _refuse_edited(run: Path, experiment: Experiment) -> None:
    for folder in reversed(checkpoint_folders(run)):
        try:
            kept = read_meta(folder)
        except CheckpointError:
            continue  # damaged; the previous checkpoint has the same configuration
        if changes := changes_since(kept, folder, experiment):
            raise ConfigError(
                f"{run / CONFIG_FILE}: changed since {folder.name} was written: {shown(changes)}. A resumed run cannot "
                "change these: put the old values back, or start a new run (`training.start_from` takes the weights)",
                key="training.start_from",
            )
        return


def changes_since(meta: Mapping[str, Any], folder: Path, experiment: Experiment) -> list[str]:
    """Return the differences between the configurations of a run and its checkpoint, in keys that cannot be changed.

    `meta` is the result of `read_meta(folder)`. Raises CheckpointError for a checkpoint of a later version.
    """
    try:
        before = Experiment.model_validate(meta["configuration"])
    except ValidationError as error:
        raise CheckpointError(
            f"{folder}: this version cannot read its configuration ({error.error_count()} keys); resume with the "
            "version of ziggurat that wrote it"
        ) from None
    return changed(_unchangeable(before), _unchangeable(experiment))


def _unchangeable(experiment: Experiment) -> dict[str, Any]:
    content = experiment.model_dump(mode="json")
    training = {key: content["training"][key] for key in _FIXED}
    return {
        "data": {key: value for key, value in content["data"].items() if key != "store"},
        "model": content["model"],
        "training": training,
    }


def settled_before(run: Path, experiment: Experiment) -> Experiment:
    """Return the configuration of a resumed run, with the values that `fit` and `auto` stood for when it started.

    Trials and measurements may give different results a second time, but the batches and precision of a run are fixed.
    """
    training = experiment.training
    if not training.batch.fit and training.precision != "auto":
        return experiment
    found: dict[str, Any] = {}
    before = load_experiment(run / CONFIG_FILE).training
    if training.batch.fit:
        settled = {key: getattr(before.batch, key) for key in ("max_tokens", "fit", "fit_limit", "fit_margin")}
        found["batch"] = training.batch.model_copy(update=settled)
    if training.precision == "auto":
        found["precision"] = before.precision
    return experiment.model_copy(update={"training": training.model_copy(update=found)})


def _keep_configuration(run: Path, experiment: Experiment) -> None:
    # Called after the last check that might refuse it.
    if load_experiment(run / CONFIG_FILE) != experiment:
        write_atomically(run / CONFIG_FILE, dump(experiment).encode())


def keep_environment(run: Path, device: str, processes: int) -> list[str]:
    """Write `environment.json`, the versions and hardware of this start; return the differences from the last start."""
    found, before = _environment(device, processes), {}
    with contextlib.suppress(OSError, ZigguratError):  # a damaged one is also replaced
        before = read_json(
            run / ENVIRONMENT_FILE, RootModel[dict[str, str]], error=DataError, remedy="remove the file"
        ).root
    write_atomically(run / ENVIRONMENT_FILE, json.dumps(found, indent=1).encode())
    return changed(before, found) if before else []


def _environment(device: str, processes: int) -> dict[str, str]:
    place = usable_device(device, "training.device")
    threads = torch.get_num_threads()
    found = {
        "ziggurat": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": platform.system(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "device": device_name(place),
        "threads": str(threads),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    return found | ({"processes": str(processes)} if processes > 1 else {})


def _processor() -> str:
    """Return the processor's name; on Linux, Python knows only its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


_TOKEN = ".shared"
"""_TOKEN is a temporary file by which processes check whether they share the folder."""

_JOB = ".job"
"""_JOB is the file with the names of the job that trained last in a run."""


@contextlib.contextmanager
def run_locked(run: Path, experiment: Experiment, processes: Processes) -> Iterator[list[str]]:
    """Lock the run for all processes of this job, and write the configuration and environment with which it continues.

    Yields, in the first process, how the environment differs from that of the last start.

    Raises CheckpointError when another job trains in it, ConfigError when a process does not see its folder or the
    configuration differs from that of the checkpoints.
    """
    with contextlib.ExitStack() as stack:
        # The lock comes first: only its holder may remove leftovers, and what is checked must not change.
        processes.first_does(lambda: stack.enter_context(run_lock(run)))
        processes.first_does(lambda: clear_leftovers(run))
        refuse_unshared(run, processes)
        processes.first_does(lambda: _refuse_edited(run, experiment))
        processes.first_does(lambda: _keep_configuration(run, experiment))
        differing: list[str] = []
        processes.first_does(
            lambda: differing.extend(keep_environment(run, experiment.training.device, processes.count))
        )
        yield differing


@contextlib.contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Lock the run for this job. Raises CheckpointError when another process trains in it."""
    with locked(run):
        write_atomically(run / _JOB, os.fsencode("\n".join(_job())))  # may not be UTF-8
        yield


def was_requeued(run: Path) -> bool:
    """True when torchrun, after a failure, or Slurm, after a requeue, has restarted the job that trained in `run`.

    The same command then continues the run. Any other job that finds a run in its folder is refused.
    """
    try:
        before = os.fsdecode((run / _JOB).read_bytes()).split("\n")
    except OSError:
        return False
    job = _job()
    # A meeting place is not a unique name, since the next job may use the same port, so it counts only after a restart.
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        job = [name for name in job if not name.startswith("place-")]
    # The same holds for a Slurm job, since two commands of one job script would otherwise share a run.
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        job = [name for name in job if not name.startswith("slurm-")]
    return any(name in before for name in job)


def _job() -> list[str]:
    """Return the names of this process's job, which are the same for all its starts on all its machines."""
    torchrun = os.environ.get("TORCHELASTIC_RUN_ID")
    found = {
        "torchrun": torchrun if torchrun != "none" else None,  # torchrun's id is "none" if there is none
        "place": f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if torchrun == "none" else None,
        "slurm": os.environ.get("SLURM_JOB_ID"),
    }
    return [f"{kind}-{name}" for kind, name in found.items() if name]


def refuse_unshared(run: Path, processes: Processes) -> None:
    """Raise ConfigError in all processes when one does not see the folder to which the first one writes.

    Such a process would write its parts of checkpoints where no other process finds them.
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
