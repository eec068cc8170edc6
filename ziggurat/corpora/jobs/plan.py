"""Plan of a job: everything that its result depends on, written once into its folder.

Models and inputs are named by their content. A later call in the same folder must have the same plan.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ziggurat.data.store_checks import InputWatch, differences
from ziggurat.system.errors import DataError
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import parse_json, read_bounded
from ziggurat.system.temporary import TEMPORARY, locked
from ziggurat.system.yaml_text import shown

PLAN_FILE = "plan.json"
_FORMAT = 1
_LOCK = f".{PLAN_FILE}.lock"


@dataclass(frozen=True)
class Plan:
    """Work to be done, and the settings that its result depends on.

    Attributes:
        folder: folder of the job.
        verb: verb of the command line that it is a job of.
        settings: everything that the result depends on.
        lines: lines of all inputs, or pairs.
        shard_lines: lines of a shard.
        watch: watch over the inputs.
    """

    folder: Path
    verb: str
    settings: dict[str, Any]
    lines: int
    shard_lines: int
    watch: InputWatch

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.lines // self.shard_lines)

    @property
    def fingerprint(self) -> str:
        """128-bit xxHash of settings and lines in hexadecimal; each shard's manifest contains it."""
        return str(xxhash.xxh3_128_hexdigest(json.dumps([self.settings, self.lines], sort_keys=True).encode()))

    def check_inputs(self) -> None:
        """Raise DataError if an input may have had other content at any time since the plan was made."""
        self.watch.check(f"begin again in another folder than {self.folder}, where shards may be of either content")

    def lines_of(self, shard: int) -> int:
        """Return the number of lines of a shard."""
        return min(self.shard_lines, self.lines - shard * self.shard_lines)


def fix_plan(
    folder: Path,
    verb: str,
    settings: dict[str, Any],
    watch: InputWatch,
    shard_lines: int,
    count: Callable[[], int],
) -> Plan:
    """Return the plan of a job, and write it into its folder unless it is there already.

    Args:
        folder: folder of the job.
        verb: its verb.
        settings: everything that the result depends on, as JSON can represent it without loss.
        watch: watch over the inputs, whose fingerprints the settings have from it.
        shard_lines: lines of a shard.
        count: returns the number of lines, at least one; called where the folder is new. It takes a pass over the
            input, which the plan saves: the fingerprints in the settings say that the input is the same.

    Raises DataError for a folder with another plan, or with other things; what `count` raises.
    """
    path = folder / PLAN_FILE
    lines = _lines_known(path, verb, settings)
    if lines is None:
        counted = count()
        # Written only now: a folder with a plan has passed all checks.
        folder.mkdir(parents=True, exist_ok=True)
        # Another call may have made the folder its own meanwhile: whoever has the lock first.
        with locked(folder / _LOCK, fcntl.LOCK_EX, ""):
            lines = _lines_known(path, verb, settings)
            if lines is None:
                lines = counted
                document = {"format": _FORMAT, "settings": settings, "lines": lines}
                write_atomically(path, json.dumps(document, indent=1).encode() + b"\n")
    return Plan(folder, verb, settings, lines, shard_lines, watch)


def _lines_known(path: Path, verb: str, settings: dict[str, Any]) -> int | None:
    """Return the lines of the plan in the folder; None where there is no plan yet. Raises DataError for another one."""
    known = _known(path, verb)
    if known is None:
        return None
    if changed := differences(known["settings"], settings, verb):
        names = shown([name.removeprefix(f"{verb}.") for name in changed])
        raise DataError(
            f"{path.parent}: was begun with other settings or files (there -> now): {names}. Continue with the same "
            "ones, or name another folder"
        )
    return int(known["lines"])


def _known(path: Path, verb: str) -> dict[str, Any] | None:
    """Return the plan in the folder, or None for a new or empty folder. Raises DataError for anything else."""
    folder = path.parent
    if not path.exists():
        if not folder.exists() or (folder.is_dir() and all(_passing(p.name) for p in folder.iterdir())):
            return None
        if not path.exists():  # a call for another part may have written it, and its lock, before we looked around
            raise DataError(f"{folder}: exists and is no folder of a `{verb}`; name another one")
    try:
        plan: dict[str, Any] = parse_json(read_bounded(path), str(path))
        if plan["format"] == _FORMAT:
            return {"settings": dict(plan["settings"]), "lines": int(plan["lines"])}
    except (OSError, DataError, ValueError, KeyError, TypeError, OverflowError):
        pass
    raise DataError(f"{path}: damaged, or of another version of ziggurat; name another folder")


def _passing(name: str) -> bool:
    """Return whether a call that has not written its plan yet may have left a file of this name."""
    return name == _LOCK or TEMPORARY.fullmatch(name) is not None
