"""Processes that work for this one: none outlives it, and one that dies is a plain error."""

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

from ziggurat.errors import DataError

__all__ = ["in_order", "worker_pool"]

Task = TypeVar("Task")
Result = TypeVar("Result")


@contextlib.contextmanager
def _left_to_parent() -> Iterator[None]:
    """Have processes that are started here take no notice of Ctrl-C or of a terminal that goes away.

    Both reach all processes of a terminal, but only the parent acts on them. What is blocked is inherited.
    """
    blocked = (signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


@contextlib.contextmanager
def worker_pool(workers: int, *, when_killed: str = "") -> Iterator[Callable[..., Future[Any]]]:
    """Give `submit(function, *arguments)`, which has one of `workers` new processes do it; at the end none is left.

    The processes are started with the first task. Whatever ends the block, an interrupt too, ends them, at once and in
    the middle of what they do. Ctrl-C and the end of the terminal are left to this process.

    Raises DataError, with `when_killed` at its end, where a worker died.
    """
    with _left_to_parent():  # multiprocessing's own process, which tracks semaphores, is started here
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _leave_with_parent)
    started: set[Any] = set()

    def begin(function: Callable[..., Any], *arguments: object) -> tuple[Future[Any], bool]:
        """Hand one task over; also return whether another process was started for it."""
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
            # The pool wakes the thread that watches its processes before it starts another, not after. The death of
            # that one would not be noticed until another task ends, or ever, so one that does nothing comes behind it.
            while more:
                _, more = begin(_nothing)
        return future

    try:
        yield submit
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, perhaps for want of memory: use fewer `--workers` or a smaller "
            f"`batch_tokens`{when_killed}"
        ) from None
    finally:
        for process in started:
            process.terminate()
        pool.shutdown(cancel_futures=True)


def in_order(start: Callable[[Task], Future[Result]], tasks: Iterable[Task], limit: int) -> Iterator[Result]:
    """Yield the results of `tasks` in their order, with at most `limit` of them started and not yet yielded.

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
    """Be a task."""


def _leave_with_parent() -> None:
    """Have this worker end when its parent does, however that came about."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
