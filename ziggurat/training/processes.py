"""The processes that train together: one, or those that torchrun started."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ziggurat.errors import ConfigError, TrainingError

__all__ = ["Processes", "joined"]

_BEAT = "ziggurat/update"


@dataclass(frozen=True)
class Processes:
    """One process among `count`; every method is called by all of them, in the same order.

    Numbers travel as fp64 on the CPU (gloo), texts as UTF-8 bytes: nothing is pickled, no GPU waits.

    Attributes:
        rank: number of this process, from 0.
        count: how many there are.
        local_rank: number of this process on its machine.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all processes, the same everywhere."""
        if self.count == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        summed: list[float] = total.tolist()
        return summed

    def any(self, flag: bool) -> bool:
        """Whether `flag` holds in any process; all get the same answer."""
        return flag if self.count == 1 else self.sums([float(flag)])[0] > 0

    def of_first(self, value: float) -> float:
        """Return the first process's `value`."""
        return self.sums([value if self.first else 0.0])[0]

    def texts(self, mine: Sequence[str]) -> list[list[str]]:
        """Return the texts of every process, by rank."""
        if self.count == 1:
            return [list(mine)]
        raw = torch.frombuffer(bytearray(json.dumps(list(mine)).encode()), dtype=torch.uint8)
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor(raw.numel()))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: raw.numel()] = raw
        gathered = [torch.zeros_like(padded) for _ in range(self.count)]
        dist.all_gather(gathered, padded)
        return [json.loads(bytes(g[: int(n)].tolist())) for g, n in zip(gathered, sizes, strict=True)]

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.count > 1:
            self.sums([0.0])

    def beat(self, update: int) -> None:
        """Say that this process has come to `update`, for `hanging`."""
        if self.count > 1:
            _store().set(f"{_BEAT}/{self.rank}", str(update))

    def hanging(self, error: Exception) -> TrainingError:
        """Return what to say when communication failed with `error`: which processes are behind the others."""
        updates = [int(_store().get(f"{_BEAT}/{rank}")) for rank in range(self.count)]
        furthest = max(updates)
        behind = [f"process {rank} (update {update})" for rank, update in enumerate(updates) if update < furthest]
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        who = f"behind: {', '.join(behind)}" if behind else "none is behind: it hangs or died within the update"
        return TrainingError(
            f"the processes lost each other at update {furthest}; {who}. ({reason}) Start again with `--resume`; "
            "`torchrun --max-restarts` does so by itself"
        )


def _store() -> Store:
    store: Store = dist.distributed_c10d._get_default_store()
    return store


@contextmanager
def joined(timeout_minutes: float) -> Iterator[Processes]:
    """Join the processes that torchrun started, if it did, and leave them at the end.

    The first communication that takes longer than `timeout_minutes` fails. GPUs talk over NCCL, everything else over
    gloo. Raises ConfigError when torchrun's variables are incomplete or more processes than GPUs share a machine.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    try:
        processes = Processes(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"WORLD_SIZE is set, but {error} is missing or no number: start by torchrun") from None
    backend = "gloo"
    if torch.cuda.is_available():
        if processes.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {processes.local_rank} of this machine has no GPU of its own, there are "
                f"{torch.cuda.device_count()}: lower torchrun's `--nproc-per-node`"
            )
        torch.cuda.set_device(processes.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    try:
        processes.beat(-1)
        yield processes
    finally:
        dist.destroy_process_group()
