"""Cost of saving: the share of training time spent waiting for checkpoints, asynchronous and synchronous.

    python -m benchmarks.checkpoint [--every 20] [--updates 40] [--tokens 1024] [--folder FOLDER] [--json]

Transformer base, 6+6 layers, vocabulary 32,000, Adam, fp32, CPU: a checkpoint has 60.5 million parameters, 0.73 GB with
moments. The two ways take turns, `--every` updates each with one save, in one process and on one model. Files are
written to `--folder` (default: a temporary one), so the figures are for the disk there.

`waited` is the time that `save` took. `lost` also counts what the writing thread takes from concurrent updates: the
time of a turn minus that of as many updates without saving, which have a separate turn in every round. The share at the
default cadence of 1,000 updates follows from the wait for one checkpoint and the time of an update.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ziggurat.config import Experiment
from ziggurat.config.recipes import load_named
from ziggurat.data.babel import generate
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Loader
from ziggurat.data.prepare import prepare
from ziggurat.model.build import build_model, parameter_roles
from ziggurat.train.checkpoint import RunProgress
from ziggurat.train.device import keep_freed_memory
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.run_log import RunLog
from ziggurat.train.saving import Saver
from ziggurat.train.update import train_update

VOCABULARY, DEFAULT_CADENCE, LIMIT = 32_000, 1000, 0.05
WAYS = ("none", "asynchronous", "synchronous")


@dataclass
class Learner:
    """The methods that a saver calls."""

    parallel: Parallel
    optimiser: Optimiser
    depth: tuple[int, int]


def experiment(folder: Path, tokens: int) -> Experiment:
    """Return transformer-base on a few thousand embedded pairs, prepared in `folder`."""
    pairs = list(generate(4000, seed=1))
    for side, language in enumerate(("qlo", "qhi")):
        (folder / f"train.{language}").write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
    corpus = f"[{{source: {folder}/train.qlo, target: {folder}/train.qhi}}]"
    overrides = ["data.source_language=qlo", "data.target_language=qhi", f"data.store={folder}/store"]
    overrides += [f"data.train={corpus}", "data.dev=[]", "data.subword={vocabulary_size: 400}"]
    overrides += [
        f"training.batch={{max_tokens: {tokens}, accumulate: 1}}",
        "training.checkpoint={keep_last: 1, keep_best: 0}",
    ]
    found = load_named("transformer-base", overrides)
    prepare(found.data)
    return found


def measure(folder: Path, every: int, updates: int, tokens: int) -> dict[str, Any]:
    """Train with each way of saving in turn, and return seconds per update and per wait."""
    keep_freed_memory()
    config = experiment(folder, tokens)
    store, training = Store.open(config.data.store), config.training
    model = build_model(config.model, VOCABULARY, VOCABULARY)
    optimiser = Optimiser(model, parameter_roles(model), training.optimiser)
    learner: Any = Learner(Parallel(model, training.loss), optimiser, (6, 6))
    groups = Loader(store.train, store.source, store.target, training.batch, seed=1).groups()
    progress = RunProgress()
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    log = RunLog(run, Console(file=io.StringIO()))
    savers: dict[str, Saver] = {}
    for way in WAYS[1:]:
        kept = training.checkpoint.model_copy(update={"asynchronous": way == "asynchronous"})
        changed = {"training": training.model_copy(update={"checkpoint": kept})}
        savers[way] = Saver(run, config.model_copy(update=changed), store, progress, log)

    def turn(way: str, length: int) -> tuple[float, float]:
        saver = savers.get(way)
        before, began = saver.waited_seconds if saver else 0.0, time.perf_counter()
        for number in range(length):
            train_update(learner.parallel, next(groups).batches, optimiser, rate=1e-5, clip_norm=1.0)
            progress.update += 1
            if number == 0 and saver is not None:  # early in the turn, so that the thread writes during updates
                saver.save(learner, interim=False)
        seconds = time.perf_counter() - began
        if saver is None:
            return seconds, 0.0
        waited = saver.waited_seconds - before
        saver.wait()  # not timed: at the default cadence the disk is done long before
        return seconds, waited

    for way in WAYS:  # from here on memory stays allocated, as in a run with several checkpoints
        turn(way, 2)
    turns: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(max(1, updates // every)):
        for way in WAYS:
            turns[way].append(turn(way, every))
    size = sum(file.stat().st_size for file in (run / "last").resolve().rglob("*") if file.is_file())
    return {"every": every, "tokens": tokens, "threads": torch.get_num_threads(), "bytes": size, "turns": turns}


def summary(measured: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return, for each way of saving, medians over its turns."""
    every = measured["every"]
    plain = statistics.median(seconds for seconds, _ in measured["turns"]["none"])
    found = {}
    for way in WAYS[1:]:
        seconds, waits = zip(*measured["turns"][way], strict=True)
        wait = statistics.median(waits)
        found[way] = {
            "wait_seconds": wait,
            "waited": wait / statistics.median(seconds),
            "lost": 1 - plain / statistics.median(seconds),
            "waited_at_default_cadence": wait / (wait + DEFAULT_CADENCE * plain / every),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ziggurat-bench-", dir=o.folder) as folder:
        measured = measure(Path(folder), o.every, o.updates, o.tokens)
    ways = summary(measured)
    if o.json:
        print(json.dumps({**measured, "summary": ways, "limit": LIMIT}, indent=2))
        return
    plain = statistics.median(seconds for seconds, _ in measured["turns"]["none"]) / o.every
    print(f"{measured['bytes'] / 1e9:.2f} GB per checkpoint, one in {o.every} updates of {plain:.2f} s", end="")
    print(f" ({o.tokens:,} tokens, {measured['threads']} threads)")
    for way, figures in ways.items():
        print(
            f"{way:>13}: waits {figures['wait_seconds']:.3f} s, {figures['waited']:.2%} of the time; lost "
            f"{figures['lost']:.2%}; one in {DEFAULT_CADENCE:,}: {figures['waited_at_default_cadence']:.4%}"
        )
    ratio = ways["synchronous"]["wait_seconds"] / ways["asynchronous"]["wait_seconds"]
    within = "within" if ways["asynchronous"]["waited"] < LIMIT else "OVER"
    print(f"asynchronous saving cuts the wait by a factor of {ratio:.1f}, {within} the limit of {LIMIT:.0%}")


if __name__ == "__main__":
    main()
