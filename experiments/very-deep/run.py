"""60-12 layers at their real size (Liu et al. 2020) on a CPU: which models train, and which the depth check predicted.

    python experiments/very-deep/run.py --store STORE --work FOLDER [--system 'ADMIN 60-12' ...]   # resumes
    python experiments/very-deep/run.py --table   # the table, and the figure next to this file

For each system the verdict of the depth check is recorded first (results/NAME.check.json); then it is trained, and its
figures are written (results/NAME.json). Existing results are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from measuring import commit, lines_of, processor  # noqa: E402

from ziggurat.config import Experiment  # noqa: E402
from ziggurat.config.recipes import load_named  # noqa: E402
from ziggurat.data.corpus import Store  # noqa: E402
from ziggurat.inspect.check import check_depth  # noqa: E402
from ziggurat.inspect.trial import TrialOptions  # noqa: E402
from ziggurat.model.build import build_model, count_parameters  # noqa: E402
from ziggurat.system.errors import TrainingError  # noqa: E402
from ziggurat.system.files import write_atomically  # noqa: E402
from ziggurat.train.loop import train  # noqa: E402

RESULTS = HERE / "results"
PLAIN = ["model.residual=post", "model.init.kind=xavier"]
DLCL = [
    "model.residual=pre",
    "model.init.kind=xavier",
    "model.encoder.history=dlcl",
    "model.decoder.history=dlcl",
]


class System(NamedTuple):
    """A model, and the number of its training updates."""

    encoder: int
    decoder: int
    settings: list[str]
    updates: int
    peak: float = 1e-3


SYSTEMS = {
    "post-norm 6-6": System(6, 6, PLAIN, 400),
    "ADMIN 60-12": System(60, 12, [], 400),
    "ADMIN 60-12 at 3e-4": System(60, 12, [], 400, peak=3e-4),
    "post-norm 60-12": System(60, 12, PLAIN, 400),
    "pre-norm DLCL 60-12": System(60, 12, DLCL, 400),
    "post-norm 18-18": System(18, 18, PLAIN, 300),
    "DS-Init 18-18": System(18, 18, ["model.residual=post", "model.init.kind=depth_scaled"], 300),
    "pre-norm DLCL 30-6": System(30, 6, DLCL, 300),
}
"""Systems are sorted by importance; settings that are not given are those of the recipe ADMIN 60-12, En-De."""
TOKENS, WARM_UP = 2048, 200


def experiment_of(system: System, store: Path, corpus: str, recompute: bool = False) -> Experiment:
    """Return the configuration of a system: base width, in bf16, with activations kept or recomputed."""
    source, target = corpus.split("-")
    return load_named(
        "admin-en-de-base-60-12-admin",
        [
            f"data.source_language={source}",
            f"data.target_language={target}",
            f"data.store={store}",
            "data.subword.vocabulary_size=8000",
            f"model.encoder.layers={system.encoder}",
            f"model.decoder.layers={system.decoder}",
            *system.settings,
            f"training.batch={{max_tokens: {TOKENS}}}",
            f"training.schedule={{kind: isqrt, peak: {system.peak}, warmup_updates: {WARM_UP}}}",
            "training.precision=bf16",
            f"training.recompute={'{encoder: 1, decoder: 1}' if recompute else '{}'}",
            "training.validation={every_updates: 100, decode: false, metric: loss}",
            "training.checkpoint={every_updates: 100, keep_last: 1}",
            "training.diagnostics={every_updates: 100, max_share: null}",
            "training.log_every_updates=5",
            "training.tensorboard=false",
            f"training.stop={{updates: {system.updates}}}",
        ],
    )


def predict(name: str, experiment: Experiment) -> None:
    """Record the verdict of the depth check before there is an outcome."""
    out = RESULTS / f"{slug(name)}.check.json"
    if out.exists():
        return
    check = check_depth(experiment, TrialOptions(), lambda trial, updates: lambda update: None, remedies=False)
    write(
        out,
        {
            "system": name,
            "commit": commit(),
            **check.as_record(),
            "data": f"Tatoeba {experiment.data.source_language}-{experiment.data.target_language}",
        },
    )
    print(f"{name}: the depth check says: {check.verdict.label}", flush=True)


def one_run(name: str, experiment: Experiment, work: Path) -> None:
    """Train a system and write its figures."""
    out, folder = RESULTS / f"{slug(name)}.json", work / slug(name)
    if out.exists():
        return
    failure = None
    try:
        resume = any((folder / "checkpoints").glob("step-*"))
        result = train(folder, experiment, resume=resume, console=Console(quiet=True))
        if result.signal is not None:
            raise SystemExit(128 + result.signal)
    except TrainingError as error:
        failure = str(error)
    records = lines_of(folder / "metrics.jsonl")
    depth = lines_of(folder / "diagnostics" / "depth.jsonl")
    store = Store.open(experiment.data.store)
    model = build_model(experiment.model, store.source.size, store.target.size)
    trained = [r for r in records if r["kind"] == "train"]
    figures = {
        "system": name,
        "commit": commit(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "parameters": count_parameters(model),
        "failure": failure,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "train": [[r["update"], r["nll"], r["grad_norm"]] for r in trained],
        "dev": [[r["update"], r.get("nll")] for r in records if r["kind"] == "validation"],
        "depth": [depth[0], depth[-1]] if depth else [],
    }
    write(out, figures)
    print(f"{name}: {outcome(figures)}", flush=True)


def write(out: Path, figures: dict[str, Any]) -> None:
    """Write figures as one line of JSON."""
    RESULTS.mkdir(exist_ok=True)
    write_atomically(out, (json.dumps(figures) + "\n").encode())


def slug(name: str) -> str:
    """Return the name of a system's files."""
    return name.lower().replace(" ", "-")


def outcome(figures: dict[str, Any]) -> str:
    """Return the outcome of a training run."""
    losses = [nll for _, nll in figures["dev"] if nll is not None and math.isfinite(nll)]
    if figures["failure"] or not losses:
        return f"failed ({figures['failure'] or 'no finite dev loss'})"
    return f"dev loss {losses[-1]:.3f}"


def table() -> None:
    """Print a row for each system, and draw the training losses."""
    columns = ["system", "parameters", "depth check, before", "first loss", "last dev loss", "gradients, lowest / top"]
    print(f"| {' | '.join(columns)} | source | GiB |")
    print("|---" * 8 + "|")
    shown = {}
    for name in SYSTEMS:
        file, check = RESULTS / f"{slug(name)}.json", RESULTS / f"{slug(name)}.check.json"
        said = json.loads(check.read_text("utf-8"))["verdict"]["label"] if check.exists() else ""
        if not file.exists():
            print(f"| {name} | | {said} | | not run | | | |")
            continue
        figures = shown[name] = json.loads(file.read_text("utf-8"))
        norms = [record["values"]["gradient_norm"]["encoder"] for record in figures["depth"]]
        ratios = " → ".join(f"{of[0] / of[-1]:.2g}" for of in norms if of[0] and of[-1])
        cells = [name, f"{figures['parameters'] / 1e6:.0f} M", said, f"{figures['train'][0][1]:.2f}", outcome(figures)]
        source = f"{figures['depth'][-1]['values']['source_dependence']:.3f}" if figures["depth"] else ""
        print("| " + " | ".join([*cells, ratios, source, f"{figures['peak_mib'] / 1024:.1f}"]) + " |")
    draw(shown)


def draw(shown: dict[str, dict[str, Any]]) -> None:
    """Draw the training losses over updates."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "deep", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.subplots()
        for name, figures in shown.items():
            updates, losses, _ = zip(*figures["train"], strict=True)
            axes.plot(updates, losses, label=name, linewidth=1)
        axes.set_xlabel(f"updates of {TOKENS:,} tokens")
        axes.set_ylabel("training loss, nats per token")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        FigureCanvasSVG(figure)
        figure.savefig(HERE / "losses.svg", metadata={"Date": None, "Title": "60-12 layers at base width"})


def main() -> None:
    """Record verdicts and train, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--corpus", default="fr-en", help="its languages")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--recompute", action="store_true", help="60-12 takes 7 to 10 GiB instead of 16, and a third longer"
    )
    parser.add_argument("--system", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--table", action="store_true")
    o = parser.parse_args()
    if o.table:
        table()
    elif o.store and o.work:
        os.nice(19)
        torch.set_num_threads(o.threads)
        experiments = {
            name: experiment_of(SYSTEMS[name], o.store.resolve(), o.corpus, o.recompute) for name in o.system
        }
        for name, experiment in experiments.items():
            predict(name, experiment)
        for name, experiment in experiments.items():
            one_run(name, experiment, o.work.resolve())
    else:
        parser.error("give --store, the prepared data, and --work, the folder for runs")


if __name__ == "__main__":
    main()
