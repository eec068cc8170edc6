"""Train configurations until they read their source, or long enough to tell that they do not; one JSON file per run.

    python experiments/depth-check/reading.py --store STORE [--only NAME ...]
    python experiments/depth-check/reading.py --table

STORE is Tatoeba fr-en (`unseen.py`). The trial of `ziggurat inspect` comes first, then a real run of 600 updates that
measures every 100 updates how much the loss rises when sentences get each other's sources. Existing results are not
repeated, so two calls with different names may share the work.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from configurations import Configuration  # noqa: E402
from measuring import commit, lines_of, processor  # noqa: E402
from table import read_trial  # noqa: E402
from unseen import languages  # noqa: E402

from ziggurat.config.recipes import load_named  # noqa: E402
from ziggurat.data.corpus import Store, unigram_entropy  # noqa: E402
from ziggurat.inspect.check import READS, Reference, evenness, judge, reference_of  # noqa: E402
from ziggurat.inspect.trial import TrialOptions, run_trial  # noqa: E402
from ziggurat.system.errors import TrainingError  # noqa: E402
from ziggurat.system.files import write_atomically  # noqa: E402
from ziggurat.train.loop import train  # noqa: E402

RESULTS = HERE / "results" / "reading"
CONFIGURATIONS = [
    Configuration("18-18", "deepnorm", "1e-3"),
    Configuration("18-18", "pre", "2e-3"),
    Configuration("18-18", "keel", "1e-2"),
    Configuration("18-18", "admin", "1e-3"),
    Configuration("36-6", "post", "1e-3"),
    Configuration("6-6", "post", "1e-3"),
    Configuration("18-18", "ds-init", "1e-3"),
    Configuration("36-12", "mix-ln-gpas", "5e-3"),
    Configuration("60-12", "admin", "1e-3"),
    Configuration("36-12", "admin", "1e-3"),
    Configuration("18-18", "b2t", "1e-3"),
    Configuration("18-18", "pre", "1e-2"),
    Configuration("36-12", "ln_scaling-layer_scale", "2e-3"),
    Configuration("18-18", "dlcl-pre", "1e-2"),
]
"""CONFIGURATIONS are those whose earlier trials had hardly any effect of the source, and others for comparison. The
last three were chosen when the outcomes of nine were known."""
UPDATES = 600
"""UPDATES is the length of a run; longer ones are judged at this update."""
LONGER = [
    f"training.stop={{updates: {UPDATES}}}",
    "training.diagnostics={every_updates: 100, max_share: null}",
    f"training.checkpoint.every_updates={UPDATES}",
]


def one_run(out: Path, configuration: Configuration, store: Store) -> None:
    """Try a configuration, train it, and write the figures of both to `out`."""
    values = [*configuration.overrides, *languages("fr-en"), f"data.store={store.path}"]
    experiment = load_named("multi30k-de-en", values)
    unigram = unigram_entropy(store)
    reference = reference_of(experiment, store, unigram, TrialOptions(), lambda name, updates: lambda update: None)
    trial = run_trial(experiment, store, unigram, TrialOptions(updates=reference.updates))
    failure = None
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            longer = load_named("multi30k-de-en", [*values, *LONGER])
            if train(run, longer, console=Console(quiet=True)).signal is not None:
                raise SystemExit("stopped; this run starts again")
        except TrainingError as error:
            failure = str(error).replace(folder, "")
        dev = [(r["update"], r.get("nll")) for r in lines_of(run / "metrics.jsonl") if r["kind"] == "validation"]
        depth = lines_of(run / "diagnostics" / "depth.jsonl")
    figures = {
        "name": configuration.name,
        "commit": commit(),
        "processor": processor(),
        "reference": asdict(reference),
        "trial": asdict(trial),
        "failure": failure,
        "dev": dev,
        "depth": [[r["update"], *(r["values"][key] for key in ("source_dependence", "gradient_norm"))] for r in depth],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_atomically(out, (json.dumps(figures) + "\n").encode())
    print(row(json.loads(json.dumps(figures))), flush=True)


def row(figures: dict[str, Any]) -> str:
    """Return a configuration's row of the table."""
    trial = read_trial(figures["trial"])
    verdict, last = judge(trial, Reference(**figures["reference"])), trial.points[trial.updates]
    evens = (f"{evenness(last['gradient_norm'][side]):.0e}" for side in ("encoder", "decoder"))
    depth = {update: cost for update, cost, _ in figures["depth"] if update <= UPDATES}
    reads = [update for update, cost in depth.items() if cost > READS]
    said = [figures["name"], verdict.label, f"{verdict.learned:.2f}", *evens, f"{last['source_dependence']:.0e}"]
    found = [f"{reads[0]:,}" if reads else "never", f"{depth[UPDATES]:.4f}", f"{dict(figures['dev'])[UPDATES]:.2f}"]
    return f"| {' | '.join([*said, *found])} |"


def table() -> None:
    """Print the trial and the run of each configuration."""
    columns = (
        "configuration",
        "verdict",
        "learned",
        "encoder",
        "decoder",
        "source",
        "reads from update",
        "source at end",
    )
    print(f"| {' | '.join(columns)} | dev loss |")
    print("|---" * (len(columns) + 1) + "|")
    for configuration in CONFIGURATIONS:
        file = RESULTS / f"{configuration.name}.json"
        if file.exists():
            print(row(json.loads(file.read_text("utf-8"))))


def main() -> None:
    """Try and train the configurations that have no result yet, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="prepared data")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these configurations, such as 18-18-keel-1e-2")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        table()
        return
    if options.store is None:
        parser.error("--store says where the data is")
    torch.set_num_threads(1)
    store = Store.open(options.store)
    for configuration in CONFIGURATIONS:
        out = RESULTS / f"{configuration.name}.json"
        if not out.exists() and (options.only is None or configuration.name in options.only):
            one_run(out, configuration, store)


if __name__ == "__main__":
    main()
