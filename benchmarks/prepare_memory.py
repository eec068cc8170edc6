"""Peak memory of `ziggurat prepare` against the number of pairs: it must not grow with the corpus.

    python -m benchmarks.prepare_memory [--pairs 200000 2000000] [--sample-pairs 100000] [--duplicates] [--json]

Writes generated corpora of each size to a temporary folder, prepares each in a process of its own and prints the
peak resident memory of that process (ru_maxrss) and the ratio of the largest to the smallest. The subword sample is
what SentencePiece holds in memory, so it is the same for all sizes. `--duplicates` switches the one filter on whose
memory does grow, by 8 bytes per pair and as much again while it merges. Exit status 1 if the ratio is above 1.2 or a
peak above 2 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MEGABYTE = 1e6
LIMIT_RATIO, LIMIT_BYTES = 1.2, 2e9

PREPARE = """
import sys
from ziggurat.config.data import DataConfig
from ziggurat.data.prepare import prepare
print(prepare(DataConfig.model_validate_json(sys.argv[1]), threads=2).kept)
"""


def write_corpus(folder: Path, pairs: int, seed: int = 1) -> tuple[Path, Path]:
    """Write `pairs` pairs of sentences of 3 to 25 words out of 30 thousand, by Zipf's law, as two text files."""
    generator = random.Random(seed)
    syllables = [c + v for c in "bdfgklmnprstvwz" for v in ("a", "e", "i", "o", "u", "ä", "ei")]
    words = ["".join(generator.choices(syllables, k=1 + int(generator.paretovariate(1.5)) % 5)) for _ in range(30_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    paths = folder / f"{pairs}.source", folder / f"{pairs}.target"
    with paths[0].open("w") as source, paths[1].open("w") as target:
        for _ in range(0, pairs, 10_000):
            drawn = iter(generator.choices(words, weights, k=10_000 * 2 * 25))
            for _ in range(min(10_000, pairs)):
                for file in (source, target):
                    line = [next(drawn) for _ in range(generator.randint(3, 25))]
                    file.write(" ".join(line) + " .\n")
    return paths


def measure(folder: Path, pairs: int, sample_pairs: int, duplicates: bool) -> dict[str, Any]:
    """Prepare a generated corpus of `pairs` pairs in a child process; return its peak memory and time."""
    source, target = write_corpus(folder, pairs)
    config = {
        "source_language": "a", "target_language": "b", "store": str(folder / f"store-{pairs}"),
        "train": [{"source": str(source), "target": str(target)}],
        "filters": {"duplicates": duplicates, "identical": True, "max_length_ratio": 9.0},
        "subword": {"sample_pairs": sample_pairs, "vocabulary_size": 16_000},
    }  # fmt: skip
    started = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", PREPARE, json.dumps(config)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    kept = int(child.stdout.read())
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"prepare ended with status {child.returncode}")
    return {
        "pairs": pairs,
        "kept": kept,
        "peak_bytes": usage.ru_maxrss * 1024,
        "seconds": time.perf_counter() - started,
        "corpus_bytes": source.stat().st_size + target.stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[200_000, 2_000_000])
    parser.add_argument("--sample-pairs", type=int, default=100_000, help="the product's default is 200,000")
    parser.add_argument("--duplicates", action="store_true", help="drop repeated pairs (memory grows)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for pairs in options.pairs:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder), pairs, options.sample_pairs, options.duplicates))
        if not options.json:
            print(
                f"{pairs:>12,} pairs: peak {rows[-1]['peak_bytes'] / MEGABYTE:,.0f} MB, {rows[-1]['seconds']:,.0f} s, "
                f"corpus {rows[-1]['corpus_bytes'] / MEGABYTE:,.0f} MB",
                flush=True,
            )
    peaks = [row["peak_bytes"] for row in rows]
    ratio = max(peaks) / min(peaks)
    good = ratio <= LIMIT_RATIO and max(peaks) <= LIMIT_BYTES
    if options.json:
        print(
            json.dumps(
                {
                    "sample_pairs": options.sample_pairs,
                    "duplicates": options.duplicates,
                    "rows": rows,
                    "ratio": ratio,
                    "within_limits": good,
                }
            )
        )
    else:
        print(f"ratio {ratio:.3f} (limit {LIMIT_RATIO}), {'within' if good else 'OUTSIDE'} the limits")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
