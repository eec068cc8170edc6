"""Verbs on a full or read-only disk: real file systems in memory, of every size that is too small.

So writes by libraries that bypass Python fail, too. Mounting needs root's rights.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.faults.ledger import Ledger
from tests.faults.ground import Ground
from tests.faults.nursery import Nursery
from tests.faults.trials import Bench
from tests.faults.verbs import EXPORTS, VERBS

_STEPS = 8
_PAGE = 4096
_ROOM = 1 << 28


def mountable(folder: Path) -> bool:
    """Return whether this process may mount a file system."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError), _mounted(folder / "probe"):
        return True
    return False


def fill_disks(ledger: Ledger, folder: Path, names: Sequence[str]) -> None:
    """Run each of the named verbs on disks with too little room, then on a read-only one."""
    verbs = {**VERBS, **EXPORTS}
    with Nursery(folder / "scratch") as nursery, _mounted(folder / "disk") as disk:
        ground = Ground(folder / "ground", nursery)
        for name in names or [*verbs]:
            verb = verbs[name]
            bench = Bench(verb, ground, disk / "work")
            after = _used(disk)
            ground.lay(verb, disk / "work")
            before = _used(disk)
            attempts = [(f"{size - before:,} bytes of {after - before:,}", size) for size in sizes(before, after)]
            for said, size in [*attempts, ("read-only", None)]:
                attack = f"disk {'read-only' if size is None else 'full'}: {verb.arguments[0]}"
                key = f"{name} {said}"
                if ledger.has(attack, key):
                    continue
                ground.lay(verb, disk / "work")
                _remount(disk, "ro" if size is None else f"size={size}")
                ended = nursery.run(verb.arguments, disk / "work", prepare=verb.prepare, preload=verb.preload)
                _remount(disk, "rw" if size is None else f"size={_ROOM}")
                found = bench.judged(ended, os.strerror(errno.EROFS if size is None else errno.ENOSPC))
                ledger.add(attack, key, found.verdict, found.detail)
                if found.verdict != "survived":
                    print(f"{key}: {found.verdict}: {found.detail}", flush=True)
            print(f"{name}: {len(attempts) + 1} disks", flush=True)


def sizes(before: int, after: int) -> list[int]:
    """Return disk sizes, in bytes, that are too small for a verb: it needs between `before` and `after` bytes.

    They are at least one page, even for verbs that start with nothing: for tmpfs `size=0` means no limit, and it
    refuses to set a limit later.
    """
    room = max(0, after - before)
    return sorted({max(_PAGE, before + room * step // _STEPS // _PAGE * _PAGE) for step in range(_STEPS)})


@contextlib.contextmanager
def _mounted(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "tmpfs", str(folder)], check=True, capture_output=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def _used(folder: Path) -> int:
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize
