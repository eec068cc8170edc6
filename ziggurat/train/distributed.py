"""The processes that train together: one, or those that torchrun started.

`Processes` wraps collective calls: every process calls the same methods in the same order, or all wait for the missing
one. The rest of the module handles how processes meet at the start and leave at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ziggurat.model.accelerator import default_device, make_current, runtime
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, MachineError, TrainingError, ZigguratError
from ziggurat.train.signals import end_at_once, leave_with_launcher

_ARRIVALS = "ziggurat/arrivals"

_DISK = "disk"
_KINDS: dict[str, type[ZigguratError]] = {
    error.__name__: error for error in (ConfigError, DataError, CheckpointError, MachineError, TrainingError)
}
"""Errors that are passed between processes, by name; other kinds arrive as a TrainingError."""


@dataclass
class Processes:
    """One process among `count`, and its collective calls.

    Numbers are sent as fp64 on the CPU (gloo), texts as UTF-8 bytes: nothing is pickled, and no GPU waits.

    Attributes:
        rank, count: this process's number, from 0, and the number of processes.
        local_rank, here: the same within its machine.
        timeout_minutes: longest wait for another process.
        group: torch's group for the messages; None: the default one.
        update: number of the update in progress, for `hanging`.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    here: int = 1
    timeout_minutes: float = 30.0
    group: dist.ProcessGroup | None = None
    update: int = field(default=-1, compare=False)
    _arrivals: int = field(default=0, compare=False)

    @property
    def first(self) -> bool:
        """True in the process that logs and writes for all."""
        return self.rank == 0

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all processes, the same everywhere."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all processes, the same everywhere."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.count == 1:
            return list(values)
        self.arrive()
        tensor = torch.tensor(values, dtype=torch.float64)  # exact for counts up to 2^53
        dist.all_reduce(tensor, operation, group=self.group)
        reduced: list[float] = tensor.tolist()
        return reduced

    def any(self, flag: bool) -> bool:
        """Return True, in all processes, when `flag` is true in any."""
        return self.sums([flag])[0] > 0

    def of_first(self, value: int) -> int:
        """Return the first process's `value` in all of them."""
        return int(self.sums([value if self.first else 0])[0])

    def texts(self, mine: Sequence[str]) -> list[list[str]]:
        """Return the texts of every process, by rank."""
        if self.count == 1:
            return [list(mine)]
        self.arrive()
        # Sizes first: all_gather takes tensors of one size, so texts are padded to the longest.
        raw = torch.frombuffer(bytearray(json.dumps(list(mine)).encode()), dtype=torch.uint8)
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor(raw.numel()), group=self.group)
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: raw.numel()] = raw
        gathered = [torch.zeros_like(padded) for _ in range(self.count)]
        dist.all_gather(gathered, padded, group=self.group)
        return [json.loads(bytes(g[: int(n)].tolist())) for g, n in zip(gathered, sizes, strict=True)]

    def first_does(self, work: Callable[[], object]) -> None:
        """Run `work` in the first process while the others wait.

        An error is raised in all of them: an OSError, or a ZigguratError of the same class, so that all handle it in
        the same way; the others quote the first one's message.
        """
        if self.count == 1:
            work()
            return
        # The outcome is sent before anything is raised, because the others wait for it; as text, since nothing is
        # pickled.
        failed: OSError | ZigguratError | None = None
        if self.first:
            try:
                work()
            except (OSError, ZigguratError) as error:
                failed = error
        kind, said = "", str(failed)
        if isinstance(failed, OSError):
            kind, said = _DISK, failed.strerror or said
        elif failed is not None:
            kind = next((name for name, error in _KINDS.items() if isinstance(failed, error)), TrainingError.__name__)
        kind, said = self.texts([kind, said])[0]
        if failed is not None:
            raise failed
        if kind:
            raise OSError(said) if kind == _DISK else _KINDS[kind](f"the first process could not continue: {said}")

    def aside(self) -> Processes:
        """Return the same processes with a separate group, for messages of another thread."""
        if self.count == 1:
            return self
        timeout = timedelta(minutes=self.timeout_minutes)
        return replace(self, group=dist.new_group(backend="gloo", timeout=timeout))

    def arrive(self) -> None:
        """Record that this process is about to send a message, so that `hanging` can name those that are not."""
        if self.count > 1 and self.group is None:  # messages from other threads come in any order
            self._arrivals += 1
            with contextlib.suppress(RuntimeError):  # torchrun, which holds the store, may be gone
                _store().set(f"{_ARRIVALS}/{self.rank}", f"{self._arrivals} {self.update}")

    def hanging(self, error: Exception) -> TrainingError:
        """Return the error to raise when communication failed with `error`; it names the processes that are behind."""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        keys = [f"{_ARRIVALS}/{rank}" for rank in range(self.count)]
        try:
            store = _store()
            # `check` comes first, because `get` would wait for the key of a process that has never arrived.
            said = [store.get(key).decode().split() if store.check([key]) else ("0", "0") for key in keys]
        except RuntimeError:
            return TrainingError(
                f"the processes lost contact, and the one through which they connect is gone ({reason})"
            )
        furthest = max(int(arrivals) for arrivals, _ in said)
        behind = [
            f"process {rank} (in or after update {update})"
            for rank, (arrivals, update) in enumerate(said)
            if int(arrivals) < furthest
        ]
        who = f"behind: {', '.join(behind)}" if behind else "no process is behind: one died, or the network failed"
        return TrainingError(
            f"the processes lost contact at update {self.update}; {who}. ({reason}) Start again with `--resume`; "
            "`torchrun --max-restarts` does so by itself"
        )


def _meeting_place(store: Store, rank: int, count: int, timeout: timedelta) -> str:
    """Return a name on which all processes of this start agree, and which no earlier start has used.

    torchrun may give a new start the store of the previous one, which still holds the addresses of dead processes
    (github.com/pytorch/pytorch/issues/135712), and each machine counts starts separately. So every process publishes a
    random word; the first process answers each word with its own until the owner confirms. A word left from an earlier
    start gets an answer that nobody reads, until its process publishes the new one.
    """
    word = uuid4().hex
    if rank > 0:
        store.set(f"ziggurat/word/{rank}", word)
        place: str = store.get(f"ziggurat/place/{word}").decode()
        store.set(f"ziggurat/heard/{place}/{rank}", "")
        return place
    unheard, end = set(range(1, count)), time.monotonic() + timeout.total_seconds()
    while unheard:
        if time.monotonic() > end:
            raise RuntimeError(f"processes {sorted(unheard)} did not answer")
        for other in sorted(unheard):
            theirs = store.get(f"ziggurat/word/{other}").decode()  # this may still be the word of an earlier start
            store.set(f"ziggurat/place/{theirs}", word)
            if store.check([f"ziggurat/heard/{word}/{other}"]):
                unheard.remove(other)
        time.sleep(0.01)
    return word


def _meet(backend: str, processes: Processes) -> None:
    """Open the default process group.

    Raises ConfigError when the environment does not define a meeting place, TrainingError when others do not arrive.
    """
    rank, count, timeout = processes.rank, processes.count, timedelta(minutes=processes.timeout_minutes)
    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        place = _meeting_place(store, rank, count, timeout)
        dist.init_process_group(backend, store=PrefixStore(place, store), rank=rank, world_size=count, timeout=timeout)
    except ValueError as error:
        raise ConfigError(
            f"the processes cannot connect: {str(error).splitlines()[0]}; start them with torchrun"
        ) from None
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise TrainingError(
            f"process {rank} of {count} could not reach the others at {where}: {str(error).splitlines()[0]}"
        ) from None


def lost(error: RuntimeError) -> bool:
    """True when `error` means that another process did not answer; gloo shows it only in its message."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "Gloo", "NCCL"))


def _store() -> Store:
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _as_launched(timeout_minutes: float) -> Processes:
    """Return this process as torchrun's variables describe it; without them, or alone, it is the only one."""
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Processes()
        rank, count, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", count))
        return Processes(rank, count, local_rank, here, timeout_minutes)
    except (KeyError, ValueError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else f"a variable is not a number ({error})"
        raise ConfigError(f"WORLD_SIZE is set, but {said}: start with torchrun, or unset it") from None


@contextmanager
def joined(timeout_minutes: float, device: str = "cpu") -> Iterator[Processes]:
    """Context in which this process has joined those that torchrun started, if it did.

    A message that takes longer than `timeout_minutes` fails. GPUs communicate over NCCL, everything else over gloo.
    `device` is `training.device`; the GPU with this process's local number becomes torch's current GPU.

    Raises ConfigError when torchrun's variables are incomplete, more processes than GPUs share a machine, or `device`
    names one GPU for all.
    """
    leave_with_launcher()
    processes = _as_launched(timeout_minutes)
    if processes.count == 1:
        yield processes
        return
    backend = "gloo"
    try:
        gpu = default_device() if device == "auto" else torch.device(device)
        shared = gpu.index is not None
    except RuntimeError:
        shared = True
    if shared:
        raise ConfigError(f"`training.device: {device}`: of several processes each has its own; set `auto` or `cuda`")
    if gpu.type != "cpu" and (count := runtime(gpu).device_count()):
        if processes.local_rank >= count:
            raise ConfigError(
                f"process {processes.local_rank} of this machine has no separate GPU, there are "
                f"{count}: lower torchrun's `--nproc-per-node`"
            )
        make_current(torch.device(gpu.type, processes.local_rank))
        # gloo as well, because counts and texts are on the CPU and NCCL accepts only GPU tensors.
        backend = f"cpu:gloo,{gpu.type}:{torch.distributed.get_default_backend_for_device(gpu)}"
    _meet(backend, processes)
    try:
        processes.arrive()
        yield processes
    except BaseException:
        # All processes of a machine leave NCCL together. A process that fails alone would wait for the others, here or
        # at Python's exit, and they would wait for it; the launcher, which ends all of them when one has ended, would
        # not notice.
        if backend == "gloo":
            dist.destroy_process_group()
        else:
            atexit.register(end_at_once)
        raise
    dist.destroy_process_group()


def shard_name(rank: int) -> str:
    """Return the name of a process's shard file."""
    return f"shard-{rank:05d}.safetensors"


def shard_header(begins: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the header of a shard whose slice of each tensor starts at these offsets, one per dimension."""
    offsets = {name: {"saved_offsets": list(begin)} for name, begin in begins.items()}
    return {"DCP_SHARDING_INFO": json.dumps(offsets, sort_keys=True), "DCP_VERSION": "1.0"}
