"""Estimates of `ziggurat inspect` compared with real updates, in CPU seconds with one thread (docs/depth-check.md).

OMP_NUM_THREADS=1 python -m benchmarks.inspect_costs [--only multi30k]
"""

from __future__ import annotations

import argparse
import time

import torch

from ziggurat.config.recipes import load_named
from ziggurat.inspect.cost import Batches, time_cost
from ziggurat.inspect.machine import BatchShape, full_batch, measure_speed, simulate_update, slowness
from ziggurat.model.build import build_model, parameter_roles, set_recompute
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import train_update

CPU = torch.device("cpu")
VOCABULARY = 8000
CASES = {
    "multi30k-de-en": ("multi30k-de-en", [], 64),
    "multi30k-de-en, bf16": ("multi30k-de-en", ["training.precision=bf16"], 64),
    "multi30k-de-en, 18-18 layers of width 128, post-norm": (
        "multi30k-de-en",
        ["model.preset=tiny", "model.residual=post", "model.encoder.layers=18", "model.decoder.layers=18"],
        64,
    ),
    "transformer-base, fp32": ("transformer-base", ["training.precision=fp32"], 32),
    "transformer-base, bf16, recompute.encoder 1": ("transformer-base", ["training.recompute.encoder=1"], 32),
    "rnmt, 3-3 layers of width 128": (
        "transparent-en-de-rnmt-512-6-8",
        ["model.d_model=128", "model.encoder.layers=3", "model.decoder.layers=3"],
        32,
    ),
}


def main() -> None:
    """Print a line for each case whose name begins with the given text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="how the names of the cases begin")
    chosen = parser.parse_args().only
    torch.set_num_threads(1)
    print("| configuration | sentences of 16 + 16 tokens | measured, s | estimated | ratio |\n|---|---|---|---|---|")
    for name, (recipe, overrides, sentences) in CASES.items():
        if not name.startswith(chosen):
            continue
        experiment = load_named(recipe, [*overrides, "training.batch.accumulate=1"])
        training, sizes = experiment.training, (VOCABULARY, VOCABULARY)
        shape = BatchShape(sentences, 16, 16)
        update = simulate_update(experiment, sizes, shape, CPU)
        kinds = {kind for work in update.work.values() for kind in work.operations}
        speed = measure_speed(kinds, (experiment.model.d_model, experiment.model.d_ff), CPU, 1)
        batches = Batches((shape,), 16, 16, 16 * sentences, 16 * sentences, 16 * sentences, name)
        estimated = time_cost(update, shape, batches, speed, slowness(experiment, speed, CPU), 1).seconds

        model = build_model(experiment.model, *sizes)
        set_recompute(model, training.recompute)
        optimiser = Optimiser(model, parameter_roles(model), training.optimiser)
        parallel = Parallel(model, training.loss, training.precision)
        seconds = []
        for _ in range(4):
            began = time.process_time()
            train_update(parallel, [full_batch(shape, CPU)], optimiser, rate=1e-4, clip_norm=None)
            seconds.append(time.process_time() - began)
        measured = min(seconds[1:])
        print(f"| {name} | {sentences} | {measured:.2f} | {estimated:.2f} | {estimated / measured:.2f} |", flush=True)


if __name__ == "__main__":
    main()
