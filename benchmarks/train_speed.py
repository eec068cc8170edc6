"""Target tokens/s of training on a prepared store, alternating with a peer's own command if one is given.

    python -m benchmarks.train_speed STORE_CONFIG [key=value ...] [--updates 12] [--rounds 3]
        [--peer 'command that prints its target tokens/s as the last number of its output'] [--json]

STORE_CONFIG is a configuration or recipe whose store is prepared (for example multi30k-en-de). Each round runs ours
and then the peer, so that a disturbance of the machine hits both; the figure is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time


def measure(config: str, overrides: list[str], updates: int) -> float:
    import torch

    from ziggurat.config.recipes import load_named
    from ziggurat.data.corpus import Store
    from ziggurat.data.loader import Loader
    from ziggurat.models.build import build_model, model_slots
    from ziggurat.training.allocator import keep_freed_memory
    from ziggurat.training.optim import Optimiser
    from ziggurat.training.step import train_update

    keep_freed_memory()
    experiment = load_named(config, overrides)
    training = experiment.training
    if training.threads:
        torch.set_num_threads(training.threads)
    store = Store.open(experiment.data.store)
    model = build_model(experiment.model, store.source.size, store.target.size)
    optimiser = Optimiser(model, model_slots(model), training.optimiser)
    groups = Loader(store.train, store.source, store.target, training.batch, seed=training.seed).groups()
    tokens, began = 0, 0.0
    for update in range(-3, updates):
        if update == 0:
            tokens, began = 0, time.perf_counter()
        tokens += train_update(
            model,
            next(groups).batches,
            optimiser,
            training.loss,
            rate=1e-5,
            clip_norm=training.clip_norm,
            precision=training.precision,
        ).target_tokens
    return tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_intermixed_args()
    if o.once:
        print(measure(o.config, o.overrides, o.updates))
        return
    command = [
        sys.executable,
        "-m",
        "benchmarks.train_speed",
        o.config,
        *o.overrides,
        "--once",
        "--updates",
        str(o.updates),
    ]
    ours, peer = [], []
    for _ in range(o.rounds):
        ours.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        if o.peer:
            output = subprocess.run(o.peer, shell=True, check=True, capture_output=True, text=True).stdout
            peer.append(float(re.findall(r"\d+\.?\d*", output)[-1]))
    result: dict[str, object] = {"ours": ours, "peer": peer}
    if peer:
        result["ratio"] = statistics.median(ours) / statistics.median(peer)
    if o.json:
        print(json.dumps(result, indent=2))
        return
    for name, figures in (("ziggurat", ours), ("peer", peer)):
        if figures:
            spread = f"{min(figures):,.0f} to {max(figures):,.0f}"
            print(f"{name:<10} {statistics.median(figures):8,.0f} target tokens/s (median of {o.rounds}; {spread})")
    if peer:
        print(f"ratio      {result['ratio']:8.2f}")


if __name__ == "__main__":
    main()
