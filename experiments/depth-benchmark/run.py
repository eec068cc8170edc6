"""Every depth method on one budget: a small sweep of rates for each, then seeds and depths at the best rate.

    python experiments/depth-benchmark/run.py --store STORE --work FOLDER [--jobs 2]    # all, most valuable first
    python experiments/depth-benchmark/run.py --store STORE --work FOLDER --brief       # only the methods in BRIEF
    python experiments/depth-benchmark/run.py --store STORE --work FOLDER --cost        # seconds and memory
    python experiments/depth-benchmark/run.py --store STORE --work FOLDER --long        # best eight, Tatoeba fr-en

STORE is Multi30k prepared by `ziggurat prepare multi30k-de-en` (for --long, Tatoeba fr-en: README.md); FOLDER keeps the
runs, for `ziggurat report`.
A run is one file in results/, and its translations another; existing ones are not repeated, so a stopped call resumes,
and new methods are filled in. --method, --depth and --seed select some. table.py prints the figures so far.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing
import shutil
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from measuring import commit, processor, seconds_in_turns  # noqa: E402
from methods import (  # noqa: E402
    BEYOND,
    BRIEF,
    CLIMBED,
    DEPTHS,
    LEAN,
    LONG,
    METHODS,
    PRECISION,
    RATES,
    SLOWER,
    SWEEP,
    SWEPT_AT,
    TIE,
    UPDATES,
    common,
)

import ziggurat  # noqa: E402
from ziggurat.config.recipes import load_named  # noqa: E402
from ziggurat.data.corpus import Store  # noqa: E402
from ziggurat.evaluate.scores import evaluate  # noqa: E402
from ziggurat.inspect.machine import BatchShape, simulate_update  # noqa: E402
from ziggurat.model.build import build_model, count_parameters  # noqa: E402
from ziggurat.system.errors import TrainingError, ZigguratError  # noqa: E402
from ziggurat.system.files import write_atomically  # noqa: E402
from ziggurat.train.loop import train  # noqa: E402

MAIN = "18-18"
TEST = Path("../shared/data/multi30k/test_2016_flickr")
LONG_TEST = Path("../shared/data/tatoeba-fr-en/test")
PLAIN = "pre"
"""PLAIN is the method with which all are compared."""
BEST = 8
"""BEST are the methods tried on the second corpus besides the plain one: those with the lowest mean dev losses."""


class Run(NamedTuple):
    """One training run."""

    method: str
    depth: str
    seed: int
    updates: int
    rate: float

    @property
    def name(self) -> str:
        """Name of the run's file and folder."""
        rate = f"{'rate' if self.trial else 'at'}-{self.rate:g}"
        return f"{'fr-en-' if self.long else ''}{self.depth}-{self.method}-{self.seed}-{rate}"

    @property
    def trial(self) -> bool:
        """Return whether it is a short run that tries a rate."""
        return self.updates == SWEEP

    @property
    def long(self) -> bool:
        """Return whether it is a run on the second corpus."""
        return self.updates == LONG

    @property
    def test(self) -> tuple[list[str], list[str]]:
        """Source and reference of its test set."""
        test, source = (LONG_TEST, "fr") if self.long else (TEST, "de")
        return lines_of(test, source), lines_of(test, "en")


def trial(method: str, rate: float) -> Run:
    """Return the short run that tries a rate."""
    return Run(method, SWEPT_AT.get(method, MAIN), 1, SWEEP, rate)


def result_of(run: Run) -> Path:
    """Return the file with the figures of a run."""
    return HERE / "results" / f"{run.name}.json"


def loss_of(run: Run) -> float | None:
    """Return the dev loss after the last update: infinite where training failed, None where it has not been run."""
    if not (file := result_of(run)).exists():
        return None
    found = json.loads(file.read_text("utf-8"))
    loss = found["dev"][-1][1] if found["dev"] and not found["failure"] else math.inf
    return loss if math.isfinite(loss) else math.inf


def swept(method: str) -> dict[float, float]:
    """Return the dev loss after each rate tried so far."""
    tried = {rate: loss_of(trial(method, rate)) for rate in (*RATES, *BEYOND)}
    return {rate: loss for rate, loss in tried.items() if loss is not None}


def missing(method: str) -> list[float]:
    """Return the rates to try next: those of the sweep, then one beyond its edge as long as the edge is best."""
    tried = swept(method)
    if not set(RATES) <= set(tried):
        return [rate for rate in RATES if rate not in tried]
    best = min(tried, key=lambda rate: tried[rate])
    if best == max(tried):
        return [rate for rate in BEYOND if rate > best][:1]
    return [rate for rate in BEYOND if rate < best] if best == min(tried) else []


def rate_of(method: str, depth: str = MAIN) -> float:
    """Return the rate of a method at a depth: the best of the first seed's full runs, or else that of the trials."""
    at = SWEPT_AT.get(method, depth)
    full = losses_at(method, at) if at == MAIN or method in CLIMBED.get(at, ()) else {}
    if not full and at not in (MAIN, SWEPT_AT.get(method)):
        return rate_of(method)
    found = full or swept(method)
    return min(found, key=lambda rate: found[rate])


def losses_at(method: str, depth: str) -> dict[float, float]:
    """Return the dev loss of the first seed's full runs by rate."""
    tried = {rate: loss_of(Run(method, depth, 1, UPDATES, rate)) for rate in (*RATES, *BEYOND)}
    return {rate: loss for rate, loss in tried.items() if loss is not None}


def climbing(method: str, depth: str) -> list[Run]:
    """Return the next full run in the search for a method's rate at a depth, if there is one.

    The rate of its trials comes first (at other depths: the rate of the main depth), then lower ones as long as they
    improve, then higher ones that trials do not rule out.
    """
    if missing(method) or method not in CLIMBED.get(depth, ()):
        return []
    rates, tried, trials = sorted((*RATES, *BEYOND)), losses_at(method, depth), swept(method)
    best = rates.index(rate_of(method, depth))
    if not tried:
        return [Run(method, depth, 1, UPDATES, rates[best])]
    around = ((rates[max(0, best - 1)], LEAN), (rates[min(best + 1, len(rates) - 1)], TIE))
    bar = min(trials.values())
    likely = [rate for rate, more in around if rate not in tried and trials.get(rate, math.inf) < bar + more]
    return [Run(method, depth, 1, UPDATES, rate) for rate in likely[:1]]


def all_runs() -> list[Run]:
    """Return the table's runs whose rates are known, most important first."""
    known = [method for method in (*(m for m in METHODS if m not in BRIEF), *BRIEF) if not missing(method)]
    first = sorted(known, key=lambda method: method in SLOWER)
    seeds = [
        Run(method, MAIN, seed, UPDATES, rate_of(method))
        for slower in (False, True)
        for seed in (1, 2, 3)
        for method in known
        if (method in SLOWER) == slower
    ]
    others = [
        Run(method, depth, 1, UPDATES, rate_of(method, depth))
        for depth in DEPTHS
        for method in first
        if depth in BRIEF.get(method, DEPTHS) and depth != MAIN
    ]
    return [*seeds, *others]


def long_runs() -> list[Run]:
    """Return the runs on the second corpus: plain pre-norm and the best methods that have three seeds at 18-18."""
    losses = {}
    for method in METHODS:
        if not missing(method):
            found = [loss_of(Run(method, MAIN, seed, UPDATES, rate_of(method))) for seed in (1, 2, 3)]
            if None not in found:
                losses[method] = statistics.mean(loss for loss in found if loss is not None)
    best = sorted(losses, key=lambda method: losses[method])[:BEST]
    return [Run(method, MAIN, 1, LONG, rate_of(method)) for method in dict.fromkeys((*best, PLAIN)) if method in losses]


def one_run(run: Run, store: str, work: Path) -> None:
    """Train once, translate the test set, and write the figures."""
    out, folder = result_of(run), work / run.name
    out.parent.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    values = [*common(run.method, DEPTHS[run.depth], run.rate, run.updates, run.seed), f"data.store={store}"]
    if run.long:
        values.append("data.source_language=fr")
    experiment = load_named("multi30k-de-en", values)
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was stopped
    began, failure = time.perf_counter(), None
    try:
        result = train(folder, experiment, console=Console(stderr=True, quiet=True))
        if result.signal is not None:
            raise SystemExit(128 + result.signal)
    except TrainingError as error:
        failure = str(error)
    seconds = time.perf_counter() - began
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    measured = [json.loads(line) for line in (folder / "diagnostics" / "depth.jsonl").read_text("utf-8").splitlines()]
    figures: dict[str, Any] = {
        **run._asdict(),
        "commit": commit(),
        "precision": PRECISION,
        "processor": processor(),
        "seconds": round(seconds, 1),
        "failure": failure,
        # Non-finite values are left out of a record.
        "train": [[r["update"], r.get("nll"), r.get("grad_norm")] for r in records if r["kind"] == "train"][::6],
        "dev": [[r["update"], r.get("nll", math.inf)] for r in records if r["kind"] == "validation"],
    }
    if not run.trial:
        figures["measures"] = {"first": kept(measured[0]), "last": kept(measured[-1])} if measured else None
        if failure is None:
            figures |= scored(folder, *run.test, out.with_suffix(".en.gz"))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if run.trial:
        shutil.rmtree(folder, ignore_errors=True)
    write_atomically(out, (json.dumps(figures) + "\n").encode())
    said = f"dev nll {figures['dev'][-1][1]:.3f}" if figures["dev"] else str(failure)
    print(f"{run.name}: {said}, BLEU {figures.get('bleu', 0):.1f}, {seconds:.0f} s", flush=True)


def lines_of(test: Path, language: str) -> list[str]:
    """Return the lines of one side of a test set."""
    with gzip.open(f"{test}.{language}.gz", "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def kept(measured: dict[str, Any]) -> Any:
    """Return the values of each layer in an entry of depth.jsonl, to four digits, without layer-by-layer matrices."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rounded(part) for key, part in value.items()}
        if isinstance(value, list):
            return [rounded(part) for part in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return rounded({k: v for k, v in measured["values"].items() if k not in ("residual_dependency", "similarity")})


def scored(folder: Path, source: list[str], reference: list[str], out: Path) -> dict[str, float]:
    """Translate the source into `out` with the averaged weights; return BLEU and chrF."""
    try:
        translator = ziggurat.load(folder, which="averaged", device="cpu")
    except ZigguratError:  # nothing was averaged: the run was too short
        translator = ziggurat.load(folder, device="cpu")
    found = [t.text for t in translator.translate(source, beam_size=4)]
    write_atomically(out, gzip.compress("".join(line + "\n" for line in found).encode(), mtime=0))
    bleu, chrf = evaluate(found, [reference], metrics=("bleu", "chrf"))
    return {"bleu": bleu.value, "chrf": chrf.value}


def cost(store: str, depth: str, methods: list[str], rounds: int = 12) -> None:
    """Measure an update of each method, interleaved with plain pre-norm, and the memory of the method's tensors."""
    out = HERE / "results" / f"cost-{depth}.json"
    out.parent.mkdir(exist_ok=True)
    opened, found = Store.open(store), json.loads(out.read_text("utf-8")) if out.exists() else {}
    for name in methods:
        experiments = {
            which: load_named("multi30k-de-en", [*common(which, DEPTHS[depth], 1e-3, 600, 1), f"data.store={store}"])
            for which in dict.fromkeys((PLAIN, name))
        }
        times = seconds_in_turns(experiments, opened, rounds)
        means = {which: statistics.median(seconds) for which, seconds in times.items()}
        sizes = (opened.source.size, opened.target.size)
        shape = BatchShape(32, 16, 16)
        peaks = {w: simulate_update(e, sizes, shape, torch.device("cpu")).peak for w, e in experiments.items()}
        found[name] = {
            "seconds": means[name],
            "relative": means[name] / means[PLAIN],
            "memory": peaks[name] / peaks[PLAIN],
            "parameters": count_parameters(build_model(experiments[name].model, *sizes)),
        }
        print(f"{name}: {found[name]}", flush=True)
        write_atomically(out, (json.dumps({m: found[m] for m in METHODS if m in found}, indent=1) + "\n").encode())


def main() -> None:
    """Train what is missing, or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--method", choices=METHODS, nargs="*", default=list(METHODS))
    parser.add_argument("--brief", action="store_true", help="only the methods in BRIEF (methods.py), cheap ones first")
    parser.add_argument("--depth", choices=DEPTHS, nargs="*", default=list(DEPTHS))
    parser.add_argument("--seed", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--long", action="store_true", help="the runs on the second corpus")
    o = parser.parse_args()
    if o.brief:
        o.method = [method for method in BRIEF if method in o.method]
    if o.store is None or o.work is None:
        parser.error("give --store with the data and --work for the runs")
    if o.cost:
        cost(o.store, MAIN, o.method)
        return
    o.work.mkdir(parents=True, exist_ok=True)

    def wanted(runs: list[Run]) -> list[tuple[Run, str, Path]]:
        chosen = [r for r in runs if r.method in o.method and r.depth in o.depth and r.seed in o.seed]
        return [(r, o.store, o.work.resolve()) for r in chosen if not result_of(r).exists()]

    def trials() -> list[Run]:
        methods = sorted(o.method, key=lambda method: method in SLOWER)
        return [trial(method, rate) for method in methods for rate in missing(method)]

    def climbed(depth: str) -> list[Run]:
        return [run for method in o.method for run in climbing(method, depth)]

    # In stages: the next rate depends on those tried before, and the runs for the table on all of these.
    at_most = len((*RATES, *BEYOND))
    searches = [partial(climbed, depth) for depth in CLIMBED if depth in o.depth for _ in range(at_most)]
    stages = [long_runs] if o.long else [trials, trials, trials, *searches, all_runs]
    # One process per run, so that none inherits another's memory.
    with multiprocessing.get_context("spawn").Pool(o.jobs, maxtasksperchild=1) as pool:
        for stage in stages:
            pool.starmap(one_run, wanted(stage()), chunksize=1)


if __name__ == "__main__":
    main()
