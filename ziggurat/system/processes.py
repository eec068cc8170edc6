"""Pool of worker processes: none outlives its parent, and one that dies is a plain error.

This module does not import PyTorch. A new process imports it before it can watch its parent, and would live on for
seconds, unwatched, while it imports PyTorch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from ziggurat.system.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")


@contextlib.contextmanager
def _left_to_parent() -> Iterator[None]:
    """Block Ctrl-C and the end of the terminal in processes that are started inside the block.

    Both signals reach all processes of a terminal, but only the parent is to act on them.
    """
    # A new process inherits the signals that are blocked when it starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def worker_pool(workers: int, *, way_out: str) -> Iterator[Callable[..., Future[Any]]]:
    """Yield `submit(function, *arguments)`, which runs the function in one of `workers` new processes.

    The first task starts the processes. The end of the block, by an interrupt too, ends them at once, in the middle of
    their tasks. Ctrl-C and the end of the terminal are left to this process.

    Raises DataError, with `way_out` at its end, where a worker died.
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
            # `submit` wakes the thread that watches the processes before it starts a new one, not after. The death of
            # the new one would go unnoticed until another task ends, or for ever. So each new process is followed by a
            # task that does nothing, which wakes the thread again.
            while more:
                _, more = begin(_nothing)
        return future

    try:
        yield submit
    except BrokenProcessPool:
        raise DataError(f"a worker process was killed, perhaps for want of memory: {way_out}") from None
    finally:
        # Before `shutdown`, which would wait for the tasks under way.
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
    """Do nothing: a task that only wakes the pool (see `worker_pool`)."""


def _leave_with_parent() -> None:
    """End this worker when its parent ends, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)  # sys.exit would end this thread alone

    threading.Thread(target=watch, daemon=True).start()
