"""The whole road, from Tatoeba German-English with planted noise and news of one language each to a student.

    python experiments/pipeline/run.py --data ../shared/data --work WORK
    python experiments/pipeline/run.py --data ../shared/data --work OTHER --kills 30 --like WORK

writes corpora and the pipeline's file to the work folder and runs `ziggurat pipeline` there; the same command goes on
after it was stopped. `--kills` kills the program so many times at random moments before it may end. `--like` compares
all that the steps hand on with another work folder. `--tiny` makes corpora and models small enough to try it.
"""

from __future__ import annotations

import argparse
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

from ziggurat.data.files import write_atomically

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
"""Values for a trial: what they make is worth nothing."""


def write_corpora(data: Path, folder: Path, pairs: int, few: int | None) -> None:
    """Write all corpora; the last one tells that they are there."""
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


def run(work: Path, overrides: Sequence[str], kills: int, seed: int) -> list[float]:
    """Run the pipeline, killed `kills` times on the way; return after how many seconds of each call."""
    command = [sys.executable, "-m", "ziggurat", "pipeline", "pipeline.yaml", *overrides]
    generator = random.Random(seed)
    longest, killed = 20.0, list[float]()
    while True:
        process = subprocess.Popen(command, cwd=work, start_new_session=True)
        moment = generator.uniform(1.0, longest) if len(killed) < kills else None
        try:
            status = process.wait(moment)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too, as a power cut would
            process.wait()
            killed.append(float(moment or 0))
            longest *= 1.1  # or a long step, begun anew, would never end
            continue
        if status:
            sys.exit(f"the pipeline ended with status {status}")
        return killed


def differences(work: Path, other: Path) -> list[str]:
    """Return the files that steps of one of the two hand on, and that differ in the other."""
    found = []
    for manifest in sorted((work / "road").glob("*/manifest.json")):
        ours = json.loads(manifest.read_bytes())["outputs"]
        theirs = json.loads((other / "road" / manifest.parent.name / "manifest.json").read_bytes())["outputs"]
        found += [f"{manifest.parent.name}/{name}" for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)]
    return found


def noise_left(work: Path) -> dict[str, dict[str, int]]:
    """Return by kind of noise how many pairs were planted, and how many are still there after cleaning."""
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
    """Return a report without its examples of dropped pairs: text of corpora does not belong in the repository."""
    corpora = [{key: value for key, value in corpus.items() if key != "examples"} for corpus in report["corpora"]]
    return {**report, "corpora": corpora}


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpora")
    parser.add_argument("--work", type=Path, required=True, help="folder of everything that is written")
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("--kills", type=int, default=0, help="kill the program so many times at random moments")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--like", type=Path, help="compare with what this work folder has")
    parser.add_argument("--tiny", action="store_true", help="small enough to try it")
    given = parser.parse_args()
    work: Path = given.work
    write_corpora(given.data, work / "corpora", FEW if given.tiny else ALL, 100 if given.tiny else None)
    shutil.copyfile(HERE / "pipeline.yaml", work / "pipeline.yaml")
    began = time.perf_counter()
    killed = run(work, TINY if given.tiny else (), given.kills, given.seed)
    result: dict[str, Any] = {
        "commit": commit(),
        "processor": processor(),
        "minutes": (time.perf_counter() - began) / 60,
        "killed_after_seconds": killed,
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
