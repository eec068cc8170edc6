"""Attacks the toolkit as a hostile machine would, and prints what it survived (experiments/faults/README.md).

    python -m experiments.faults all                    everything below, one by one; hours
    python -m experiments.faults kills --count 1000     SIGKILLs during training, in every configuration
    python -m experiments.faults operations             each file operation of each verb: killed, and made to fail
    python -m experiments.faults disks                  full and read-only disks (as root)
    python -m experiments.faults flips                  damaged files
    python -m experiments.faults fuzz                   readers of every format: damaged files, too little memory
    python -m experiments.faults tests                  attacks that are tests
    python -m experiments.faults table                  the table of what was tried

Each campaign resumes where it stopped; attacks in the folder of results are not repeated.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from experiments.faults.disks import fill_disks, mountable
from experiments.faults.kills import CONFIGURATIONS, kill_training
from experiments.faults.ledger import Ledger, table
from experiments.faults.tested import flip_bits, fuzz_readers, run_tests
from experiments.faults.verbs import disturb_verbs

CAMPAIGNS = ("kills", "operations", "disks", "flips", "fuzz", "tests")


def main() -> int:
    description, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m experiments.faults",
        description=description,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["all", *CAMPAIGNS, "table"])
    parser.add_argument("--count", type=int, default=1000, help="total kills of training, including earlier ones")
    parser.add_argument("--per-file", type=int, default=20, help="bits flipped in each file")
    parser.add_argument("--cases", type=int, default=500, help="damaged files given to each reader (fuzz)")
    parser.add_argument("--brief", action="store_true", help="operations: one error for each, instead of all in turn")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="operations: only one in N")
    parser.add_argument("--only", nargs="+", default=[], help="names of configurations (kills) or verbs")
    parser.add_argument("--results", type=Path, default=Path("faults"), help="folder for the records; default: faults")
    parser.add_argument("--folder", type=Path, help="where to work; default: in memory, if /dev/shm exists")
    given = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory if memory.is_dir() else None) as temporary:
        for what in CAMPAIGNS if given.what == "all" else [given.what]:
            _attack(what, given, (given.folder or Path(temporary)).resolve() / what)
    records = [record for path in sorted(given.results.glob("*.jsonl")) for record in Ledger(path).records]
    print(table(records))
    return int(any(record["verdict"] != "survived" for record in records))


def _attack(what: str, given: argparse.Namespace, folder: Path) -> None:
    """Run one campaign, which writes its records to a file named after it."""
    if what == "table":
        return
    ledger = Ledger(given.results / f"{what}.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    if what == "kills":
        kill_training(ledger, folder, given.count, given.only or [*CONFIGURATIONS])
    elif what == "operations":
        for errors in (False, True):
            disturb_verbs(ledger, folder, given.only, errors=errors, brief=given.brief, every=given.every)
    elif what == "disks" and mountable(folder):
        fill_disks(ledger, folder, given.only)
    elif what == "disks":
        print("disks: not tried: this process may not mount file systems", flush=True)
    elif what == "flips":
        flip_bits(ledger, folder, given.per_file)
    elif what == "fuzz":
        fuzz_readers(ledger, folder, given.cases)
    elif what == "tests":
        run_tests(ledger, folder)


if __name__ == "__main__":
    sys.exit(main())
