"""The training pairs' checksums, compared beside the first updates."""

from __future__ import annotations

import threading

from ziggurat.data.corpus import Store
from ziggurat.errors import DataError

__all__ = ["Verification"]


class Verification:
    """Compares the training pairs of a store with their checksums in a thread, from now on.

    Whoever trains meanwhile keeps nothing of it before `wait` has returned without an error. Reading and hashing are
    done outside Python's lock, 2 to 10 GB a second from memory.

    Args:
        store: just opened, nothing read of its training pairs.
        patience: seconds within which it is done as if there were no thread; most stores are.

    Raises DataError naming the file when damage was found within them.
    """

    def __init__(self, store: Store, patience: float = 1.0) -> None:
        self._shards = store.train.shards
        self._error: BaseException | None = None
        self._ended = threading.Event()
        for shard in self._shards:
            shard.checked_elsewhere = True
        threading.Thread(target=self._go, name="ziggurat-checksums", daemon=True).start()
        if self._ended.wait(patience):
            self.wait()

    def _go(self) -> None:
        try:
            for shard in self._shards:
                shard.verify()
        except BaseException as error:  # raised by `wait`
            self._error = error
        self._ended.set()

    @property
    def done(self) -> bool:
        """Whether all is compared, or damage was found."""
        return self._ended.is_set()

    @property
    def damaged(self) -> bool:
        """Whether damage was found so far."""
        return self._error is not None

    def found_damage(self) -> bool:
        """Wait until everything is compared; return whether damage was found."""
        self._ended.wait()
        return self.damaged

    def wait(self) -> None:
        """Return when everything is compared. Raises DataError naming the damaged file, and the way out."""
        self._ended.wait()
        if isinstance(self._error, DataError):
            raise DataError(
                f"{self._error}. Training has stopped, and nothing was saved that has seen these data; a run that was "
                "whole before goes on with `--resume` once the store is as it was"
            )
        if self._error is not None:
            raise self._error
