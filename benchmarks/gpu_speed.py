"""Training speed on a GPU, ours and that of a plain torch.nn.Transformer loop, in one call of under 9 minutes.

    python -m benchmarks.gpu_speed [--model "base 6-6" ...] [--tokens 25000 4096 50000] [--seconds 4] [--minutes 8]
        [--small] [--device cuda] [--no-compile]
    python -m benchmarks.gpu_speed --device pretend --small     # the default without a GPU

First come checks that only a GPU can answer (flash attention on padded batches, CUDA graphs, compiled layers, bf16),
then translation: 256 sentences of 20 tokens to outputs of the same length, beam 4, 64 at a time and one alone,
untrained weights, only the search, and the same with CTranslate2 where it is installed. Then every model at every batch
size, all in bf16 autocast: base 6-6, 30-6, 60-12, MAtt 12-12 (width 512), RNMT+ 6 (width 1024), vocabulary 32,000,
random sentences with log-normal lengths. It reports real target tokens/s, the needed operations (6 per weight and
token, 12 d per query and key, without padding) as a share of torch's fastest bf16 product of two 8192 x 8192 matrices,
and the peak of what torch allocates. MAtt's plain loop is a Transformer of its depth with attention instead of
averages; RNMT+ has none. At base 6-6 compiled layers and CUDA graphs are measured too, at 60-12 graphs, and
recomputation in the largest batches.

A cell warms up on all its batches, then ours and the plain loop take turns, `--seconds` each in two rounds. Whatever
does not fit into memory or into `--minutes` is skipped, and reported. `--small` (the default without a GPU) runs the
same code at tiny sizes. On the pretend accelerator (tools/pretend_device.py), the default without a GPU, speed columns
stay empty, and launched operators, waits, copies to the device and their bytes are counted for an update and for a
search step. The last line is the whole result as JSON. Exit status 1 if a check fails, or a cell breaks.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_checks import checks
from benchmarks.gpu_counts import HEAD, being_there, best_device, counts_of, is_real, said, shared_out
from benchmarks.gpu_models import MODELS, Ours, Plain, batches_of, config_of, operations
from benchmarks.gpu_translation import translation
from ziggurat.data.loader import Batch
from ziggurat.model.accelerator import device_name, free_cache, memory_in_use, runtime, synchronize, usable_device
from ziggurat.system.errors import printable
from ziggurat.train.device import Shortage, within_memory

GIB = 1 << 30
ROUNDS = 2
COMPILE_SECONDS = 120.0
"""COMPILE_SECONDS is how long a first compilation may take; it cannot be interrupted."""


class Sizes(NamedTuple):
    """The sizes in which a GPU differs from a trial of this code on a CPU."""

    width: int
    lstm_width: int
    heads: int
    vocabulary: int
    longest: int
    batches: int
    square: int
    divide_tokens: int


LARGE = Sizes(512, 1024, 8, 32_000, 250, 4, 8192, 1)
SMALL = Sizes(16, 16, 2, 60, 20, 2, 256, 100)


class Clock:
    """The remaining time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Return the seconds that are left; below 0 when time is up."""
        return self._end - time.perf_counter()


def peak(device: torch.device, square: int) -> float:
    """Return the TFLOP/s of the fastest bf16 product of square matrices within two seconds."""
    a, b = (torch.randn(square, square, device=device, dtype=torch.bfloat16) for _ in range(2))
    best, end = 0.0, time.perf_counter() + 2
    while time.perf_counter() < end:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(5):
            a @ b
        synchronize(device)
        best = max(best, 5 * 2 * square**3 / (time.perf_counter() - began) / 1e12)
    return best


class Runner(NamedTuple):
    """The training to be measured, warmed up, and its peak memory in GiB (None where PyTorch does not report it)."""

    trains: Ours | Plain
    peak_gib: float | None


def prepared(
    make: Callable[[], Ours | Plain], batches: list[Batch], rounds: int, device: torch.device
) -> Runner | Shortage:
    """Build one candidate and warm it up, `rounds` times over all batches."""
    module = runtime(device)
    kept = hasattr(module, "max_memory_allocated")
    gc.collect()
    free_cache(device)
    if kept:
        module.reset_peak_memory_stats(device)
    before = memory_in_use(device)

    def warm() -> Ours | Plain:
        made = make()
        for batch in batches * rounds:
            made.update(batch)
        synchronize(device)
        return made

    made = within_memory(warm, device)
    if isinstance(made, Shortage):
        return made
    return Runner(made, (module.max_memory_allocated(device) - before) / GIB if kept else None)


def speeds(runners: dict[str, Runner], batches: list[Batch], device: torch.device, seconds: float) -> dict[str, float]:
    """Return the target tokens/s of each, means of the rounds in which they take turns."""
    found: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(ROUNDS):
        for name, runner in runners.items():
            began, tokens, updates = time.perf_counter(), 0, 0
            for batch in cycle(batches):
                runner.trains.update(batch)
                tokens, updates = tokens + batch.target_tokens, updates + 1
                if updates % len(batches) == 0:  # whole cycles: batches differ
                    synchronize(device)
                    if time.perf_counter() - began > seconds / ROUNDS:
                        break
            found[name].append(tokens / (time.perf_counter() - began))
    return {name: statistics.fmean(values) for name, values in found.items()}


class Cell(NamedTuple):
    """One model at one batch size; `variants` are ours."""

    model: str
    tokens: int
    variants: tuple[str, ...]
    plain: bool


def cells(models: list[str], budgets: list[int], compiled: bool) -> Iterator[Cell]:
    """Yield the cells to measure, most important first."""
    for tokens in budgets:
        for model in models:
            yield Cell(model, tokens, ("eager",), plain=not model.startswith("RNMT"))
    for model in (m for m in ("base 6-6", "60-12") if m in models):
        for tokens in budgets:
            yield Cell(model, tokens, ("graphs",), plain=False)
    if "60-12" in models:
        yield Cell("60-12", max(budgets), ("recompute",), plain=False)
    if compiled and "base 6-6" in models:
        for tokens in budgets:
            yield Cell("base 6-6", tokens, ("compiled",), plain=False)


def measure(
    cell: Cell, sizes: Sizes, device: torch.device, seconds: float, limit: float | None
) -> list[dict[str, Any]]:
    """Return a row for each candidate of the cell."""
    width = sizes.lstm_width if cell.model.startswith("RNMT") else sizes.width
    config = config_of(cell.model, width, sizes.heads)
    tokens = max(4 * sizes.longest, cell.tokens // sizes.divide_tokens)
    batches = batches_of(tokens, sizes.vocabulary, sizes.batches, sizes.longest)
    makers: dict[str, Callable[[], Ours | Plain]] = {
        variant: lambda variant=variant: Ours(config, sizes.vocabulary, device, variant)  # type: ignore[misc]
        for variant in cell.variants
    }
    if cell.plain:
        makers["plain loop"] = lambda: Plain(config, sizes.vocabulary, device, sizes.longest)
    # Graphs are recorded in the second round and replayed in the third.
    tried = {name: prepared(make, batches, 3 if name == "graphs" else 1, device) for name, make in makers.items()}
    runners = {name: runner for name, runner in tried.items() if isinstance(runner, Runner)}
    found = speeds(runners, batches, device, seconds) if is_real(device) else {}
    models = [runner.trains.model for runner in runners.values() if isinstance(runner.trains, Ours)]
    target = sum(batch.target_tokens for batch in batches)
    work = sum(operations(models[0], batch) for batch in batches) / target if models else 0.0
    rows = []
    for name, runner in tried.items():
        row: dict[str, Any] = {"model": cell.model, "tokens": cell.tokens, "candidate": name}
        if isinstance(runner, Shortage):
            rows.append({**row, "skipped": f"out of memory: {runner}"})
            continue
        counts = counts_of(device, lambda trains=runner.trains: [trains.update(batch) for batch in batches])  # type: ignore[misc]
        speed = found.get(name)
        row |= {"tokens_per_second": speed, "share": speed * work / 1e12 / limit if speed and work and limit else None}
        rows.append({**row, "peak_gib": runner.peak_gib, "an_update": shared_out(counts, len(batches))})
    return rows


def skipped(cell: Cell, why: str) -> list[dict[str, Any]]:
    names = [*cell.variants, *(["plain loop"] if cell.plain else [])]
    return [{"model": cell.model, "tokens": cell.tokens, "candidate": name, "skipped": why} for name in names]


def line(row: dict[str, Any], plain: float | None) -> str:
    head = f"{row['model']:<11} {row['tokens']:>6}  {row['candidate']:<11}"
    if "skipped" in row:
        return f"{head} {row['skipped']}"
    gib = row["peak_gib"]
    memory = "     - GiB" if gib is None else f"{gib:6.1f} GiB" if gib > 0.1 else f"{1024 * gib:6.1f} MiB"
    share = "     -" if row["share"] is None else f"{row['share']:6.1%}"
    speed = "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}"
    ratio = f"   {row['tokens_per_second'] / plain:5.2f} times the plain loop" if plain else ""
    return f"{head} {speed:>11}  {share}  {memory}{ratio}  {said(row['an_update'])}".rstrip()


def all_cells(
    o: argparse.Namespace, sizes: Sizes, device: torch.device, clock: Clock, limit: float | None
) -> list[dict[str, Any]]:
    """Measure as much as time permits, and print results as they come."""
    rows: list[dict[str, Any]] = []
    plain: dict[tuple[str, int], float] = {}
    head = "model       tokens  candidate    target tok/s   share   peak"
    print(head if is_real(device) else f"{head}        {HEAD}  of an update", flush=True)
    for cell in cells(o.model, o.tokens, o.compile):
        first = cell.variants == ("compiled",) and not any(r["candidate"] == "compiled" for r in rows)
        wanted = 2 * o.seconds * (1 + cell.plain) + (COMPILE_SECONDS if first else 0) if not o.small else 0.0
        if clock.left < wanted:
            new = skipped(cell, "no time left")
        elif cell.variants == ("graphs",) and device.type != "cuda":
            new = skipped(cell, "CUDA graphs need a GPU")
        else:
            try:
                new = measure(cell, sizes, device, o.seconds, limit)
            except Exception as error:  # a failure of one cell must not hide the others
                new = skipped(cell, f"failed: {type(error).__name__}: {printable(str(error), 300)}")
        for row in new:
            if row["candidate"] == "plain loop" and row.get("tokens_per_second"):
                plain[cell.model, cell.tokens] = row["tokens_per_second"]
        for row in new:
            beside = None if row["candidate"] == "plain loop" else plain.get((cell.model, cell.tokens))
            print(line(row, beside), flush=True)
        rows += new
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default=best_device())
    parser.add_argument("--small", action=argparse.BooleanOptionalAction)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    o = parser.parse_args()
    with being_there(o.device):
        raise SystemExit(run(o, usable_device(o.device, "--device")))


def run(o: argparse.Namespace, device: torch.device) -> int:
    """Run the requested checks and measurements; return the exit status."""
    clock = Clock(60 * o.minutes)
    o.small = device.type == "cpu" or not is_real(device) if o.small is None else o.small
    o.compile = device.type == "cuda" if o.compile is None else o.compile
    o.seconds = o.seconds or (0.1 if o.small else 4.0)
    # Counts hardly depend on the size of batches.
    o.tokens = o.tokens or ([25_000, 4096, 50_000] if is_real(device) else [25_000])
    sizes = SMALL if o.small else LARGE
    limit = peak(device, sizes.square) if is_real(device) else None
    reached = "no speeds are measured on it" if limit is None else f"bf16 matmul peak {limit:.3g} TFLOP/s"
    print(f"{device_name(device)}, torch {torch.__version__}, {reached}", flush=True)
    tested = []
    for check in checks(device, sizes.width, sizes.heads, sizes.vocabulary, compiled=o.compile):
        verdict = {True: "right", False: "WRONG", None: "not to be seen here"}[check.right]
        print(f"{check.name}: {verdict}: {check.found}", flush=True)
        tested.append(check._asdict())
    translated = translation(sizes.width, sizes.heads, sizes.vocabulary, device)
    rows = all_cells(o, sizes, device, clock, limit)
    document = {"device": device_name(device), "torch": torch.__version__, "peak_tflops": limit, "small": o.small}
    print(json.dumps({**document, "checks": tested, "translation": translated, "rows": rows}))
    broken = rows if is_real(device) else rows + translated
    return any(check["right"] is False for check in tested) or any(
        row.get("skipped", "").startswith("failed") for row in broken
    )


if __name__ == "__main__":
    main()
