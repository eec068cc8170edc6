"""Depth against width when training has converged: quality by depth, and its cost in core hours.

    python experiments/depth-that-pays/converge.py --store STORE --fr-en STORE --work FOLDER   # resumes
    python experiments/depth-that-pays/converge.py --work FOLDER --status   # core hours so far
    python experiments/depth-that-pays/converge.py --table

README.md says how to make the stores, Tatoeba de-en and fr-en. A single thread at the lowest priority uses a machine's
spare hours; it may be stopped (SIGSTOP) or killed at any moment. Each completed run leaves one file with its figures
and one with its translations of the test set in results/converged; existing ones are not repeated.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import run as budgets  # noqa: E402
from measuring import commit, processor  # noqa: E402

import ziggurat  # noqa: E402
from ziggurat.config.recipes import load_named  # noqa: E402
from ziggurat.data.corpus import Store  # noqa: E402
from ziggurat.evaluate.comparison import System, compare  # noqa: E402
from ziggurat.evaluate.scores import evaluate  # noqa: E402
from ziggurat.model.build import build_model, count_parameters  # noqa: E402
from ziggurat.system.errors import TrainingError  # noqa: E402
from ziggurat.system.files import write_atomically  # noqa: E402
from ziggurat.train.loop import train  # noqa: E402

RESULTS = HERE / "results" / "converged"
LAYERS = {"6-6": 6, "18-6": 18, "30-6": 30, "12-6": 12, "wide 6-6": 6, "grown 18-6": 18}
"""LAYERS maps a system to its encoder layers, the most important first."""
WIDE = {128: 168, 256: 344}
"""WIDE maps the width of 18-6 to the width of a 6-6 model with as many parameters, within 1.1 %."""
GROWN = "{layers: 6, updates: 4000}, {layers: 12, updates: 8000}"
PEAKS = (1e-3, 2e-3, 4e-3)
BEYOND = (2.5e-4, 5e-4, 8e-3, 1.6e-2)
"""BEYOND are the rates to try while the best so far is at an edge of those tried."""
TRIAL = 3000
"""TRIAL is the updates, two passes over the data, after which dev losses choose the rate; the best trial continues."""
WARM_UP = 1000
DROPOUTS = (0.1, 0.2, 0.3)
EVERY, PATIENCE = 500, 8
"""EVERY is the updates between validations; PATIENCE is how many without a lower dev loss mean convergence."""
SECONDS = 30
"""SECONDS is the time between readings of the CPU clock, and thus the most that a kill leaves uncounted."""


class Run(NamedTuple):
    """One training run."""

    corpus: str
    width: int
    system: str
    dropout: float
    seed: int
    rate: float

    @property
    def name(self) -> str:
        """Name of the run's files and folder."""
        return f"{self.stem}{self.rate:g}"

    @property
    def stem(self) -> str:
        """Common beginning of the names of runs that differ in their rate."""
        system = self.system.replace(" ", "-")
        return f"{self.corpus}-{self.width}-{system}-dropout-{self.dropout:g}-seed-{self.seed}-at-"

    def settings(self) -> list[str]:
        """Return the model and the training, all but their end."""
        width = WIDE[self.width] if self.system == "wide 6-6" else self.width
        layers = LAYERS[self.system]
        return [
            *budgets.System(layers, width).settings(layers),
            f"data.source_language={self.corpus[:2]}",
            *(f"model.dropout.{place}={self.dropout}" for place in ("residual", "embedding")),
            f"training.schedule={{kind: isqrt, peak: {self.rate}, warmup_updates: {WARM_UP}}}",
            *([f"training.growth.stages=[{GROWN}]"] if self.system.startswith("grown") else []),
            "training.precision=bf16",
            f"training.validation={{every_updates: {EVERY}, decode: false, metric: loss}}",
            f"training.checkpoint={{every_updates: {EVERY}, keep_last: 5, average_last: 5}}",
            "training.log_every_updates=100",
            f"training.seed={self.seed}",
        ]

    def result(self, trial: bool = False) -> dict[str, Any] | None:
        """Return the figures of the converged run, or of its first TRIAL updates; None if there are none yet."""
        file = RESULTS / f"{'trial-' if trial else ''}{self.name}.json"
        return json.loads(file.read_text("utf-8")) if file.exists() else None

    def loss(self, trial: bool = False) -> float:
        """Return the lowest dev loss in nats, or a trial's last; infinite if training failed or has not ended."""
        figures = self.result(trial)
        if figures is None or figures["failure"]:
            return math.inf
        losses: list[float] = [loss for _, loss, _ in figures["dev"]]
        return losses[-1] if trial else min(losses)


class Meter:
    """Context that counts a run's CPU time across interruptions.

    Every SECONDS it adds a line to `file`: the time, and the CPU seconds of all processes so far.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._ended = file, threading.Event()
        read = readings(file)
        self._before = read[-1][1] - time.process_time() if read else -time.process_time()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def read(self) -> float:
        """Record the time, and return the CPU seconds so far."""
        seconds = self._before + time.process_time()
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{time.time():.0f} {seconds:.1f}\n")
        return seconds

    def _watch(self) -> None:
        while not self._ended.wait(SECONDS):
            self.read()

    def __enter__(self) -> Meter:
        self.read()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.read()


def readings(file: Path) -> list[tuple[float, float]]:
    """Return a meter's readings of time and CPU seconds, without a line cut off by a kill."""
    whole = file.read_text("utf-8").splitlines(keepends=True) if file.exists() else []
    pairs = [line.split() for line in whole if line.endswith("\n")]
    return [(float(pair[0]), float(pair[1])) for pair in pairs if len(pair) == 2]


def trials(run: Run) -> Iterator[tuple[Run, bool]]:
    """Yield the trials of rates for a run: PEAKS, then the next rate while the best is at an edge."""
    tried = list(PEAKS)
    yield from ((run._replace(rate=rate), True) for rate in tried)
    while True:
        best = min(tried, key=lambda rate: run._replace(rate=rate).loss(trial=True))
        lower, higher = ([r for r in BEYOND if r < min(tried)], [r for r in BEYOND if r > max(tried)])
        beyond = lower[-1:] if best == min(tried) else higher[:1] if best == max(tried) else []
        if not beyond:
            return
        tried += beyond
        yield run._replace(rate=beyond[0]), True


def best_rates(run: Run) -> list[float]:
    """Return the rates whose trials did not fail, best first."""
    losses = {rate: run._replace(rate=rate).loss(trial=True) for rate in (*PEAKS, *BEYOND)}
    return sorted((rate for rate in losses if losses[rate] < math.inf), key=lambda rate: losses[rate])


def full(run: Run, tried: Run) -> Iterator[tuple[Run, bool]]:
    """Yield a run to convergence at the best rate in the trials of `tried`; if it fails, at the next best."""
    for rate in best_rates(tried):
        yield run._replace(rate=rate), False
        if run._replace(rate=rate).loss() < math.inf:
            return


def best_of(runs: Iterable[Run]) -> Run:
    """Return the run with the lowest dev loss, each at its best rate."""
    return min((run._replace(rate=rate) for run in runs for rate in (*PEAKS, *BEYOND)), key=Run.loss)


def plan() -> Iterator[tuple[Run, bool]]:
    """Yield all runs, most important first, and whether each is a trial; later ones depend on earlier results."""
    first = Run("de-en", 128, "6-6", DROPOUTS[0], 1, 0.0)
    for run in (first, first._replace(system="18-6")):  # the most important runs, before the search for a dropout
        yield from trials(run)
        yield from full(run, run)
    for dropout in DROPOUTS[1:]:
        yield from full(first._replace(dropout=dropout), first)
    dropout = best_of(first._replace(dropout=dropout) for dropout in DROPOUTS).dropout
    for corpus, width in (("de-en", 128), ("de-en", 256), ("fr-en", 128), ("fr-en", 256)):
        found = {system: Run(corpus, width, system, dropout, 1, 0.0) for system in LAYERS}
        for system, run in found.items():
            # Each width and depth gets one search for a rate, on de-en and with a model that does not start shallow.
            of = "18-6" if system.startswith("grown") else system
            tried = first if (of, width) == (first.system, first.width) else run._replace(corpus="de-en", system=of)
            yield from trials(tried)
            yield from full(run, tried)
        if (corpus, width) == ("de-en", 128):
            deep = best_of(run for system, run in found.items() if LAYERS[system] > 6)
            for run in (best_of([found["6-6"]]), deep):
                yield from ((run._replace(seed=seed), False) for seed in (2, 3))


def one_run(run: Run, trial: bool, stores: dict[str, Path], work: Path) -> None:
    """Train a run for TRIAL updates or to convergence, translate the test set if converged, and write the figures."""
    out, folder = RESULTS / f"{'trial-' if trial else ''}{run.name}.json", work / run.name
    stop = f"training.stop={{updates: {TRIAL if trial else 'null'}, patience: {PATIENCE}}}"
    experiment = load_named("multi30k-de-en", [*run.settings(), stop, f"data.store={stores[run.corpus]}"])
    opened = Store.open(stores[run.corpus])
    resume = any((folder / "checkpoints").glob("step-*"))
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)  # left by a run killed before its first checkpoint
    failure = None
    with Meter(work / f"{run.name}.cpu") as meter:
        try:
            result = train(folder, experiment, resume=resume, console=Console(quiet=True))
            if result.signal is not None:
                raise SystemExit(128 + result.signal)
        except TrainingError as error:
            failure = str(error)
        seconds = meter.read()
        figures: dict[str, Any] = {
            **run._asdict(),
            "commit": commit(),
            "processor": processor(),
            "parameters": count_parameters(build_model(experiment.model, opened.source.size, opened.target.size)),
            "failure": failure,
            "cpu_seconds": round(seconds),
            "dev": curve(folder, readings(work / f"{run.name}.cpu")),
        }
        if not trial and failure is None:
            figures |= scored(run, folder, out.with_suffix(".en.gz"))
            figures["cpu_seconds_with_test"] = round(meter.read())
    write_atomically(out, (json.dumps(figures) + "\n").encode())
    if not trial and failure is None:
        shutil.rmtree(folder / "checkpoints")
        for other in work.glob(f"{run.stem}*/"):  # trials of other rates
            if other != folder:
                shutil.rmtree(other)
    loss = run.loss(trial)
    bleu = f", BLEU {figures['bleu']:.1f}" if "bleu" in figures else ""
    print(f"{out.stem}: dev loss {loss:.4f}{bleu}, {seconds / 3600:.2f} core hours", flush=True)


def curve(folder: Path, clock: list[tuple[float, float]]) -> list[tuple[int, float, int]]:
    """Return each validation's update, dev loss in nats (infinite if None was recorded) and CPU seconds."""
    file = folder / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    times, seconds = zip(*clock, strict=True)
    return [
        (r["update"], r.get("nll", math.inf), round(float(np.interp(r["time"], times, seconds))))
        for r in records
        if r["kind"] == "validation"
    ]


def scored(run: Run, folder: Path, out: Path) -> dict[str, Any]:
    """Translate the test set with a run's default weights, averaged or best; keep the translations."""
    translator = ziggurat.load(folder, device="cpu")
    found = [t.text for t in translator.translate(lines(run.corpus, run.corpus[:2]), beam_size=4)]
    bleu, chrf = evaluate(found, [lines(run.corpus, "en")], metrics=("bleu", "chrf"))
    write_atomically(out, gzip.compress("".join(line + "\n" for line in found).encode(), mtime=0))
    return {"bleu": bleu.value, "chrf": chrf.value, "signature": bleu.signature}


def lines(corpus: str, language: str) -> list[str]:
    """Return one side of a test set."""
    with gzip.open(f"../shared/data/tatoeba-{corpus}/test.{language}.gz", "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def status(work: Path) -> None:
    """Print the progress of each run, and the core hours of all."""
    total = 0.0
    for file in sorted(work.glob("*.cpu"), key=lambda file: file.stat().st_mtime):
        read = readings(file)
        total += read[-1][1] if read else 0
        name, state = file.name.removesuffix(".cpu"), "running"
        dev = curve(work / name, read) if read else []
        if (RESULTS / f"{name}.json").exists():
            state = "done"
        elif (RESULTS / f"trial-{name}.json").exists():
            state = "tried"
        said = f"update {dev[-1][0]:,}, dev loss {min(loss for _, loss, _ in dev):.4f}" if dev else ""
        print(f"{name:56} {read[-1][1] / 3600 if read else 0:6.2f} h  {state:9}  {said}")
    print(f"{total / 3600:.1f} core hours")


def table() -> None:
    """Print means and standard errors over seeds, and each system's p against 6-6 (paired bootstrap, BLEU)."""
    files = sorted(RESULTS.glob("[!t]*.json"))
    figures = [f for f in (json.loads(file.read_text("utf-8")) for file in files) if not f["failure"]]

    def place(f: dict[str, Any]) -> tuple[str, int, float]:
        return f["corpus"], f["width"], f["dropout"]

    columns = ("system", "parameters", "rate", "seeds", "updates", "core hours", "dev loss", "BLEU", "chrF", "p")
    for (corpus, width, dropout), group in groupby(sorted(figures, key=place), key=place):
        print(f"\nTatoeba {corpus}, width {width}, dropout {dropout:g}\n\n| " + " | ".join(columns) + " |")
        print("|---" * len(columns) + "|")
        found = list(group)
        rows = {system: rows for system in LAYERS if (rows := [f for f in found if f["system"] == system])}
        worse = significance(corpus, rows)
        for system, seeds in rows.items():
            cells = [system, f"{seeds[0]['parameters'] / 1e6:.1f} M", f"{seeds[0]['rate']:g}", str(len(seeds))]
            cells += [f"{statistics.mean(f['dev'][-1][0] for f in seeds):,.0f}"]
            cells += [f"{statistics.mean(f['cpu_seconds'] for f in seeds) / 3600:.1f}"]
            cells += [with_error([min(loss for _, loss, _ in f["dev"]) for f in seeds], 3)]
            cells += [with_error([f[metric] for f in seeds], 1) for metric in ("bleu", "chrf")]
            print("| " + " | ".join([*cells, worse.get(system, "")]) + " |")


def with_error(values: list[float], digits: int) -> str:
    """Return the mean over seeds, with its standard error if there are several."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{error}"


def significance(corpus: str, rows: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Return by system the p of its BLEU against that of 6-6, corrected for the number of pairs (Holm)."""
    if len(rows) < 2 or "6-6" not in rows:
        return {}
    systems = []
    for system, seeds in rows.items():
        names = [Run(*(f[field] for field in Run._fields)).name for f in seeds]
        texts = [gzip.decompress((RESULTS / f"{name}.en.gz").read_bytes()).decode().splitlines() for name in names]
        systems.append(System(system, texts))
    (scores,) = compare(systems, [lines(corpus, "en")], metrics=("bleu",), trials=100).scores
    return {pair.right: f"{pair.bootstrap_adjusted:.3f}" for pair in scores.pairs if pair.left == "6-6"}


def main() -> None:
    """Train, or print the progress or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--fr-en", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--status", action="store_true")
    parser.add_argument("--table", action="store_true")
    o = parser.parse_args()
    if o.table:
        table()
    elif o.work and o.status:
        status(o.work)
    elif o.store and o.fr_en and o.work:
        os.nice(19)
        torch.set_num_threads(1)
        RESULTS.mkdir(parents=True, exist_ok=True)
        o.work.mkdir(parents=True, exist_ok=True)
        for run, trial in plan():
            if run.result(trial) is None:
                one_run(run, trial, {"de-en": o.store.resolve(), "fr-en": o.fr_en.resolve()}, o.work.resolve())
    else:
        parser.error("--store, --fr-en and --work say where the data is and where runs go")


if __name__ == "__main__":
    main()
