"""Speed by how OpenMP's threads wait for each other, on an idle machine and next to busy processes.

    python -m benchmarks.threads [--policy default spin-2000 ...] [--beside 0 1 2] [--work demo T1 translate]
        [--rounds 2] [--seconds 8] [--json]

Two threads that share a product meet at a barrier after it. A thread that spins there while another process needs its
core blocks that process, and often the very thread for which it waits; a thread that sleeps has to be woken, which
takes longer than a short product. libgomp reads its policy from the environment when it is loaded, so every figure
comes from a separate process. Policies take turns within a round, loads within a policy. `ours` is
ziggurat.system.processes: like `default` on an idle machine, asleep while others want the cores.

`demo` trains the recipe of that name (3+3 layers of width 128), `T1` trains 6+6 layers of width 256, and `translate`
runs a beam of 4 over the demo's model with random weights, 24 tokens per sentence. Busy processes are Python loops with
one thread each. Figures are medians of the rounds: target tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

POLICIES: dict[str, dict[str, str]] = {
    "ours": {},
    "default": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    **{f"spin-{count}": {"GOMP_SPINCOUNT": str(count)} for count in (500, 1000, 2000, 5000, 10000, 30000)},
}
"""POLICIES maps a policy to what it sets. `ours` leaves it to ziggurat.system.processes, which does nothing where
something is set; `default` is libgomp's behaviour where nothing is (env.c: 300,000 turns, about 3 ms).
"""
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
WIDE = ["model={preset: tiny, d_model: 256, d_ff: 1024, heads: 4, encoder: {layers: 6}, decoder: {layers: 6}}"]
WORK: dict[str, list[str]] = {"demo": [], "T1": WIDE, "translate": []}
SENTENCE_TOKENS = 24


def prepared(folder: Path) -> None:
    """Make a store of 4,000 pairs of the embedded language pair in `folder`."""
    from ziggurat.data.babel import generate
    from ziggurat.data.prepare import prepare

    pairs = list(generate(4000, seed=1))
    for side, language in enumerate(("qlo", "qhi")):
        (folder / f"train.{language}").write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
    prepare(_experiment(folder, []).data)


def _experiment(folder: Path, overrides: list[str]) -> Any:
    from ziggurat.config.recipes import load_named

    corpus = f"data.train=[{{source: {folder}/train.qlo, target: {folder}/train.qhi}}]"
    return load_named("demo", [f"data.store={folder}/store", "data.dev=[]", corpus, *overrides])


def once(work: str, folder: Path, seconds: float) -> float:
    """Work for `seconds` after a warm-up of a quarter of that time, and return target tokens per second."""
    import torch

    from ziggurat.data.corpus import Store
    from ziggurat.model.build import build_model
    from ziggurat.system.processes import share_cores

    share_cores(torch.get_num_threads())
    experiment = _experiment(folder, WORK[work])
    store = Store.open(experiment.data.store)
    model = build_model(experiment.model, store.source.size, store.target.size)
    tokens = _translating(experiment, store, model) if work == "translate" else _training(experiment, store, model)
    warm = time.perf_counter() + seconds / 4
    while time.perf_counter() < warm:
        next(tokens)
    began, done = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        done += next(tokens)
    return done / (time.perf_counter() - began)


def _training(experiment: Any, store: Any, model: Any) -> Iterator[int]:
    """Train update by update, yielding the target tokens of each."""
    from ziggurat.data.loader import Loader
    from ziggurat.model.build import parameter_roles
    from ziggurat.train.device import keep_freed_memory
    from ziggurat.train.optim import Optimiser
    from ziggurat.train.parallel import Parallel
    from ziggurat.train.update import train_update

    keep_freed_memory()
    training = experiment.training
    optimiser = Optimiser(model, parameter_roles(model), training.optimiser)
    parallel = Parallel(model, training.loss, training.precision)
    for group in Loader(store.train, store.source, store.target, training.batch, seed=training.seed).groups():
        yield train_update(parallel, group.batches, optimiser, rate=1e-5, clip_norm=1.0).target_tokens


def _translating(experiment: Any, store: Any, model: Any) -> Iterator[int]:
    """Translate 32 sentences again and again, forced to the same length, yielding the tokens each time."""
    from ziggurat.translate.translator import Translator

    translator = Translator(model.eval(), store.source, store.target, experiment.decoding)
    texts = [" ".join(["Su divusim ne gokun"] * 3)] * 32
    length = {"min_length": SENTENCE_TOKENS, "max_length": {"limit": SENTENCE_TOKENS}}
    while True:
        translator.translate(texts, beam_size=4, **length)
        yield len(texts) * SENTENCE_TOKENS


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` processes of one thread each busy."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(o: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure policies in interleaved rounds, and return each figure with its policy, load and work."""
    rows = []
    own = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    with tempfile.TemporaryDirectory(prefix="ziggurat-bench-") as name:
        prepared(Path(name))
        command = [sys.executable, "-m", "benchmarks.threads", "--folder", name, "--seconds", str(o.seconds)]
        for number in range(o.rounds):
            for work in o.work:
                for policy in o.policy:
                    for beside in o.beside:
                        with busy(beside):
                            said = subprocess.run(
                                [*command, "--once", work],
                                check=True,
                                capture_output=True,
                                text=True,
                                env=own | POLICIES[policy],
                            ).stdout
                        row = {"work": work, "policy": policy, "beside": beside, "round": number}
                        rows.append({**row, "tokens_per_second": float(said.splitlines()[-1])})
                        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]], o: argparse.Namespace) -> str:
    """Return the medians, one line per policy and work, with the ratio to the first policy under the same load."""
    lines = []
    for work in o.work:
        lines.append(f"{work:<12}" + "".join(f"{f'beside {beside}':>18}" for beside in o.beside))
        base: dict[int, float] = {}
        for policy in o.policy:
            cells = []
            for beside in o.beside:
                figures = [
                    row["tokens_per_second"]
                    for row in rows
                    if (row["work"], row["policy"], row["beside"]) == (work, policy, beside)
                ]
                median = statistics.median(figures)
                base.setdefault(beside, median)
                cells.append(f"{median:10,.0f} ({median / base[beside]:.2f})")
            lines.append(f"  {policy:<10}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--beside", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--work", nargs="*", choices=WORK, default=list(WORK))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--once", choices=WORK, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.once:
        print(once(o.once, o.folder, o.seconds))
        return
    rows = measure(o)
    print(json.dumps(rows, indent=2) if o.json else table(rows, o))


if __name__ == "__main__":
    main()
