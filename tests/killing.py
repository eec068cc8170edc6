"""Killing a process at its n-th file operation, and snapshots of folders."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EVENTS = ("open", "os", "shutil", "tempfile", "fcntl")


def run_and_kill(work: Callable[[], object], paths: str, operation: int) -> bool:
    """Fork, run `work`, and SIGKILL it at its `operation`-th operation on a file that matches the pattern `paths`.

    Returns whether it was killed.
    """
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # the parent must not wait for ever
        seen = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal seen
            if event.partition(".")[0] in _EVENTS and (event == "fcntl.flock" or re.search(paths, str(args))):
                seen += 1
                if seen == operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFSIGNALED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return os.WIFSIGNALED(status)


def tree(folder: Path, *, contents: Callable[[Path], object] = Path.read_bytes) -> dict[str, object]:
    """Return a map of everything under a folder: `contents` for files, targets for links, None for folders."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else contents(path)
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }
