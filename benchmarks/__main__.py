"""`make bench`: the benchmarks that need nothing but the package, one after the other."""

from __future__ import annotations

import subprocess
import sys

QUICK = ("attention_kernel", "linear_kernel", "loss_memory", "rnmt", "checkpoint", "prepare_rate", "prepare_memory")


def main() -> None:
    for name in QUICK:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
    print("== `make bench-train`, `memory` and `overhead` take longer: see benchmarks/README.md")


if __name__ == "__main__":
    main()
