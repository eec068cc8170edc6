"""Transfer of a learning rate tuned on a small model to one with four times the width and six times the depth.

    python experiments/rate-transfer/run.py --store STORE [--side standard]    # resumes where it was stopped
    python experiments/rate-transfer/run.py --table                            # the figures so far

STORE is Multi30k prepared by `ziggurat prepare multi30k-de-en`. At the small size all RATES are tried with three seeds,
at the large one those around the best of the small one, and further ones while the best is at an edge of those tried.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

from ziggurat.config import Experiment
from ziggurat.config.recipes import load_named
from ziggurat.data.corpus import Store
from ziggurat.inspect.trial import KeptTrials
from ziggurat.inspect.tuning import Size, Tried, best, sweep
from ziggurat.system.files import write_atomically

RESULTS = Path(__file__).resolve().parent / "results"
BASE, TARGET = Size(64, 3, 3), Size(256, 18, 18)
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
SEEDS = {BASE: (1, 2, 3), TARGET: (1,)}
UPDATES = 150
SIDES: dict[str, dict[str, Any]] = {
    "standard": {},
    "completep": {"transfer": BASE._asdict()},
}


def experiment_of(side: str, store: str) -> Experiment:
    """Return the configuration at the base's size: heads of 32, pre-norm, Adam, no clipping."""
    transfer = [f"model.transfer={json.dumps(t)}"] if (t := SIDES[side].get("transfer")) else []
    values = [
        "model={preset: tiny, dropout: {residual: 0.1, attention: 0.0, activation: 0.1, embedding: 0.1}}",
        "model.residual=pre",
        f"model={{d_model: {BASE.width}, d_ff: {4 * BASE.width}, heads: 2}}",
        f"model.encoder={{layers: {BASE.encoder_layers}, d_ff: null}}",
        f"model.decoder.layers={BASE.decoder_layers}",
        "training.optimiser={kind: adam, betas: [0.9, 0.98], epsilon: 1e-8}",
        "training.schedule={kind: isqrt, warmup_updates: 60, peak: 1e-3}",
        "training.clip_norm=null",
        *transfer,
        f"data.store={store}",
    ]
    return load_named("multi30k-de-en", values)


def run(side: str, store: str) -> None:
    """Sweep the rates at both sizes, and write the figures."""
    torch.set_num_threads(1)
    experiment, opened = experiment_of(side, store), Store.open(store)
    kept = KeptTrials(RESULTS / f"{side}-kept.json")  # to resume a stopped run; not committed
    rates, found = RATES, list[Tried]()
    for size in (BASE, TARGET):
        options = {"updates": UPDATES, "seeds": SEEDS[size], "kept": kept, "told": lambda t: print(side, t, flush=True)}
        here = sweep(experiment, opened, [size], rates=rates, **options)
        rates = tuple(best(here).rate * factor for factor in (0.5, 1.0, 2.0))
        found += here
    figures = {
        "side": side,
        "updates": UPDATES,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "tried": [[str(t.size), t.rate, t.loss, len(SEEDS[t.size])] for t in found],
    }
    write_atomically(RESULTS / f"{side}.json", (json.dumps(figures, indent=1) + "\n").encode())


def table() -> None:
    """Print loss by rate at both sizes."""
    print("| parametrisation | size | rate | loss |\n|---|---|---|---|")
    for side in SIDES:
        if (file := RESULTS / f"{side}.json").exists():
            for size, rate, loss, _ in json.loads(file.read_text("utf-8"))["tried"]:
                print(f"| {side} | {size} | {rate:g} | {loss:.3f} |")


def main() -> None:
    """Sweep, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store")
    parser.add_argument("--side", choices=SIDES, nargs="*", default=list(SIDES))
    parser.add_argument("--table", action="store_true")
    o = parser.parse_args()
    if o.table:
        table()
        return
    if o.store is None:
        parser.error("give --store with the data")
    for side in o.side:
        run(side, o.store)


if __name__ == "__main__":
    main()
