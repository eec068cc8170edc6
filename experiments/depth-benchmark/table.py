"""The table and the figure of the depth benchmark, from the runs so far: `python experiments/depth-benchmark/table.py`.

Prints Markdown, with the rates still to be tried, and draws docs/images/what-depth-is-worth.svg. Figures are means over
seeds with standard errors; Welch's t-test over seeds judges differences of BLEU and chrF from plain pre-norm (on the
second corpus, with one seed each, a paired bootstrap over sentences), with p-values corrected for the number of methods
(Holm).
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from methods import CLIMBED, DEPTHS, LONG, METHODS, UPDATES  # noqa: E402
from run import MAIN, PLAIN, Run, climbing, missing, rate_of, result_of  # noqa: E402

from ziggurat.evaluate.metrics import TestSet  # noqa: E402
from ziggurat.evaluate.significance import compare_scores, holm  # noqa: E402

FIGURE = HERE.parents[1] / "docs" / "images" / "what-depth-is-worth.svg"
LEVEL = 0.05
MARKERS = {"6-6": ("s", "tab:grey"), "18-18": ("o", "tab:blue"), "36-12": ("D", "tab:red")}
"""MARKERS maps a depth to its marker and colour in the figure."""


@dataclass
class Found:
    """All runs of one method at one depth that did not fail, and the number of those that did."""

    runs: list[dict[str, Any]]
    failed: int

    @property
    def losses(self) -> list[float]:
        """Dev loss after the last update, one per seed, nats per token."""
        return [run["dev"][-1][1] for run in self.runs]

    def mean(self, key: str) -> str:
        """Return the mean of a score, to one decimal."""
        return f"{statistics.mean(run[key] for run in self.runs):.1f}" if self.runs else ""


def found(method: str, depth: str) -> Found:
    """Read the results of a method at its rate."""
    rates = [] if missing(method) else [rate_of(method, depth)]
    files = [result_of(Run(method, depth, seed, UPDATES, rate)) for rate in rates for seed in (1, 2, 3)]
    runs = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
    good = [run for run in runs if not run["failure"]]
    return Found(good, len(runs) - len(good))


def run_of(figures: dict[str, Any]) -> Run:
    """Return the run that has these figures."""
    return Run(*(figures[field] for field in Run._fields))


def translations(figures: dict[str, Any]) -> list[str]:
    """Read a run's translations of its test set."""
    return gzip.decompress(result_of(run_of(figures)).with_suffix(".en.gz").read_bytes()).decode("utf-8").splitlines()


def signs(p_values: dict[str, float], differences: dict[str, float]) -> dict[str, str]:
    """Return `+` or `-` for each method that is significantly better or worse than pre-norm."""
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return {m: ("+" if differences[m] > 0 else "-") if p < LEVEL else "" for m, p in adjusted.items()}


def by_seeds(runs: dict[str, list[dict[str, Any]]], score: str) -> dict[str, str]:
    """Return the sign of each method with several seeds; `runs`: method -> the figures of its runs."""
    scores = {method: [run[score] for run in of] for method, of in runs.items() if len(of) > 1}
    others = {method: found for method, found in scores.items() if method != PLAIN and PLAIN in scores}
    p_values = {method: welch(found, scores[PLAIN]) for method, found in others.items()}
    return signs(p_values, {m: statistics.mean(found) - statistics.mean(scores[PLAIN]) for m, found in others.items()})


def welch(first: list[float], second: list[float]) -> float:
    """Return the two-sided p-value of Welch's t-test (1947) of equal means."""
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    t = (statistics.mean(first) - statistics.mean(second)) / sum(parts) ** 0.5
    freedom = sum(parts) ** 2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (first, second), strict=True))
    # The tail of Student's distribution: x = tan(angle) sqrt(freedom) makes its density cos(angle)^(freedom - 1).
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    tail = density[angles >= np.arctan(abs(t) / freedom**0.5)]
    return float(tail.sum() / density.sum())


def by_sentences(runs: dict[str, dict[str, Any]], name: str) -> dict[str, str]:
    """Return the sign of each method on the same test set; `runs`: method -> the figures of its only run."""
    if PLAIN not in runs:
        return {}
    metric = TestSet([run_of(runs[PLAIN]).test[1]], None, "en", None, False).metric(name, None)
    tables = {method: metric.statistics([translations(run)]) for method, run in runs.items()}
    pairs = {
        method: compare_scores(metric, (method, PLAIN), (table, tables[PLAIN]), trials=1).pairs[0]
        for method, table in tables.items()
        if method != PLAIN
    }
    return signs({m: pair.bootstrap for m, pair in pairs.items()}, {m: pair.difference for m, pair in pairs.items()})


def with_error(values: list[float]) -> str:
    """Return the mean, and the standard error where there are several values."""
    if not values:
        return ""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{error}"


def measures(runs: list[dict[str, Any]]) -> list[str]:
    """Return the initial gradient of the lowest decoder layer relative to the highest, and how alike states become."""
    known = [run["measures"] for run in runs if run["measures"]]
    if not known:
        return ["", ""]
    gradients = [found["first"]["gradient_norm"]["decoder"] for found in known]
    alike = [value for found in known for value in found["last"]["adjacent_similarity"] if value is not None]
    # The mean is geometric, as for all ratios, and leaves out runs in which no gradient reaches one of the two.
    ratios = [layers[0] / layers[-1] for layers in gradients if layers[0] and layers[-1]]
    return [f"{statistics.geometric_mean(ratios):.2g}" if ratios else "", f"{statistics.mean(alike):.2f}"]


def draw(of: dict[str, dict[str, Found]], cost: dict[str, Any]) -> None:
    """Draw dev losses at each depth, the best at the main depth on top, and the cost of an update."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    everything = of[MAIN]
    shown = sorted((m for m, at in everything.items() if at.runs), key=lambda m: -statistics.mean(everything[m].losses))
    with mpl.rc_context({"svg.hashsalt": "depth", "svg.fonttype": "none", "font.size": 8, "axes.spines.right": False}):
        figure = Figure(figsize=(7.2, 0.17 * len(shown) + 1.1), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        for depth, (marker, colour) in MARKERS.items():
            seeds = {row: of[depth][method].losses for row, method in enumerate(shown) if of[depth][method].runs}
            means = [statistics.mean(losses) for losses in seeds.values()]
            left.plot(means, list(seeds), marker, color=colour, markersize=4, label=f"{depth} layers")
            for row, losses in seeds.items():
                left.plot([min(losses), max(losses)], [row, row], color=colour, linewidth=1)
        for row, method in enumerate(shown):
            if method in cost:
                right.barh(row, cost[method]["relative"], color="tab:grey", height=0.6)
        left.axvline(statistics.mean(everything[PLAIN].losses), color=MARKERS[MAIN][1], linewidth=0.5)
        left.set_yticks(range(len(shown)), shown)
        left.set_xlabel(f"dev loss after {UPDATES} updates, nats per token (a line: all seeds)")
        left.legend(loc="center right", frameon=False)
        right.set_xlabel("seconds per update,\nof pre-norm's")
        for axes in (left, right):
            axes.spines["top"].set_visible(False)
        FigureCanvasSVG(figure)
        figure.savefig(FIGURE, metadata={"Date": None, "Title": "What depth is worth, method by method"})


def second_corpus() -> None:
    """Print the runs on Tatoeba fr-en, best first."""
    known = [method for method in METHODS if not missing(method)]
    files = [result_of(Run(method, MAIN, 1, LONG, rate_of(method))) for method in known]
    runs = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
    good = {run["method"]: run for run in runs if not run["failure"]}
    bleu, chrf = (by_sentences(good, name) for name in ("bleu", "chrf"))
    if runs:
        print(f"\n| method, Tatoeba fr-en, {LONG} updates | dev loss | BLEU | chrF |\n" + "|---" * 4 + "|")
    for run in sorted(runs, key=lambda run: float("inf") if run["failure"] else run["dev"][-1][1]):
        method, row = run["method"], ["failed", "", ""]
        if not run["failure"]:
            scores = (f"{run[name]:.1f}{of.get(method, '')}" for name, of in (("bleu", bleu), ("chrf", chrf)))
            row = [f"{run['dev'][-1][1]:.3f}", *scores]
        print("| " + " | ".join([method, *row]) + " |")


def open_searches() -> None:
    """Print the full runs that would continue the search for rates."""
    for depth in CLIMBED:
        wanted = [run for method in METHODS for run in climbing(method, depth) if not result_of(run).exists()]
        if wanted:
            print(f"\nRates still to be tried at {depth}: " + ", ".join(f"{r.method} {r.rate:g}" for r in wanted))


def main() -> None:
    """Print the table, and draw the figure."""
    of = {depth: {method: found(method, depth) for method in METHODS} for depth in DEPTHS}
    main_depth = of[MAIN]
    costs = HERE / "results" / f"cost-{MAIN}.json"
    cost = json.loads(costs.read_text("utf-8")) if costs.exists() else {}
    bleu, chrf = (by_seeds({m: here.runs for m, here in main_depth.items()}, name) for name in ("bleu", "chrf"))
    others = [depth for depth in DEPTHS if depth != MAIN]
    heads = ["method", "rate", "seeds", f"dev loss {MAIN}", "BLEU", "chrF", *(f"dev loss {depth}" for depth in others)]
    heads += ["lowest gradient", "likeness", "seconds", "memory"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    tried = [method for method in METHODS if main_depth[method].runs or main_depth[method].failed]
    for method in sorted(tried, key=lambda m: statistics.mean(main_depth[m].losses or [float("inf")])):
        here, more = main_depth[method], cost.get(method)
        row = [
            method,
            ", ".join(sorted({f"{run['rate']:g}" for run in here.runs})),
            f"{len(here.runs)}" + (f", {here.failed} failed" if here.failed else ""),
            with_error(here.losses),
            here.mean("bleu") + bleu.get(method, ""),
            here.mean("chrf") + chrf.get(method, ""),
            *(with_error(of[depth][method].losses) for depth in others),
            *measures(here.runs),
            f"{more['relative']:.2f}" if more else "",
            f"{more['memory']:.2f}" if more else "",
        ]
        print("| " + " | ".join(row) + " |")
    second_corpus()
    open_searches()
    if any(here.runs for here in main_depth.values()):
        draw(of, cost)


if __name__ == "__main__":
    main()
