"""Fingerprints of files that are asked for again and again, remembered as long as the files are untouched."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ziggurat.system.errors import DataError
from ziggurat.system.files import fingerprint, write_atomically
from ziggurat.system.small_files import parse_json, read_bounded

_SETTLED_NS = 2_000_000_000
"""A file touched later than this before it was read may change again within the clock's resolution, unnoticed."""


class Fingerprints:
    """Fingerprints by path; of a file of the same size, inode and times of change it is not computed again.

    No program can set the time of an inode's last change (ctime), so new content is always noticed.

    Args:
        memory: file to remember them in.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, tuple[list[int], str]] = {}
        try:
            for path, (stamp, digest) in parse_json(read_bounded(memory), str(memory)).items():
                self._known[str(path)] = ([int(number) for number in stamp], str(digest))
        except (OSError, DataError, ValueError, TypeError, AttributeError):
            self._known = {}  # nothing is lost but time
        self._new = False

    def of(self, file: Path) -> str:
        """Return the fingerprint of a file. Raises DataError where it cannot be read."""
        name, stamp = os.path.abspath(file), _stamp(file)
        known = self._known.get(name)
        if known is not None and stamp is not None and known[0] == stamp:
            return known[1]
        digest = fingerprint(file)
        if stamp is not None and stamp == _stamp(file) and time.time_ns() - max(stamp[2:]) > _SETTLED_NS:
            self._known[name] = (stamp, digest)
            self._new = True
        return digest

    def keep(self) -> None:
        """Write what is known, if there is anything new."""
        if self._new:
            write_atomically(self._memory, json.dumps(self._known, indent=0, sort_keys=True).encode() + b"\n")
            self._new = False


def _stamp(file: Path) -> list[int] | None:
    """Return size, inode and times of the last change in nanoseconds; None where there is no such file."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return None
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
