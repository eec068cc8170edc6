"""Damages files of every kind and reads them: `python -m experiments.faults.fuzz --count 500 --seed 1`.

With `--memory` it reads undamaged files with too little memory, in steps of that many KiB until it is enough. Prints
each fault with the command that repeats it, and a table; exits with status 1 if there was any.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.fuzzing import FAULTS, fuzz, starve, table
from tests.faults.readers import READERS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reader", action="append", choices=list(READERS), help="only this one; repeat for several")
    parser.add_argument("--count", type=int, default=200, help="cases per reader")
    parser.add_argument("--seed", type=int, default=1, help="of each reader's first case; later cases count up")
    parser.add_argument("--memory", type=int, metavar="KIB", help="step in which memory is granted; without damage")
    parser.add_argument("--golden", type=Path, help="set of tests/golden to damage; default: the newest")
    parser.add_argument("--work", type=Path, help="folder to work in, kept; default: a temporary one")
    parser.add_argument("--shown", type=int, default=5, help="faults to print per kind and reader")
    asked = parser.parse_args()
    readers = asked.reader or list(READERS)
    golden = asked.golden and asked.golden.absolute()
    began, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory() as temporary:
        work = (asked.work or Path(temporary)).absolute()
        work.mkdir(exist_ok=True)
        cases = [(name, asked.seed + i) for name in readers for i in range(asked.count)]
        for outcome in starve(work, readers, asked.memory << 10, golden) if asked.memory else fuzz(work, cases, golden):
            outcomes.append(outcome)
            of_kind = sum(o.reader == outcome.reader and o.kind == outcome.kind for o in outcomes)
            if outcome.kind in FAULTS and of_kind <= asked.shown:
                how = f"--memory {asked.memory}" if asked.memory else f"--seed {outcome.seed} --count 1"
                print(f"{outcome.kind}: {outcome.file}: {outcome.damage}")
                print(
                    f"  python -m experiments.faults.fuzz --reader {outcome.reader} {how}\n{outcome.said}\n", flush=True
                )
    print(table(outcomes))
    print(f"\n{len(outcomes):,} cases in {time.monotonic() - began:.0f} s")
    return int(any(outcome.kind in FAULTS for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
