"""Depth against width at equal CPU seconds of training: quality and decoding speed after 30 and 90 core minutes.

    python experiments/depth-that-pays/run.py --store STORE --cost         # first: CPU seconds per update
    python experiments/depth-that-pays/run.py --store STORE --work FOLDER  # resumes where it stopped
    python experiments/depth-that-pays/run.py --store STORE --work FOLDER --speed   # decoding, on an idle machine
    python experiments/depth-that-pays/run.py --table

STORE is Tatoeba de-en, prepared as README.md says. A budget is a number of updates: core seconds divided by the seconds
that an update takes. So other work on the machine does not matter while a model trains, and a stopped experiment can be
resumed on another machine with the same budgets.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measuring import commit, processor, seconds_in_turns  # noqa: E402

import ziggurat  # noqa: E402
from ziggurat.config.recipes import load_named  # noqa: E402
from ziggurat.data.corpus import Store  # noqa: E402
from ziggurat.evaluate.scores import evaluate  # noqa: E402
from ziggurat.model.build import build_model, count_parameters  # noqa: E402
from ziggurat.system.files import write_atomically  # noqa: E402
from ziggurat.train.loop import train  # noqa: E402

RESULTS = HERE / "results"
TEST = Path("../shared/data/tatoeba-de-en/test")
BUDGETS = (1800, 5400)
"""BUDGETS are in core seconds: a quarter and three quarters of an hour on two cores."""
PRECISION = "fp32"
"""PRECISION is not bf16, because processors without AVX-512 emulate that too slowly to show anything about depth."""
HISTORY = ("model.encoder.history=dlcl", "model.decoder.history=dlcl")
"""HISTORY is the history of all systems, which differ only in depth: the best for its cost in depth-benchmark."""


class System(NamedTuple):
    """A model. `stages`: depths of the encoder before the last, each with its share of the first budget."""

    layers: int
    width: int = 256
    stages: tuple[tuple[int, float], ...] = ()

    def settings(self, layers: int) -> list[str]:
        """Return the overrides for a model with this many encoder layers, including all that the systems share."""
        return [
            f"model={{preset: small, d_model: {self.width}, d_ff: {4 * self.width}, heads: 4}}",
            "model.residual=pre",
            "model.dropout={residual: 0.1, attention: 0.1, activation: 0.0, embedding: 0.1}",
            f"model.encoder.layers={layers}",
            "model.decoder.layers=6",
            *HISTORY,
            "training.batch.max_tokens=1024",
            "training.optimiser={kind: adam, betas: [0.9, 0.98], epsilon: 1e-8}",
            "training.schedule={kind: isqrt, peak: 2e-3, warmup_updates: 400}",
            "training.clip_norm=1.0",
            f"training.precision={PRECISION}",
            "training.threads=1",
            "training.tensorboard=false",
        ]


SYSTEMS = {
    "6-6": System(6),
    "wide 6-6": System(6, width=344),  # as many parameters as 18-6
    "18-6": System(18),
    "30-6 grown": System(30, stages=((6, 0.3), (12, 0.15), (24, 0.15))),
}


def cost_file() -> dict[str, dict[str, float]]:
    """Return the parameters of each system, and the CPU seconds of an update at each of its depths."""
    found: dict[str, dict[str, float]] = json.loads((RESULTS / "cost.json").read_text("utf-8"))["systems"]
    return found


def measure_cost(store: str, rounds: int = 20) -> None:
    """Measure an update of every system at each of its depths, in interleaved rounds."""
    opened = Store.open(store)
    experiments = {
        (name, layers): load_named("multi30k-de-en", [*system.settings(layers), f"data.store={store}"])
        for name, system in SYSTEMS.items()
        for layers in (*(depth for depth, _ in system.stages), system.layers)
    }
    seconds = seconds_in_turns(
        {f"{name}/{layers}": e for (name, layers), e in experiments.items()}, opened, rounds, clock=time.process_time
    )
    sizes = (opened.source.size, opened.target.size)
    found: dict[str, dict[str, float]] = {name: {} for name in SYSTEMS}
    for (name, layers), experiment in experiments.items():
        found[name][str(layers)] = statistics.median(seconds[f"{name}/{layers}"])
        if layers == SYSTEMS[name].layers:
            found[name]["parameters"] = count_parameters(build_model(experiment.model, *sizes))
    about = {"processor": processor(), "precision": PRECISION, "commit": commit(), "rounds": rounds}
    whole = json.dumps({**about, "systems": found}, indent=1) + "\n"
    write_atomically(RESULTS / "cost.json", whole.encode())
    print(whole, end="")


def updates(name: str) -> tuple[list[int], list[int]]:
    """Return the updates after which a system's stages end, and those at which its budgets are spent."""
    system, cost = SYSTEMS[name], cost_file()[name]
    done, spent, ends = 0.0, 0.0, []
    for layers, share in system.stages:
        done += share * BUDGETS[0] / cost[str(layers)]
        spent += share * BUDGETS[0]
        ends.append(round(done))
    return ends, [round(done + (budget - spent) / cost[str(system.layers)]) for budget in BUDGETS]


def one_system(name: str, store: str, work: Path) -> None:
    """Train a system to both budgets; translate the test set at each."""
    torch.set_num_threads(1)
    system, folder = SYSTEMS[name], work / name.replace(" ", "-")
    ends, budgets = updates(name)
    stages = [f"{{layers: {layers}, updates: {end}}}" for (layers, _), end in zip(system.stages, ends, strict=True)]
    for budget, last in zip(BUDGETS, budgets, strict=True):
        out = RESULTS / f"{name.replace(' ', '-')}-{budget}.json"
        if out.exists():
            continue
        every = budgets[0] // 20
        values = [
            *system.settings(system.layers),
            *([f"training.growth.stages=[{', '.join(stages)}]"] if stages else []),
            f"training.validation={{every_updates: {4 * every}, decode: false, metric: loss}}",
            f"training.checkpoint={{every_updates: {every}, keep_last: 5, average_last: 5}}",
            "training.log_every_updates=50",
            f"training.stop={{updates: {last}}}",
            f"data.store={store}",
        ]
        experiment = load_named("multi30k-de-en", values)
        result = train(folder, experiment, resume=(folder / "checkpoints").exists(), console=Console(quiet=True))
        if result.signal is not None:
            raise SystemExit(128 + result.signal)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        translator = ziggurat.load(folder, which="averaged", device="cpu")
        found = [t.text for t in translator.translate(lines("de"), beam_size=4)]
        bleu, chrf = evaluate(found, [lines("en")], metrics=("bleu", "chrf"))
        figures = {
            "system": name,
            "core_seconds": budget,
            "updates": last,
            "stages": ends,
            "commit": commit(),
            "precision": PRECISION,
            "processor": processor(),
            "dev": [[r["update"], r["nll"]] for r in records if r["kind"] == "validation"],
            "bleu": bleu.value,
            "chrf": chrf.value,
            "signature": bleu.signature,
        }
        translations = "".join(line + "\n" for line in found).encode()
        write_atomically(out.with_suffix(".en.gz"), gzip.compress(translations, mtime=0))
        write_atomically(out, (json.dumps(figures) + "\n").encode())
        print(f"{name}, {budget} core seconds: BLEU {bleu.value:.1f}", flush=True)


def lines(language: str) -> list[str]:
    """Return one side of the test set."""
    with gzip.open(f"{TEST}.{language}.gz", "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def speed(store: str, work: Path, rounds: int = 3) -> None:
    """Measure decoding of the test set, in output tokens per second on all cores, in interleaved rounds.

    Every translation has the average length of the references, so barely trained models are good enough. So all systems
    are measured on one machine, wherever they were trained.
    """
    translators = {}
    for name, system in SYSTEMS.items():
        values = [*system.settings(system.layers), f"data.store={store}", "training.stop={updates: 1}"]
        folder = work / "speed" / name.replace(" ", "-")
        if not folder.exists():
            train(folder, load_named("multi30k-de-en", values), console=Console(quiet=True))
        translators[name] = ziggurat.load(folder, which="last", device="cpu")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    pieces = translators["6-6"].target_tokenizer.encode(lines("en"))
    length = round(sum(map(len, pieces)) / len(pieces))
    how = {"beam_size": 4, "min_length": length, "max_length": {"ratio": 0.0, "extra": length, "limit": length}}
    source, found = lines("de"), {name: list[float]() for name in SYSTEMS}
    for _ in range(rounds):
        for name, translator in translators.items():
            began = time.perf_counter()
            tokens = sum(len(t.hypotheses[0].tokens) for t in translator.translate(source, **how))
            found[name].append(tokens / (time.perf_counter() - began))
    medians = {name: statistics.median(values) for name, values in found.items()}
    about = {"processor": processor(), "threads": torch.get_num_threads(), "commit": commit(), "length": length}
    about |= {"rounds": rounds}
    write_atomically(RESULTS / "speed.json", (json.dumps({**about, "tokens/s": medians}, indent=1) + "\n").encode())


def table() -> None:
    """Print the figures so far."""
    file = RESULTS / "speed.json"
    rates: dict[str, float] = json.loads(file.read_text("utf-8"))["tokens/s"] if file.exists() else {}
    print("| system | parameters | core minutes | updates | dev loss | BLEU | chrF | tokens/s |\n" + "|---" * 8 + "|")
    for budget in BUDGETS:
        for name in SYSTEMS:
            file = RESULTS / f"{name.replace(' ', '-')}-{budget}.json"
            if file.exists():
                r = json.loads(file.read_text("utf-8"))
                size = cost_file()[name]["parameters"] / 1e6
                row = [name, f"{size:.1f} M", f"{budget // 60}", f"{r['updates']:,}", f"{r['dev'][-1][1]:.3f}"]
                row += [f"{r['bleu']:.1f}", f"{r['chrf']:.1f}", f"{rates[name]:,.0f}" if name in rates else ""]
                print("| " + " | ".join(row) + " |")
    if all((RESULTS / f"{name.replace(' ', '-')}-{BUDGETS[-1]}.json").exists() for name in SYSTEMS):
        for name in list(SYSTEMS)[1:]:
            crossing(name)


def crossing(name: str) -> None:
    """Print when a system would reach the dev loss of 6-6, by two extrapolations of their difference at equal time.

    The difference at the system's validations from the first budget on is fitted by a straight line over the logarithm
    of time, which crosses zero, and by a power of time, which does not.
    """
    times, losses = curve(name)
    shallow_times, shallow = curve("6-6")
    late = (times >= 0.99 * BUDGETS[0] / 60) & (times <= shallow_times[-1])
    logs = np.log(times[late])
    lead = losses[late] - np.interp(logs, np.log(shallow_times), shallow)
    slope, level = np.polyfit(logs, lead, 1)
    said = f"{name} minus 6-6: {lead[0]:+.3f} nats after {times[late][0]:.0f} core minutes, {lead[-1]:+.3f} at the end"
    if lead[-1] > 0 > slope:
        said += f"; a straight line over log time reaches 0 after {np.exp(-level / slope):.0f} core minutes"
    if (lead > 0).all():
        said += f"; as a power of time, its exponent is {np.polyfit(logs, np.log(lead), 1)[0]:.2f}"
    print(said)


def curve(name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return core minutes and dev losses of a system's validations, both `[validations]`."""
    system, cost, at = SYSTEMS[name], cost_file()[name], 0
    r = json.loads((RESULTS / f"{name.replace(' ', '-')}-{BUDGETS[-1]}.json").read_text("utf-8"))
    dev = np.array(r["dev"])
    minutes = np.zeros(len(dev))
    depths = [*(layers for layers, _ in system.stages), system.layers]
    for end, layers in zip([*r["stages"], r["updates"]], depths, strict=True):
        minutes += np.clip(dev[:, 0] - at, 0, end - at) * cost[str(layers)] / 60
        at = end
    return minutes, dev[:, 1]


def main() -> None:
    """Measure, train, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--system", choices=SYSTEMS, nargs="*", default=list(SYSTEMS))
    parser.add_argument("--jobs", type=int, default=1, help="systems trained in parallel, one thread each")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--table", action="store_true")
    o = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if o.table:
        table()
    elif o.speed and o.store and o.work:
        speed(o.store, o.work.resolve())
    elif o.cost and o.store:
        measure_cost(o.store)
    elif o.store and o.work:
        # One process per system, because threads are set once, and none should inherit another's memory.
        with multiprocessing.get_context("spawn").Pool(o.jobs, maxtasksperchild=1) as pool:
            pool.starmap(one_system, [(name, o.store, o.work.resolve()) for name in o.system], chunksize=1)
    else:
        parser.error("give --store, the prepared data, and --work, the folder for runs")


if __name__ == "__main__":
    main()
