"""Runs a function of a test module in several processes, as torchrun would start them, over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

__all__ = ["finish", "launch", "run_together"]

ROOT = Path(__file__).resolve().parents[2]


def launch(module: str, function: str, count: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start `function(*arguments)` of `module` in `count` processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"import sys; from {module} import {function}; {function}(*sys.argv[1:])"
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def finish(started: list[subprocess.Popen[str]], timeout: float = 120.0) -> list[tuple[int, str, str]]:
    """Wait for them; return status, output and errors of each, by rank."""
    try:
        ended = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(started, ended, strict=True)]


def run_together(module: str, function: str, count: int, *arguments: str) -> list[str]:
    """Run `function(*arguments)` in `count` processes, all of which must succeed; return what each printed."""
    ended = finish(launch(module, function, count, *arguments))
    assert [status for status, _, _ in ended] == [0] * count, "\n".join(errors for _, _, errors in ended)
    return [output for _, output, _ in ended]
