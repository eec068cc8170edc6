"""Peak memory of `ziggurat prepare` against the number of pairs: it must not grow with the corpus.

    python -m benchmarks.prepare_memory [--pairs 200000 2000000] [--sample-pairs 100000] [--duplicates] [--ray] [--json]

Writes generated corpora of each size to a temporary folder, prepares each in its own process and prints that process's
peak resident memory (ru_maxrss) and the ratio of the largest to the smallest. SentencePiece holds the subword sample in
memory, so the sample is the same for all sizes. `--duplicates` switches on the only filter whose memory does grow, by 8
bytes per pair and the same again while it merges. `--ray` prepares as a job on a local Ray cluster of two nodes with
one CPU each: the peak is the sum of proportional shares of the processes of the larger node, including Ray's own and
the caller's. It needs `ray` and `psutil`, and also compares the store with that of one process. Exit
status 1 if the ratio is above 1.2 or a peak above 2 GB.
"""

from __future__ import annotations

import argparse
import contextlib
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

PREPARE_ON_RAY = """
import sys
from functools import partial
from pathlib import Path
from ray.cluster_utils import Cluster
from ziggurat.config.data import DataConfig
from ziggurat.corpora.jobs.launchers import ray_actors
from ziggurat.corpora.jobs.preparation import prepare_job
from ziggurat.corpora.jobs.job import Work
node = {"num_cpus": 1, "object_store_memory": 200 << 20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
cluster.add_node(**node)
cluster.wait_for_nodes()
config = DataConfig.model_validate_json(sys.argv[1])
job = Path(config.store + ".job")
print(prepare_job(config, job, Work(partial(ray_actors, cluster.address, None))).report.kept)
sys.stdout.flush()
cluster.shutdown()
"""


def node_peaks(child: subprocess.Popen[bytes]) -> list[int]:
    """Return the peak memory of the head (with the caller) and of the other node, in bytes, once the child has ended.

    A node is a raylet and the processes that it started; pages that processes share are divided among them.
    """
    import psutil

    peaks = [0, 0]
    while child.poll() is None:
        time.sleep(0.5)
        with contextlib.suppress(psutil.Error):
            everything = psutil.Process(child.pid)
            raylets = [p for p in everything.children() if p.name() == "raylet"]
            if len(raylets) != 2:
                continue
            other = {raylets[1], *raylets[1].children(recursive=True)}
            head = {everything, *everything.children(recursive=True)} - other
            for number, node in enumerate((head, other)):
                peaks[number] = max(peaks[number], sum(shares(process) for process in node))
    return peaks


def shares(process: Any) -> int:
    """Return the proportional share of a process's memory; 0 for one that has ended."""
    import psutil

    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def write_corpus(folder: Path, pairs: int, seed: int = 1) -> tuple[Path, Path]:
    """Write `pairs` pairs of sentences of 3 to 25 words, drawn from 30 thousand by Zipf's law, as two text files."""
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


def measure(folder: Path, pairs: int, sample_pairs: int, duplicates: bool, ray: bool) -> dict[str, Any]:
    """Prepare a generated corpus of `pairs` pairs in a child process; return its peak memory and time."""
    source, target = write_corpus(folder, pairs)
    config = {
        "source_language": "a", "target_language": "b", "store": str(folder / f"store-{pairs}"),
        "train": [{"source": str(source), "target": str(target)}],
        "filters": {"duplicates": duplicates, "identical": True, "max_length_ratio": 9.0},
        "subword": {"sample_pairs": sample_pairs, "vocabulary_size": 16_000},
    }  # fmt: skip
    found = {} if not ray else on_ray({**config, "store": str(folder / f"ray-{pairs}")})
    started = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", PREPARE, json.dumps(config)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    kept = int(child.stdout.read())
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"prepare ended with status {child.returncode}")
    if ray and (unlike := [p.name for p in Path(config["store"]).iterdir() if not same(p, folder / f"ray-{pairs}")]):
        raise SystemExit(f"the store of the job differs from that of one process: {unlike}")
    return {
        "pairs": pairs,
        "kept": kept,
        "peak_bytes": usage.ru_maxrss * 1024,
        "seconds": time.perf_counter() - started,
        "corpus_bytes": source.stat().st_size + target.stat().st_size,
        **found,
    }


def on_ray(config: dict[str, Any]) -> dict[str, Any]:
    """Prepare as a job on two nodes in a child process; return the larger node's peak and the time."""
    started = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", PREPARE_ON_RAY, json.dumps(config)], stdout=subprocess.PIPE)
    peaks = node_peaks(child)
    if child.returncode:
        raise SystemExit(f"the job ended with status {child.returncode}")
    return {"peak_bytes": max(peaks), "node_peak_bytes": peaks, "seconds": time.perf_counter() - started}


def same(path: Path, other: Path) -> bool:
    """Return whether another store has this file with the same bytes; manifests name their folders."""
    return path.name == "manifest.json" or (other / path.name).read_bytes() == path.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[200_000, 2_000_000])
    parser.add_argument("--sample-pairs", type=int, default=100_000, help="the product's default is 200,000")
    parser.add_argument("--duplicates", action="store_true", help="drop repeated pairs (memory grows)")
    parser.add_argument("--ray", action="store_true", help="as a job on two nodes of a local Ray cluster")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for pairs in options.pairs:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder), pairs, options.sample_pairs, options.duplicates, options.ray))
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
