"""Compare verdicts with outcomes: the tables of README.md, from results/ and verdicts/.

python experiments/depth-check/table.py
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from configurations import CALIBRATION, CONFIGURATIONS, Configuration  # noqa: E402

from ziggurat.trainability.trial import Trial  # noqa: E402
from ziggurat.trainability.verdict import Reference, Verdict, judge  # noqa: E402

OUTCOMES = ("trains", "slow", "stuck")
EXPECTED = {"trains": "trains", "risky": "slow", "will not train": "stuck"}
UPDATE = 300
LEARNED = 0.5
REFERENCE = Reference(80, 0.994)
"""Of the trials: width 128, 80 updates, Multi30k de-en."""


def outcome(configuration: Configuration, unigram: float) -> tuple[str, float] | None:
    """Return what became of a real run by update 300, and its dev loss, nats per token; None: not run.

    `trains`: half a nat below what word frequencies give; `stuck`: not below it, or a training that failed; `slow`:
    in between.
    """
    own = HERE / "results" / f"{configuration.name}.json"
    other = HERE.parent / "depth-trainability" / "results" / f"{configuration.outcome}.json"
    file = other if configuration.outcome else own
    if not file.exists():
        return None
    run = json.loads(file.read_text())
    nll = dict(run["dev"]).get(UPDATE)
    if nll is None or run["failure"]:
        return "stuck", float("nan")
    return ("trains" if nll <= unigram - LEARNED else "slow" if nll < unigram else "stuck"), nll


def read_trial(record: dict[str, Any]) -> Trial:
    """Return the trial that verdicts.py wrote."""
    points = {int(update): values for update, values in record["points"].items()}
    return Trial(**{**record, "points": points})


def main() -> None:
    """Print the table of all configurations, and the confusion tables."""
    rows: list[tuple[Configuration, Verdict, str]] = []
    print("| depth | method | peak rate | verdict | learned | encoder | decoder | outcome | dev loss | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for configuration in CONFIGURATIONS:
        file = HERE / "verdicts" / f"{configuration.name}.json"
        if not file.exists():
            continue
        trial = read_trial(json.loads(file.read_text())["trial"])
        verdict, found = judge(trial, REFERENCE), outcome(configuration, trial.unigram)
        if found is None:
            continue
        became, nll = found
        wrong = "" if EXPECTED[verdict.label] == became else "wrong"
        even = [f"{finding.even:.0e}" for finding in verdict.findings if finding.even is not None] or ["", ""]
        rows.append((configuration, verdict, became))
        print(
            f"| {configuration.depth} | {configuration.method} | {configuration.rate} | {verdict.label} "
            f"| {verdict.learned:.2f} | {' | '.join(even)} | {became} | {nll:.2f} | {wrong} |"
        )
    for title, chosen in (
        ("all", rows),
        ("bands were chosen on these", [row for row in rows if row[0].name in CALIBRATION]),
        ("never looked at before", [row for row in rows if row[0].name not in CALIBRATION]),
    ):
        counts = Counter((verdict.label, became) for _, verdict, became in chosen)
        print(f"\n{title}: {len(chosen)} configurations\n\n| verdict | {' | '.join(OUTCOMES)} |\n|---|---|---|---|")
        for label in EXPECTED:
            print(f"| {label} | {' | '.join(str(counts[label, became]) for became in OUTCOMES)} |")
        wrong_ones = sum(count for (label, became), count in counts.items() if EXPECTED[label] != became)
        print(f"\nwrong: {wrong_ones} of {len(chosen)}")


if __name__ == "__main__":
    main()
