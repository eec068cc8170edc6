"""Whether the data that a run trains on are known to be whole, for all its processes together."""

from __future__ import annotations

from ziggurat.data.corpus import Store
from ziggurat.data.verification import Verification
from ziggurat.errors import DataError
from ziggurat.training.processes import Processes

__all__ = ["Trust"]


class Trust:
    """The comparison of a store with its checksums, beside training; nothing is kept before it is over.

    Args:
        store: just opened.
        processes: who train together; each compares what it reads itself.

    Raises DataError when the store is damaged and that was found at once.
    """

    def __init__(self, store: Store, processes: Processes) -> None:
        self._store, self._processes, self._settled = store, processes, False
        self._verification = Verification(store)

    def notice(self) -> None:
        """Raise DataError, as `settle` does, if damage was found so far; all processes call this together."""
        if self._settled:
            return
        found = self._verification
        pending, damaged = self._processes.largest([not found.done, found.damaged])
        if damaged or not pending:
            self.settle()

    def settle(self) -> None:
        """Wait until the store is known to be whole; all processes call this together.

        Raises DataError in all of them when one found damage, naming the file in that one.
        """
        if self._settled:
            return
        (damaged,) = self._processes.largest([self._verification.found_damage()])
        if damaged:
            self._verification.wait()
            raise DataError(f"{self._store.path}: damaged, as another process found; its message names the file")
        self._settled = True
