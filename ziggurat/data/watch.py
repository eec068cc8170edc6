"""Notices when files change under the process that reads them: those of an open store, those a store is made of."""

from __future__ import annotations

import os
from pathlib import Path

from ziggurat.data.corpus import Store
from ziggurat.data.files import fingerprint
from ziggurat.errors import DataError

__all__ = ["InputWatch", "StoreWatch"]


class StoreWatch:
    """What the files of `store` were when it was opened; `check` compares, at the price of one `stat` a file.

    Another store in its place (`prepare --force`, a removed folder) does not touch a process that has the old files
    mapped; the same file with other content does.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = {name: _identity(os.stat(store.path / name)) for name in store.manifest["files"]}

    def check(self) -> str | None:
        """Return, for people, what took the store's place; None when it is untouched.

        Raises DataError naming a file whose content was changed where it lies.
        """
        for name, seen in self._seen.items():
            path = self._store.path / name
            try:
                now = _identity(os.stat(path))
            except OSError:
                return f"{path} is gone"
            if now == seen:
                continue
            if now[:2] != seen[:2]:
                return f"{path} is another file now"
            if fingerprint(path) != self._store.manifest["files"][name]["xxh3_128"]:
                raise DataError(
                    f"{path}: changed while it was being read, so updates since the last checkpoint may have seen "
                    "damaged data; restore the store, then `--resume`"
                )
            self._seen[name] = now
        return None


class InputWatch:
    """What the files that a store is made of were when their fingerprints were taken; `check` compares.

    They are read several times over, and a store is known by the fingerprints of the first time.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[tuple[int, int, int, int], int, str]] = {}

    def fingerprint(self, path: Path) -> str:
        """Return the file's fingerprint (ziggurat.data.files.fingerprint, raising as it does)."""
        try:
            status = os.stat(path)  # before the content: what changes from now on is noticed
        except OSError:
            return fingerprint(path)
        found = fingerprint(path)
        self._seen.setdefault(path, (_identity(status), status.st_ctime_ns, found))
        return found

    def check(self) -> None:
        """Raise DataError when a file may have been another one at some time since."""
        for path, (identity, changed, content) in self._seen.items():
            try:
                now = os.stat(path)
            except OSError:
                now = None
            # Rights and links change a file's ctime, too; what puts back the mtime of an edit cannot put back this one.
            other = now is None or _identity(now) != identity
            if other or (now and now.st_ctime_ns != changed and fingerprint(path) != content):
                raise DataError(f"{path}: changed while being read; run `ziggurat prepare` again")


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    """Device and file number; size and time of the last change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
