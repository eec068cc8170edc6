"""Cases in child processes, one by one until the child dies; it may crash, hang or take all memory."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

Case = TypeVar("Case")
Told = dict[str, str]
"""Told are a child's answers about a case: first what it is about to do, finally its outcome, with the key `kind`."""


def in_child(work: Callable[[], None]) -> None:
    """Run something in a child process, because it may start threads, after which this process could no longer fork."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("a child failed; its error is above")


def in_children(
    cases: Sequence[Case], do: Callable[[Case], Iterator[Told]], *, of_a_child: int, patience: float
) -> Iterator[tuple[Case, Told]]:
    """Yield every case with the answers of the child that ran it, and with how the child ended if the case killed it.

    `kind` is then `crash`, or `hang` if it used all its CPU time or did not answer for `patience` seconds.
    """
    left = list(cases)
    while left:
        done = 0
        for told in _one_child(left[:of_a_child], do, patience):
            yield left[done], told
            done += 1
        left = left[done:]


def _one_child(cases: Sequence[Case], do: Callable[[Case], Iterator[Told]], patience: float) -> Iterator[Told]:
    """Yield a child's answers about each case, until all are done or it dies."""
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(here)
        _be_child(cases, do, there)
    os.close(there)
    done, said = 0, {}
    with os.fdopen(here, "rb", buffering=0) as lines:  # `select` does not see what is in a buffer
        while line := _next_line(lines, pid, patience):
            message = json.loads(line)
            if "broken" in message:
                raise RuntimeError(f"{cases[done]}: {message['broken']}")
            said |= message
            if "kind" in message:
                yield said
                done, said = done + 1, {}
        _, status = os.waitpid(pid, 0)
        if done == len(cases):
            return
        killed = signal.Signals(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None
        late = killed in (signal.SIGXCPU, signal.SIGALRM)
        ending = f"signal {killed.name}" if killed else f"status {os.WEXITSTATUS(status)}"
        yield said | {"kind": "hang" if late else "crash", "said": ending}


def _next_line(lines: Any, pid: int, patience: float) -> bytes:
    """Return the child's next answer, or nothing if it died; one that sleeps for ever is killed."""
    if not select.select([lines], [], [], patience)[0]:
        os.kill(pid, signal.SIGALRM)
    return bytes(lines.readline())


def _be_child(cases: Sequence[Case], do: Callable[[Case], Iterator[Told]], tell: int) -> None:
    """Run the cases and end this process."""
    status = 1
    try:
        import torch

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # native libraries write there
            os.dup2(quiet, descriptor)
        for case in cases:
            for told in do(case):
                os.write(tell, json.dumps(told).encode() + b"\n")
        status = 0
    except BaseException:  # outside any case: undamaged files cannot be read, or the tests are at fault
        os.write(tell, json.dumps({"broken": traceback.format_exc()}).encode() + b"\n")
    finally:
        os._exit(status)


@contextlib.contextmanager
def limited(memory: int, seconds: float) -> Iterator[None]:
    """Limit address space and CPU time to this many bytes and seconds more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = resource.getrusage(resource.RUSAGE_SELF)
    space, times = resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, times[1]))
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, space[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, space)
        resource.setrlimit(resource.RLIMIT_CPU, times)
