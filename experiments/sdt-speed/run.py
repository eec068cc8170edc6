"""Shallow-to-deep training against training from scratch: the seconds that each needs to reach the same dev loss.

    python experiments/sdt-speed/run.py --store STORE [--layers 24 48] [--seeds 1 2 3] [--jobs 2]   # all runs
    python experiments/sdt-speed/run.py --store STORE --cost [--layers 24 48]    # seconds per update
    python experiments/sdt-speed/run.py --table                                  # the figures as a table

STORE is Multi30k prepared by `ziggurat prepare multi30k-de-en`. Existing results are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measuring import commit, seconds_in_turns  # noqa: E402

from ziggurat.config.recipes import load_named  # noqa: E402
from ziggurat.data.corpus import Store  # noqa: E402
from ziggurat.model.depth import at_depth  # noqa: E402
from ziggurat.train.loop import train  # noqa: E402

PERIOD = 6
"""PERIOD is the number of layers per block."""
UPDATES = 1200


class Stage(NamedTuple):
    """Encoder and decoder layers, and the share of the updates after which the stage ends."""

    encoder: int
    decoder: int
    end: float


SCHEDULES: dict[str, dict[int, tuple[Stage, ...]]] = {
    "from scratch": {24: (), 48: ()},
    "shallow to deep": {
        24: (Stage(6, 2, 0.4), Stage(12, 4, 0.6)),
        48: (Stage(6, 2, 0.4), Stage(12, 4, 0.55), Stage(24, 6, 0.7)),
    },
}
"""SCHEDULES maps a name to the encoder's final depth and then to the stages before it."""


def overrides(layers: int, name: str, seed: int) -> list[str]:
    """Return the settings: those of depth-trainability, with blocks, and stages if the model grows."""
    stages = ", ".join(
        f"{{layers: {stage.encoder}, decoder_layers: {stage.decoder}, updates: {round(stage.end * UPDATES)}}}"
        for stage in SCHEDULES[name][layers]
    )
    updates = UPDATES
    return [
        f"model={{preset: tiny, residual: pre, encoder: {{layers: {layers}, history: blocks}}}}",
        f"model.combination.period={PERIOD}",
        "model.dropout={residual: 0.1, attention: 0.0, activation: 0.1, embedding: 0.1}",
        "training.batch.max_tokens=1024",
        "training.optimiser={kind: adam, betas: [0.9, 0.997], epsilon: 1e-8}",
        f"training.schedule={{kind: isqrt, peak: 2e-3, warmup_updates: {updates // 8}}}",
        "training.clip_norm=null",
        "training.log_every_updates=10",
        f"training.validation={{every_updates: {updates // 20}, decode: false}}",
        f"training.checkpoint={{every_updates: {updates}, keep_last: 1}}",
        f"training.stop={{updates: {updates}}}",
        "training.threads=1",
        "training.tensorboard=false",
        f"training.seed={seed}",
        "training.precision=bf16",
        *([f"training.growth={{stages: [{stages}], keep_stages: false}}"] if stages else []),
    ]


def result_of(name: str, layers: int, seed: int) -> Path:
    """Return the file with the figures of a run."""
    return HERE / "results" / f"{layers}-{name.replace(' ', '-')}-{seed}.json"


def one_run(name: str, store: str, layers: int, seed: int) -> None:
    """Train once and write the figures."""
    out = result_of(name, layers, seed)
    if out.exists():
        print(f"{out.name}: there already")
        return
    values = overrides(layers, name, seed)
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
        if record["kind"] == "validation":  # the time of this and earlier validations is not training time
            dev.append([record["update"], trained[record["update"]] - validating, record["nll"]])
            validating += record["seconds"]
    document = {
        "name": name,
        "layers": layers,
        "seed": seed,
        "overrides": values,
        "commit": commit(),
        "machine": f"{os.uname().machine}, 1 thread, torch {torch.__version__}",
        "seconds": result.seconds,
        "seconds_of_validation": validating,
        "dev": dev,
    }
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{out.name}: dev nll {dev[-1][2]:.3f} in {result.seconds:.0f} s", flush=True)


def cost(store: str, layers: int, rounds: int = 40) -> None:
    """Measure interleaved updates at each depth, so that other work on the machine affects all equally."""
    experiment = load_named("multi30k-de-en", [*overrides(layers, "from scratch", 1), f"data.store={store}"])
    final = (layers, experiment.model.decoder.layers)
    depths = sorted({(stage.encoder, stage.decoder) for stage in SCHEDULES["shallow to deep"][layers]} | {final})
    models = {f"{n}-{m}": at_depth(experiment.model, n, m) for n, m in depths}
    experiments = {name: experiment.model_copy(update={"model": model}) for name, model in models.items()}
    times = seconds_in_turns(experiments, Store.open(store), rounds)
    found = {name: statistics.mean(sorted(seconds)[: 3 * rounds // 4]) for name, seconds in times.items()}
    out = HERE / "results" / f"{layers}-cost.json"
    out.write_text(json.dumps({"layers": layers, "seconds_per_update": found}, indent=1) + "\n", encoding="utf-8")
    print(found)


def at_cost(run: dict[str, Any], costs: dict[str, float]) -> dict[str, Any]:
    """Return `run` with its times replaced by the cost of its updates at their depths."""
    stages, total = SCHEDULES[run["name"]][run["layers"]], run["dev"][-1][0]

    def seconds(update: int) -> float:
        now = next((stage for stage in stages if update <= round(stage.end * UPDATES)), None)
        return costs[f"{now.encoder}-{now.decoder}" if now else f"{run['layers']}-6"]

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
    """Print, by depth and seed, the seconds to the same dev loss at the measured costs, and the means.

    The loss for a seed is the higher of the two final ones, so both runs reach it.
    """
    costs = {}
    for path in sorted((HERE / "results").glob("*-cost.json")):
        document = json.loads(path.read_text("utf-8"))
        costs[document["layers"]] = document["seconds_per_update"]
        print(f"{document['layers']}-6: seconds per update {document['seconds_per_update']}")
    print("\n| model | seed | dev nll of both | from scratch, s | grown, s | ratio | final nll, from scratch | grown |")
    print("|---|---|---|---|---|---|---|---|")
    for layers in costs:
        ratios, differences = [], []
        for seed in range(1, 100):
            files = [result_of(name, layers, seed) for name in SCHEDULES]
            if not all(path.exists() for path in files):
                continue
            scratch, grown = (at_cost(json.loads(path.read_text("utf-8")), costs[layers]) for path in files)
            ends = [run["dev"][-1][2] for run in (scratch, grown)]
            whole, less = (time_to(run, max(ends)) for run in (scratch, grown))
            assert whole is not None
            assert less is not None
            ratios.append(whole / less)
            differences.append(ends[1] - ends[0])
            print(
                f"| {layers}-6 | {seed} | {max(ends):.3f} | {whole:.0f} | {less:.0f} | {whole / less:.2f} "
                f"| {ends[0]:.3f} | {ends[1]:.3f} |"
            )
        if len(ratios) > 1:
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            print(
                f"| {layers}-6 | mean | | | | **{statistics.mean(ratios):.2f}** "
                f"| | {statistics.mean(differences):+.3f} +- {error:.3f} |"
            )


def main() -> None:
    """Train, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store")
    parser.add_argument("--layers", type=int, nargs="*", default=[24, 48])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--names", choices=list(SCHEDULES), nargs="*", default=list(SCHEDULES))
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        table()
        return
    if options.store is None:
        parser.error("--store is missing")
    if options.cost:
        for layers in options.layers:
            cost(options.store, layers)
        return
    runs = [
        (name, options.store, layers, seed)
        for seed in options.seeds
        for layers in options.layers
        for name in options.names
    ]
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        pool.starmap(one_run, runs, chunksize=1)


if __name__ == "__main__":
    main()
