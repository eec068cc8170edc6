"""Tables and the plot of the Pareto front from the recorded figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "students"

from matplotlib import pyplot as plt  # noqa: E402


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points (speed, quality) that no other point beats in both, fastest first."""
    kept: list[int] = []
    for index in sorted(range(len(points)), key=lambda n: (-points[n][0], -points[n][1])):
        if not kept or points[index][1] > points[kept[-1]][1]:
            kept.append(index)
    return kept


def _baseline(figures: Sequence[Mapping[str, Any]], engine: str) -> Mapping[str, Any] | None:
    """Return the figures of the teacher with an engine and beam 4, with which all are compared."""
    found = [f for f in figures if (f["model"], f["engine"], f["beam"]) == ("teacher", engine, 4)]
    return found[0] if found else None


def print_tables(record: Mapping[str, Any]) -> None:
    """Print one table per engine: a row for each model and beam, those on the front in bold."""
    figures = record["figures"]
    print(f"{record['processor']}; commit {record['commit']}; seed {record['seed']}; {record['plan']}\n")
    for engine in dict.fromkeys(figure["engine"] for figure in figures):
        rows = [figure for figure in figures if figure["engine"] == engine]
        best = front([(row["tokens_per_second"], row["bleu"]) for row in rows])
        teacher = _baseline(figures, engine)
        print(f"{engine}\n\n| model | parameters | beam | BLEU | chrF | tokens/s | tokens per CPU s | times teacher |")
        print("|---" * 8 + "|")
        for number, row in enumerate(rows):
            times = row["tokens_per_second"] / teacher["tokens_per_second"] if teacher else float("nan")
            name = f"**{row['model']}**" if number in best else row["model"]
            cells = [
                name,
                f"{row['parameters'] / 1e6:.1f} M",
                str(row["beam"]),
                f"{row['bleu']:.2f}",
                f"{row['chrf']:.2f}",
            ]
            cells += [f"{row['tokens_per_second']:,.0f}", f"{row['tokens_per_cpu_second']:,.0f}", f"{times:.2f}"]
            print("| " + " | ".join(cells) + " |")
        print()


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw BLEU against output tokens per second, one panel per int8 engine, with the front as a line."""
    engines = [e for e in dict.fromkeys(f["engine"] for f in record["figures"]) if "int8" in e and "shortlist" not in e]
    engines = engines or ["own fp32"]
    figure, axes = plt.subplots(1, len(engines), figsize=(6.0 * len(engines), 4.2), squeeze=False, sharey=True)
    for axis, engine in zip(axes[0], engines, strict=True):
        rows = [row for row in record["figures"] if row["engine"] == engine]
        points = [(row["tokens_per_second"], row["bleu"]) for row in rows]
        for row, point in zip(rows, points, strict=True):
            tuned, beam = row["model"].endswith("-int8"), row["beam"]
            axis.plot(*point, "o" if beam == 1 else "s", color="tab:orange" if tuned else "tab:blue")
            label = f"{row['model'].removesuffix('-int8')}, {beam}"
            axis.annotate(label, point, textcoords="offset points", xytext=(5, 4), fontsize=7)
        axis.plot(*zip(*(points[n] for n in front(points)), strict=True), color="grey", linewidth=0.8, zorder=0)
        axis.set_xscale("log")
        axis.set_xlabel("output tokens per second on all cores")
        axis.set_title(engine)
    axes[0][0].set_ylabel("BLEU (orange: fine-tuned in int8; round: beam 1, square: beam 4)", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
