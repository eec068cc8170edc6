"""SIGKILLs during training: each run is killed repeatedly until it is complete, then compared with an undisturbed one.

Half of the kills come at a random moment, half at a random file operation.
"""

from __future__ import annotations

import random
import shutil
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from experiments.faults.jobs import Job
from experiments.faults.ledger import Ledger
from tests.faults.ground import Ground
from tests.faults.nursery import Ended, Nursery
from tests.faults.operations import Fault
from tests.faults.trees import differences, leftovers, snapshot
from tests.faults.trials import Outcome, bad_end, last_line
from tests.faults.verbs import TORCH
from tests.small import merged

UPDATES = 24
_MOST_KILLS = 15
"""_MOST_KILLS is the number of kills after which a run may end."""
_PATIENCE = 120.0
"""_PATIENCE is the maximum number of seconds for a command, a hundred times what it needs."""

_TRAINING: dict[str, Any] = {
    "threads": 1,
    "batch": {"max_tokens": 150},
    "stop": {"updates": UPDATES},
    "checkpoint": {"every_updates": 2, "keep_last": 3, "average_last": 2, "asynchronous": False},
    "validation": {"every_updates": 6, "decode": False},
    "log_every_updates": 5,
}


@dataclass(frozen=True)
class Configuration:
    """The model that is trained, the number of processes, and how often it is chosen relative to the others."""

    training: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    torchrun: bool = False
    clocked: bool = False
    """Return whether the clock decides which checkpoints exist."""
    share: float = 1.0


_RNMT = {
    "family": "rnmt",
    "embedding": {"positions": "none", "sharing": "none"},
    "dropout": {"attention": 0.0, "activation": 0.0},
}
_STAGES = {"stages": [{"layers": 1, "updates": 7}, {"layers": 2, "updates": 15}], "moments": "copy"}
_SENSITIVE = {"action": "roll_back", "loss_spike": 1.0001, "window": 2}
_TOGETHER = {"batch": {"accumulate": 2}, "distributed": {"timeout_minutes": 0.08}}
"""_TOGETHER are settings with which a process that waits for a killed one gives up before it counts as an orphan.
"""
_DEEPER = {"encoder": {"layers": 3}}

CONFIGURATIONS: dict[str, Configuration] = {
    "plain": Configuration(),
    "asynchronous": Configuration({"checkpoint": {"asynchronous": True, "every_updates": 1, "keep_last": 2}}),
    "growth": Configuration({"growth": _STAGES}, _DEEPER),
    "growth-asynchronous": Configuration(
        {"growth": {**_STAGES, "moments": "reset"}, "checkpoint": {"asynchronous": True}}, _DEEPER
    ),
    "bf16": Configuration({"precision": "bf16"}),
    "accumulation": Configuration({"batch": {"accumulate": 3}, "clip_norm": 1.0}),
    "roll-back": Configuration(
        {
            "divergence": {**_SENSITIVE, "max_roll_backs": 20, "rate_factor": 0.9},
            "patience": {"non_finite": 1},
            "checkpoint": {"keep_last": 9},
        }
    ),
    "rnmt": Configuration(model=_RNMT),
    "dlcl-diagnosed": Configuration(
        {"diagnostics": {"every_updates": 4, "max_share": None}},
        {"encoder": {"layers": 2, "history": "dlcl"}, "decoder": {"layers": 2, "history": "dlcl"}},
    ),
    "best-by-bleu": Configuration(
        {
            "validation": {"decode": True, "max_sentences": 4, "every_updates": 3},
            "checkpoint": {"keep_best": 2, "keep_last": 1, "average_last": 0},
        }
    ),
    "every-minutes": Configuration(
        {"checkpoint": {"every_updates": 1000, "every_minutes": 0.001, "average_last": 0}}, clocked=True
    ),
    "every-minutes-asynchronous": Configuration(
        {"checkpoint": {"every_minutes": 0.002, "asynchronous": True, "average_last": 0}}, clocked=True
    ),
    "two-processes": Configuration(_TOGETHER, processes=2),
    "two-processes-growth": Configuration(
        {**_TOGETHER, "growth": _STAGES, "checkpoint": {"asynchronous": True}}, _DEEPER, processes=2
    ),
    "torchrun-growth": Configuration({**_TOGETHER, "growth": _STAGES}, _DEEPER, processes=2, torchrun=True, share=0.3),
}
"""CONFIGURATIONS maps a name to a run that is killed."""


def kill_training(ledger: Ledger, folder: Path, count: int, names: list[str]) -> None:
    """Kill training until there have been `count` kills in total, with the configurations of `names` in turn."""
    with Nursery(folder / "scratch") as nursery:
        ground = Ground(folder / "ground", nursery)
        rigs: dict[str, _Rig] = {}
        while True:
            kills = {name: ledger.tried(_attack(name)) for name in names}
            if sum(kills.values()) >= count:
                return
            name = min(names, key=lambda one: kills[one] / CONFIGURATIONS[one].share)
            if name not in rigs:
                rigs[name] = _Rig(name, ground, nursery, folder / name)
            number = sum(record["attack"] == _attack(name) for record in ledger.records)
            began = time.monotonic()
            found = rigs[name].chain(number)
            ledger.add(
                _attack(name),
                str(number),
                found.outcome.verdict,
                found.outcome.detail,
                tried=found.timed + found.counted,
                timed=found.timed,
                counted=found.counted,
                seconds=round(time.monotonic() - began, 1),
            )
            print(f"{sum(kills.values()) + found.timed + found.counted:5} {name} {number}: {found}", flush=True)


def _attack(name: str) -> str:
    return f"SIGKILL of training: {name}"


class _Chain(NamedTuple):
    """The fate of a run.

    Attributes:
        timed: kills at a random moment.
        counted: kills at a file operation.
        outcome: the result of all of them.
    """

    timed: int
    counted: int
    outcome: Outcome


class _Rig:
    """One configuration: its undisturbed run, and its killed runs."""

    def __init__(self, name: str, ground: Ground, nursery: Nursery, folder: Path) -> None:
        self._configuration, self._nursery, self._folder, self._name = CONFIGURATIONS[name], nursery, folder, name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copytree(ground.part("store"), folder / "store")
        training = merged(_TRAINING, self._configuration.training)
        made = ground.configuration(f"{name}.yaml", training, self._configuration.model)
        shutil.copy(made, folder / "config.yaml")
        began = time.monotonic()
        ended = self._started().wait(_PATIENCE)
        self._seconds = time.monotonic() - began
        if ended.status != 0:
            raise RuntimeError(f"{name}: {ended}")
        self._expected = self._found()
        self._operations = sum(kind != "read" for kind, _ in ended.operations)

    def _found(self) -> dict[str, Any]:
        """Return what the run left, without its checkpoints if they depend on the clock."""
        found = snapshot(self._folder / "run")
        if not self._configuration.clocked:
            return found
        last = f"checkpoints/step-{UPDATES:08d}/"
        kept = {key: value for key, value in found.items() if not key.startswith("checkpoints/step-")}
        return kept | {key: value for key, value in found.items() if key.startswith(last) and ".safetensors" in key}

    def chain(self, number: int) -> _Chain:
        """Train a run under kills until it is complete; return its fate."""
        random_ = random.Random(f"{self._name} {number}")
        shutil.rmtree(self._folder / "run", ignore_errors=True)  # the previous chain may have ended without a run
        timed = counted = 0
        while True:
            enough = timed + counted >= _MOST_KILLS
            by_operation = not self._configuration.torchrun and random_.random() < 0.5
            victim = random_.randrange(self._configuration.processes)
            fault = Fault(random_.randrange(1, self._operations + 1)) if by_operation and not enough else None
            job = self._started(fault, victim)
            began = time.monotonic()
            if not by_operation and not enough:
                job.kill_after(random_.uniform(0.0, 0.9) * self._seconds, random_)
            ended = job.wait(_PATIENCE)
            if ended.killed:
                timed, counted = timed + (not by_operation), counted + by_operation
            if ended.orphans:
                return _Chain(
                    timed, counted, Outcome("orphans", f"{ended.orphans} workers were left: {last_line(ended.said)}")
                )
            if "internal error" in ended.said:  # only in survivors: torchrun itself shows tracebacks
                return _Chain(timed, counted, Outcome("internal", last_line(ended.said)))
            if ended.killed:
                continue
            if bad := bad_end(Ended(ended.status, ended.said, []), (0, 2)):
                return _Chain(timed, counted, bad)
            if ended.status == 2:
                return _Chain(timed, counted, Outcome("refused", last_line(ended.said)))
            if fault is None and not by_operation and not enough:  # the machine has become faster or slower
                self._seconds = 0.5 * self._seconds + 0.5 * max(0.2, time.monotonic() - began)
            return _Chain(timed, counted, self._compared())

    def _compared(self) -> Outcome:
        try:
            unlike = differences(self._found(), self._expected)
        except ValueError as error:
            return Outcome("lost", f"a file cannot be read: {error}")
        if unlike:
            return Outcome("lost", "; ".join(unlike[:3]))
        left = leftovers(self._folder)
        return Outcome("leftovers", ", ".join(left[:3])) if left else Outcome("survived")

    def _started(self, fault: Fault | None = None, victim: int = 0) -> Job:
        """Start the run, or resume it; `fault` is for the process `victim`."""
        begun = (self._folder / "run" / "checkpoints").is_dir()
        arguments = ["train", "--run", "run", "--resume"] if begun else ["train", "config.yaml", "-r", "run"]
        if self._configuration.torchrun:
            head = ["--standalone", "--nproc-per-node=2", "-m", "ziggurat"]
            started = self._nursery.start(
                [*head, *(argument.replace("--run", "-r") for argument in arguments)],
                self._folder,
                preload=("torch.distributed.run",),
                command="torch.distributed.run:main",
            )
            return Job(self._nursery, [started], launched=True)
        count, together = self._configuration.processes, []
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(count)}
        for rank in range(count):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
            mine = fault if rank == victim else None
            together.append(
                self._nursery.start(
                    arguments,
                    self._folder,
                    fault=mine,
                    watched=rank == 0 and fault is None,
                    preload=TORCH,
                    environment=environment,
                )
            )
        return Job(self._nursery, together)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
