"""Records that several experiments share: the code's commit, the processor, and interleaved, timed updates of several
models.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ziggurat.config import Experiment
from ziggurat.data.corpus import Store
from ziggurat.train.device import keep_freed_memory, loader_of
from ziggurat.train.learner import Learner
from ziggurat.train.update import train_update

_HERE = Path(__file__).resolve().parent


def commit() -> str:
    """Return the commit of the code, with `+` when files differ from it."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=_HERE)
    changed = subprocess.run(["git", "status", "--porcelain", "../ziggurat"], capture_output=True, text=True, cwd=_HERE)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def processor() -> str:
    """Return the processor's name and the widest instructions that PyTorch uses on it."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines, or none if it is missing."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def seconds_in_turns(
    experiments: Mapping[str, Experiment],
    store: Store,
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of `rounds` updates of each experiment's model, with one thread and the same batches.

    They take turns, so that other work on the machine affects all equally; the batches are the first experiment's. With
    `clock` time.process_time, the time of other processes is left out.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    learners = {name: Learner(experiment, store, torch.device("cpu")) for name, experiment in experiments.items()}
    groups = loader_of(next(iter(experiments.values())), store).groups()
    seconds: dict[str, list[float]] = {name: [] for name in experiments}
    for number in range(rounds + 2):
        group = next(groups)
        for name, learner in learners.items():
            began = clock()
            train_update(learner.parallel, group.batches, learner.optimiser, rate=1e-4, clip_norm=None)
            if number >= 2:  # the first ones create moments and warm up
                seconds[name].append(clock() - began)
    return seconds
