"""Cost of logging, TensorBoard, checkpoints and depth measures in training on a CPU.

    python -m benchmarks.overhead [--shape demo ...] [--updates 100] [--rounds 4] [--threads N] [--tokens 2048]
        [--folder FOLDER] [--json]

Every turn is a whole run of `ziggurat train` on the embedded language pair, in one process; clocks run from its 11th
update to its last. Four ways take turns:

- `off`: no record, no TensorBoard, no bar, no checkpoint, no depth measures;
- `logging`: the defaults (a record every 50 updates, TensorBoard, the terminal's bar), but no checkpoint;
- `everything`: also one checkpoint in the middle of the `--updates`, written during training;
- `measures`: `off`, plus all depth measures once, in the middle (`training.diagnostics`).

So checkpoints are 1000 / `--updates` times as frequent as by default, and measures 100 / `--updates` times. The cost is
scaled to one checkpoint per 1,000 updates, or one measurement per 100; both figures are printed. Figures are medians of
the rounds' ratios, of wall time and of the CPU time of the process (all threads, including that of the checkpoint),
which other work on the machine disturbs less.

`demo` is the recipe of that name (3+3 layers of width 128), whose short updates suffer most from fixed costs; `T1` is
6+6
layers of width 256. Files go to `--folder` (default: a temporary one).
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from ziggurat.config import Experiment
from ziggurat.config.recipes import load_named
from ziggurat.config.train import TrainingConfig
from ziggurat.data.babel import generate
from ziggurat.data.prepare import prepare
from ziggurat.train.loop import train
from ziggurat.train.update import train_update

SHAPES: dict[str, list[str]] = {
    "demo": [],
    "T1": ["model={preset: tiny, d_model: 256, d_ff: 1024, heads: 4, encoder: {layers: 6}, decoder: {layers: 6}}"],
}
WAYS = ("off", "logging", "everything", "measures")
NEVER, WARM, DEFAULT_CADENCE, AIM = 10**9, 10, 1000, 0.03
MEASURED_EVERY = TrainingConfig().diagnostics.every_updates or NEVER

Cost = tuple[float, float]
"""Cost is seconds per update: wall time, CPU time."""


def experiments(folder: Path, shape: str, o: argparse.Namespace) -> dict[str, Experiment]:
    """Return the configuration of each way, using a store prepared in `folder`."""
    pairs = list(generate(20_000, seed=1))
    for side, language in enumerate(("qlo", "qhi")):
        (folder / f"train.{language}").write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
    overrides = [f"data.store={folder}/store", "data.dev=[]", *SHAPES[shape]]
    overrides += [f"data.train=[{{source: {folder}/train.qlo, target: {folder}/train.qhi}}]"]
    overrides += [f"training.batch.max_tokens={o.tokens}", f"training.stop.updates={WARM + o.updates}"]
    overrides += [f"training.threads={o.threads}"] if o.threads else []
    default, middle = TrainingConfig().log_every_updates, WARM + o.updates // 2
    settings = {
        "off": [f"training.log_every_updates={NEVER}", "training.tensorboard=false"],
        "logging": [f"training.log_every_updates={default}", "training.tensorboard=true"],
    }
    settings |= {"everything": settings["logging"], "measures": settings["off"]}
    found = {}
    for way in WAYS:
        saved = middle if way == "everything" else NEVER
        measured = f"{{every_updates: {middle if way == 'measures' else 'null'}, max_share: null}}"
        rest = [f"training.checkpoint={{every_updates: {saved}}}", f"training.diagnostics={measured}"]
        found[way] = load_named("demo", [*overrides, *settings[way], *rest])
    prepare(found["off"].data)
    return found


def turn(run: Path, way: str, experiment: Experiment) -> Cost:
    """Train once and return what an update took."""
    stamps: list[Cost] = []

    def stamped(*arguments: Any, **options: Any) -> Any:
        stamps.append((time.perf_counter(), time.process_time()))
        return train_update(*arguments, **options)

    console = Console(file=io.StringIO(), force_terminal=way != "off", width=120)
    with patch("ziggurat.train.loop.train_update", stamped):
        train(run, experiment, console=console)
    first, last = stamps[WARM], stamps[-1]
    updates = len(stamps) - 1 - WARM
    return (last[0] - first[0]) / updates, (last[1] - first[1]) / updates


def measure(shape: str, o: argparse.Namespace) -> dict[str, list[Cost]]:
    """Take turns and return what an update took in each."""
    with tempfile.TemporaryDirectory(prefix="ziggurat-bench-", dir=o.folder) as name:
        folder = Path(name)
        configured = experiments(folder, shape, o)
        turn(folder / "warm", "everything", configured["everything"])  # imports, and memory that later turns reuse
        turns: dict[str, list[Cost]] = {way: [] for way in WAYS}
        for number in range(o.rounds):
            start = number % len(WAYS)  # so that no way is always the first
            for way in WAYS[start:] + WAYS[:start]:
                turns[way].append(turn(folder / f"{way}-{number}", way, configured[way]))
    return turns


def drops(turns: dict[str, list[Cost]], updates: int) -> dict[str, dict[str, float]]:
    """Return each way's drop in speed, by clock: medians of the rounds' ratios.

    `default` has checkpoints at the default cadence, `measures_default` has measures.
    """
    found = {}
    for clock, name in enumerate(("wall", "cpu")):
        rounds: dict[str, list[float]] = {
            way: [] for way in ("logging", "everything", "default", "measures", "measures_default")
        }
        for off, logging, everything, measures in zip(
            *([cost[clock] for cost in turns[way]] for way in WAYS), strict=True
        ):
            default = logging + (everything - logging) * updates / DEFAULT_CADENCE
            measures_default = off + (measures - off) * updates / MEASURED_EVERY
            costs = logging, everything, default, measures, measures_default
            for way, cost in zip(rounds, costs, strict=True):
                rounds[way].append(1 - off / cost)
        seconds = statistics.median(cost[clock] for cost in turns["off"])
        found[name] = {"seconds_per_update": seconds, **{way: statistics.median(r) for way, r in rounds.items()}}
    return found


def report(shape: str, found: dict[str, dict[str, float]], o: argparse.Namespace) -> None:
    """Print the figures of one shape."""
    wall, cpu = found["wall"], found["cpu"]
    print(
        f"{shape}: {wall['seconds_per_update']:.4f} s per update, {cpu['seconds_per_update']:.4f} s of CPU "
        f"({o.tokens:,} tokens, {torch.get_num_threads()} threads, {o.rounds} rounds of {o.updates} updates)"
    )
    said = {
        "logging": "logging, TensorBoard, bar",
        "everything": f"and a checkpoint in {o.updates:,} updates",
        "default": f"and one in {DEFAULT_CADENCE:,}, the default",
        "measures": f"measures of depth in {o.updates:,} updates",
        "measures_default": f"and in {MEASURED_EVERY:,}, the default",
    }
    for way, words in said.items():
        print(f"  {words:<34} speed drops by {wall[way]:7.2%} (wall), {cpu[way]:7.2%} (CPU)")
    worst = max(clock[way] for clock in (wall, cpu) for way in ("default", "measures_default"))
    print(f"  {'within' if worst <= AIM else 'OVER'} the aim of {AIM:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    documents = {}
    for shape in o.shape:
        turns = measure(shape, o)
        found = drops(turns, o.updates)
        documents[shape] = {"turns": turns, "drops": found, "updates": o.updates, "tokens": o.tokens, "aim": AIM}
        if not o.json:
            report(shape, found, o)
    if o.json:
        print(json.dumps(documents, indent=2))


if __name__ == "__main__":
    main()
