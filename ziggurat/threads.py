"""How OpenMP's threads wait for each other: awake on an idle machine, asleep on one that others use too.

After each operation that torch shares between threads they meet at a barrier. GNU's OpenMP (libgomp, in torch's wheels
for Linux) lets them spin there for some milliseconds before they sleep. On an idle machine that is best, since the next
operation comes within microseconds. Where another process wants one of the cores it is ruin: the thread that spins
holds the very core that the thread it waits for needs, and training is ten times as slow (benchmarks/README.md).
Sleeping at once costs a quarter of the speed of small models on an idle machine, so neither can be set for good, and
the environment variables that choose between them are read only once, when the library is loaded.

libgomp itself spins only for microseconds when the process has more of its threads than there are CPUs (libgomp's
config/linux/wait.h: gomp_throttled_spin_count_var). `share_cores` uses that rule: it watches how busy the machine is
with other things, and holds a team of idle threads for as long as it is. They compute nothing, so results do not
change. LLVM's and Intel's OpenMP (KMP_BLOCKTIME) yield by the same rule.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Crowd", "idle_team", "share_cores"]

_STAT = Path("/proc/stat")
_MAPS = Path("/proc/self/maps")
_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_SECONDS = 0.5  # between two looks: a share of a core can be told from CPU times that count hundredths of a second
_CROWDED, _CALM = 0.25, 0.1  # cores that others take beyond those we leave them
_CALM_LOOKS = 6  # three seconds, so that a program with pauses does not make us change to and fro


class _Times(NamedTuple):
    """CPU seconds up to a moment: `others` of everything else on our CPUs, at `clock`."""

    clock: float
    others: float


class Crowd:
    """Tells from samples of CPU times whether other processes want the cores that our threads use.

    Args:
        threads: threads that share an operation.
        cpus: CPUs that this process may use.
    """

    def __init__(self, threads: int, cpus: int) -> None:
        self.threads, self.cpus = threads, cpus
        self.crowded = False
        self._calm = 0

    def look(self, others: float) -> bool:
        """Take in how many cores others kept busy since the last look; return whether it is crowded."""
        taken = others - max(0, self.cpus - self.threads)
        self._calm = 0 if taken > _CALM else self._calm + 1
        if taken > _CROWDED:
            self.crowded = True
        elif self._calm >= _CALM_LOOKS:
            self.crowded = False
        return self.crowded


def share_cores(threads: int) -> None:
    """Let the `threads` of torch's operations in this process wait as the machine's load asks for, from now on.

    Done by a daemon thread, one for each process. Nothing is done where the user has chosen how threads wait
    (OMP_WAIT_POLICY, GOMP_SPINCOUNT or KMP_BLOCKTIME is set), with one thread, which waits for no other, or where the
    system has no /proc/stat to tell the load from.
    """
    if threads < 2 or any(name in os.environ for name in _SETTINGS) or not _STAT.is_file():
        return
    with _lock:
        if _watch is not None and _watch.pid == os.getpid():  # a thread does not outlive a fork
            _watch.crowd.threads = threads
        else:
            _start(threads)


class _Watch(NamedTuple):
    """The thread that watches, and whose."""

    pid: int
    crowd: Crowd


_lock = threading.Lock()
_watch: _Watch | None = None


def _start(threads: int) -> None:
    global _watch
    _watch = _Watch(os.getpid(), Crowd(threads, len(os.sched_getaffinity(0))))
    threading.Thread(target=_watching, args=(_watch.crowd,), name="share-cores", daemon=True).start()


def _watching(crowd: Crowd) -> None:
    """Look at the machine's load for as long as the process lives; hold a team while it is crowded."""
    let_go: Callable[[], None] | None = None
    try:
        before = _times()
        while True:
            time.sleep(_SECONDS)
            now = _times()
            crowded = crowd.look((now.others - before.others) / (now.clock - before.clock))
            before = now
            if crowded and let_go is None:
                # With more threads than CPUs the library does so by itself; less than one is no team, and crashes it.
                let_go = idle_team(max(1, crowd.cpus - crowd.threads + 2))
            elif not crowded and let_go is not None:
                let_go()
                let_go = None
    except (OSError, ValueError):  # a /proc that changes or hides: threads wait as they did before
        if let_go is not None:
            let_go()


def _times() -> _Times:
    """Return what everything but this process has taken of the CPUs that it may use.

    Work of lower priority is left out unless this process has a low one itself: it gives way by itself. Time that
    a hypervisor gave to other machines counts, since it is gone just the same.
    """
    ours, low = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0) > 0
    ticks = 0
    for line in _STAT.read_text("ascii").splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in ours:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(int, fields)
            ticks += user + system + irq + softirq + steal + (nice if low else 0)
    return _Times(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - time.process_time())


def idle_team(size: int) -> Callable[[], None]:
    """Make every OpenMP library of this process hold a team of `size` threads that sleep; return what ends them.

    The team belongs to a thread of its own, which has to live as long: a library frees the teams of threads that end.
    """
    ready, done = threading.Event(), threading.Event()
    libraries = [ctypes.CDLL(path) for path in _openmp()]
    # Any function that takes no notice of its argument will do; a Python one would need the interpreter in each thread.
    nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)

    def hold() -> None:
        for library in libraries:
            library.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
        ready.set()
        done.wait()

    holder = threading.Thread(target=hold, name="idle-team", daemon=True)
    holder.start()
    ready.wait()

    def let_go() -> None:
        done.set()
        holder.join()

    return let_go


def _openmp() -> list[str]:
    """Return the paths of the OpenMP libraries that are loaded; CDLL of such a path gives the loaded one."""
    paths = {line.split(maxsplit=5)[5] for line in _MAPS.read_text().splitlines() if "omp" in line and "/" in line}
    names = ("libgomp", "libomp", "libiomp5")
    return sorted(path for path in paths if os.path.basename(path).startswith(names) and os.path.isfile(path))
