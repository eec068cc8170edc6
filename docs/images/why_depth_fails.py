"""The figure of README.md, drawn from records that are in the repository.

    python docs/images/why_depth_fails.py

Left: training loss of 18-18 layers on Multi30k (experiments/depth-trainability/results), mean of 50 updates. Right:
gradient norm by decoder layer before the first update, 18-18 layers of base size
(experiments/figures/results/figure-1.csv).
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from ziggurat.inspect.report import drawing as paper
from ziggurat.inspect.report.figure import Figure, Panel, Series

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parents[1] / "experiments"
METHODS = {"post": "post-norm", "ds-init": "DS-Init", "admin": "ADMIN", "dlcl-pre": "DLCL, pre-norm"}
WINDOW = 5
"""Records of ten updates each that are averaged."""


def losses(method: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return updates and training losses of a run of 18-18 layers, each loss the mean of the last `WINDOW` records."""
    path = EXPERIMENTS / "depth-trainability" / "results" / f"18-18-{method}.json"
    points = [(update, loss) for update, loss, _ in json.loads(path.read_text("utf-8"))["train"]]
    ends = range(WINDOW, len(points) + 1)
    means = (sum(loss for _, loss in points[end - WINDOW : end]) / WINDOW for end in ends)
    return tuple(points[end - 1][0] for end in ends), tuple(means)


def gradients(series: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return layers and gradient norms of a decoder of 18 layers."""
    with (EXPERIMENTS / "figures" / "results" / "figure-1.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["panel"] == "decoder" and row["series"] == series]
    return tuple(float(row["x"]) for row in rows), tuple(float(row["y"]) for row in rows)


def main() -> None:
    """Write why-depth-fails.svg beside this file."""
    runs = {label: number for number, label in enumerate(METHODS.values())}
    learning = tuple(Series(label, *losses(method), run=runs[label]) for method, label in METHODS.items())
    vanishing = tuple(
        Series(label, *gradients(series), run=runs[label])
        for series, label in (("18 layers, base", "post-norm"), ("18 layers, DS-Init", "DS-Init"))
    )
    panels = (
        Panel("Training loss, 18-18 layers", "update", "nats per token", learning),
        Panel("Before the first update", "decoder layer", "gradient norm", vanishing, log_y=True),
    )
    title = "Post-norm at 18-18 layers does not learn: the gradient does not reach its lower decoder layers"
    paper.save(Figure("why-depth-fails", "", title, "", "", panels), HERE, ["svg"])


if __name__ == "__main__":
    main()
