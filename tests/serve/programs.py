"""Servers in separate processes, and raw requests to them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil


@contextlib.contextmanager
def running(command: list[str], address: str, seconds: float = 60, **environment: str) -> Iterator[None]:
    """Context in which a program serves at this address."""
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=said, text=True
        ) as process,
    ):
        try:
            end = time.monotonic() + seconds
            while True:
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(f"{address}/health")
                    break
                assert process.poll() is None, (said.seek(0), said.read())
                assert time.monotonic() < end, "it does not answer"
                time.sleep(0.1)
            yield
        finally:
            process.terminate()


class Server(NamedTuple):
    """Our server in a separate process."""

    process: psutil.Process
    port: int

    def exchange(self, *parts: bytes, pause: float = 0.0, patience: float = 30.0) -> bytes:
        """Send the parts with pauses between them; return everything received until the server closes or is quiet."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=patience) as connection:
            answer = b""
            try:
                for part in parts:
                    connection.sendall(part)
                    time.sleep(pause)
                while new := connection.recv(65536):
                    answer += new
            except (ConnectionError, TimeoutError):  # the server closed the connection early, or is waiting
                pass
            return answer

    def high_water(self) -> int:
        """Return the peak of its resident memory in bytes."""
        found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text("ascii"))
        assert found is not None
        return int(found[1]) << 10


@contextlib.contextmanager
def served(folder: Path, model: Path, **settings: Any) -> Iterator[Server]:
    """Context with a server over a model, with settings from a configuration that is written into `folder`.

    At the end it must exit cleanly, without messages.
    """
    config = folder / "serve.yaml"
    config.write_text(
        json.dumps({"models": [{"path": str(model), "threads": 1}], "port": 0, **settings}), encoding="utf-8"
    )
    command = [sys.executable, "-m", "ziggurat", "serve", "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r":(\d+) ", process.stderr.readline())
            assert found is not None
            yield Server(psutil.Process(process.pid), int(found[1]))
        finally:
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        assert process.returncode in (0, 143)
        assert re.fullmatch(r"(ziggurat: stopped by SIGTERM\n)?", said), said[:6000]


def head(*lines: str, path: str = "/translate", method: str = "POST") -> bytes:
    """Return the head of a request with these headers."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode("latin-1")


def statuses(answer: bytes) -> list[int]:
    """Return the statuses of all answers in what a server sent."""
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]
