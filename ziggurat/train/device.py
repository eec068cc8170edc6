"""The training device: its memory, and the transfer of batches to it.

Memory covers work that fails for lack of it, how much of it the machine or this process's control group has left, and
whether glibc's allocator keeps freed memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Group, Loader, LoaderState
from ziggurat.model.accelerator import copies_aside, free_cache, memory_in_use, runtime
from ziggurat.system.errors import out_of_memory, printable
from ziggurat.train.distributed import Processes

# Work that runs out of memory

Result = TypeVar("Result")


@dataclass(frozen=True)
class Shortage:
    """Work that did not fit into memory.

    Attributes:
        wanted: bytes of the refused allocation, or None if the allocator does not report it.
        in_use: bytes in use at that moment: tensors on a GPU; on a CPU, the peak resident size of the process.
        here: False when another process ran out of memory.
        message: message of the error.
    """

    wanted: int | None
    in_use: int
    here: bool = True
    message: str = ""

    def __str__(self) -> str:
        if not self.here:
            return "another process ran out of memory"
        more = f"{readable(self.wanted)} more needed" if self.wanted is not None else self.message or "more needed"
        return f"{more}, with {readable(self.in_use)} in use"


def within_memory(
    compute: Callable[[], Result], device: torch.device, agree: Callable[[bool], bool] = bool
) -> Result | Shortage:
    """Return the result of `compute`, or the shortage, here or in another process; other errors pass through.

    `agree` takes whether this process ran out and returns whether any did. All processes must call it, so that all skip
    the same work. Memory held by the work is freed; the caller must drop its other traces, such as gradients.
    """
    result: Result | None = None
    shortage: Shortage | None = None
    try:
        result = compute()
    except Exception as error:
        if not out_of_memory(error):
            raise
        shortage = Shortage(_wanted(str(error)), _in_use(device), message=printable(str(error), 200))
    # Memory is freed here, not in the handler above, during which the error keeps the frames that hold activations.
    if shortage is not None:
        _free_leftovers(device)
    if not agree(shortage is not None):
        return result  # type: ignore[return-value]  # None only if Result allows it
    _free_leftovers(device)  # in every process, after `agree`, which may have dropped gradients
    return shortage or Shortage(None, _in_use(device), here=False)


def _free_leftovers(device: torch.device) -> None:
    """Free what interrupted work has left behind, and return it to the system."""
    gc.collect()  # traceback frames hold activations in reference cycles
    if device.type != "cpu":
        free_cache(device)
    elif (library := _glibc()) is not None:
        library.malloc_trim(0)


_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _wanted(message: str) -> int | None:
    """Parse the refused size from "you tried to allocate 1024 bytes" (CPU) or "Tried to allocate 2.00 GiB" (GPU)."""
    found = re.search(r"[Tt]ried to allocate ([0-9.]+) (bytes|[KMG]iB)", message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


def _in_use(device: torch.device) -> int:
    if device.type != "cpu":
        return memory_in_use(device)
    # The unit of ru_maxrss is the byte on macOS, and 1 KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def readable(size: int) -> str:
    """Return a number of bytes as text, such as `1.5 GiB`."""
    unit = next(name for name in ("GiB", "MiB", "KiB", "bytes") if size >= _UNITS[name] or name == "bytes")
    return f"{size} bytes" if unit == "bytes" else f"{size / _UNITS[unit]:.1f} {unit}"


# Free memory


@contextlib.contextmanager
def limited_to_available_memory(device: torch.device, share: float = 1.0) -> Iterator[None]:
    """Make allocations on a CPU fail once they exceed `share` of the free memory of the machine or control group.

    Linux promises more memory than it has and kills the process that uses it. Under this limit on the address space, a
    trial that is too large raises an error instead. Memory freed inside is returned to the system at once. There is no
    limit on other devices, or if the system does not report free memory.
    """
    available, size = available_memory(), _address_space()
    if device.type != "cpu" or available is None or size is None:
        yield
        return
    before = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # The limit counts addresses, which far exceed the resident memory, so it starts from the present size. Existing
    # limits stay in force.
    rooms = [available, *(limit - size for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (size + max(0, int(share * min(rooms))), hard))
    try:
        # Large tensors are mapped one by one, so that a trial leaves no fragmented memory behind.
        _set_allocator(_GIVING_BACK)
        yield
    finally:
        _set_allocator(_Allocator.values)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _address_space() -> int | None:
    return _kilobytes(Path("/proc/self/status"), "VmSize")


def _kilobytes(file: Path, name: str) -> int | None:
    """Parse a line such as `MemAvailable: 1024 kB` into bytes."""
    with contextlib.suppress(OSError):
        for line in file.read_text("ascii", "replace").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) << 10
    return None


def available_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many bytes can still be allocated without swapping, or None if the system does not report it.

    This is the minimum over the machine and the control groups of this process (version 1 or 2). The default paths are
    Linux's; tests pass others.
    """
    found = [_kilobytes(proc / "meminfo", "MemAvailable")]
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text("ascii", "replace").splitlines():
            _, controllers, path = line.split(":", 2)
            # Control groups version 2 have one line, which names no controllers; version 1 has a line per set of
            # controllers.
            if not controllers:
                found += _rooms(groups, path, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                found += _rooms(groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min((room for room in found if room is not None), default=None)


def _rooms(root: Path, path: str, limit_file: str, usage_file: str) -> list[int | None]:
    """Return the memory left in a control group and in each of its parents; droppable file pages count as free."""
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


# Freed memory: settings of glibc's allocator

# Parameters of mallopt (glibc's malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
# No block is mapped by itself, the heap grows by 64 MiB at a time, and is trimmed only when 1 GiB at its end is free.
_KEEPING = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 1 << 30, _TOP_PAD: 64 << 20}
# All blocks of 256 KiB or more are mapped, and unmapped when they are freed. Setting the threshold also turns off
# glibc's own rule, which raises it to the size of every mapped block that is freed.
_GIVING_BACK = {_MMAP_MAX: 1 << 15, _MMAP_THRESHOLD: 256 << 10, _TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 1 << 20}


class _Allocator:
    values = _GIVING_BACK
    """The latest choice for the whole process, kept because mallopt cannot be queried."""


def _glibc() -> ctypes.CDLL | None:
    """Return the C library if its allocator has settings; that of musl has none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        _ = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return None
    return library


def _set_allocator(values: dict[int, int]) -> bool:
    library = _glibc()
    return library is not None and all(library.mallopt(parameter, value) for parameter, value in values.items())


def keep_freed_memory() -> bool:
    """Make glibc's allocator keep freed memory between updates; return False without glibc.

    Page faults on memory that is freed and mapped again take a few percent of an update on a CPU.
    """
    _Allocator.values = _KEEPING
    return _set_allocator(_KEEPING)


def give_back_freed_memory() -> bool:
    """Make glibc's allocator map every block of 256 KiB or more separately; return False without glibc.

    With recomputed layers, blocks that are kept alternate with blocks that are freed at once, and the heap reuses few
    of the holes: torch requests aligned blocks, which need a hole larger than themselves, so a freed block has no room
    for another of its size. Resident memory then reaches up to three times that of the tensors. Page faults on fresh
    blocks lengthen an update by up to a half (benchmarks/README.md has both figures).
    """
    _Allocator.values = _GIVING_BACK
    return _set_allocator(_GIVING_BACK)


def loader_of(experiment: Experiment, store: Store, processes: Processes | None = None) -> Loader:
    """Return the loader of this process's batches in a run of `experiment`. Raises DataError as Loader does."""
    processes, limit = processes or Processes(), experiment.model.embedding.limit
    return Loader(
        store.train,
        store.source,
        store.target,
        experiment.training.batch,
        seed=experiment.training.seed,
        data=experiment.data,
        longest=None if limit is None else limit - 1,
        links=experiment.training.loss.alignment is not None,
        rank=processes.rank,
        count=processes.count,
    )


def to_device(loader: Loader, state: LoaderState, device: torch.device) -> Iterator[Group]:
    """Yield the groups of `loader` from `state` on.

    For a GPU with streams, batches are already on it: while it works on one group, another stream copies the next. For
    other devices they stay in CPU memory.
    """
    if not copies_aside(device):
        return loader.groups(state)
    # Only page-locked memory is copied asynchronously; the loader's thread locks it, so that training does not wait.
    return send_ahead(loader.groups(state, partial(_page_locked, device=device)), device)


def send_ahead(groups: Iterator[Group], device: torch.device) -> Iterator[Group]:
    """Yield `groups` with their batches on the GPU `device`; each is sent before its predecessor is yielded.

    The copies overlap with other work only if the tensors lie in page-locked memory.
    """
    gpu = runtime(device)
    stream = gpu.Stream(device)

    def sent(group: Group) -> tuple[Group, Any]:
        with gpu.stream(stream):
            return _with_each(group, lambda tensor: tensor.to(device, non_blocking=True)), stream.record_event()

    following = sent(next(groups))
    while True:
        group, arrived = following
        following = sent(next(groups))  # before `group` is yielded, so that its update hides the copy
        yield _received(group, arrived, gpu.current_stream(device))


def _page_locked(group: Group, device: torch.device) -> Group:
    with runtime(device).device(device):  # every thread starts on the first GPU, whatever the process uses
        return _with_each(group, Tensor.pin_memory)


def _received(group: Group, arrived: Any, stream: Any) -> Group:
    """Make `stream` wait for the copies, and keep their memory from being reused until `stream` is done with them."""
    stream.wait_event(arrived)

    def used(tensor: Tensor) -> Tensor:
        # Allocated on the copying stream: without this, the allocator would reuse the memory for the next copy as soon
        # as Python drops the tensor, while kernels of `stream` still read it.
        tensor.record_stream(stream)
        return tensor

    return _with_each(group, used)


def _with_each(group: Group, function: Callable[[Tensor], Tensor]) -> Group:
    return group._replace(batches=[batch.with_each(function) for batch in group.batches])
