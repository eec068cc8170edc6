"""`make bench`: every benchmark that needs only the package, one after the other, in a quarter of an hour.

Each is shortened where possible: fewer rounds, shorter runs. benchmarks/README.md has the commands behind its figures.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ALL = (
    "attention_kernel",
    "linear_kernel",
    "compiled_loops --rounds 1",
    "shortlist --rounds 1",
    "loss_memory",
    "rnmt --widths 128 --depths 6 --rounds 1 --sentences 8",
    "train_speed --peer --rounds 1 --seconds 6 --shape T1",
    "growing --axis depth length corpus --seconds 1 --two",
    "memory --part base --moments fp32",
    "decode_speed --peer --rounds 1 --beam 4 --precision float32 int8",
    "decode_speed --peer --latency --rounds 1",
    "decode_speed --whole --rounds 1 --peer",
    "checkpoint --every 8 --updates 8",
    "overhead --shape demo --rounds 1 --updates 40",
    "inspect_costs --only multi30k",
    "threads --work translate --beside 0 1 --policy ours default --rounds 1 --seconds 4",
    "prepare_rate",
    "prepare_memory --pairs 200000 1000000",
)
MULTI30K = Path("../shared/data/multi30k")


def main() -> None:
    """Run all of them, and report how long each took."""
    began = time.perf_counter()
    for line in ALL:
        print(f"== {line}", flush=True)
        name, *arguments = line.split()
        if (name == "train_speed" or "--whole" in arguments) and not MULTI30K.is_dir():
            print(f"   (left out: it needs the corpus Multi30k in {MULTI30K})", flush=True)
            continue
        before = time.perf_counter()
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=True)
        print(f"   ({time.perf_counter() - before:.0f} s)", flush=True)
    minutes = (time.perf_counter() - began) / 60
    print(f"== all: {minutes:.1f} minutes; with peers: `make bench-train`, `make bench-decode`")


if __name__ == "__main__":
    main()
