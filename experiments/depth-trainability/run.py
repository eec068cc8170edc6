"""Train every method at every depth with the same data order and budget; one JSON file of figures per run.

    python experiments/depth-trainability/run.py --store STORE --depth 18-18 --method post --updates 400
    python experiments/depth-trainability/run.py --store STORE --unequal --updates 300   # each initialisation
    python experiments/depth-trainability/table.py                               # figures -> tables and figure

Run from the repository with Multi30k prepared by `ziggurat prepare multi30k-de-en`; existing results are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from measuring import commit  # noqa: E402
from methods import DEPTHS, INITIALISATIONS, METHODS, UNEQUAL, common, growth  # noqa: E402

from ziggurat.config.recipes import load_named  # noqa: E402
from ziggurat.system.errors import TrainingError  # noqa: E402
from ziggurat.train.loop import train  # noqa: E402


def one_run(out: Path, name: str, depth: tuple[int, int], overrides: list[str], options: argparse.Namespace) -> None:
    """Train once and write the figures to `out`."""
    if out.exists():
        print(f"{out.name}: there already")
        return
    shared = common(*depth, options.updates, options.tokens, options.warmup)
    values = [*shared, *overrides, f"training.seed={options.seed}"]
    experiment = load_named("multi30k-de-en", [*values, f"data.store={options.store}"])
    started = time.perf_counter()
    failure = None
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            result = train(run, experiment, console=Console(stderr=True, quiet=True))
            if result.signal is not None:
                raise SystemExit(128 + result.signal)
        except TrainingError as error:
            failure = str(error)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figures: dict[str, Any] = {
        "name": name,
        "depth": f"{depth[0]}-{depth[1]}",
        "overrides": values,
        "seed": options.seed,
        "commit": commit(),
        "machine": f"{platform.machine()}, 1 thread, torch {torch.__version__}",
        "seconds": round(time.perf_counter() - started, 1),
        "failure": failure,
        "train": [[r["update"], r["nll"], r["grad_norm"]] for r in records if r["kind"] == "train"],
        "dev": [[r["update"], r["nll"]] for r in records if r["kind"] == "validation"],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(figures) + "\n")
    os.replace(temporary, out)
    print(
        f"{out.name}: dev nll {figures['dev'][-1][1]:.3f}" if figures["dev"] else f"{out.name}: {failure}", flush=True
    )


def main() -> None:
    """Parse the options, then train the selected runs one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="store made by `ziggurat prepare multi30k-de-en`")
    parser.add_argument("--depth", nargs="+", choices=DEPTHS, default=list(DEPTHS))
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--unequal", action="store_true", help="unequal depths, every initialisation")
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per batch")
    parser.add_argument("--warmup", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = HERE / "results"
    if options.unequal:
        for depth_name, depth in UNEQUAL.items():
            for name, overrides in INITIALISATIONS.items():
                file = f"unequal-{depth_name}-{name.replace(', ', '-').replace(' ', '-')}.json"
                one_run(results / file, name, depth, overrides, options)
        return
    for depth_name in options.depth:
        for name in options.method:
            depth = DEPTHS[depth_name]
            extra = growth(depth[0], options.updates) if name.startswith("sdt") else []
            file = f"{depth_name}-{name.replace('/', '')}.json"
            one_run(results / file, name, depth, [*METHODS[name], *extra], options)


if __name__ == "__main__":
    main()
