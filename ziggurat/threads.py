"""Waiting of OpenMP's threads for each other: spinning on an idle machine, sleeping on one that others use too.

After each operation that torch splits among threads, the threads meet at a barrier. GNU's OpenMP (libgomp, in torch's
wheels for Linux) lets them spin there for some milliseconds before they sleep. On an idle machine that is best, since
the next operation follows within microseconds. Where another process wants one of the cores it is fatal: a spinning
thread occupies the core that the thread it waits for needs, and training becomes ten times slower
(benchmarks/README.md). Sleeping at once costs small models a quarter of their speed on an idle machine. So neither fits
all cases, and the environment variables that choose between them are read only once, when the library is loaded.

libgomp itself spins only for microseconds when the process has more OpenMP threads than there are CPUs (libgomp's
config/linux/wait.h: gomp_throttled_spin_count_var). `share_cores` uses that rule: while other processes keep the
machine busy, it holds a team of idle threads. They compute nothing, so results do not change. LLVM's and Intel's OpenMP
(KMP_BLOCKTIME) yield by the same rule.
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
_SECONDS = 0.5  # between two samples: long enough to measure 0.1 cores with CPU times in hundredths of a second
_CROWDED, _CALM = 0.25, 0.1  # cores that others use beyond those we leave them: turn on above, off below
_CALM_LOOKS = 6  # three seconds, so that a program that pauses does not make us switch back and forth


class _Times(NamedTuple):
    """CPU seconds used on our CPUs by all other processes (`others`), up to the time `clock`."""

    clock: float
    others: float


class Crowd:
    """Detector of other processes that want the cores of our threads, from samples of CPU times.

    Args:
        threads: threads that share an operation.
        cpus: CPUs that this process may use.
    """

    def __init__(self, threads: int, cpus: int) -> None:
        self.threads, self.cpus = threads, cpus
        self.crowded = False
        self._calm = 0

    def look(self, others: float) -> bool:
        """Record how many cores others kept busy since the last call; return True while the machine is crowded."""
        taken = others - max(0, self.cpus - self.threads)
        self._calm = 0 if taken > _CALM else self._calm + 1
        if taken > _CROWDED:
            self.crowded = True
        elif self._calm >= _CALM_LOOKS:
            self.crowded = False
        return self.crowded


def share_cores(threads: int) -> None:
    """Adapt the waiting of torch's `threads` threads to the machine's load, from now on, in a daemon thread.

    Does nothing where the user has chosen how threads wait (OMP_WAIT_POLICY, GOMP_SPINCOUNT or KMP_BLOCKTIME is set),
    for one thread, which waits for no other, or on systems without /proc/stat, where the load is unknown.
    """
    if threads < 2 or any(name in os.environ for name in _SETTINGS) or not _STAT.is_file():
        return
    with _lock:
        if _watch is not None and _watch.pid == os.getpid():  # a thread does not outlive a fork
            _watch.crowd.threads = threads
        else:
            _start(threads)


class _Watch(NamedTuple):
    """The watching thread's detector, and the process it belongs to."""

    pid: int
    crowd: Crowd


_lock = threading.Lock()
_watch: _Watch | None = None


def _start(threads: int) -> None:
    global _watch
    _watch = _Watch(os.getpid(), Crowd(threads, len(os.sched_getaffinity(0))))
    threading.Thread(target=_watching, args=(_watch.crowd,), name="share-cores", daemon=True).start()


def _watching(crowd: Crowd) -> None:
    """Sample the machine's load until the process ends; hold a team of idle threads while it is crowded."""
    let_go: Callable[[], None] | None = None
    try:
        before = _times()
        while True:
            time.sleep(_SECONDS)
            now = _times()
            crowded = crowd.look((now.others - before.others) / (now.clock - before.clock))
            before = now
            if crowded and let_go is None:
                # libgomp counts a team without its first thread, so a team of n brings the count to threads + n - 1;
                # this n makes it exceed the CPUs by one. A team of less than one thread crashes the library.
                let_go = idle_team(max(1, crowd.cpus - crowd.threads + 2))
            elif not crowded and let_go is not None:
                let_go()
                let_go = None
    except (OSError, ValueError):  # /proc changed or is hidden: threads wait as they did before
        if let_go is not None:
            let_go()


def _times() -> _Times:
    """Return the CPU time that all other processes have used on the CPUs of this process.

    Time at low priority (nice) counts only if this process has a low priority itself, since the scheduler prefers us
    otherwise. Time that a hypervisor gave to other machines (steal) counts: it is lost to us as well.
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
    """Make every OpenMP library of this process hold a team of `size` sleeping threads; return a function to end them.

    The team belongs to a thread started here, which lives as long: a library frees a team when its thread ends.
    """
    ready, done = threading.Event(), threading.Event()
    libraries = [ctypes.CDLL(path) for path in _openmp()]
    # Any function that ignores its argument will do; a Python function would need the interpreter in every thread.
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
    """Return the paths of the loaded OpenMP libraries; CDLL of such a path returns the loaded library."""
    paths = {line.split(maxsplit=5)[5] for line in _MAPS.read_text().splitlines() if "omp" in line and "/" in line}
    names = ("libgomp", "libomp", "libiomp5")
    return sorted(path for path in paths if os.path.basename(path).startswith(names) and os.path.isfile(path))
