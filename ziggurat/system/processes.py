"""Worker processes and threads: a pool that never outlives its parent, and OpenMP's threads on a busy machine.

PyTorch is not imported here: a new process imports this module before it can watch its parent.

After each operation that torch splits among threads, the threads meet at a barrier, where GNU's OpenMP (libgomp) lets
them spin for some milliseconds before they sleep. This is best on an idle machine. If another process wants a core,
however, a spinning thread occupies the core needed by the very thread for which it waits, and training becomes ten
times slower (benchmarks/README.md). The environment variables that control this are read only once, when the library is
loaded. But libgomp spins only for microseconds if the process has more OpenMP threads than there are CPUs (its
config/linux/wait.h: gomp_throttled_spin_count_var). So while other processes keep the machine busy, `share_cores` holds
a team of idle threads, which compute nothing. LLVM's and Intel's OpenMP (KMP_BLOCKTIME) yield by the same rule.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ziggurat.system.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")


@contextlib.contextmanager
def _left_to_parent() -> Iterator[None]:
    """Block stop signals sent to whole process groups, in processes started inside the block.

    Ctrl-C, the end of a terminal and a scheduler's warning reach all processes, but only the parent should act on them.
    """
    # A new process inherits the signals that are blocked when it starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def worker_pool(workers: int, *, way_out: str) -> Iterator[Callable[..., Future[Any]]]:
    """Yield `submit(function, *arguments)`, which runs the function in one of `workers` new processes.

    The first task starts the processes. The end of the block, even by an interrupt, ends them at once, in the middle of
    their tasks. Only this process handles Ctrl-C and the closing of the terminal. Raises DataError, which ends with
    `way_out`, if a worker died.
    """
    # The pool's semaphores start multiprocessing's resource tracker, which must not take Ctrl-C either.
    with _left_to_parent():
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _leave_with_parent)
    started: set[Any] = set()

    def begin(function: Callable[..., Any], *arguments: object) -> tuple[Future[Any], bool]:
        """Submit one task; also return True if a process was started for it."""
        others = set(multiprocessing.active_children())
        try:
            future = pool.submit(function, *arguments)
        finally:
            new = set(multiprocessing.active_children()) - others
            started.update(new)
        return future, bool(new)

    def submit(function: Callable[..., Any], *arguments: object) -> Future[Any]:
        with _left_to_parent():
            future, more = begin(function, *arguments)
            # `submit` wakes the thread that watches the processes before it starts a new process, not after. The death
            # of the new process would go unnoticed until another task ends, or forever. So each new process is
            # followed by an empty task, which wakes the thread again.
            while more:
                _, more = begin(_nothing)
        return future

    try:
        yield submit
    except BrokenProcessPool:
        raise DataError(f"a worker process was killed, perhaps for lack of memory: {way_out}") from None
    finally:
        # Before `shutdown`, which would wait for the running tasks.
        for process in started:
            process.terminate()
        pool.shutdown(cancel_futures=True)


def in_order(start: Callable[[Task], Future[Result]], tasks: Iterable[Task], limit: int) -> Iterator[Result]:
    """Yield the results of `tasks` in order; at most `limit` tasks are started and not yet yielded.

    If `tasks` raises an error, the results of those before it are yielded first.
    """
    source = iter(tasks)
    pending: deque[Future[Result]] = deque()
    failure: Exception | None = None
    more = True
    while more or pending:
        while more and len(pending) < limit:
            try:
                task = next(source)
            except StopIteration:
                more = False
            except Exception as error:
                more, failure = False, error
            else:
                pending.append(start(task))
        if pending:
            yield pending.popleft().result()
    if failure is not None:
        raise failure


def _nothing() -> None:
    """Do nothing; as a task, this only wakes the pool (see `worker_pool`)."""


def _leave_with_parent() -> None:
    """End this worker when its parent ends, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)  # sys.exit would end only this thread

    threading.Thread(target=watch, daemon=True).start()


_STAT = Path("/proc/stat")
_MAPS = Path("/proc/self/maps")
_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_SECONDS = 0.5  # between two samples: long enough to measure 0.1 cores with CPU times in hundredths of a second
_CROWDED, _CALM = 0.25, 0.1  # cores used by others beyond those left free: on above the first, off below the second
_CALM_LOOKS = 6  # three seconds, so that a pausing program does not cause switching back and forth


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    # macOS does not bind processes to CPUs.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Times(NamedTuple):
    clock: float
    others: float


class CoreContention:
    """Detector of other processes that compete for this process's cores, from samples of CPU times."""

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
    """Start a daemon thread that adapts the waiting of torch's `threads` threads to the machine's load.

    Does nothing if the user has chosen how threads wait (OMP_WAIT_POLICY, GOMP_SPINCOUNT or KMP_BLOCKTIME is set), for
    a single thread, which waits for no other, or on systems without /proc/stat, where the load is unknown.
    """
    if threads < 2 or any(name in os.environ for name in _SETTINGS) or not _STAT.is_file():
        return
    with _lock:
        if _watch is not None and _watch.pid == os.getpid():  # a thread does not outlive a fork
            _watch.crowd.threads = threads
        else:
            _start(threads)


class _Watch(NamedTuple):
    pid: int
    crowd: CoreContention


_lock = threading.Lock()
_watch: _Watch | None = None


def _start(threads: int) -> None:
    global _watch
    _watch = _Watch(os.getpid(), CoreContention(threads, usable_cpus()))
    threading.Thread(target=_watching, args=(_watch.crowd,), name="share-cores", daemon=True).start()


def _watching(crowd: CoreContention) -> None:
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
                let_go = idle_team(_team_size(crowd))
            elif not crowded and let_go is not None:
                let_go()
                let_go = None
    except (OSError, ValueError):  # /proc changed or is hidden: threads wait as before
        if let_go is not None:
            let_go()


def _team_size(crowd: CoreContention) -> int:
    """Return the size of the idle team that makes threads sleep at once.

    libgomp does not count a team's first thread, so a team of n brings the count to threads + n - 1. With this n the
    count exceeds the number of CPUs by one. A team of fewer than one thread crashes the library.
    """
    return max(1, crowd.cpus - crowd.threads + 2)


def _times(*, low: bool | None = None) -> _Times:
    """Return the CPU time that all other processes have used on the CPUs of this process.

    `low`: whether time at low priority (nice) counts; by default only if this process itself has a low priority, since
    otherwise the scheduler prefers this process. Time that a hypervisor gave to other machines (steal) counts, because
    it is lost as well.
    """
    ours = os.sched_getaffinity(0)
    low = os.getpriority(os.PRIO_PROCESS, 0) > 0 if low is None else low
    ticks = 0
    for line in _STAT.read_text("ascii").splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in ours:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(int, fields)
            ticks += user + system + irq + softirq + steal + (nice if low else 0)
    return _Times(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - time.process_time())


def busy_notice(others: float) -> str:
    """Return the start of a message that other processes took the share `others` of the CPUs' time."""
    return f"the machine is busy: {others:.0%} of its CPU time went to other processes"


class SystemLoad:
    """The load on this process's CPUs from other processes of any priority, since this object was created.

    Low priority counts here: it disturbs measurements of milliseconds nearly as much, since a thread that wakes up
    waits until the other's time slice ends.
    """

    def __init__(self) -> None:
        self._began = self._look()

    @staticmethod
    def _look() -> _Times | None:
        try:
            return _times(low=True)
        except (OSError, ValueError, AttributeError):  # no /proc/stat, or a hidden one: the load is unknown
            return None

    def look(self, threads: int) -> tuple[float, bool]:
        """Return the share of the CPUs' time that others used, and whether `threads` here had to compete with them."""
        now, began = self._look(), self._began
        if now is None or began is None or now.clock <= began.clock:
            return 0.0, False
        cpus = usable_cpus()
        others = min(max(0.0, (now.others - began.others) / (now.clock - began.clock)), cpus)
        return others / cpus, CoreContention(threads, cpus).look(others)


@contextlib.contextmanager
def sleeping_at_once(threads: int) -> Iterator[None]:
    """Context in which torch's `threads` threads sleep while they wait for each other, instead of spinning.

    A thread's CPU time is then the time that it works. If the user has chosen how threads wait, or if the OpenMP
    library has no such rule, they wait as before.
    """
    let_go: Callable[[], None] | None = None
    if threads > 1 and not any(name in os.environ for name in _SETTINGS) and _MAPS.is_file():
        let_go = idle_team(_team_size(CoreContention(threads, usable_cpus())))
    try:
        yield
    finally:
        if let_go is not None:
            let_go()


def idle_team(size: int) -> Callable[[], None]:
    """Make every OpenMP library of this process hold a team of `size` sleeping threads; return a function to end them.

    The team belongs to a thread started here that lives as long, because a library frees a team when its thread ends.
    """
    ready, done = threading.Event(), threading.Event()
    libraries = [ctypes.CDLL(path) for path in _openmp()]
    # Any C function that ignores its argument works; a Python function would need the interpreter in every thread.
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
    """Return the paths of the loaded OpenMP libraries; CDLL with such a path returns the loaded library."""
    paths = {line.split(maxsplit=5)[5] for line in _MAPS.read_text().splitlines() if "omp" in line and "/" in line}
    names = ("libgomp", "libomp", "libiomp5")
    return sorted(path for path in paths if os.path.basename(path).startswith(names) and os.path.isfile(path))
