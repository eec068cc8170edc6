"""Every reader with damaged files, and with too little memory, each case in a child with limits on memory and time.

Children are forked from this process, which has imported everything and never computes.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from tests.faults.children import Told, in_child, in_children, limited
from tests.faults.material import newest_set, write_material
from tests.faults.mutations import damage
from tests.faults.readers import READERS, FailedError, Reader, RefusedError
from ziggurat.system.errors import ZigguratError, shortage

OUTCOMES = ("refused", "equal", "differs", "silent", "unnamed", "leftover", "internal", "memory", "hang", "crash")
"""OUTCOMES are `refused`: with a message that names a file (or reports too little memory); `unnamed`: with one that
does not. `equal`: the result is that of the undamaged file. `differs`: it differs, and nothing could have shown that
(no checksum); `silent`: it differs, and a checksum should have shown that. `leftover`: refused, but a part of the
output is left. `internal`: any other exception. `memory`: more than `MEMORY`. `hang`: longer than `SECONDS`. `crash`:
ended by a signal.
"""

FAULTS = ("silent", "unnamed", "leftover", "internal", "memory", "hang", "crash")
"""FAULTS are the outcomes that must not happen."""

MEMORY = 500 << 20
"""MEMORY is how many bytes of address space a damaged file may take beyond what the child has."""

SECONDS = 10.0
"""SECONDS is the CPU seconds that a case may take; on a busy machine the clock may show four times as many."""

_WITHOUT_MEANS = ("out of memory", "annot allocate memory", "no more threads")
_CASES_OF_A_CHILD = 150
_ENOUGH = 3


@dataclass(frozen=True)
class Outcome:
    """The end of a case.

    Attributes:
        reader: name of the reader.
        seed: seed of the damage, or the bytes of memory available.
        kind: one of OUTCOMES.
        file: the damaged file.
        damage: the damage in words.
        said: message or traceback.
    """

    reader: str
    seed: int
    kind: str
    file: str
    damage: str
    said: str


def fuzz(work: Path, cases: Sequence[tuple[str, int]], golden: Path | None = None) -> Iterator[Outcome]:
    """Yield the outcome of every case (reader, seed) in the folder `work`, from now or from an earlier call.

    The seed chooses the file and the damage.
    """
    material = _material(work, golden)
    wanted: dict[str, str] = {}

    def case(which: tuple[str, int]) -> Iterator[Told]:
        reader = READERS[which[0]]
        if reader.name not in wanted:
            _lay_out(reader, material, work / "case")
            wanted[reader.name] = _digest(reader.read())
        _lay_out(reader, material, work / "case")
        rng = random.Random(f"{reader.name} {which[1]}")
        file = rng.choice(
            sorted({path for pattern in reader.files for path in Path().glob(pattern) if _is_whole(path)})
        )
        checked, names = reader.checked(file), {n for path in Path().rglob("*") for n in (path.name, str(path))}
        special = str(file) not in reader.parts
        yield {"file": str(file), "damage": damage(file, rng.randrange(2**63), special=special)}
        yield _read(reader, wanted[reader.name], checked, names, MEMORY)

    for (name, seed), told in in_children(cases, case, of_a_child=_CASES_OF_A_CHILD, patience=4 * SECONDS):
        yield Outcome(name, seed, told["kind"], told.get("file", ""), told.get("damage", ""), told["said"])


def starve(work: Path, readers: Sequence[str], step: int, golden: Path | None = None) -> Iterator[Outcome]:
    """Yield every reader's outcome on undamaged files with `step` bytes of memory, with twice as many, and so on.

    It stops once the memory suffices three times in a row. Each time uses a new child, without reserves.
    """
    material = _material(work, golden)

    def whole(name: str) -> Iterator[Told]:
        _lay_out(READERS[name], material, work / "case")
        yield {"kind": "equal", "said": _digest(READERS[name].read())}

    def case(memory: int, *, name: str, wanted: str) -> Iterator[Told]:
        _lay_out(READERS[name], material, work / "case")
        yield _read(READERS[name], wanted, False, (), memory)

    for name in readers:
        if name == "begin":  # a run that lacks the memory to train still exists, and can be resumed
            continue
        [(_, undamaged)] = in_children([name], whole, of_a_child=1, patience=4 * SECONDS)
        memory, enough = 0, 0
        do = partial(case, name=name, wanted=undamaged["said"])
        while enough < _ENOUGH:
            memory += step
            [(_, told)] = in_children([memory], do, of_a_child=1, patience=4 * SECONDS)
            kind = {"memory": "refused", "refused": "unnamed", "differs": "silent"}.get(told["kind"], told["kind"])
            enough = enough + 1 if kind == "equal" else 0
            yield Outcome(name, memory, kind, "", f"{memory / 2**20:g} MiB", told["said"])


def _material(work: Path, golden: Path | None) -> Path:
    if not (work / "material").exists():
        in_child(lambda: write_material(work / "material", golden or newest_set()))
    return work / "material"


def _lay_out(reader: Reader, material: Path, case: Path) -> None:
    """Put what the reader needs in the folder `case`, and change to it."""

    os.chdir(material)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(case)
    case.mkdir()
    for part in reader.parts:
        if (material / part).is_dir():
            shutil.copytree(material / part, case / part, symlinks=True)
        else:
            shutil.copy(material / part, case / part)
    os.chdir(case)


def _digest(found: Any) -> str:
    return xxhash.xxh3_128_hexdigest(repr(found).encode("utf-8", "surrogatepass"))


def _is_whole(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode) and path.stat().st_size > 0


def _read(reader: Reader, wanted: str, checked: bool, names: Collection[str], memory: int) -> Told:
    """Return the outcome of reading with this much memory; `names` are file names, `checked` is for the damaged one."""
    with limited(memory, SECONDS):
        kind, said = "internal", ""
        try:
            same = _digest(reader.read()) == wanted
            kind = "equal" if same else "silent" if checked else "differs"
        except (ZigguratError, RefusedError) as error:
            said = str(error)
            kind = "refused" if any(name in said for name in names) else "unnamed"
            if shortage(error) or any(words in said for words in _WITHOUT_MEANS):
                kind = "memory"
        except OSError as error:  # the command line reports its file and reason
            said = str(error)
            kind = "refused" if error.filename else "unnamed"
        except FailedError as error:
            said = str(error)
        except BaseException as error:
            kind = "memory" if shortage(error) else "internal"
            said = traceback.format_exc()
    if kind in ("refused", "unnamed", "memory") and any(Path(path).exists() for path in reader.outputs):
        kind = "leftover"
    return {"kind": kind, "said": said[-4000:]}


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the counts by reader as a Markdown table."""
    readers = list(dict.fromkeys(outcome.reader for outcome in outcomes))
    counts = {name: Counter(o.kind for o in outcomes if o.reader == name) for name in readers}
    counts["all"] = Counter(outcome.kind for outcome in outcomes)
    lines = [f"| reader | cases | {' | '.join(OUTCOMES)} |", "|---|" + "---:|" * (len(OUTCOMES) + 1)]
    lines += [
        f"| {name} | {sum(found.values())} | {' | '.join(str(found[kind]) for kind in OUTCOMES)} |"
        for name, found in counts.items()
    ]
    return "\n".join(lines)
