"""Time and memory as the work grows: depth, batch, vocabulary, sentence length, and the size of the corpus.

    python -m benchmarks.growing [--axis depth batch vocabulary length processes corpus] [--seconds 6] [--two] [--json]

One thing at a time changes in a pre-norm Transformer of width 256 with 6+6 layers, 8,000 types, and batches of 4,096
tokens in sentences of 16, fp32, dropout 0.1: target tokens/s of whole updates, the share of the peak (torch's fastest
2048 x 2048 product, measured first), and the peak memory of the process. Tokens are random, which costs the same.
`processes`: two threads in one process, or one in each of two processes that add up their gradients (DDP), each with
its own batches. `corpus` plans an epoch of that many pairs with log-normal lengths, as the loader does before the first
batch:
seconds, and peak memory above that of the lengths themselves.

Every point is its own process, so that no memory is left over from the previous one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

AXES: dict[str, Sequence[int]] = {
    "depth": (6, 12, 24, 48, 96),
    "batch": (256, 1024, 4096, 16384),
    "vocabulary": (8_000, 16_000, 32_000, 64_000),
    "length": (16, 32, 64, 128, 256, 512),
    "processes": (1, 2),
    "corpus": (10**5, 10**6, 10**7, 10**8),
}
"""AXES are encoder layers, tokens per batch, types of the joint vocabulary, tokens per sentence, processes, pairs."""


def training(axis: str, value: int, seconds: float) -> dict[str, float]:
    """Return target tokens/s, GFLOP/s and peak memory of training with this value on `axis`."""
    import torch

    from benchmarks.gpu_models import config_of, operations, random_batch
    from ziggurat.config.train import LossConfig, OptimiserConfig
    from ziggurat.model.build import build_model, parameter_roles
    from ziggurat.train.device import keep_freed_memory
    from ziggurat.train.distributed import joined
    from ziggurat.train.optim import Optimiser
    from ziggurat.train.parallel import Parallel, Replicated
    from ziggurat.train.update import train_update

    sizes = {"depth": 6, "batch": 4096, "vocabulary": 8_000, "length": 16, "processes": 1, axis: value}
    keep_freed_memory()
    torch.set_num_threads(2 // sizes["processes"])
    layers = {"encoder": {"layers": sizes["depth"]}, "decoder": {"layers": 6}, "residual": "pre"}
    config = config_of("base 6-6", 256, 4, **layers, dropout={"residual": 0.1, "attention": 0.1})
    model = build_model(config, sizes["vocabulary"], sizes["vocabulary"])
    optimiser = Optimiser(model, parameter_roles(model), OptimiserConfig())
    tokens = sizes["length"] - 1  # plus end-of-sentence
    batch = random_batch([(tokens, tokens)] * max(1, sizes["batch"] // sizes["length"]), sizes["vocabulary"])
    with joined(timeout_minutes=5) as processes:
        parallel = (
            Replicated(model, LossConfig(), "fp32", processes)
            if processes.count > 1
            else Parallel(model, LossConfig(), "fp32")
        )
        for _ in range(2):
            train_update(parallel, [batch], optimiser, rate=1e-5, clip_norm=1.0)
        updates, began, going = 0, time.perf_counter(), True
        while going:
            train_update(parallel, [batch], optimiser, rate=1e-5, clip_norm=1.0)
            updates += 1
            passed = time.perf_counter() - began
            going = processes.any(passed < seconds or updates < 3)  # all stop after the same update
    done = updates * processes.count
    return {
        "tokens_per_second": done * batch.target_tokens / passed,
        "gflops": done * operations(model, batch) / passed / 1e9,
        "threads": torch.get_num_threads(),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def planning(pairs: int) -> dict[str, float]:
    """Return the seconds that the plan of an epoch takes, and its peak memory per pair."""
    import numpy as np

    from ziggurat.data.batching import epoch_indices, make_batches

    draw = np.random.Generator(np.random.PCG64(1))
    lengths = [np.maximum(1, draw.lognormal(3.0, 0.5, pairs)).astype(np.int32) for _ in range(2)]
    corpora = np.zeros(pairs, dtype=np.int32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    indices = epoch_indices(corpora, (1.0,), 1.0, 1, epoch=0)
    batches = make_batches(indices, *lengths, max_tokens=4096, seed=1, epoch=0)
    seconds = time.perf_counter() - began
    above = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / pairs
    return {"seconds": seconds, "bytes_per_pair": above, "batches": len(batches)}


def in_child(axis: str, value: int, seconds: float) -> dict[str, Any]:
    """Return the figures of one point, measured in its own process."""
    module = ["benchmarks.growing", "--one", axis, str(value), "--seconds", str(seconds)]
    launcher = (
        ["torch.distributed.run", "--standalone", f"--nproc-per-node={value}", "-m"] if axis == "processes" else []
    )
    command = [sys.executable, "-m", *launcher, *module]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def row(axis: str, value: int, figures: dict[str, float], limit: float) -> str:
    """Return the figures of a point as a line."""
    if axis == "corpus":
        return f"  {value:>12,}  {figures['seconds']:8.2f} s  {figures['bytes_per_pair']:6.0f} bytes per pair"
    share = figures["gflops"] * 1e9 / limit
    return (
        f"  {value:>12,}  {figures['tokens_per_second']:8,.0f} target tokens/s  {share:4.0%} of peak  "
        f"{figures['peak_gib']:6.2f} GiB"
    )


def main() -> None:
    """Measure the points of the requested axes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", nargs="*", choices=AXES, default=list(AXES))
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--two", action="store_true", help="two points per axis: the first and the third, if any")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        axis, value = options.one[0], int(options.one[1])
        figures = planning(value) if axis == "corpus" else training(axis, value, options.seconds)
        if os.environ.get("RANK", "0") == "0":  # one line in all, not one per process
            print(json.dumps(figures))
        return
    from benchmarks.train_speed import peak

    limit = peak("fp32") * 1e9
    document = []
    for axis in options.axis:
        if not options.json:
            print(f"{axis}  (matmul peak {limit / 1e9:.0f} GFLOP/s)" if axis != "corpus" else axis)
        for value in AXES[axis][:3:2] if options.two and len(AXES[axis]) > 2 else AXES[axis]:
            figures = in_child(axis, value, options.seconds)
            document.append({"axis": axis, "value": value, **figures})
            if not options.json:
                print(row(axis, value, figures, limit), flush=True)
    if options.json:
        print(json.dumps({"peak_gflops": limit / 1e9, "points": document}, indent=2))


if __name__ == "__main__":
    main()
