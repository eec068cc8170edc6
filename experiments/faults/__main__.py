"""Attack the toolkit as the table of the README says: `python -m experiments.faults kills --count 1000`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from experiments.faults.kills import CONFIGURATIONS, kill_training
from experiments.faults.ledger import Ledger, table

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.faults", description=__doc__)
    parser.add_argument("what", choices=["kills", "table"])
    parser.add_argument("--count", type=int, default=1000, help="how many kills in all, those before included")
    parser.add_argument("--only", nargs="+", default=[], help="names of configurations or verbs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records; a campaign goes on")
    parser.add_argument("--folder", type=Path, help="where to work; default: in memory where /dev/shm is there")
    given = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory if memory.is_dir() else None) as temporary:
        folder = given.folder or Path(temporary)
        if given.what == "kills":
            kill_training(Ledger(given.results / "kills.jsonl"), folder, given.count, given.only or [*CONFIGURATIONS])
    records = [record for path in sorted(given.results.glob("*.jsonl")) for record in Ledger(path).records]
    print(table(records))


if __name__ == "__main__":
    main()
