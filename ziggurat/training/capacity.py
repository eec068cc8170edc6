"""How much memory there is: what the machine still gives, and what happens to work that needs more."""

from __future__ import annotations

import contextlib
import gc
import re
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ziggurat.errors import out_of_memory, printable
from ziggurat.training.allocator import return_freed_memory, returning_freed_memory

__all__ = ["Shortage", "available_memory", "limited_to_available_memory", "readable", "within_memory"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class Shortage:
    """Work that did not fit into memory.

    Attributes:
        wanted: bytes of the piece that was refused, or None where the allocator does not say.
        in_use: bytes in use by then: tensors on a GPU, the largest resident size of the process on a CPU.
        here: False when it was another process that ran out.
        said: the error's own words.
    """

    wanted: int | None
    in_use: int
    here: bool = True
    said: str = ""

    def __str__(self) -> str:
        if not self.here:
            return "another process ran out of memory"
        more = f"{readable(self.wanted)} more wanted" if self.wanted is not None else self.said or "more wanted"
        return f"{more}, with {readable(self.in_use)} in use"


def within_memory(
    compute: Callable[[], Result], device: torch.device, agree: Callable[[bool], bool] = bool
) -> Result | Shortage:
    """Return what `compute` returns, or the Shortage that ended it; what it held is then free again.

    The only place that decides whether work has failed for want of memory. Any other error is raised.

    Args:
        compute: the work; whatever it leaves behind outside (gradients) is its caller's to drop.
        device: where it allocates.
        agree: takes whether this process ran out, returns whether any did; with several processes it must be called
            by all of them, so that all skip the same work.
    """
    shortage: Shortage | None = None
    result: Result | None = None
    try:
        result = compute()
    except Exception as error:
        if not out_of_memory(error):
            raise
        shortage = Shortage(_wanted(str(error)), _in_use(device), said=printable(str(error), 200))
    if shortage is not None:
        _give_back(device)
    if not agree(shortage is not None):
        return result  # type: ignore[return-value]  # of type Result: nothing was raised
    result = None
    _give_back(device)
    return shortage or Shortage(None, _in_use(device), here=False)


def _give_back(device: torch.device) -> None:
    """Free what work that broke off has left."""
    gc.collect()  # frames of the traceback hold activations in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        return_freed_memory()


_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _wanted(message: str) -> int | None:
    """Read the refused size out of "you tried to allocate 1024 bytes" (CPU) or "Tried to allocate 2.00 GiB" (GPU)."""
    found = re.search(r"[Tt]ried to allocate ([0-9.]+) (bytes|[KMG]iB)", message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


def _in_use(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def readable(size: int) -> str:
    """Return a number of bytes for people."""
    unit = next(name for name in ("GiB", "MiB", "KiB", "bytes") if size >= _UNITS[name] or name == "bytes")
    return f"{size} bytes" if unit == "bytes" else f"{size / _UNITS[unit]:.1f} {unit}"


@contextlib.contextmanager
def limited_to_available_memory(device: torch.device, share: float = 1.0) -> Iterator[None]:
    """Let allocations on a CPU fail at what the machine, or this process's control group, still has free.

    Linux promises more memory than there is and kills the process that uses it; under this limit on its address space
    a trial that is too large raises an error instead; with `share`, already at that part of what is free. What was
    allocated goes back to the system when it is freed.
    Nothing happens on other devices or where nothing is known.
    """
    available, size = available_memory(), _address_space()
    if device.type != "cpu" or available is None or size is None:
        yield
        return
    before = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    rooms = [available, *(limit - size for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (size + max(0, int(share * min(rooms))), hard))
    try:
        with returning_freed_memory():
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _address_space() -> int | None:
    return _kilobytes(Path("/proc/self/status"), "VmSize")


def _kilobytes(file: Path, name: str) -> int | None:
    """Read a line such as `MemAvailable:  1024 kB`, in bytes."""
    with contextlib.suppress(OSError):
        for line in file.read_text("ascii", "replace").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) << 10
    return None


def available_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many bytes can still be taken without swapping, or None where the system does not say.

    The smallest of what the machine has and what the control groups of this process (version 1 or 2) leave. Both
    paths are Linux's; others are for tests.
    """
    found = [_kilobytes(proc / "meminfo", "MemAvailable")]
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text("ascii", "replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                found += _rooms(groups, path, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                found += _rooms(groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min((room for room in found if room is not None), default=None)


def _rooms(root: Path, path: str, limit_file: str, usage_file: str) -> list[int | None]:
    """Return what is left in a control group and in each one around it; file pages that can be dropped are free."""
    folder = root / path.strip("/")
    rooms: list[int | None] = []
    for group in (folder, *folder.parents):
        if group == root.parent:
            break
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
            limit, usage = (int((group / name).read_text()) for name in (limit_file, usage_file))
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            rooms.append(max(0, limit - usage + (int(cached[1]) if cached else 0)))
    return rooms
