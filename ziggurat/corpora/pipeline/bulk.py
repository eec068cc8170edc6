"""The way in which a call does the steps of a pipeline that are jobs (ziggurat.corpora.jobs); no result depends on
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ziggurat.system.errors import ConfigError, printable
from ziggurat.system.processes import usable_cpus

if TYPE_CHECKING:
    from ziggurat.corpora.jobs.run import Progress, Work


@dataclass(frozen=True)
class Bulk:
    """Where the shards of jobs are done, and which of them.

    Attributes:
        ray: address of a Ray cluster; None: processes of this machine.
        workers: number of processes, or of actors on the cluster; None: as the step's section says, or one for each
            core, on a GPU one; on a cluster as many as its nodes can hold.
        part: (i, n): only every n-th shard, from shard i, and no merge.
    """

    ray: str | None = None
    workers: int | None = None
    part: tuple[int, int] = (0, 1)

    @property
    def shared(self) -> bool:
        """True where more than one process is asked for."""
        return self.ray is not None or self.workers is not None or self.part[1] > 1

    def processes(self, workers: int | None, threads: int, device: str) -> int:
        """Return the number of processes on this machine; `workers` is what the section says."""
        return self.workers or workers or (1 if _on_gpu(device) else max(1, usable_cpus() // threads))

    def check(self, step: str, device: str) -> None:
        """Raise ConfigError for a device that is not there, or that workers on a cluster cannot have."""
        if self.ray is not None and ":" in device:
            raise ConfigError(
                f"step {step}, `device: {printable(device)}`: Ray chooses the GPU of each worker; write `cuda`"
            )
        _on_gpu(device)

    def work(self, workers: int | None, threads: int, device: str, progress: Progress) -> Work:
        """Return the work of this call at a job; see `processes`."""
        from ziggurat.corpora.jobs.launchers import processes, ray_actors
        from ziggurat.corpora.jobs.run import Work

        if self.ray is None:
            launch = partial(processes, self.processes(workers, threads, device))
        else:
            launch = partial(ray_actors, self.ray, self.workers, cpus=threads, gpus=int(_on_gpu(device)))
        return Work(launch, self.part, progress=progress)


def _on_gpu(device: str) -> bool:
    if device == "cpu":
        return False
    from ziggurat.model.directory import usable_device

    return usable_device(device, "device").type != "cpu"
