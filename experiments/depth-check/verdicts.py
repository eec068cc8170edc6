"""Give every configuration of a data set its verdict, with the same trial as `ziggurat inspect`; one JSON file each.

    python experiments/depth-check/verdicts.py --store STORE [--data fr-en]

Existing verdicts are not repeated. `table.py` compares them with the outcomes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from configurations import Configuration  # noqa: E402
from outcomes import commit  # noqa: E402
from unseen import DATA, languages  # noqa: E402

from ziggurat.config.recipes import load_named  # noqa: E402
from ziggurat.data.corpus import Store, unigram_entropy  # noqa: E402
from ziggurat.inspect.check import judge, reference_of  # noqa: E402
from ziggurat.inspect.trial import (  # noqa: E402
    TrialOptions,
    run_trial,
)


def one_verdict(out: Path, configuration: Configuration, data: str, store: Store) -> None:
    """Try one configuration and write the measurements to `out`."""
    experiment = load_named("multi30k-de-en", [*configuration.overrides, *languages(data), f"data.store={store.path}"])
    started = time.perf_counter()
    unigram = unigram_entropy(store)
    reference = reference_of(experiment, store, unigram, TrialOptions(), lambda name, updates: lambda update: None)
    options = TrialOptions(updates=reference.updates)
    trial = run_trial(experiment, store, unigram, options)
    verdict = judge(trial, reference)
    figures = {
        "name": configuration.name,
        "settings": asdict(options),
        "reference": asdict(reference),
        "trial": asdict(trial),
        "verdict": asdict(verdict),
        "seconds": round(time.perf_counter() - started, 1),
        "commit": commit(),
        "machine": f"{platform.machine()}, 1 thread, torch {torch.__version__}",
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(figures) + "\n")
    os.replace(temporary, out)
    print(f"{configuration.name}: {verdict.label}, learned {verdict.learned:.2f} in {figures['seconds']} s")
    for finding in verdict.findings:
        print(f"    {finding.part}: {finding.said}", flush=True)


def main() -> None:
    """Try the configurations that have no verdict yet, one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="prepared data")
    parser.add_argument("--data", choices=DATA, default="multi30k", help="the data set")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = Store.open(options.store)
    for configuration in DATA[options.data]:
        out = HERE / "verdicts" / options.data / f"{configuration.name}.json"
        if not out.exists():
            one_verdict(out, configuration, options.data, store)


if __name__ == "__main__":
    main()
