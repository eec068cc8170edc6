"""Train some configurations that learn and some that do not, with depth measures every 10 updates.

    python experiments/health-bands/run.py --store STORE [--only NAME ...]

Run from the repository with Multi30k prepared by `ziggurat prepare multi30k-de-en`. Each run leaves
`results/NAME/diagnostics/depth.jsonl`: its own file without values that no band uses, with four digits per number.
Existing results are not repeated.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "depth-check"))

from configurations import METHODS, SHARED  # noqa: E402

from ziggurat.config.recipes import load_named  # noqa: E402
from ziggurat.train.loop import train  # noqa: E402
from ziggurat.train.records import read_records, write_records  # noqa: E402

RUNS: list[tuple[str, str, str, int]] = [
    ("18-18", "post", "1e-3", 300),
    ("18-18", "admin", "1e-3", 300),
    ("18-18", "pre", "2e-3", 300),
    ("3-12", "post", "1e-3", 200),
    ("6-6", "post", "1e-3", 300),
    ("18-18", "deepnorm", "1e-3", 200),
    ("18-18", "dlcl-pre", "2e-3", 200),
    ("18-18", "lingvo", "6.6e-4", 200),
    ("18-18", "transparent-pre", "6.6e-4", 200),
    ("18-18", "ds-init", "1e-3", 200),
    ("18-18", "dlcl-post", "1e-3", 200),
    ("18-18", "hyper", "2e-3", 200),
]
"""RUNS are depth, method of experiments/depth-check, peak rate and updates; the warm-up is 120 updates."""

KEPT = ("nll", "source_dependence", "gradient_norm", "r", "variance", "update_ratio", "attention_entropy")
"""KEPT are the measures that bands use."""


def rounded(value: Any) -> Any:
    """Return `value` with every number in it rounded to four digits."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def one_run(out: Path, overrides: list[str]) -> None:
    """Train once and write the records to `out`."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(run, load_named("multi30k-de-en", overrides), console=Console(quiet=True))
        records = [
            replace(r, values=rounded({k: r.values[k] for k in KEPT if k in r.values})) for r in read_records(run)
        ]
    out.mkdir(parents=True)
    write_records(out, (replace(r, values=rounded({k: r.values[k] for k in KEPT if k in r.values})) for r in records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--only", nargs="+", help="names of runs, such as 18-18-post")
    o = parser.parse_args()
    for depth, method, rate, updates in RUNS:
        name = f"{depth}-{method}"
        out = HERE / "results" / name
        if out.exists() or (o.only and name not in o.only):
            continue
        encoder, decoder = depth.split("-")
        print(name, flush=True)
        one_run(
            out,
            [
                *SHARED,
                *METHODS[method],
                f"model.encoder.layers={encoder}",
                f"model.decoder.layers={decoder}",
                f"training.schedule.peak={rate}",
                f"training.stop.updates={updates}",
                "training.validation.every_updates=1000",
                "training.diagnostics={every_updates: 10, max_share: null}",
                f"data.store={o.store}",
            ],
        )


if __name__ == "__main__":
    main()
