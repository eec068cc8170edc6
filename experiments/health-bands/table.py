"""The bands of warnings applied to the recorded runs: the tables in README.md.

python experiments/health-bands/table.py
"""

from __future__ import annotations

import math
from pathlib import Path

from ziggurat.train.diagnosis.health import Watch, readings
from ziggurat.train.records import read_records

RESULTS = Path(__file__).resolve().parent / "results"
WARMUP = 120
LEAST = (
    "gradient_ratio.encoder",
    "gradient_ratio.decoder",
    "r.encoder",
    "update_ratio.encoder",
    "update_ratio.decoder",
    "source_dependence",
)
MOST = ("update_ratio.largest", "variance")


def extremes(run: Path) -> tuple[dict[str, float], list[str]]:
    """Return the minimum or maximum of each measure in a run, and the warnings that it would have given."""
    watch, records, warnings = Watch(WARMUP), read_records(run), []
    found = dict.fromkeys(LEAST, math.inf) | dict.fromkeys(MOST, 0.0)
    for number, record in enumerate(records):
        for reading in readings(record, records[:number], warmup_updates=WARMUP):
            name = "variance" if reading.measure.startswith("variance") else reading.measure
            if name in found and reading.value is not None:
                found[name] = (min if name in LEAST else max)(found[name], reading.value)
        for warned in watch.see(record):
            warnings.append(f"{warned.update}: {'' if warned.kind == 'warning' else 'again healthy: '}{warned.measure}")
    return found, warnings


def main() -> None:
    runs = {run.name: extremes(run) for run in sorted(RESULTS.iterdir())}
    print("| run | last update | probe nll then |" + "".join(f" {name} |" for name in (*LEAST, *MOST)))
    print("|---|---|---|" + "---|" * len((*LEAST, *MOST)))
    for name, (found, _) in runs.items():
        last = read_records(RESULTS / name)[-1]
        cells = "".join(" |" if math.isinf(found[m]) else f" {found[m]:.1e} |" for m in (*LEAST, *MOST))
        print(f"| {name} | {last.update} | {last.values['nll']:.2f} |{cells}")
    print("\n| run | warnings, by update |\n|---|---|")
    for name, (_, warnings) in runs.items():
        print(f"| {name} | {'; '.join(warnings) or 'none'} |")


if __name__ == "__main__":
    main()
