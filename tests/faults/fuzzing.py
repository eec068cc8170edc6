"""Damaged files in front of every reader, each case in a child with limits on memory and time.

A case is a reader and a seed: the seed chooses the file and the damage. Children are forked from this process, which
has imported everything and never computes, and do one case after the other until they die; whoever dies or does not end
is the outcome of the case under way.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import stat
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tests.faults.material import newest_set, write_material
from tests.faults.mutations import damage
from tests.faults.readers import READERS, FailedError, Reader, RefusedError
from ziggurat.errors import ZigguratError, out_of_memory

__all__ = ["FAULTS", "OUTCOMES", "Outcome", "fuzz", "limited", "table"]

OUTCOMES = ("refused", "equal", "differs", "silent", "unnamed", "leftover", "internal", "memory", "hang", "crash")
"""`refused`: with a message that names a file; `unnamed`: with one that does not. `equal`: the result is that of the
undamaged file. `differs`: it is another, and nothing could have told (no checksum); `silent`: it is another, and a
checksum should have told. `leftover`: refused, but a part of the output is there. `internal`: any other exception.
`memory`: more than `MEMORY`. `hang`: longer than `SECONDS`. `crash`: ended by a signal."""

FAULTS = ("silent", "unnamed", "leftover", "internal", "memory", "hang", "crash")
"""Outcomes that must not be."""

MEMORY = 500 << 20
"""Bytes a case may take beyond what the child has."""

SECONDS = 10.0
"""Processor seconds a case may take; on a busy machine the clock may show four times as many."""

_CASES_OF_A_CHILD = 150


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        reader: name of the reader.
        seed: of the case, which `fuzz` can repeat.
        kind: one of OUTCOMES.
        file: what was damaged.
        damage: how.
        said: message or traceback.
    """

    reader: str
    seed: int
    kind: str
    file: str
    damage: str
    said: str


def fuzz(work: Path, cases: Sequence[tuple[str, int]], golden: Path | None = None) -> Iterator[Outcome]:
    """Yield the outcome of every case (reader, seed), in the new or empty folder `work`."""
    material = work / "material"
    if not material.exists():
        _in_child(lambda: write_material(material, golden or newest_set()))
    left = list(cases)
    while left:
        done = yield from _one_child(work, material, left[:_CASES_OF_A_CHILD])
        left = left[done:]


def _in_child(work: Callable[[], None]) -> None:
    """Do something that may start threads, with which this process could not fork any more."""
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
        raise RuntimeError("the material could not be made")


def _one_child(work: Path, material: Path, cases: Sequence[tuple[str, int]]) -> Iterator[Outcome]:
    """Let one child do cases until all are done or it dies; yield the outcomes and return how many."""
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(told)
        _be_child(work, material, cases, tell)
    os.close(tell)
    done, begun = 0, {"file": "", "damage": ""}
    with os.fdopen(told, "rb") as lines:
        while True:
            line = _next_line(lines, pid)
            message = json.loads(line) if line else None
            if message is None:  # it died or was killed
                _, status = os.waitpid(pid, 0)
                if done == len(cases):
                    return done
                killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
                late = killed in (signal.SIGXCPU, signal.SIGALRM)
                ending = f"signal {signal.Signals(killed).name}" if killed else f"status {os.WEXITSTATUS(status)}"
                reader, seed = cases[done]
                yield Outcome(reader, seed, "hang" if late else "crash", begun["file"], begun["damage"], ending)
                return done + 1
            if "broken" in message:  # no case: undamaged files cannot be read, or this file has a fault
                raise RuntimeError(f"{cases[done]}: {message['broken']}")
            if "kind" not in message:
                begun = message
                continue
            reader, seed = cases[done]
            yield Outcome(reader, seed, message["kind"], begun["file"], begun["damage"], message["said"])
            done += 1


def _next_line(lines: Any, pid: int) -> bytes:
    """Return what the child says next, nothing when it died; one that sleeps for ever is killed."""
    if not select.select([lines], [], [], 4 * SECONDS)[0]:
        os.kill(pid, signal.SIGALRM)
    return bytes(lines.readline())


def _be_child(work: Path, material: Path, cases: Sequence[tuple[str, int]], tell: int) -> None:
    """Do the cases and end this process."""
    status = 1
    try:
        import torch

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # native libraries complain there
            os.dup2(quiet, descriptor)
        wanted: dict[str, str] = {}
        for name, seed in cases:
            reader = READERS[name]
            if name not in wanted:
                _copy(reader, material, work / "case")
                wanted[name] = _digest(reader.read())
            _copy(reader, material, work / "case")
            for record in _case(reader, seed, wanted[name]):
                os.write(tell, json.dumps(record).encode() + b"\n")
        status = 0
    except BaseException:
        os.write(tell, json.dumps({"broken": traceback.format_exc()}).encode() + b"\n")
    finally:
        os._exit(status)


def _copy(reader: Reader, material: Path, case: Path) -> None:
    """Lay out what the reader needs in the folder `case`, and go there."""
    os.chdir(material)
    _remove(case)
    case.mkdir()
    for part in reader.parts:
        if (material / part).is_dir():
            shutil.copytree(material / part, case / part, symlinks=True)
        else:
            shutil.copy(material / part, case / part)
    os.chdir(case)


def _remove(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _digest(found: Any) -> str:
    return xxhash.xxh3_128_hexdigest(repr(found).encode("utf-8", "surrogatepass"))


def _case(reader: Reader, seed: int, wanted: str) -> Iterator[dict[str, str]]:
    """Damage a file, say so, read, say what came of it."""
    rng = random.Random(f"{reader.name} {seed}")
    places = sorted({path for pattern in reader.files for path in Path().glob(pattern) if _is_whole(path)})
    file = rng.choice(places)
    checked = reader.checked(file)
    names = {name for path in Path().rglob("*") for name in (path.name, str(path))}
    special = str(file) not in reader.parts
    yield {"file": str(file), "damage": damage(file, rng.randrange(2**63), special=special)}
    yield _read(reader, wanted, checked, names)


def _is_whole(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode) and path.stat().st_size > 0


def _read(reader: Reader, wanted: str, checked: bool, names: Collection[str]) -> dict[str, str]:
    with limited(MEMORY, SECONDS):
        kind, said = "internal", ""
        try:
            same = _digest(reader.read()) == wanted
            kind = "equal" if same else "silent" if checked else "differs"
        except (ZigguratError, RefusedError) as error:
            said = str(error)
            kind = "refused" if any(name in said for name in names) else "unnamed"
        except OSError as error:  # the command line says its file and reason
            said = repr(error)
            kind = "refused" if error.filename else "unnamed"
        except FailedError as error:
            said = str(error)
        except BaseException as error:
            kind = "memory" if out_of_memory(error) else "internal"
            said = traceback.format_exc()
    if "out of memory" in said and kind in ("refused", "unnamed"):
        kind = "memory"
    if kind in ("refused", "unnamed") and any(Path(path).exists() for path in reader.outputs):
        kind = "leftover"
    return {"kind": kind, "said": said[-4000:]}


@contextlib.contextmanager
def limited(memory: int, seconds: float) -> Iterator[None]:
    """Limit the address space to so many bytes more than now, and the processor time to so many seconds more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = resource.getrusage(resource.RUSAGE_SELF)
    space, times = resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, space[1]))
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, times[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, space)
        resource.setrlimit(resource.RLIMIT_CPU, times)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the counts by reader as a table in Markdown."""
    readers = list(dict.fromkeys(outcome.reader for outcome in outcomes))
    counts = {name: Counter(o.kind for o in outcomes if o.reader == name) for name in readers}
    counts["all"] = Counter(outcome.kind for outcome in outcomes)
    lines = [f"| reader | cases | {' | '.join(OUTCOMES)} |", "|---|" + "---:|" * (len(OUTCOMES) + 1)]
    lines += [
        f"| {name} | {sum(found.values())} | {' | '.join(str(found[kind]) for kind in OUTCOMES)} |"
        for name, found in counts.items()
    ]
    return "\n".join(lines)
