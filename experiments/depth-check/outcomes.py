"""Train every configuration of a data set for 300 real updates, with one JSON file of figures per run.

    python experiments/depth-check/outcomes.py --store STORE [--data fr-en]

STORE is the prepared data: for Multi30k that of `ziggurat prepare multi30k-de-en`. Existing results are not repeated.
The shallow run, with which the others are compared, comes first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from configurations import Configuration  # noqa: E402
from unseen import DATA, SHALLOW, languages  # noqa: E402

from ziggurat.config.recipes import load_named  # noqa: E402
from ziggurat.data.corpus import Store  # noqa: E402
from ziggurat.system.errors import TrainingError  # noqa: E402
from ziggurat.train.loop import train  # noqa: E402


def commit() -> str:
    """Return the commit of the code, with `+` when files differ from it."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    changed = subprocess.run(["git", "status", "--porcelain", "ziggurat"], capture_output=True, text=True, cwd=HERE)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def level(store: Store) -> float:
    """Return the dev loss, in nats, of a model that has learnt only the word frequencies of the training data.

    The entropy of these frequencies is the same on Multi30k (5.79), 0.01 lower on Tanaka, and 0.15 lower on Tatoeba,
    whose dev sentences differ more from the training data.
    """

    def counts(part: str) -> np.ndarray:
        table = getattr(store, part)
        _, targets = table.pairs(np.arange(len(table)))
        ids = np.concatenate([np.asarray(one) for one in targets])
        return np.append(np.bincount(ids, minlength=store.target.size), len(table))  # the last is end-of-sentence

    smoothed, dev = counts("train") + 1.0, counts("dev")
    return float(-(dev * np.log(smoothed / smoothed.sum())).sum() / dev.sum())


def one_run(out: Path, configuration: Configuration, data: str, store: str, seed: int) -> None:
    """Train once and write the figures to `out`."""
    values = [*configuration.overrides, *languages(data), f"training.seed={seed}"]
    experiment = load_named("multi30k-de-en", [*values, f"data.store={store}"])
    started = time.perf_counter()
    failure = None
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            result = train(run, experiment, console=Console(stderr=True, quiet=True))
            if result.signal is not None:
                raise SystemExit(128 + result.signal)
        except TrainingError as error:
            failure = str(error).replace(folder, "")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figures: dict[str, Any] = {
        "name": configuration.method,
        "depth": configuration.depth,
        "rate": configuration.rate,
        "overrides": values,
        "seed": seed,
        "commit": commit(),
        "machine": f"{platform.machine()}, 1 thread, torch {torch.__version__}",
        "level": round(level(Store.open(store)), 4),
        "seconds": round(time.perf_counter() - started, 1),
        "failure": failure,
        "train": [[r["update"], r.get("nll"), r.get("grad_norm")] for r in records if r["kind"] == "train"],
        "dev": [[r["update"], r.get("nll")] for r in records if r["kind"] == "validation"],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(figures) + "\n")
    os.replace(temporary, out)
    print(f"{out.name}: train {figures['train'][-1:]}, dev {figures['dev'][-1:]} {failure or ''}", flush=True)


def main() -> None:
    """Train the configurations that have no outcome yet, one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="prepared data")
    parser.add_argument("--data", choices=DATA, default="multi30k", help="the data set")
    parser.add_argument("--only-shallow", action="store_true", help="train only the shallow run")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for configuration in [SHALLOW, *([] if options.only_shallow else DATA[options.data])]:
        out = HERE / "results" / options.data / f"{configuration.name}.json"
        if configuration.outcome is None and not out.exists():
            one_run(out, configuration, options.data, options.store, options.seed)


if __name__ == "__main__":
    main()
