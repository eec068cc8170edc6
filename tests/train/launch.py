"""Runs a function of a test module in several processes, as torchrun would start them, over gloo.

They are forked from a server that has already imported torch, which saves seconds per process.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

from tests.conftest import forkserver
from tools.pretend_device import NAME, present
from ziggurat.model.accelerator import default_device

ROOT = Path(__file__).resolve().parents[2]


class Started(NamedTuple):
    """A process and where its output goes."""

    process: ForkServerProcess
    output: Path
    errors: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def _main(
    module: str,
    function: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    files: list[str],
    pretends: bool,
) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    try:
        with present() if pretends else nullcontext():
            getattr(importlib.import_module(module), function)(*arguments)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def launch(module: str, function: str, count: int, *arguments: str) -> list[Started]:
    """Start `function(*arguments)` of `module` in `count` processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    folder, started = Path(tempfile.mkdtemp()), []
    pretends = default_device().type == NAME  # if so, they need the device, too
    for rank in range(count):
        files = [folder / f"{rank}.out", folder / f"{rank}.err"]
        for file in files:
            file.touch()
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = forkserver().Process(
            target=_main, args=(module, function, arguments, environment, [str(file) for file in files], pretends)
        )
        process.start()
        started.append(Started(process, *files))
    return started


def finish(started: list[Started], timeout: float = 240.0) -> list[tuple[int, str, str]]:
    """Wait for the processes; return the status, output and errors of each, by rank."""
    end = time.monotonic() + timeout
    try:
        for one in started:
            one.process.join(max(0.0, end - time.monotonic()))
            assert one.process.exitcode is not None, f"still running: {one.errors.read_text()}"
    finally:
        for one in started:
            one.process.kill()
            one.process.join()
    return [(one.process.exitcode or 0, one.output.read_text(), one.errors.read_text()) for one in started]


def run_together(module: str, function: str, count: int, *arguments: str, timeout: float = 240.0) -> list[str]:
    """Run `function(*arguments)` in `count` processes, all of which must succeed; return each one's output."""
    ended = finish(launch(module, function, count, *arguments), timeout)
    assert [status for status, _, _ in ended] == [0] * count, "\n".join(errors for _, _, errors in ended)
    return [output for _, output, _ in ended]
