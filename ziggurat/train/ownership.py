"""The right of one job to train in the folder of a run: a lock, and the name of the job, kept for its next start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from ziggurat.config import Experiment
from ziggurat.model.run_folder import locked
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import write_atomically
from ziggurat.train.processes import Processes
from ziggurat.train.retention import clear_leftovers
from ziggurat.train.run import keep_configuration, keep_environment, refuse_edited

_TOKEN = ".shared"
"""File by which processes see whether they share the folder; there for a moment."""

_JOB = ".job"
"""File with the names of the job that trained last in a run."""


@contextlib.contextmanager
def held(run: Path, experiment: Experiment, processes: Processes) -> Iterator[None]:
    """Hold the run for all processes of this job, and write the configuration and environment with which it goes on.

    Raises CheckpointError when another job trains in it, ConfigError when a process does not see its folder or the
    configuration is not that of the checkpoints.
    """
    with contextlib.ExitStack() as stack:
        # The lock comes first: leftovers may be removed only by its holder, and what is checked must stay as it is.
        processes.first_does(lambda: stack.enter_context(owned(run)))
        processes.first_does(lambda: clear_leftovers(run))
        refuse_unshared(run, processes)
        processes.first_does(lambda: refuse_edited(run, experiment))
        processes.first_does(lambda: keep_configuration(run, experiment))
        processes.first_does(lambda: keep_environment(run, experiment.training.device, processes.count))
        yield


@contextlib.contextmanager
def owned(run: Path) -> Iterator[None]:
    """Hold the run for this job. Raises CheckpointError when another process trains in it."""
    with locked(run):
        write_atomically(run / _JOB, os.fsencode("\n".join(_job())))  # as the environment has them, UTF-8 or not
        yield


def restarted(run: Path) -> bool:
    """True when torchrun, after a failure, or Slurm, after a requeue, has restarted the job that trained in `run`.

    The same command then goes on with the run. Any other job that finds a run in its folder is refused.
    """
    try:
        before = os.fsdecode((run / _JOB).read_bytes()).split("\n")
    except OSError:
        return False
    job = _job()
    # A meeting place is no unique name, since the next job may use the same port: it counts only after a restart.
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        job = [name for name in job if not name.startswith("place-")]
    # Likewise a Slurm job, or two commands of one job script would share a run.
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        job = [name for name in job if not name.startswith("slurm-")]
    return any(name in before for name in job)


def _job() -> list[str]:
    """Return the names of this process's job that all its starts, on all its machines, share."""
    torchrun = os.environ.get("TORCHELASTIC_RUN_ID")
    found = {
        "torchrun": torchrun if torchrun != "none" else None,  # torchrun says "none" for no id: the place must do then
        "place": f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if torchrun == "none" else None,
        "slurm": os.environ.get("SLURM_JOB_ID"),
    }
    return [f"{kind}-{name}" for kind, name in found.items() if name]


def refuse_unshared(run: Path, processes: Processes) -> None:
    """Raise ConfigError in all processes when one does not see the folder to which the first one writes.

    Such a process would write its parts of checkpoints where nobody looks for them.
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
