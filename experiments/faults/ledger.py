"""Record of what was tried, one JSON object per line, written as it happens, so that a campaign resumes where it
stopped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SURVIVED = "survived"


class Ledger:
    """The records of one campaign in a file.

    A record has `attack` (a row of the table), `key` (unique within it), `tried` (how many disturbances it counts),
    `verdict` (`survived`, or what went wrong) and `detail`; there may be others.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        self.records: list[dict[str, Any]] = []
        for line in lines:
            try:
                self.records.append(json.loads(line))
            except ValueError:  # the last line, cut off
                continue
        self._keys = {(record["attack"], record["key"]) for record in self.records}
        path.write_text("".join(json.dumps(record) + "\n" for record in self.records), encoding="utf-8")

    def has(self, attack: str, key: str) -> bool:
        """Return whether this was tried already."""
        return (attack, key) in self._keys

    def tried(self, attack: str) -> int:
        """Return how many disturbances of this kind there were."""
        return sum(record["tried"] for record in self.records if record["attack"] == attack)

    def add(self, attack: str, key: str, verdict: str, detail: str = "", *, tried: int = 1, **more: Any) -> None:
        """Write one record."""
        record = {"attack": attack, "key": key, "tried": tried, "verdict": verdict, "detail": detail, **more}
        self.records.append(record)
        self._keys.add((attack, key))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the table of README.md: for every attack, how many were tried, survived, or went wrong in each way.

    A record of several disturbances that went wrong counts as one, because one of them was the cause.
    """
    rows: dict[str, Counter[str]] = {}
    for record in records:
        row = rows.setdefault(record["attack"], Counter())
        row["tried"] += record["tried"]
        wrong = record["verdict"] != SURVIVED
        row[SURVIVED] += record["tried"] - wrong
        if wrong:
            row[record["verdict"]] += 1
    columns = ["tried", SURVIVED]
    columns += sorted({"lost", "silent", "internal"} | {name for row in rows.values() for name in row} - set(columns))
    lines = [f"| attack | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    total: Counter[str] = sum(rows.values(), Counter())
    for name, row in [*rows.items(), ("all", total)]:
        lines.append(f"| {name} | " + " | ".join(f"{row[column]:,}" for column in columns) + " |")
    return "\n".join(lines)
