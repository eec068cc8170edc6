"""The check, beside training, that the store is whole.

Comparing a large store with its checksums can take minutes, so training does not wait for it; but no weights that have
seen the data are written to disk before the check is over.
"""

from __future__ import annotations

from ziggurat.data.corpus import Store
from ziggurat.data.store_checks import Verification
from ziggurat.system.errors import DataError
from ziggurat.train.processes import Processes


class StoreCheck:
    """The comparison of a store with its checksums, in all processes: damage found by one ends the run in all.

    Args:
        store: just opened.
        processes: all that train on it; each compares the files as it sees them.

    Raises DataError when damage was found within the first second.
    """

    def __init__(self, store: Store, processes: Processes) -> None:
        self._store, self._processes, self._confirmed = store, processes, False
        self._verification = Verification(store)

    def poll(self) -> None:
        """Raise DataError, as `confirm` does, if damage was found so far; all processes call this together."""
        if self._confirmed:
            return
        found = self._verification
        pending, damaged = self._processes.largest([not found.done, found.damaged])
        if damaged or not pending:
            self.confirm()

    def confirm(self) -> None:
        """Wait until the store is known to be whole; all processes call this together.

        Raises DataError in all of them when one found damage; that one's message names the file.
        """
        if self._confirmed:
            return
        # Agree before anything is raised: processes that went on would wait for the others in vain.
        (damaged,) = self._processes.largest([self._verification.found_damage()])
        if damaged:
            self._verification.wait()  # raises in the process that found it
            raise DataError(f"{self._store.path}: damaged, as another process found; its message names the file")
        self._confirmed = True
