"""Figures of run.py -> tables in Markdown on standard output, and curves.svg and unequal.svg next to this file.

python experiments/depth-trainability/table.py
"""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from methods import DEPTHS, INITIALISATIONS, METHODS, UNEQUAL  # noqa: E402

COLOURS = [
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#6cc5b0",
    "#3ca951",
    "#ff8ab7",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#9498a0",
    "#1b9e77",
    "#d95f02",
]
WIDTH, HEIGHT, LEFT, TOP = 300, 260, 44, 28
LOW, HIGH = 3.0, 9.0
"""LOW and HIGH are the range of the loss axis, nats per token."""


Curve = list[tuple[int, float]]
"""Curve is a list of (update, nats per token)."""


def smoothed(run: dict[str, Any], window: int = 5) -> Curve:
    """Return the training loss, each point the mean of the last `window` records."""
    points = [(u, nll) for u, nll, _ in run["train"] if nll is not None]
    return [
        (points[i][0], sum(v for _, v in points[max(0, i + 1 - window) : i + 1]) / min(window, i + 1))
        for i in range(len(points))
    ]


def on_dev(run: dict[str, Any]) -> Curve:
    """Return the loss on the dev set; its exponential is the perplexity."""
    return [(u, nll) for u, nll in run["dev"]]


def panel(title: str, curves: dict[str, Curve], colours: dict[str, str], left: float, top: float) -> list[str]:
    """Return the SVG elements of one panel of curves by name."""
    last = max(u for curve in curves.values() for u, _ in curve)

    def at(update: float, loss: float) -> str:
        x = left + LEFT + update / last * (WIDTH - LEFT - 10)
        y = top + TOP + (HIGH - min(HIGH, max(LOW, loss))) / (HIGH - LOW) * (HEIGHT - TOP - 30)
        return f"{x:.1f},{y:.1f}"

    elements = [f'<text x="{left + LEFT}" y="{top + 16}" font-weight="bold">{html.escape(title)}</text>']
    for loss in range(int(LOW), int(HIGH) + 1):
        (x0, y), (x1, _) = (at(u, loss).split(",") for u in (0, last))
        elements.append(f'<line x1="{x0}" y1="{y}" x2="{x1}" y2="{y}" stroke="#ddd"/>')
        elements.append(f'<text x="{float(x0) - 6}" y="{float(y) + 4}" text-anchor="end">{loss}</text>')
    for update in range(0, last + 1, max(100, last // 4 // 100 * 100)):
        x, y = at(update, LOW).split(",")
        elements.append(f'<text x="{x}" y="{float(y) + 16}" text-anchor="middle">{update}</text>')
    for name, curve in curves.items():
        points = " ".join(at(u, v) for u, v in curve)
        elements.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.6">'
            f"<title>{html.escape(name)}</title></polyline>"
        )
    return elements


def figure(title: str, rows: list[tuple[str, dict[str, dict[str, Curve]]]]) -> str:
    """Return an SVG with a row of panels for each (what it shows, depth -> curves), and a legend."""
    names = list(dict.fromkeys(name for _, depths in rows for curves in depths.values() for name in curves))
    colours = dict(zip(names, COLOURS * 2, strict=False))
    body = []
    for number, (what, depths) in enumerate(rows):
        for i, (depth, curves) in enumerate(depths.items()):
            body += panel(f"{what}, {depth} layers", curves, colours, i * WIDTH, number * HEIGHT)
    below = len(rows) * HEIGHT
    for i, name in enumerate(names):
        x, y = 50 + i % 4 * 190, below + 14 + i // 4 * 18
        body.append(
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}" stroke="{colours[name]}" stroke-width="3"/>'
        )
        body.append(f'<text x="{x + 24}" y="{y}">{html.escape(name)}</text>')
    width = max(820, WIDTH * max(len(depths) for _, depths in rows))
    height = below + 30 + (len(names) + 3) // 4 * 18
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><title>{html.escape(title)}</title>'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(body)}</svg>\n'
    )


def loss_between(run: dict[str, Any], first: int, last: int) -> str:
    """Return the mean training nll in the records of updates `first` to `last`."""
    values = [nll for u, nll, _ in run["train"] if first <= u <= last and nll is not None]
    return f"{sum(values) / len(values):.2f}" if values else "-"


def main() -> None:
    """Read every result, print the tables, write the figure."""
    files = sorted((HERE / "results").glob("*.json"))
    runs = [json.loads(path.read_text("utf-8")) for path in files if not path.name.startswith("unequal")]
    compared = {d: [r for r in runs if r["depth"] == d] for d in DEPTHS}
    compared = {
        d: sorted(found, key=lambda r: list(METHODS).index(r["name"])) for d, found in compared.items() if found
    }
    for depth, found in compared.items():
        print(
            f"\n### {depth} layers\n\n"
            "| method | train nll, updates 1-100 | 101-200 | last 100 | dev nll | dev perplexity | s |"
        )
        print("|---|---|---|---|---|---|---|")
        for run in found:
            if run["failure"] is not None or not run["train"]:
                print(f"| {run['name']} | diverged: {run['failure']} | | | | | {run['seconds']:.0f} |")
                continue
            last = run["train"][-1][0]
            windows = [loss_between(run, a, b) for a, b in ((1, 100), (101, 200), (last - 99, last))]
            dev = run["dev"][-1][1] if run["dev"] else float("nan")
            print(
                f"| {run['name']} | {' | '.join(windows)} | {dev:.3f} | {2.718281828**dev:.1f} | {run['seconds']:.0f} |"
            )
    unequal = [json.loads(path.read_text("utf-8")) for path in files if path.name.startswith("unequal")]
    if unequal:
        print(
            "\n### Unequal depths, training nll\n\n"
            "| depth | initialisation | 1-50 | 51-100 | 101-200 | 201-300 | largest gradient norm |"
        )
        print("|---|---|---|---|---|---|---|")
        for run in sorted(
            unequal, key=lambda r: (list(UNEQUAL).index(r["depth"]), list(INITIALISATIONS).index(r["name"]))
        ):
            windows = [loss_between(run, a, b) for a, b in ((1, 50), (51, 100), (101, 200), (201, 300))]
            norms = [norm for _, _, norm in run["train"] if norm is not None]
            print(f"| {run['depth']} | {run['name']} | {' | '.join(windows)} | {max(norms, default=0.0):.1f} |")
    if compared:
        rows = [
            ("training nll", {d: {r["name"]: smoothed(r) for r in found} for d, found in compared.items()}),
            ("dev nll", {d: {r["name"]: on_dev(r) for r in found} for d, found in compared.items()}),
        ]
        title = "Loss (nats per token; training: mean of 50 updates) over updates, by depth and method"
        (HERE / "curves.svg").write_text(figure(title, rows), encoding="utf-8")
    if unequal:
        depths = {d: {r["name"]: smoothed(r) for r in unequal if r["depth"] == d and r["train"]} for d in UNEQUAL}
        rows = [("training nll", {d: curves for d, curves in depths.items() if curves})]
        title = "Training loss of the first 300 updates at unequal depths, by initialisation"
        (HERE / "unequal.svg").write_text(figure(title, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
