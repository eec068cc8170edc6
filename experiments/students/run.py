"""Students with deep encoders and shallow decoders: quality against speed in int8, compared with their teacher.

    python experiments/students/run.py WORK --data TATOEBA          # everything: two to three hours
    python experiments/students/run.py WORK --data TATOEBA --tiny   # the same with 300 pairs, a few minutes
    python experiments/students/run.py WORK --measure               # speed and scores again, on an idle machine
    python experiments/students/run.py WORK --table                 # tables and pareto.svg

TATOEBA has train, dev and test as `train.de.gz`, `train.en.gz` and so on. WORK holds stores, runs and exports. Finished
parts are not repeated, so a run that was cut off resumes. The training length in updates is core seconds divided by the
CPU seconds of an update, so other work on the machine does not matter.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from measuring import commit, processor, seconds_in_turns  # noqa: E402
from results import draw, print_tables  # noqa: E402
from speed import measure  # noqa: E402
from systems import DECODING, FULL, SEED, TINY, Plan, training  # noqa: E402

from ziggurat.config import load_experiment  # noqa: E402
from ziggurat.data.corpus import Store  # noqa: E402
from ziggurat.exchange.exporter import reachable  # noqa: E402
from ziggurat.model.fast.precision import training_precision  # noqa: E402
from ziggurat.system.files import write_atomically  # noqa: E402

UPDATE_TOKENS = 2048
CORES = len(os.sched_getaffinity(0))


def ziggurat(*arguments: str | Path) -> None:
    """Run a verb; a failure ends the experiment."""
    print("ziggurat", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "ziggurat", *map(str, arguments)], check=True)


@dataclass(frozen=True)
class Study:
    """The folders of the experiment.

    Attributes:
        work: folder for all stores, runs and exports.
        data: the corpus; None: it has already been read.
        results: folder for the figures.
        plan: the sizes.
    """

    work: Path
    data: Path | None
    results: Path
    plan: Plan

    @property
    def models(self) -> list[str]:
        """Names of the systems that are exported and measured."""
        return ["teacher", *(name for student in self.plan.students for name in (student, f"{student}-int8"))]

    def text(self, name: str) -> Path:
        """Return a text file, which is cut to the plan's number of lines on first use."""
        path = self.work / "text" / name
        if not path.exists():
            if self.data is None:
                raise SystemExit(f"{path} is missing: give --data TATOEBA")
            path.parent.mkdir(parents=True, exist_ok=True)
            most = {"test": self.plan.test_lines, "dev": self.plan.test_lines}.get(name.split(".")[0], self.plan.lines)
            with gzip.open(self.data / f"{name}.gz", "rt", encoding="utf-8", newline="\n") as file:
                write_atomically(path, "".join(islice(file, most)).encode())
        return path

    def run(self, name: str) -> Path:
        """Return the folder of a training run."""
        return self.work / "runs" / name

    def store(self, name: str) -> Path:
        """Return a store, for the teacher, the backward model, students from scratch or those with its vocabulary."""
        name = name.removesuffix("-int8")
        cut = self.plan.systems[name].without is not None
        return self.work / "stores" / (name if name in ("teacher", "backward") else "cut" if cut else "students")

    def config(self, name: str) -> Path:
        """Return the configuration of a system."""
        return self.work / f"{name}.yaml"

    def served(self, name: str) -> Path:
        """Return the folder of an export."""
        return self.work / "served" / name


@cache
def faster(width: int) -> Literal["fp32", "bf16"]:
    """Return the precision in which this machine trains faster; it is explicit, since parts of a job might differ."""
    return training_precision(torch.device("cpu"), (width, 4 * width))


def write_config(study: Study, name: str, updates: int) -> Path:
    """Write the configuration of a system; only its length is not known in advance."""
    plan, system = study.plan, study.plan.systems[name]
    source, target = ("en", "de") if name == "backward" else ("de", "en")
    pairs = {"source": str(study.text(f"train.{source}")), "target": str(study.text(f"train.{target}"))}
    subword: dict[str, Any] = {"kind": "bpe", "vocabulary_size": plan.pieces, "joint": True}
    if name == "backward":
        subword = {"kind": "existing", "source_model": str(study.store("teacher") / "joint.spm")}
    if system.without is not None:
        subword = {"kind": "existing", "source_model": str(study.run("teacher"))}
    if name in plan.students:
        corpus = yaml.safe_load((study.work / "filtered" / "corpus.yaml").read_text("utf-8"))["data"]["train"]
        pairs = corpus[0]
    peak = plan.peak if system.without is None else plan.peak / 2
    learning = training(updates, peak, UPDATE_TOKENS, faster(plan.width))
    if name in plan.students:  # a teacher's translations are already smooth
        learning["loss"] = {"label_smoothing": 0.0, "alignment": {}}
    if system.without is not None:
        learning["start_from"] = str(study.work / "cut" / name)
    config = {
        "data": {
            "source_language": source,
            "target_language": target,
            "store": str(study.store(name)),
            "train": [pairs],
            "dev": [{"source": str(study.text(f"dev.{source}")), "target": str(study.text(f"dev.{target}"))}],
            "subword": subword,
            # With guidance, a single decoder layer learns much sooner where to look (cut.py).
            **({"alignment": {"compute": "hmm"}} if name in plan.students else {}),
        },
        "model": system.model(plan.width),
        "training": learning,
        "decoding": {**DECODING, "precision": {"bf16": "bfloat16", "fp32": "float32"}[faster(plan.width)]},
    }
    write_atomically(study.config(name), yaml.safe_dump(config, sort_keys=False).encode())
    return study.config(name)


def updates_of(study: Study, name: str) -> int:
    """Return the number of updates that a system's core seconds allow; the cost of an update is measured once."""
    if study.plan.updates is not None:
        return study.plan.updates
    file = study.results / "cost.json"
    cost: dict[str, float] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    if name not in cost:
        experiment = load_experiment(study.config(name))
        seconds = seconds_in_turns({name: experiment}, Store.open(study.store(name)), 10, clock=time.process_time)
        cost[name] = statistics.median(seconds[name])
        write_atomically(file, (json.dumps(cost, indent=1) + "\n").encode())
    return max(20, round(study.plan.systems[name].core_seconds / cost[name]))


def make_ready(study: Study, name: str) -> None:
    """Prepare the data of a system and write its configuration, unless its training has started."""
    if study.run(name).exists():
        return
    write_config(study, name, 20)
    if not study.store(name).exists():
        ziggurat("prepare", study.config(name))
    if (without := study.plan.systems[name].without) is not None and not (start := study.work / "cut" / name).exists():
        chosen = ("--to", "ziggurat", "--without-layers", without, "--lines", "20", "--which", "last")
        ziggurat("export", study.run("teacher"), *chosen, "--out", start)
    write_config(study, name, updates_of(study, name))


def train(run: Path, config: Path, *changes: str, threads: int) -> None:
    """Train a run from its current state to the end."""
    if not run.exists():
        ziggurat("train", config, "--run", run, "--threads", str(threads), *changes)
        return
    last = run / "last"
    done = int(last.resolve().name.removeprefix("step-")) if last.exists() else 0
    if done < (load_experiment(run / "config.yaml").training.stop.updates or 0):
        ziggurat("train", "--run", run, "--resume", "--threads", str(threads))


def distil(study: Study) -> None:
    """Translate the corpus with the teacher; keep the candidates nearest the references that translate back well."""
    plan, teacher = study.plan, study.run("teacher")
    text = ("--input", study.text("train.de"), "--reference", study.text("train.en"), "--n-best", str(plan.n_best))
    ziggurat(
        "backtranslate",
        teacher,
        "--forward",
        *text,
        "--max-ratio",
        str(plan.max_ratio),
        "--out",
        study.work / "distilled",
    )
    sides = [study.work / "distilled" / f"{side}.txt" for side in ("source", "target")]
    backward = (study.run("backward"), "--which", "last", "--reverse", "--keep", str(plan.keep))
    ziggurat("filter", *backward, "--source", sides[0], "--target", sides[1], "--out", study.work / "filtered")


def train_student(study: Study, name: str) -> None:
    """Train a student on one core, then for some further updates in int8."""
    train(study.run(name), study.config(name), threads=1)
    run = study.run(f"{name}-int8")
    updates = max(2, round(study.plan.tune_share * updates_of(study, name)))
    every = max(1, updates // 4)
    changes = [
        f"training.start_from={study.run(name) / 'last'}",
        "training.quantise=int8",
        f"training.schedule={{kind: linear, peak: 2e-4, warmup_updates: 0, decay_updates: {updates}, floor: 1e-6}}",
        f"training.stop.updates={updates}",
        f"training.checkpoint={{every_updates: {every}, keep_last: 1}}",
        f"training.validation={{every_updates: {every}, decode: false}}",
    ]
    train(run, study.config(name), *changes, threads=1)


def export(study: Study, name: str) -> None:
    """Write a model for CTranslate2 in int8, with a shortlist; skip models that it cannot run."""
    run, out, store = study.run(name), study.served(name), study.store(name)
    if reachable(load_experiment(run / "config.yaml"))["ctranslate2"] or out.exists():
        return
    listed = study.work / f"{store.name}.shortlist"
    if not listed.exists():
        ziggurat("shortlist", store, "-o", listed)
    ziggurat(
        *("export", run, "--to", "ctranslate2", "--quantization", "int8", "--which", "last"),
        *("--shortlist", listed, "--lines", "200", "--out", out),
    )


def everything(study: Study) -> None:
    """Make every missing part."""
    for name in ("teacher", "backward"):
        make_ready(study, name)
        train(study.run(name), study.config(name), threads=CORES)
    distil(study)
    for name in study.plan.students:  # before training starts, which would disturb the measured costs
        make_ready(study, name)
    with ThreadPoolExecutor(CORES) as pool:
        for done in [pool.submit(train_student, study, name) for name in study.plan.students]:
            done.result()
    for name in study.models:
        export(study, name)
    measure_all(study)


def measure_all(study: Study) -> None:
    """Translate the test set with every model and engine, in interleaved rounds; write the figures."""
    models = study.models
    figures = measure(
        {name: (study.run(name), study.served(name)) for name in models},
        {name: study.work / f"{study.store(name.removesuffix('-int8')).name}.shortlist" for name in models},
        [study.text(f"test.{language}").read_text("utf-8").splitlines() for language in ("de", "en")],
        study.plan.rounds,
    )
    record = {
        "plan": study.plan.name,
        "seed": SEED,
        "commit": commit(),
        "processor": processor(),
        "configs": {name: yaml.safe_load(config_text(study, name)) for name in models},
        "figures": figures,
    }
    study.results.mkdir(parents=True, exist_ok=True)
    write_atomically(study.results / "results.json", (json.dumps(record, indent=1) + "\n").encode())
    print_tables(record)
    draw(record, study.results / "pareto.svg")


def config_text(study: Study, name: str) -> str:
    """Return the configuration of a run, with WORK in place of its folder: results are kept in the repository."""
    return (study.run(name) / "config.yaml").read_text("utf-8").replace(str(study.work), "WORK")


def main() -> None:
    """Run the experiment, or a part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, help="folder of Tatoeba de-en")
    parser.add_argument("--tiny", action="store_true", help="300 pairs; results go to WORK/results")
    parser.add_argument("--leave-out", default="", metavar="NAMES", help="students not to train, such as 18-1,6-6")
    parser.add_argument("--measure", action="store_true", help="only measure, again")
    parser.add_argument("--table", action="store_true", help="only print the tables and draw the figure")
    options = parser.parse_args()
    work = options.work.absolute()
    results = work / "results" if options.tiny else HERE / "results"
    results.mkdir(parents=True, exist_ok=True)
    plan = TINY if options.tiny else FULL
    systems = {name: system for name, system in plan.systems.items() if name not in options.leave_out.split(",")}
    study = Study(work, options.data and options.data.absolute(), results, replace(plan, systems=systems))
    if options.table:
        record = json.loads((results / "results.json").read_text("utf-8"))
        print_tables(record)
        draw(record, results / "pareto.svg")
    elif options.measure:
        measure_all(study)
    else:
        everything(study)


if __name__ == "__main__":
    main()
