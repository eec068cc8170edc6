"""Shallow-to-deep training against training from scratch: the wall time that each needs for the same dev perplexity.

    python experiments/sdt-speed/run.py --store STORE [--layers 24] [--updates 1500]     # both runs, one JSON file each
    python experiments/sdt-speed/run.py --table                                          # the figures as a table

STORE is Multi30k prepared by `ziggurat prepare multi30k-de-en`. Results that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ziggurat.config.recipes import load_named
from ziggurat.training.loop import train

HERE = Path(__file__).resolve().parent
PERIOD = 6
"""Layers of a block, and of a step of growth."""


def overrides(layers: int, updates: int, grows: bool) -> list[str]:
    """Return the settings: those of the experiment depth-trainability, with blocks, and stages if the model grows.

    Each stage before the last is trained for an eighth of the updates, about the share that Li et al. 2020 give it.
    """
    depths = range(PERIOD, layers, PERIOD) if grows else ()
    stages = ", ".join(f"{{layers: {d}, updates: {n * updates // 8}}}" for n, d in enumerate(depths, start=1))
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


def one_run(out: Path, store: str, layers: int, updates: int, grows: bool) -> None:
    """Train once and write the figures to `out`."""
    if out.exists():
        print(f"{out.name}: there already")
        return
    values = overrides(layers, updates, grows)
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
        "name": "shallow to deep" if grows else "from scratch",
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
    """Print the time that each run needs for the same dev loss."""
    runs = [json.loads(path.read_text("utf-8")) for path in sorted((HERE / "results").glob("*.json"))]
    for layers in sorted({run["layers"] for run in runs}):
        scratch, grown = (
            next(r for r in runs if r["layers"] == layers and r["name"] == name)
            for name in ("from scratch", "shallow to deep")
        )
        print(f"\n{layers}-6 layers\n\n| dev nll | perplexity | from scratch, s | shallow to deep, s | ratio |")
        print("|---|---|---|---|---|")
        last = max(scratch["dev"][-1][2], grown["dev"][-1][2])
        for nll in (last + 1.0, last + 0.5, last + 0.25, last + 0.1, last):
            a, b = time_to(scratch, nll), time_to(grown, nll)
            if a is not None and b is not None:
                print(f"| {nll:.3f} | {math.exp(nll):.1f} | {a:.0f} | {b:.0f} | {a / b:.2f} |")
        for run in (scratch, grown):
            updates, seconds, nll = run["dev"][-1]
            print(f"\n{run['name']}: dev nll {nll:.3f} after {updates} updates, {seconds:.0f} s")


def main() -> None:
    """Train both, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        table()
        return
    if options.store is None:
        parser.error("--store is missing")
    for grows in (True, False):
        name = f"{options.layers}-{'grown' if grows else 'scratch'}.json"
        one_run(HERE / "results" / name, options.store, options.layers, options.updates, grows)


if __name__ == "__main__":
    main()
