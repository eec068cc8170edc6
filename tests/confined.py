"""Runs an attack in a child process with limits: a stranger's file may cost at most 5 seconds and 500 MB."""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ziggurat.system.errors import ZigguratError


@dataclass(frozen=True)
class Outcome:
    """The outcome of an action.

    Attributes:
        error: the class of the exception, `` if none was raised.
        text: the message, or the returned value as text.
        megabytes: how far the child's resident memory rose at its peak.
    """

    error: str
    text: str
    megabytes: float


def confined(action: Callable[[], object], *, seconds: float = 5, megabytes: int = 500) -> Outcome:
    """Return the outcome of `action`, run in a fork of this process (so that nothing is imported again).

    Fails if it takes longer (in CPU time; wall time may be twelve times that, since tests share the machine), takes
    more memory, or ends the process. Address space is limited to four times the memory, so that an attack cannot harm
    the machine; the test is on the resident memory.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # What earlier tests left is never collected here: a destructor may wait for a thread that did not survive.
        gc.freeze()
        os.close(reader)
        os._exit(_run(action, writer, seconds, megabytes))
    os.close(writer)
    said = b""
    try:
        while select.select([reader], [], [], 12 * seconds)[0] and (part := os.read(reader, 1 << 16)):
            said += part
    finally:
        os.close(reader)
        if not said:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    assert said, f"took more than {seconds} seconds, or ended the process (status {status})"
    error, rose, text = said.decode("utf-8", "replace").split("\n", 2)
    assert float(rose) < megabytes, f"took {rose} MB: {error}: {text[:500]}"
    return Outcome(error, text, float(rose))


def _run(action: Callable[[], object], writer: int, seconds: float, megabytes: int) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds)))
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM from here on
    before = _status("VmRSS")
    limit = int(_status("VmSize") + 4 * megabytes) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    error, text = "", ""
    torch.set_num_threads(1)  # an earlier test may have set more, but its OpenMP threads do not survive the fork
    try:
        text = str(action())
    except ZigguratError as problem:
        error, text = type(problem).__name__, str(problem)
    except BaseException as problem:
        error, text = type(problem).__name__, traceback.format_exc()
    rose = _status("VmHWM") - before
    os.write(writer, f"{error}\n{rose:.1f}\n{text}".encode("utf-8", "replace")[:60_000])
    return 0


def _status(key: str) -> float:
    """Return the MiB in a line of /proc/self/status."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024


def refusal(action: Callable[[], object], **limits: float) -> str:
    """Return the message with which `action` refuses; fails if it does not refuse, or not with an error for users."""
    outcome = confined(action, **limits)  # type: ignore[arg-type]
    assert outcome.error, f"was taken: {outcome.text[:500]}"
    assert outcome.error in {error.__name__ for error in _kinds()}, f"{outcome.error}: {outcome.text[-2000:]}"
    assert len(outcome.text) < 3000, outcome.text[:500]
    return outcome.text


def _kinds() -> list[type[ZigguratError]]:
    kinds = ZigguratError.__subclasses__()
    return [ZigguratError, *kinds, *(finer for kind in kinds for finer in kind.__subclasses__())]


def cli(*arguments: str) -> Callable[[], str]:
    """Return an action that runs the verb as the command line does, and raises ZigguratError for exit status 2."""

    def run() -> str:
        from ziggurat.cli import main

        out = io.TextIOWrapper(io.BytesIO())
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(out):
            try:
                main(list(arguments))
            except SystemExit as stop:
                if stop.code == 2:
                    raise ZigguratError(said.getvalue()) from None
                if stop.code:
                    raise AssertionError(f"status {stop.code}: {said.getvalue()}") from None
        return said.getvalue()

    return run


if sys.platform != "linux":
    raise RuntimeError("limits of a child are set as Linux has them")
