"""An iterator run ahead in a thread, in its own order."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from queue import Empty, Queue
from threading import Event, Thread, current_thread
from typing import Any, Generic, NamedTuple, TypeVar

__all__ = ["Background"]

Item = TypeVar("Item")


class _Failure(NamedTuple):
    error: BaseException


class Background(Generic[Item]):
    """Runs an iterator in one thread, at most `depth` items ahead, in its order."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._queue: Queue[Item | _Failure] = Queue(depth)
        stop = Event()
        # Neither the thread nor the finaliser knows this object, so that letting go of it ends the thread. The
        # finaliser also runs at exit: a thread still inside torch while the interpreter goes down can crash it.
        thread = Thread(target=_fill, args=(items, self._queue, stop), name="ziggurat-loader", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, self._queue, stop, thread)

    def __next__(self) -> Item:
        item = self._queue.get()
        if isinstance(item, _Failure):
            self.close()
            raise item.error
        return item


def _fill(items: Iterator[Item], queue: Queue[Item | _Failure], stop: Event) -> None:
    try:
        while not stop.is_set():
            queue.put(next(items))
    except BaseException as error:  # Everything must reach the consumer, which would wait for ever otherwise.
        queue.put(_Failure(error))


def _end(queue: Queue[Any], stop: Event, thread: Thread) -> None:
    """End the thread: an emptied queue lets a waiting `put` through, after which the thread sees `stop`."""
    stop.set()
    while True:
        try:
            queue.get_nowait()
        except Empty:
            break
    if thread is not current_thread():  # The garbage collector may come here in any thread.
        thread.join()
