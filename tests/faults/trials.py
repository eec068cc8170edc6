"""One disturbance of one verb, and its outcome."""

from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.ground import Ground
from tests.faults.nursery import Ended
from tests.faults.operations import ERRORS, Fault, Operation
from tests.faults.trees import differences, leftovers, snapshot
from tests.faults.verbs import Verb

_UNTOLD = re.compile(r"internal error|Traceback \(most recent|Fatal Python error|Segmentation fault")
_SET_ASIDE = re.compile(r"damaged-step-\d+")
_GAPPED = {"metrics.jsonl", "log.txt", "depth.jsonl"}
"""_GAPPED are the files without which training continues, after reporting it."""


class Outcome(NamedTuple):
    """The outcome of a disturbance.

    Attributes:
        verdict: `survived`, or what went wrong: `lost` (the result of the repeated command differs, or something that
        existed before is gone), `half` (an output was left half written), `refused` (the repeated command does not
        continue), `silent` (an error with exit status 0, or a different result with status 0), `internal` (a traceback
        or an internal error), `unnamed` (a message that does not name a file or the error), `leftovers`, `hung`,
        `crashed`.
        detail: further details.
    """

    verdict: str
    detail: str = ""


class Bench:
    """Disturbs one verb repeatedly, in one folder.

    Attributes:
        operations: those of the undisturbed command.
    """

    def __init__(self, verb: Verb, ground: Ground, folder: Path) -> None:
        self.verb, self._ground, self._folder = verb, ground, folder
        self._set_aside: set[str] = set()
        self._before, self._after, found = ground.undisturbed(verb, folder)
        self.operations = [Operation(*one) for one in found]

    def kill(self, fault: Fault) -> Outcome:
        """Kill the command at an operation, repeat it, compare."""
        ended = self._disturbed(fault)
        if not ended.killed:  # it ended earlier, because asynchronous checkpoints make the number of operations vary
            return bad_end(ended, (0,)) or self._compared()
        if not self.verb.trains:
            torn = self._torn(snapshot(self._folder, self.verb.timed))
            if torn:
                return Outcome("half", ", ".join(torn[:3]))
        return self._again()

    def _torn(self, left: dict[str, Any]) -> list[str]:
        """Return the files that a kill left with content that is neither old nor new."""
        skipped = leftovers(self._folder)
        names = (name for name in left if not _is_of(name, skipped) and not self.verb.goes_on(name))
        return [name for name in names if left[name] not in (self._before.get(name), self._after.get(name))]

    def fail(self, fault: Fault) -> Outcome:
        """Let an operation fail; check the message and what is left, repeat the command, compare."""
        assert fault.error is not None
        return self.judged(self._disturbed(fault), os.strerror(fault.error))

    def judged(self, ended: Ended, reason: str) -> Outcome:
        """Return the verdict on a command that met an error: its message must give the `reason` and name a file."""
        if bad := bad_end(ended, (0, 2)):
            return bad
        self._set_aside = set(_SET_ASIDE.findall(ended.said))
        left = snapshot(self._folder, self.verb.timed)
        unlike = self._unlike(left)
        if ended.status == 0 and unlike and reason not in ended.said + self._pages():
            return Outcome("silent", "; ".join(unlike[:3]))
        if ended.status == 0:  # what could not be removed is removed next time
            told = self.verb.trains and {one.split()[0].rpartition("/")[2] for one in unlike} <= _GAPPED
            return Outcome("survived") if told and unlike else self._again()
        if not _names_a_file(ended.said, [os.path.relpath(one.path, self._folder) for one in self.operations]):
            return Outcome("unnamed", last_line(ended.said))
        if reason not in ended.said:
            return Outcome("unnamed", f"not {reason!r}: {last_line(ended.said)}")
        if half := self._half(left):
            return Outcome("half", half)
        return self._again()

    def _half(self, left: dict[str, Any]) -> str:
        """Describe what an error left that is neither the old state nor the final result; nothing for training."""
        if self.verb.trains or left == self._after:
            return ""
        for said in differences(left, self._before):
            name, _, rest = said.partition(" ")
            whole = rest == "is too much" and (self.verb.goes_on(name) or name[-1] == "/")
            if not whole or left[name] != self._after.get(name, left[name]):
                return said
        return ""

    def _pages(self) -> str:
        """Return the reports, which also mention files that could not be read."""
        return "".join(path.read_text(encoding="utf-8") for path in self._folder.rglob("*.html"))

    def _unlike(self, found: dict[str, Any]) -> list[str]:
        """Describe how a snapshot differs from that of the undisturbed command, apart from leftovers."""
        left = leftovers(self._folder)
        unlike = [said for said in differences(found, self._after) if not _is_of(said, left)]
        return [said for said in unlike if not self._is_of_set_aside(said)]

    def _is_of_set_aside(self, said: str) -> bool:
        """Return whether a difference concerns a checkpoint that could not be read.

        The checkpoint is kept under another name, which is reported, and is written again with the command's settings.
        """
        anew = {f"{name.removeprefix('damaged-')}/meta.json differs: configuration" for name in self._set_aside}
        return any(name in said.split("/") for name in self._set_aside) or any(one in said for one in anew)

    def _disturbed(self, fault: Fault) -> Ended:
        self._set_aside = set()
        self._ground.lay(self.verb, self._folder)
        return self._run(self.verb.arguments, fault)

    def _run(self, arguments: Sequence[str], fault: Fault | None = None) -> Ended:
        verb = self.verb
        return self._ground.nursery.run(
            arguments, self._folder, prepare=verb.prepare, preload=verb.preload, fault=fault
        )

    def _again(self) -> Outcome:
        """Repeat the command, as a user would."""
        ended = self._run(self.verb.retyped(self._folder))
        if ended.status == 2 and not _UNTOLD.search(ended.said):
            whole = self._compared()  # it may report that everything exists already
            return whole if whole.verdict == "survived" else Outcome("refused", last_line(ended.said))
        return bad_end(ended, (0,)) or self._compared()

    def _compared(self) -> Outcome:
        unlike = self._unlike(snapshot(self._folder, self.verb.timed))
        if unlike:
            return Outcome("lost", "; ".join(unlike[:3]))
        left = leftovers(self._folder)
        return Outcome("leftovers", ", ".join(left[:3])) if left else Outcome("survived")


def bad_end(ended: Ended, expected: tuple[int, ...]) -> Outcome | None:
    """Return what is wrong with how a command ended; None if its status is one of the `expected`."""
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


def _names_a_file(said: str, paths: Sequence[str]) -> bool:
    """Return whether a message names one of the files, or a folder that contains one."""
    told = last_line(said)
    parts = {part for path in paths for part in path.split("/") if part not in ("..", ".")}
    return any(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", told) for part in parts)


def _is_of(said: str, left: Sequence[str]) -> bool:
    """Return whether a name, or a message about it, concerns a leftover or something below one."""
    name = said.partition(" ")[0].rstrip("/")
    return any(name == path or name.startswith(f"{path}/") for path in left)


def faults_of(operations: Sequence[Operation], *, errors: bool, brief: bool = False) -> list[Fault]:
    """Return every fault of a command: SIGKILL at each operation that writes, or each error of each operation.

    With `errors` and `brief`, one error per operation instead of all.
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
    """Return `count` of the faults, or all, in their order, including the first and the last."""
    if count >= len(faults):
        return list(faults)
    middle: list[Any] = random.Random(seed).sample(list(faults[1:-1]), max(0, count - 2))
    return sorted({faults[0], faults[-1], *middle}, key=lambda fault: fault.number)
