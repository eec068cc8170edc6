"""Compare verdicts with outcomes: the tables of README.md, from results/ and verdicts/.

python experiments/depth-check/table.py
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from configurations import CALIBRATION, Configuration  # noqa: E402
from unseen import ADDED, DATA, SHALLOW, TRAINS  # noqa: E402

from ziggurat.inspect.check import Reference, Verdict, judge  # noqa: E402
from ziggurat.inspect.trial import TrialMeasures  # noqa: E402

OUTCOMES = ("trains", "slow", "stuck")
EXPECTED = {"trains": "trains", "ignores its source": "trains", "risky": "slow", "will not train": "stuck"}
"""EXPECTED maps a verdict to the outcome by loss, which falls even if the source is ignored (`reading.py`)."""
UPDATE = 300
LEARNED = 0.5
"""LEARNED is how far, in nats, below the word frequencies a run on Multi30k must be to count as training."""
REFERENCE = Reference(80, 0.994)
"""REFERENCE is the reference for trials on Multi30k, whose files lack it: width 128, 80 updates."""

Row = tuple[Configuration, Verdict, str]


def run_of(data: str, configuration: Configuration) -> dict[str, Any] | None:
    """Return the figures of a real run; None: not run."""
    file = HERE / "results" / data / f"{configuration.name}.json"
    if configuration.outcome:
        file = HERE.parent / "depth-trainability" / "results" / f"{configuration.outcome}.json"
    found: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return found


def lines(data: str, unigram: float) -> tuple[float, float]:
    """Return the dev losses up to which a run trains and from which it is stuck, nats per token (README.md)."""
    if data == "multi30k":
        return unigram - LEARNED, unigram
    shallow = run_of(data, SHALLOW)
    assert shallow is not None, f"{data} has no shallow run"
    level: float = shallow["level"]
    return level - TRAINS * (level - dict(shallow["dev"])[UPDATE]), level


def outcome(run: dict[str, Any], trains: float, stuck: float) -> tuple[str, float]:
    """Return the outcome of a real run at update 300, and its dev loss; a run that failed is stuck."""
    nll = dict(run["dev"]).get(UPDATE)
    if nll is None or run["failure"]:
        return "stuck", float("nan")
    return ("trains" if nll <= trains else "slow" if nll < stuck else "stuck"), nll


def read_trial(record: dict[str, Any]) -> TrialMeasures:
    """Return the trial that verdicts.py wrote."""
    points = {int(update): values for update, values in record["points"].items()}
    return TrialMeasures(**{**record, "points": points})


def compared(data: str) -> list[Row]:
    """Print the table of a data set; return its configurations with verdict and outcome."""
    rows: list[Row] = []
    print(f"\n{data}\n")
    print("| depth | method | peak rate | verdict | learned | encoder | decoder | outcome | dev loss | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for configuration in DATA[data]:
        file, run = HERE / "verdicts" / data / f"{configuration.name}.json", run_of(data, configuration)
        if not file.exists() or run is None:
            continue
        record = json.loads(file.read_text())
        trial = read_trial(record["trial"])
        verdict = judge(trial, REFERENCE if data == "multi30k" else Reference(**record["reference"]))
        became, nll = outcome(run, *lines(data, trial.unigram))
        wrong = "" if EXPECTED.get(verdict.label) == became else "wrong"
        even = [f"{finding.even:.0e}" for finding in verdict.findings if finding.even is not None] or ["", ""]
        rows.append((configuration, verdict, became))
        print(
            f"| {configuration.depth} | {configuration.method} | {configuration.rate} | {verdict.label} "
            f"| {verdict.learned:.2f} | {' | '.join(even)} | {became} | {nll:.2f} | {wrong} |"
        )
    return rows


def confusion(title: str, rows: Sequence[Row]) -> None:
    """Print how often each verdict had each outcome."""
    counts = Counter((verdict.label, became) for _, verdict, became in rows)
    print(f"\n{title}: {len(rows)} configurations\n\n| verdict | {' | '.join(OUTCOMES)} |\n|---|---|---|---|")
    for label in dict.fromkeys([*EXPECTED, *(label for label, _ in counts)]):
        print(f"| {label} | {' | '.join(str(counts[label, became]) for became in OUTCOMES)} |")
    wrong = sum(count for (label, became), count in counts.items() if EXPECTED.get(label) != became)
    print(f"\nwrong: {wrong} of {len(rows)}")


def main() -> None:
    """Print the tables of all configurations, and the confusion tables."""
    rows = compared("multi30k")
    other = {data: compared(data) for data in DATA if data != "multi30k"}
    unseen = [row for data in other for row in other[data] if row[0] not in ADDED[data]]
    added = [row for data in other for row in other[data] if row[0] in ADDED[data]]
    confusion("Multi30k", rows)
    confusion("Multi30k, bands were chosen on these", [row for row in rows if row[0].name in CALIBRATION])
    confusion("Multi30k, never looked at before", [row for row in rows if row[0].name not in CALIBRATION])
    confusion("other data", unseen)
    confusion("other data, added since none of those was slow", added)


if __name__ == "__main__":
    main()
