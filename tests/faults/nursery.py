"""Children that have already imported everything: one process waits and forks one for each command of `ziggurat`.

A command takes seconds to import PyTorch, and milliseconds for its own work on a tiny model. The waiting process
computes nothing itself: PyTorch cannot be forked once it has. It communicates in lines of JSON:

    {"do": "start", "arguments": [...], ...} -> {"pid": 7};  {"do": "wait", "pid": 7, "seconds": 60} -> {"status": 0}
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

_ROOT = Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
    """The end of a command.

    Attributes:
        status: its exit status, or minus the number of the signal that ended it; None: it was killed because its time
        was up.
        said: standard output and error.
        operations: (kind, path) of every file operation (tests/faults/operations.py).
    """

    status: int | None
    said: str
    operations: list[tuple[str, str]]

    @property
    def killed(self) -> bool:
        """Return whether SIGKILL ended it."""
        return self.status == -signal.SIGKILL


class Started(NamedTuple):
    """A running command, whose `pid` is also the id of its process group."""

    pid: int
    said: Path
    operations: Path


class Nursery:
    """Starts commands in forked children. It is a context manager.

    Args:
        scratch: folder for their output.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._count = scratch, 0
        scratch.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), "TMPDIR": str(scratch)}
        with (scratch / "nursery.txt").open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=_ROOT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def start(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        fault: tuple[Any, ...] | None = None,
        watched: bool = False,
        prepare: str = "",
        preload: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        command: str = "ziggurat.cli:main",
    ) -> Started:
        """Start `ziggurat` with these arguments in `folder`.

        Args:
            fault: a tests.faults.operations.Fault to happen below `folder`.
            watched: whether its operations are recorded.
            prepare: `module:function` to call first in the child.
            preload: modules that the waiting process imports first, unless it already has.
            environment: variables of the child.
            command: another function to call with the arguments.
        """
        self._count = (self._count + 1) % 64
        said, operations = (self._scratch / f"{self._count}.{ending}" for ending in ("txt", "operations"))
        answer = self._ask(
            do="start",
            arguments=list(arguments),
            folder=str(folder),
            fault=fault,
            watched=watched,
            prepare=prepare,
            preload=list(preload),
            environment=dict(environment or {}),
            command=command,
            said=str(said),
            operations=str(operations),
        )
        return Started(answer["pid"], said, operations)

    def wait(self, started: Started, seconds: float = 120.0) -> Ended:
        """Wait until it has ended, or kill it and all its children after this many seconds."""
        status = self._ask(do="wait", pid=started.pid, seconds=seconds)["status"]
        said = started.said.read_text(encoding="utf-8", errors="replace")
        lines = started.operations.read_text(encoding="utf-8").splitlines() if started.operations.is_file() else []
        return Ended(status, said, [tuple(json.loads(line)) for line in lines])

    def run(self, arguments: Sequence[str], folder: Path, *, seconds: float = 120.0, **options: Any) -> Ended:
        """Start a command and wait for it."""
        return self.wait(self.start(arguments, folder, **options), seconds)

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the nursery has ended: {(self._scratch / 'nursery.txt').read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _wait() -> None:
    """Run the waiting process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output of imports out of the answers
    import ziggurat.cli.app

    assert ziggurat.cli.app
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "wait":
            print(json.dumps({"status": _status(request["pid"], request["seconds"])}), file=answers, flush=True)
            continue
        for module in request["preload"]:
            importlib.import_module(module)
        pid = os.fork()
        if pid == 0:
            answers.close()
            _be(request)
        print(json.dumps({"pid": pid}), file=answers, flush=True)


def _status(pid: int, seconds: float) -> int | None:
    descriptor = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)
    with contextlib.suppress(ProcessLookupError):  # kills everything that it left behind
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def _be(request: dict[str, Any]) -> NoReturn:
    """Act as `ziggurat`, once."""
    status = 70
    try:
        os.setsid()
        os.chdir(request["folder"])
        os.environ.update(request["environment"])
        output = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        for number, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, number)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False, errors="surrogateescape")
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
        if request["prepare"]:
            module, _, name = request["prepare"].partition(":")
            getattr(importlib.import_module(module), name)()
        log = os.open(request["operations"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if request["fault"] is not None or request["watched"]:
            from tests.faults.operations import Fault, watch

            fault = None if request["fault"] is None else Fault(*request["fault"])
            wanted = request["watched"]
            told = (lambda found: os.write(log, json.dumps(found).encode() + b"\n")) if wanted else lambda found: None
            watch(Path(request["folder"]), fault, told)
        status = _status_of(request["command"], request["arguments"])
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _status_of(command: str, arguments: Sequence[str]) -> int:
    """Call `command`; return the exit status that the process would have."""
    module, _, name = command.partition(":")
    try:
        getattr(importlib.import_module(module), name)(arguments)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    else:
        status = 0
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    return status


if __name__ == "__main__":
    _wait()
