"""The part of a file that has arrived so far, and the notes that say of which version it is.

`NAME.part` is locked while a process writes it; `NAME.part.json` has the address, the version (ETag or date) and the
length that the server gave. A part without notes is never continued.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ziggurat.system.errors import DataError, is_full_disk, written_whole
from ziggurat.system.files import write_atomically
from ziggurat.system.temporary import is_same, lock_missing, sync_folder, try_lock


@dataclass
class Part:
    """The part of a file that has arrived; the file is open and locked."""

    path: Path
    """The future file."""
    file: BinaryIO
    size: int = 0
    """Bytes in the part."""
    url: str = ""
    """Address that they came from."""
    version: str = ""
    """ETag or date of the version that they belong to; empty: the part cannot be continued."""
    total: int | None = None
    """Length of that version."""

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, waiting: Callable[[], object] = lambda: None) -> Iterator[Part]:
        """Context with the part of `path`, new or continued, once no other process has it; `waiting` says so."""
        name = path.with_name(f"{path.name}.part")
        with written_whole(path), _alone(name, waiting) as file:
            part = cls(path, file, file.tell())
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                known = json.loads(part._notes.read_bytes())
                part.url, part.version, part.total = str(known["url"]), str(known["version"]), known["total"]
            try:
                yield part
            finally:
                if not part.size:
                    name.unlink(missing_ok=True)
                    part._notes.unlink(missing_ok=True)

    @property
    def _notes(self) -> Path:
        return self.path.with_name(f"{self.path.name}.part.json")

    def restart(self, url: str = "", version: str = "", total: int | None = None) -> None:
        """Drop what has arrived, and note what comes instead."""
        self._notes.unlink(missing_ok=True)  # first: a part without notes is never continued
        self.file.truncate(0)
        self.size, self.url, self.version, self.total = 0, url, version, total
        if version:
            notes = {"url": url, "version": version, "total": total}
            write_atomically(self._notes, json.dumps(notes).encode())

    def write(self, block: bytes) -> None:
        """Add a block. Raises DataError when the disk is full."""
        try:
            self.file.write(block)
        except OSError as error:
            if is_full_disk(error):
                raise DataError(f"{self.path}: the disk is full; make room and run this again to go on") from None
            raise
        self.size += len(block)

    def finish(self, check: Callable[[Path], object]) -> None:
        """Give the file its name. Raises DataError, and drops it, where its length is wrong or `check` raises."""
        self.file.flush()
        try:
            if self.total is not None and (found := os.fstat(self.file.fileno()).st_size) != self.total:
                raise DataError(
                    f"{self.path}: has {found:,} bytes, wanted are {self.total:,}; it was dropped, run this again"
                )
            check(Path(self.file.name))
        except DataError:
            self.restart()
            raise
        os.fsync(self.file.fileno())
        self._notes.unlink(missing_ok=True)
        os.replace(self.file.name, self.path)
        sync_folder(self.path.parent)


@contextlib.contextmanager
def _alone(name: Path, waiting: Callable[[], object]) -> Iterator[BinaryIO]:
    """Context with the file `name`, open for appending and locked. Raises DataError where there are no locks."""
    while True:
        with name.open("ab") as file:
            try:
                if not try_lock(file.fileno()):
                    waiting()
                    fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            except OSError as error:
                raise lock_missing(name, error) from None
            if is_same(name, file.fileno()):  # else the other has given it its final name, or removed it
                file.seek(0, os.SEEK_END)  # the other may have written on after it was opened here
                yield file
                return
