"""The whole pipeline, from Tatoeba German-English with planted noise and monolingual news to a student.

    python experiments/pipeline/run.py --data ../shared/data --work WORK
    python experiments/pipeline/run.py --data ../shared/data --work OTHER --kills 30 --like WORK

It writes corpora and the pipeline's file to the work folder and runs `ziggurat pipeline` there; the same command
resumes after it was stopped. `--kills` kills the program that many times at random moments before it may end. `--like`
compares all outputs of the steps with another work folder. `--tiny` makes corpora and models small enough to try it.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ziggurat.system.files import write_atomically

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from cleaning.run import KINDS, planted  # noqa: E402
from measuring import commit, processor  # noqa: E402

ALL, FEW = 200_000, 1500
TINY = (
    *(f"{model}.training.{key}" for model in ("backward", "teacher", "student")
      for key in ("stop.updates=60", "validation.every_updates=60", "validation.max_sentences=20",
                  "schedule.warmup_updates=10")),
    *(f"{model}.{key}" for model in ("backward", "teacher", "student")
      for key in ("model.d_model=32", "model.d_ff=64", "subword.vocabulary_size=800")),
    "teacher.model.encoder.layers=4", "teacher.training.growth.stages=[{layers: 2, updates: 30}]",
    "quantisation.updates=10", "monolingual.source.0.lines=100", "monolingual.target.0.lines=100",
    "backtranslation.max_ratio=1000.0", "distillation.max_ratio=1000.0",
    *(f"{model}.decoding.max_length={{ratio: 1.0, extra: 5}}" for model in ("backward", "teacher", "student")),
    "export.ctranslate2.tolerance=100", "export.ctranslate2.lines=100", "export.argos.lines=100",
    "evaluation.perturb_lines=20", "evaluation.speed_lines=20",
)  # fmt: skip
"""TINY are values for a trial whose results are worthless."""
SHORT = (
    *(f"{model}.training.validation.every_updates=500" for model in ("backward", "teacher", "student")),
    "backward.training.checkpoint.every_updates=100", "backward.training.stop.updates=1250",
    *(f"{model}.training.{key}" for model in ("teacher", "student")
      for key in ("checkpoint.every_updates=50", "stop.updates=1000")),
    "teacher.training.growth.stages=[{layers: 6, updates: 600}]", "teacher.decoding.beam_size=2",
    "distillation.n_best=2", "quantisation.updates=100",
)  # fmt: skip
"""SHORT are values for a quarter of the teacher's and the student's training and half of the search, with checkpoints
frequent enough for a run that is killed every other minute.
"""
JOBS = (
    "backward-data", "backtranslate", "teacher-data", "distil", "distil-monolingual", "filter", "align", "student-data"
)  # fmt: skip
"""JOBS are the steps that can be done in parts."""
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


def write_corpora(data: Path, folder: Path, pairs: int, few: int | None) -> None:
    """Write all corpora; the last one shows that they are complete."""
    done = folder / "kinds.json"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    noisy = planted(data, "tatoeba", pairs)
    sides = {"de": noisy.source, "en": noisy.target}
    for code, texts in sides.items():
        write_lines(folder / f"train.{code}", texts)
        for name, file, most in (
            ("dev", f"tatoeba-de-en/dev.{code}", few),
            ("test", f"tatoeba-de-en/test.{code}", few),
            ("newstest", f"testsets/newstest2013.{code}", few or 500),
            ("news", f"news-de-en/train.{code}", few),
        ):
            with gzip.open(data / f"{file}.gz", "rt", encoding="utf-8") as stream:
                write_lines(folder / f"{name}.{code}", [line.rstrip("\n") for line in stream][:most])
    write_atomically(done, json.dumps(noisy.kinds.tolist()).encode())


def write_lines(path: Path, texts: Sequence[str]) -> None:
    """Write lines to a file."""
    write_atomically(path, "".join(f"{text}\n" for text in texts).encode())


def started(work: Path, *options: str, bulk: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Start the pipeline as the leader of a process group; `bulk` are options of the verb."""
    before = ["bulk", *bulk] if bulk else []
    command = [sys.executable, "-m", "ziggurat", *before, "pipeline", "pipeline.yaml", *options]
    return subprocess.Popen(command, cwd=work, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for the pipeline; end the experiment if it failed."""
    if status := process.wait():
        sys.exit(f"the pipeline ended with status {status}")


class Kills:
    """The program killed `number` times at random moments, with alternating launchers.

    Each call runs its jobs in local processes, on a Ray cluster of two nodes with one CPU each, or as two parts of a
    step at the same time, like a Slurm array. It is ended by SIGKILL, with all its processes as in a power cut, or by
    SIGTERM; of two parts one is ended while the other continues. Half of the calls on the cluster first lose a node in
    the middle of their work.
    """

    def __init__(self, work: Path, overrides: Sequence[str], number: int, minutes: float, seed: int) -> None:
        self.work, self.overrides, self.number = work, tuple(overrides), number
        self.mean = 60 * minutes / max(1, number)
        self.generator = random.Random(seed)
        self.killed: list[dict[str, Any]] = []
        self.nodes: Any = None
        self.lost: list[str] = []

    def run(self) -> None:
        """Run the pipeline to its end."""
        while len(self.killed) < self.number:
            way = self.generator.choice(("processes", "ray", "parts"))
            moment = self.generator.uniform(1.0, 2 * self.mean)
            step = self.next_job() if way == "parts" else None
            if step is not None:
                self.in_parts(step, moment)
            else:
                way = "processes" if way == "parts" else way
                process = self.on_ray() if way == "ray" else started(self.work, *self.overrides)
                if self.to_the_end(process, way, moment):
                    break
        if self.nodes is not None:
            self.nodes.shutdown()
        finish(started(self.work, *self.overrides))

    def next_job(self) -> str | None:
        """Return the next step to do, if it can be done in parts."""
        command = [sys.executable, "-m", "ziggurat", "pipeline", "pipeline.yaml", *self.overrides, "--status", "--json"]
        states = json.loads(subprocess.run(command, cwd=self.work, capture_output=True, check=True).stdout)
        step = next((state["step"] for state in states if state["state"] != "done"), None)
        return step if step in JOBS else None

    def in_parts(self, step: str, moment: float) -> None:
        """Run both parts of a step at once, and kill one of them unless it ends first."""
        parts = [
            started(self.work, *self.overrides, "--only", step, bulk=("--shard", f"{part}/2", "--workers", "1"))
            for part in (1, 2)
        ]
        victim = self.generator.choice(parts)
        try:
            victim.wait(moment)
        except subprocess.TimeoutExpired:
            self.kill(victim, "parts", moment)
            parts.remove(victim)
        for part in parts:
            finish(part)

    def on_ray(self) -> subprocess.Popen[bytes]:
        """Start the pipeline on the cluster with both nodes up."""
        from ray.cluster_utils import Cluster

        if self.nodes is None:
            self.nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        while len(self.nodes.list_all_nodes()) < 2:
            self.nodes.add_node(**NODE)
        self.nodes.wait_for_nodes()
        return started(self.work, *self.overrides, bulk=("--ray", self.nodes.address))

    def to_the_end(self, process: subprocess.Popen[bytes], way: str, moment: float) -> bool:
        """Wait until the program ends, or kill it after `moment` seconds; return whether it ended."""
        before = self.generator.uniform(0.5, 0.9) * moment if way == "ray" and self.generator.random() < 0.5 else 0.0
        try:
            if before:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(before)
                if process.poll() is None:
                    self.nodes.remove_node(next(iter(self.nodes.worker_nodes)), allow_graceful=False)
                    self.lost.append(self.at_work())
            process.wait(moment - before)
        except subprocess.TimeoutExpired:
            self.kill(process, way, moment)
            return False
        finish(process)
        return True

    def kill(self, process: subprocess.Popen[bytes], way: str, moment: float) -> None:
        """Kill the program in the middle of its work, and note its step."""
        number = self.generator.choice((signal.SIGKILL, signal.SIGTERM))
        self.killed.append({"seconds": round(moment, 1), "way": way, "signal": number.name, "step": self.at_work()})
        print(f"kill {len(self.killed)}: {self.killed[-1]}", flush=True)
        (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)
        if process.wait(120) not in (0, -number, 128 + number):
            sys.exit(f"the pipeline ended with status {process.returncode} when it was stopped")

    def at_work(self) -> str:
        """Return the step that was started last and is not done."""
        begun = [
            path for path in (self.work / "road").glob("*/begun.json") if not path.with_name("manifest.json").exists()
        ]
        return max(begun, key=lambda path: path.stat().st_mtime).parent.name if begun else ""


def differences(work: Path, other: Path) -> list[str]:
    """Return the output files of steps that differ between the two folders."""
    found = []
    for manifest in sorted((work / "road").glob("*/manifest.json")):
        ours = json.loads(manifest.read_bytes())["outputs"]
        theirs = json.loads((other / "road" / manifest.parent.name / "manifest.json").read_bytes())["outputs"]
        found += [f"{manifest.parent.name}/{name}" for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)]
    return found


def noise_left(work: Path) -> dict[str, dict[str, int]]:
    """Return for each kind of noise how many pairs were planted, and how many remain after cleaning."""
    kinds = json.loads((work / "corpora" / "kinds.json").read_bytes())

    def pairs(place: Path) -> list[tuple[str, ...]]:
        sides = [(place.with_name(f"{place.name}.{code}")).read_text("utf-8").splitlines() for code in ("de", "en")]
        return [tuple(" ".join(text.split()) for text in pair) for pair in zip(*sides, strict=True)]

    kept = set(pairs(work / "road" / "clean" / "train" / "tatoeba"))
    found: dict[str, dict[str, int]] = {}
    for pair, kind in zip(pairs(work / "corpora" / "train"), kinds, strict=True):
        of_kind = found.setdefault("right" if kind == 0 else KINDS[kind - 1], {"planted": 0, "left": 0})
        of_kind["planted"] += 1
        of_kind["left"] += pair in kept
    return found


def without_text(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without its examples of dropped pairs: corpus text does not belong in the repository."""
    corpora = [{key: value for key, value in corpus.items() if key != "examples"} for corpus in report["corpora"]]
    return {**report, "corpora": corpora}


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpora")
    parser.add_argument("--work", type=Path, required=True, help="folder for all output")
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("--kills", type=int, default=0, help="kill the program that many times at random moments")
    parser.add_argument("--minutes", type=float, default=80.0, help="its duration without kills")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--like", type=Path, help="compare with this work folder")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--short", action="store_true", help="shorter training, all of the text")
    size.add_argument("--tiny", action="store_true", help="small enough to try it")
    given = parser.parse_args()
    work: Path = given.work
    write_corpora(given.data, work / "corpora", FEW if given.tiny else ALL, 100 if given.tiny else None)
    shutil.copyfile(HERE / "pipeline.yaml", work / "pipeline.yaml")
    began = time.perf_counter()
    kills = Kills(work, TINY if given.tiny else SHORT if given.short else (), given.kills, given.minutes, given.seed)
    kills.run()
    result: dict[str, Any] = {
        "commit": commit(),
        "processor": processor(),
        "minutes": (time.perf_counter() - began) / 60,
        "values": list(kills.overrides),
        "killed": kills.killed,
        "node_lost_in": kills.lost,
        "noise": noise_left(work),
        "report": without_text(json.loads((work / "road" / "report" / "report.json").read_bytes())),
    }
    if given.like is not None:
        result["unlike"] = differences(work, given.like)
        print(f"{len(result['unlike'])} files differ: {result['unlike'][:10]}")
    if given.out is not None:
        write_atomically(given.out, json.dumps(result, indent=1).encode() + b"\n")
    print(json.dumps(result["noise"], indent=1))
    print(f"{result['minutes']:.1f} minutes")


if __name__ == "__main__":
    main()
