"""One disturbance of one verb, and what came of it."""

from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.nursery import Ended
from tests.faults.operations import ERRORS, Fault, Operation
from tests.faults.trees import differences, leftovers, snapshot
from tests.faults.verbs import Ground, Verb

__all__ = ["Bench", "Outcome", "bad_end", "chosen", "faults_of", "last_line"]

_UNTOLD = re.compile(r"internal error|Traceback \(most recent|Fatal Python error|Segmentation fault")


class Outcome(NamedTuple):
    """What came of a disturbance.

    Attributes:
        verdict: `survived`, or what went wrong: `lost` (the result is another one after the command was given again, or
            what was there before is gone), `half` (an output was left half written), `refused` (the command given again
            does not go on), `silent` (an error without exit status, or a result that is another one with status 0),
            `internal` (a traceback or an internal error), `unnamed` (a message that names no file, or not the error),
            `leftovers`, `hung`, `crashed`.
        detail: more of it.
    """

    verdict: str
    detail: str = ""


class Bench:
    """Disturbs one verb over and over, in one folder.

    Attributes:
        operations: those of the undisturbed command.
    """

    def __init__(self, verb: Verb, ground: Ground, folder: Path) -> None:
        self.verb, self._ground, self._folder = verb, ground, folder
        self._before, self._after, found = ground.undisturbed(verb, folder)
        self.operations = [Operation(*one) for one in found]

    def kill(self, fault: Fault) -> Outcome:
        """Kill the command at an operation, type it again, compare."""
        ended = self._disturbed(fault)
        if not ended.killed:
            return bad_end(ended, (0,)) or self._compared()
        return self._again()

    def fail(self, fault: Fault) -> Outcome:
        """Let an operation fail, look at what is said and left, type the command again, compare."""
        assert fault.error is not None
        ended = self._disturbed(fault)
        if bad := bad_end(ended, (0, 2)):
            return bad
        try:
            left = snapshot(self._folder, self.verb.timed)
        except ValueError as error:
            return Outcome("half", f"a file cannot be read: {error}")
        if ended.status == 0:
            unlike = differences(left, self._after)
            if unlike and not (self.verb.trains and _told(ended.said, unlike)):
                return Outcome("silent", "; ".join(unlike[:3]))
            return self._swept()
        paths = [self._relative(one) for one in self.operations]
        if not _names_a_file(ended.said, paths):
            return Outcome("unnamed", last_line(ended.said))
        if os.strerror(fault.error) not in ended.said:
            return Outcome("unnamed", f"not {errno.errorcode[fault.error]}: {last_line(ended.said)}")
        if not self.verb.trains and left not in (self._before, self._after):
            unlike = differences(left, self._before)
            if not set(unlike) <= set(_expected_parts(self.verb, unlike)):
                return Outcome("half", "; ".join(unlike[:3]))
        return self._again()

    def _relative(self, operation: Operation) -> str:
        return os.path.relpath(operation.path, self._folder)

    def _disturbed(self, fault: Fault) -> Ended:
        self._ground.lay(self.verb, self._folder)
        return self._run(self.verb.arguments, fault)

    def _run(self, arguments: Sequence[str], fault: Fault | None = None) -> Ended:
        verb = self.verb
        return self._ground.nursery.run(
            arguments, self._folder, prepare=verb.prepare, preload=verb.preload, fault=fault
        )

    def _again(self) -> Outcome:
        """Type the command again, as a user would."""
        ended = self._run(self.verb.retyped(self._folder))
        if ended.status == 2 and not _UNTOLD.search(ended.said):
            whole = self._compared()  # it may say that all is there already
            return whole if whole.verdict == "survived" else Outcome("refused", last_line(ended.said))
        return bad_end(ended, (0,)) or self._compared()

    def _compared(self) -> Outcome:
        try:
            found = snapshot(self._folder, self.verb.timed)
        except ValueError as error:
            return Outcome("lost", f"a file cannot be read: {error}")
        left = leftovers(self._folder)
        unlike = [said for said in differences(found, self._after) if not _is_of(said, left)]
        return Outcome("lost", "; ".join(unlike[:3])) if unlike else self._swept()

    def _swept(self) -> Outcome:
        left = leftovers(self._folder)
        return Outcome("leftovers", ", ".join(left[:3])) if left else Outcome("survived")


def bad_end(ended: Ended, expected: tuple[int, ...]) -> Outcome | None:
    """Return what is wrong with how a command ended; None where its status is one of the `expected`."""
    if ended.status is None:
        return Outcome("hung", last_line(ended.said))
    if _UNTOLD.search(ended.said):
        return Outcome("internal", last_line(ended.said))
    if ended.status < 0:
        return Outcome("crashed", f"signal {-ended.status}: {last_line(ended.said)}")
    if ended.status not in expected:
        return Outcome("internal", f"status {ended.status}: {last_line(ended.said)}")
    return None


def last_line(said: str) -> str:
    """Return the last message of `ziggurat` itself, or the last line."""
    lines = [line for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("ziggurat:")]
    return (told or lines or ["nothing said"])[-1][:300]


def _told(said: str, unlike: list[str]) -> bool:
    """Whether training has said that the files that differ have gaps."""
    names = {os.path.basename(line.split()[0]) for line in unlike}
    return names <= {"metrics.jsonl", "log.txt", "depth.jsonl"} and all(f"{name} cannot be" in said for name in names)


def _names_a_file(said: str, paths: Sequence[str]) -> bool:
    """Whether a message names one of the files, or a folder they are in."""
    told = last_line(said)
    parts = {part for path in paths for part in path.split("/") if part not in ("..", ".")}
    return any(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", told) for part in parts)


def _is_of(said: str, left: Sequence[str]) -> bool:
    """Whether a difference is a leftover or below one, which is told of as such."""
    name = said.removesuffix(" is too much").rstrip("/")
    return any(name == path or name.startswith(f"{path}/") for path in left)


def _expected_parts(verb: Verb, unlike: Sequence[str]) -> Iterator[str]:
    """Yield the differences that may stay after an error: parts that the same command goes on from, empty folders."""
    for said in unlike:
        if said.endswith("is too much") and (
            said.startswith(tuple(verb.parts)) if verb.parts else said.split()[0].endswith("/")
        ):
            yield said


def faults_of(operations: Sequence[Operation], *, errors: bool, brief: bool = False) -> list[Fault]:
    """Return every fault of a command: SIGKILL at each operation that writes, or each error of each operation.

    With `errors` and `brief`, one error of each operation instead of all.
    """
    if not errors:
        count = sum(one.kind != "read" for one in operations)
        return [Fault(number) for number in range(1, count + 1)]
    found = []
    for number, one in enumerate(operations, start=1):
        several = [Fault(number, error, reads=True) for error in ERRORS[one.kind]]
        if errno.ENOSPC in ERRORS[one.kind]:
            several.append(Fault(number, errno.ENOSPC, lasting=True, reads=True))
        found += [several[number % len(several)]] if brief else several
    return found


def chosen(faults: Sequence[Fault], count: int, seed: str) -> list[Fault]:
    """Return `count` of the faults, or all, in their order; the last and the first are among them."""
    if count >= len(faults):
        return list(faults)
    middle: list[Any] = random.Random(seed).sample(list(faults[1:-1]), max(0, count - 2))
    return sorted({faults[0], faults[-1], *middle}, key=lambda fault: fault.number)
