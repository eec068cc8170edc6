"""Shallow-to-deep training against training from scratch: the wall time that each needs for the same dev perplexity.

    python experiments/sdt-speed/run.py --store STORE [--layers 24] [--updates 1500]     # both runs side by side
    python experiments/sdt-speed/run.py --store STORE --cost [--layers 24]               # seconds per update, in turns
    python experiments/sdt-speed/run.py --table                                          # the figures as a table

STORE is Multi30k prepared by `ziggurat prepare multi30k-de-en`. Results that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ziggurat.config.recipes import load_named
from ziggurat.data.corpus import Store
from ziggurat.models.grow import at_depth
from ziggurat.training.feeding import loader_of
from ziggurat.training.learner import Learner
from ziggurat.training.loop import train
from ziggurat.training.memory import keep_freed_memory
from ziggurat.training.update import train_update

HERE = Path(__file__).resolve().parent
PERIOD = 6
"""Layers of a block, and of a step of growth."""


RUNS = {"from scratch": None, "shallow to deep": 5}
"""Name -> each stage before the last is trained for such a part of the updates; None: the whole depth throughout."""


def overrides(layers: int, updates: int, part: int | None) -> list[str]:
    """Return the settings: those of the experiment depth-trainability, with blocks, and stages if the model grows."""
    depths = range(PERIOD, layers, PERIOD) if part else ()
    stages = ", ".join(f"{{layers: {d}, updates: {n * updates // (part or 1)}}}" for n, d in enumerate(depths, start=1))
    return [
        f"model={{preset: tiny, residual: pre, encoder: {{layers: {layers}, history: blocks}}}}",
        f"model.combination.period={PERIOD}",
        "model.dropout={residual: 0.1, attention: 0.0, activation: 0.1, embedding: 0.1}",
        "training.batch.max_tokens=1024",
        "training.optimiser={kind: adam, betas: [0.9, 0.997], epsilon: 1e-8}",
        f"training.schedule={{kind: isqrt, peak: 2e-3, warmup_updates: {updates // 8}}}",
        "training.clip_norm=null",
        "training.log_every_updates=10",
        f"training.validation={{every_updates: {updates // 30}, decode: false}}",
        f"training.checkpoint={{every_updates: {updates}, keep_last: 1}}",
        f"training.stop={{updates: {updates}}}",
        "training.threads=1",
        "training.tensorboard=false",
        *([f"training.growth={{stages: [{stages}]}}"] if stages else []),
    ]


def one_run(name: str, store: str, layers: int, updates: int) -> None:
    """Train once and write the figures down."""
    out = HERE / "results" / f"{layers}-{name.replace(' ', '-')}.json"
    if out.exists():
        print(f"{out.name}: there already")
        return
    values = overrides(layers, updates, RUNS[name])
    experiment = load_named("multi30k-de-en", [*values, f"data.store={store}"])
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        result = train(run, experiment, console=Console(stderr=True, quiet=True))
        if result.signal is not None:
            raise SystemExit(128 + result.signal)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    trained = {r["update"]: r["seconds"] for r in records if r["kind"] == "train"}
    dev, validating = [], 0.0
    for record in records:
        if record["kind"] == "validation":  # its own time, and that of those before, is not training
            dev.append([record["update"], trained[record["update"]] - validating, record["nll"]])
            validating += record["seconds"]
    document = {
        "name": name,
        "layers": layers,
        "overrides": values,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
        ).stdout.strip(),
        "machine": f"{os.uname().machine}, 1 thread, torch {torch.__version__}",
        "seconds": result.seconds,
        "seconds_of_validation": validating,
        "dev": dev,
    }
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{out.name}: dev nll {dev[-1][2]:.3f} in {result.seconds:.0f} s", flush=True)


def cost(store: str, layers: int, rounds: int = 40) -> None:
    """Measure an update at each depth in turns, so that whatever else the machine does weighs on all alike."""
    experiment = load_named("multi30k-de-en", [*overrides(layers, 1500, None), f"data.store={store}"])
    torch.set_num_threads(1)
    keep_freed_memory()
    opened, depths = Store.open(store), range(PERIOD, layers + 1, PERIOD)
    learners = {}
    for depth in depths:
        model = at_depth(experiment.model, depth)
        learners[depth] = Learner(experiment.model_copy(update={"model": model}), opened, torch.device("cpu"))
    groups = loader_of(experiment, opened).groups()
    seconds: dict[int, list[float]] = {depth: [] for depth in depths}
    for number in range(rounds + 2):
        group = next(groups)
        for depth, learner in learners.items():
            began = time.perf_counter()
            train_update(learner.parallel, group.batches, learner.optimiser, rate=1e-4, clip_norm=None)
            if number >= 2:  # the first ones make moments and warm up
                seconds[depth].append(time.perf_counter() - began)
    found = {str(depth): statistics.mean(sorted(times)[: 3 * rounds // 4]) for depth, times in seconds.items()}
    out = HERE / "results" / f"{layers}-cost.json"
    out.write_text(json.dumps({"layers": layers, "seconds_per_update": found}, indent=1) + "\n", encoding="utf-8")
    print(found)


def at_cost(run: dict[str, Any], costs: dict[str, float]) -> dict[str, Any]:
    """Return `run` with its times replaced by what its updates cost at their depths."""
    part, layers = RUNS[run["name"]], run["layers"]
    total = run["dev"][-1][0]
    ends = {depth: n * total // part for n, depth in enumerate(range(PERIOD, layers, PERIOD), start=1)} if part else {}

    def seconds(update: int) -> float:
        depth = next((depth for depth, end in ends.items() if update <= end), layers)
        return costs[str(depth)]

    times = [0.0]
    for update in range(1, total + 1):
        times.append(times[-1] + seconds(update))
    return {**run, "dev": [[update, times[update], nll] for update, _, nll in run["dev"]]}


def time_to(run: dict[str, Any], nll: float) -> float | None:
    """Return the seconds until the dev loss was first at or below `nll`, interpolated between validations."""
    before: tuple[float, float] | None = None
    for _, seconds, value in run["dev"]:
        if value <= nll:
            if before is None:
                return float(seconds)
            then, higher = before
            return then + (seconds - then) * (higher - nll) / (higher - value)
        before = (seconds, value)
    return None


def table() -> None:
    """Print the time that each run needs for the same dev loss: as measured, and by the costs measured in turns."""
    found = [json.loads(path.read_text("utf-8")) for path in sorted((HERE / "results").glob("*.json"))]
    runs = [run for run in found if "dev" in run]
    print("\nWall time of the runs, which shared the machine")
    print_table(runs)
    costs = {run["layers"]: run["seconds_per_update"] for run in found if "dev" not in run}
    if costs:
        print(f"\nAt the seconds per update measured in turns: {costs}")
        print_table([at_cost(run, costs[run["layers"]]) for run in runs if run["layers"] in costs])


def print_table(runs: list[dict[str, Any]]) -> None:
    """Print the times of some runs."""
    for layers in sorted({run["layers"] for run in runs}):
        by_name = {run["name"]: run for run in runs if run["layers"] == layers}
        scratch, *grown = [by_name[name] for name in RUNS if name in by_name]
        heads = "".join(f" {run['name']}, s | ratio |" for run in grown)
        print(f"\n{layers}-6 layers\n\n| dev nll | perplexity | from scratch, s |{heads}")
        print("|---|---|---|" + "---|---|" * len(grown))
        last = max(run["dev"][-1][2] for run in (scratch, *grown))
        for nll in (last + 1.0, last + 0.5, last + 0.25, last + 0.1, last):
            whole = time_to(scratch, nll)
            assert whole is not None
            taken = [time_to(run, nll) for run in grown]
            cells = "".join(f" {seconds:.0f} | {whole / seconds:.2f} |" for seconds in taken if seconds is not None)
            print(f"| {nll:.3f} | {math.exp(nll):.1f} | {whole:.0f} |{cells}")
        for run in (scratch, *grown):
            updates, seconds, nll = run["dev"][-1]
            print(f"\n{run['name']}: dev nll {nll:.3f} after {updates} updates, {seconds:.0f} s")


def main() -> None:
    """Train, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--name", choices=list(RUNS), help="only this run")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        table()
        return
    if options.store is None:
        parser.error("--store is missing")
    if options.cost:
        cost(options.store, options.layers)
        return
    if options.name is not None:
        one_run(options.name, options.store, options.layers, options.updates)
        return
    both = [subprocess.Popen([sys.executable, *sys.argv, "--name", name]) for name in RUNS]
    if any(run.wait() for run in both):
        raise SystemExit("a run failed")


if __name__ == "__main__":
    main()
