"""A lock whose waiters get it in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["Turns"]


class Turns:
    """A lock for `with`, fair between threads.

    A thread that lets `threading.Lock` go and wants it again at once mostly gets it again, so that of two models that
    compute step by step one could wait for as long as the other has work.
    """

    def __init__(self) -> None:
        self._inner = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._inner:
            if not self._held:
                self._held = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def __exit__(self, *error: object) -> None:
        with self._inner:
            if self._waiting:
                self._waiting.popleft().set()  # handed over: nobody who comes now is before it
            else:
                self._held = False
