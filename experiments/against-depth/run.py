"""Runs at several depths with several methods and seeds, and a report by depth, as in the papers' figures.

    python experiments/against-depth/run.py --figure dlcl-3 --work FOLDER --small      # minutes to hours on two cores
    python experiments/against-depth/run.py --figure dlcl-3 --work FOLDER --store STORE --test NAME SOURCE REFERENCE
    python experiments/against-depth/run.py --config my.yaml --depths 6-6 12-6 --work FOLDER --store STORE
    python experiments/against-depth/run.py --method pre dlcl-en-de-base-6-6-pre model.dropout.residual=0.2 \\
        --method post dlcl-en-de-base-6-6-post --depths 6-6 20-6 --seeds 1 2 3 --work FOLDER --store STORE

Each run is trained and scored on the test set, and its decoding speed is measured in interleaved rounds; then `ziggurat
report` draws all runs. Existing results are kept, so the same command resumes where it was stopped.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measuring import processor  # noqa: E402

import ziggurat  # noqa: E402
from ziggurat.config.recipes import SUFFIX, load_named  # noqa: E402
from ziggurat.model.run_folder import SCORES, DecodingSpeed, keep_speed  # noqa: E402
from ziggurat.system.files import write_atomically  # noqa: E402
from ziggurat.translate.results import TranslationWarning  # noqa: E402


class Method(NamedTuple):
    """A line of the figure: a recipe or configuration file, settings, and whether the encoder grows by six layers."""

    config: str
    settings: tuple[str, ...] = ()
    grows: bool = False


class Depth(NamedTuple):
    """Layers of encoder and decoder."""

    encoder: int
    decoder: int

    def __str__(self) -> str:
        return f"{self.encoder}-{self.decoder}"


class Test(NamedTuple):
    """A test set: a name without blanks, the file to translate, and its reference."""

    name: str
    source: Path
    reference: Path


class Run(NamedTuple):
    """One training: its folder, and the arguments of `ziggurat train` after the folder."""

    folder: Path
    config: str
    settings: list[str]


_DLCL = {"pre-norm": Method("dlcl-en-de-base-20-6-pre"), "DLCL": Method("dlcl-en-de-base-20-6-pre-dlcl")}
_ENCODERS = tuple(Depth(layers, 6) for layers in (6, 16, 20, 25, 30, 35))
FIGURES: dict[str, tuple[tuple[Depth, ...], dict[str, Method]]] = {
    # Zhang et al. 2019, figure 3: BLEU against the depth of both stacks
    "ds-init-3": (
        tuple(Depth(layers, layers) for layers in (6, 12, 18, 20, 30)),
        {
            "base": Method("ds-init-en-de-base-6-6"),
            "DS-Init": Method("ds-init-en-de-base-12-12-ds"),
            "DS-Init + MAtt": Method("ds-init-en-de-base-12-12-ds-matt"),
        },
    ),
    # Wang et al. 2019, figures 3 and 4: BLEU and decoding speed of the same runs against the encoder's depth
    "dlcl-3": (_ENCODERS, _DLCL),
    "dlcl-4": (_ENCODERS, _DLCL),
    # the same, table 5: the decoder's depth
    "dlcl-table-5": (
        tuple(Depth(6, layers) for layers in (4, 6, 8)),
        {"DLCL": Method("dlcl-en-de-base-6-6-pre-dlcl")},
    ),
    # Li et al. 2020, figure 6: from scratch and shallow to deep
    "sdt-6": (
        tuple(Depth(layers, 6) for layers in (12, 24, 36, 48)),
        {
            "from scratch": Method("sdt-en-de-base-24-6"),
            "SDT": Method("sdt-en-de-base-24-6-sdt", grows=True),
        },
    ),
}
"""FIGURES maps a name to depths and methods."""

STAGE, BEFORE_LAST = 0.192, 0.76
"""STAGE is the share of the updates for one stage, as in the recipe with 24 layers.

BEFORE_LAST is the largest share for all stages but the last, as in the recipe with 48 layers.
"""


def growth(depth: Depth, updates: int) -> list[str]:
    """Return the stages of an encoder that grows by six layers; none if it has at most six."""
    before = range(6, depth.encoder, 6)
    share = min(STAGE, BEFORE_LAST / max(1, len(before)))
    ends = [max(number, round(number * share * updates)) for number in range(1, len(before) + 1)]
    stages = ", ".join(f"{{layers: {layers}, updates: {end}}}" for layers, end in zip(before, ends, strict=True))
    return [f"training.growth.stages=[{stages}]" if stages else "training.growth=null"]


def runs_of(options: argparse.Namespace, shared: Sequence[str]) -> list[Run]:
    """Return all runs, seed by seed and shallowest first, so that a stopped experiment has complete lines."""
    runs = []
    for seed in options.seeds:
        for depth in options.depths:
            for name, method in options.methods.items():
                settings = [*shared, *method.settings, *options.set]
                settings += [f"model.encoder.layers={depth.encoder}", f"model.decoder.layers={depth.decoder}"]
                if method.grows:
                    total = load_named(method.config, [*settings, "training.growth=null"]).training.stop.updates
                    if total is None:
                        raise SystemExit(f"{name}: stages of growth need `training.stop.updates`")
                    settings += growth(depth, total)
                folder = options.work / f"{name.replace(' ', '-')}_{depth}_{seed}"
                runs.append(Run(folder, method.config, [*settings, f"training.seed={seed}"]))
    return runs


def verb(work: Path, *arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run `ziggurat` with these arguments in the folder `work`; messages go to standard error."""
    command = [sys.executable, "-m", "ziggurat", *map(str, arguments)]
    return subprocess.run(command, cwd=work, stdout=subprocess.PIPE, check=False)


def write_small_data(work: Path, configs: Iterable[str]) -> Test:
    """Write the embedded language pair and the stores of small recipes into `work`; return its test set."""
    for arguments in (("fetch", "babel"), *(("prepare", config) for config in configs)):
        if verb(work, *arguments).returncode:
            raise SystemExit(f"ziggurat {' '.join(arguments)}: failed")
    return Test("babel", work / "data" / "babel" / "test.qlo", work / "data" / "babel" / "test.qhi")


def train(run: Run) -> bool:
    """Train a run to its end, or resume it with its original settings; return False if it failed, as some methods
    do.
    """
    again = ["--resume"] if (run.folder / "config.yaml").exists() else [run.config, *run.settings]
    done = verb(run.folder.parent, "train", *again, "--run", run.folder)
    if done.returncode < 0 or done.returncode > 128:  # a signal: stop everything
        raise SystemExit(done.returncode)
    return done.returncode == 0


def score(folder: Path, test: Test) -> None:
    """Score a run on the test set, unless it has scores newer than its training."""
    out = folder / SCORES / f"{test.name}.json"
    if out.exists() and out.stat().st_mtime > (folder / "metrics.jsonl").stat().st_mtime:
        return
    done = verb(folder.parent, "evaluate", folder, "--source", test.source, "--reference", test.reference, "--json")
    if done.returncode == 0:
        out.parent.mkdir(exist_ok=True)
        write_atomically(out, done.stdout)
    else:
        print(f"{folder}: no score on {test.name}", file=sys.stderr)


def measure_speed(folders: Sequence[Path], test: Test, lines: int, rounds: int) -> None:
    """Record each run's decoding speed, the median of interleaved rounds on all cores.

    Every translation has the average length of the references, so that badly trained models do the same work as others.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sources, references = (path.read_text("utf-8").splitlines()[:lines] for path in (test.source, test.reference))
    translators = {folder: ziggurat.load(folder, device="cpu") for folder in folders}
    pieces = next(iter(translators.values())).target_tokenizer.encode(references)
    length = round(sum(map(len, pieces)) / len(pieces))
    search: dict[str, Any] = {
        "beam_size": 4,
        "min_length": length,
        "max_length": {"ratio": 0.0, "extra": length, "limit": length},
    }
    rates: dict[Path, list[float]] = {folder: [] for folder in folders}
    for number in range(rounds + 1):
        for folder, translator in translators.items():
            began = time.perf_counter()
            with warnings.catch_warnings(action="ignore", category=TranslationWarning):  # all are cut, at one length
                tokens = sum(len(found.hypotheses[0].tokens) for found in translator.translate(sources, **search))
            if number:  # the first round warms up
                rates[folder].append(tokens / (time.perf_counter() - began))
    threads = f"{torch.get_num_threads()} threads" if torch.get_num_threads() > 1 else "1 thread"
    how = f"{len(sources)} lines of {test.name} in {length} tokens each, beam 4, {threads}, {processor()}"
    for folder, found in rates.items():
        keep_speed(folder, DecodingSpeed(tokens_per_second=statistics.median(found), rounds=rounds, how=how))


def named(config: str) -> str:
    """Return a configuration file as an absolute path, and the name of a recipe unchanged."""
    return str(Path(config).resolve()) if Path(config).is_file() else config


def parsed() -> argparse.Namespace:
    """Return the options, with `depths` and `methods` by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", choices=FIGURES)
    parser.add_argument("--config", action="append", default=[], help="a recipe or file as one method; can be repeated")
    parser.add_argument("--method", action="append", default=[], nargs="+", metavar="NAME CONFIG [KEY=VALUE]")
    parser.add_argument("--depths", nargs="+", help="such as 6-6 12-6; default: those of the figure")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--store", help="prepared data; not with --small")
    parser.add_argument("--test", nargs=3, metavar=("NAME", "SOURCE", "REFERENCE"))
    parser.add_argument("--small", action="store_true", help="the small recipes of docs/papers.md")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs trained at the same time")
    parser.add_argument("--lines", type=int, default=100, help="lines of the test set used to measure decoding")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of measuring decoding; 0: none")
    options = parser.parse_args()
    depths, methods = FIGURES[options.figure] if options.figure else ((), {})
    options.methods = {**methods, **{Path(config).stem: Method(named(config)) for config in options.config}}
    for name, config, *settings in (
        given if len(given) > 1 else parser.error("--method NAME CONFIG") for given in options.method
    ):
        options.methods[name] = Method(named(config), tuple(settings))
    if options.depths:
        try:
            depths = tuple(Depth(*map(int, text.split("-"))) for text in options.depths)
        except (TypeError, ValueError):
            parser.error("--depths: give layers of encoder and decoder, such as 6-6 12-6")
    options.depths = depths
    if not options.methods or not options.depths:
        parser.error("give --figure, or methods by --config or --method, and --depths")
    if bool(options.store) == options.small:
        parser.error("give --store with the folder of the data, or --small for the embedded language pair")
    if options.small:
        options.methods = {
            name: method._replace(config=f"{method.config}{SUFFIX}") for name, method in options.methods.items()
        }
    if options.test:
        name, *files = options.test
        options.test = Test(name, *(Path(file).resolve() for file in files))
    options.work = options.work.resolve()
    return options


def main() -> None:
    """Train, score, measure and report."""
    options = parsed()
    options.work.mkdir(parents=True, exist_ok=True)
    threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
    store = [] if options.small else [f"data.store={Path(options.store).resolve()}"]
    runs = runs_of(options, [f"training.threads={threads}", *store])
    test = write_small_data(options.work, {run.config: None for run in runs}) if options.small else options.test
    with ThreadPoolExecutor(options.jobs) as pool:
        trained = [run.folder for run, good in zip(runs, pool.map(train, runs), strict=True) if good]
    if test is not None:
        for folder in trained:
            score(folder, test)
        if options.rounds and trained:
            first = [folder for folder in trained if folder.name.endswith(f"_{options.seeds[0]}")]
            measure_speed(first, test, options.lines, options.rounds)
    folders = [run.folder for run in runs if (run.folder / "metrics.jsonl").exists()]
    out = ("--out", options.work / "report.html", "--figures", options.work / "figures")
    print(verb(options.work, "report", *folders, "--translations", "0", *out).stdout.decode(), end="")


if __name__ == "__main__":
    main()
