"""Students with one decoder layer, cut out of their teacher and trained from scratch: which learns sooner.

    python experiments/students/cut.py WORK --data TATOEBA     # two and a half hours on one core (AMD EPYC, AVX2)
    python experiments/students/cut.py WORK --table

All models have width 128 and learn from human translations, so that only the start differs. Finished parts are not
repeated, so a run that was cut off resumes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from measuring import commit, processor  # noqa: E402
from run import CORES, faster, train, ziggurat  # noqa: E402
from systems import DECODING, SEED, System, training  # noqa: E402

from ziggurat.system.files import write_atomically  # noqa: E402

RESULTS = HERE / "results" / "cut.json"
WIDTH, UPDATE_TOKENS = 128, 1024


@dataclass(frozen=True)
class Trained:
    """A model in the comparison; all encoders have 12 layers.

    Attributes:
        decoder: its decoder layers.
        updates: number of training updates.
        without: layers of the teacher that it lacks at the start; None: it is trained from scratch.
        guided: word alignments teach its decoder.
        peak: learning rate.
    """

    decoder: int
    updates: int
    without: str | None = None
    guided: bool = False
    peak: float = 2e-3


SYSTEMS = {
    "teacher": Trained(6, 4000),
    "12-1": Trained(1, 3000),
    "12-1-guided": Trained(1, 3000, guided=True),
    "12-1-lowest": Trained(1, 800, "decoder.2-6", peak=1e-3),
    "12-1-highest": Trained(1, 800, "decoder.1-5", peak=1e-3),
    "12-2-ends": Trained(2, 800, "decoder.2-5", peak=1e-3),
    "12-1-lowest-guided": Trained(1, 1500, "decoder.2-6", guided=True, peak=1e-3),
    "12-2-ends-guided": Trained(2, 1500, "decoder.2-5", guided=True, peak=1e-3),
}


def config(work: Path, name: str) -> Path:
    """Write the configuration of a model."""
    system = SYSTEMS[name]
    learning = training(system.updates, system.peak, UPDATE_TOKENS, faster(WIDTH))
    if system.guided:
        learning["loss"]["alignment"] = {"weight": 0.05}
    if system.without is not None:
        learning |= {"start_from": str(work / "cut" / name), "log_every_updates": 100}
        learning["validation"]["every_updates"], learning["checkpoint"]["every_updates"] = 100, 400
    content: dict[str, Any] = {
        "data": {
            "source_language": "de",
            "target_language": "en",
            "store": str(work / "store"),
            "train": [{"source": str(work / "train.de"), "target": str(work / "train.en")}],
            "dev": [{"source": str(work / "dev.de"), "target": str(work / "dev.en")}],
            "subword": {"kind": "bpe", "vocabulary_size": 8000, "joint": True},
            "alignment": {"compute": "hmm"},
        },
        "model": System(12, system.decoder, 4 * WIDTH, core_seconds=0).model(WIDTH),
        "training": learning,
        "decoding": DECODING,
    }
    path = work / f"{name}.yaml"
    write_atomically(path, yaml.safe_dump(content, sort_keys=False).encode())
    return path


def make(work: Path, name: str) -> None:
    """Train a model, first cutting it out of the teacher if required, and score it on the test set."""
    system, run, start = SYSTEMS[name], work / "runs" / name, work / "cut" / name
    if system.without is not None and not start.exists():
        chosen = ("--to", "ziggurat", "--without-layers", system.without, "--lines", "20")
        ziggurat("export", work / "runs" / "teacher", *chosen, "--out", start)
    train(run, config(work, name), threads=1)
    for path, scores in ((start, f"{name}.begun.json"), (run, f"{name}.json")):
        if path.exists() and not (work / scores).exists():
            words = ("--source", work / "test.de", "--reference", work / "test.en", "--threads", "1", "--json")
            command = [sys.executable, "-m", "ziggurat", "evaluate", path, *words]
            found = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE).stdout
            write_atomically(work / scores, found)


def everything(work: Path, data: Path | None) -> None:
    """Make every missing part; write the figures."""
    for name in (f"{split}.{language}" for split in ("train", "dev", "test") for language in ("de", "en")):
        if not (work / name).exists():
            if data is None:
                raise SystemExit(f"{work / name} is missing: give --data TATOEBA")
            write_atomically(work / name, gzip.decompress((data / f"{name}.gz").read_bytes()))
    if not (work / "store").exists():
        ziggurat("prepare", config(work, "teacher"))
    beginners = [name for name, system in SYSTEMS.items() if system.without is None]
    for names in (beginners, [name for name in SYSTEMS if name not in beginners]):
        with ThreadPoolExecutor(CORES) as pool:
            for done in [pool.submit(make, work, name) for name in names]:
                done.result()
    figures = {name: _figures(work, name) for name in SYSTEMS}
    record = {
        "seed": SEED,
        "commit": commit(),
        "processor": processor(),
        "precision": faster(WIDTH),
        "figures": figures,
    }
    write_atomically(RESULTS, (json.dumps(record, indent=1) + "\n").encode())
    table(record)


def _figures(work: Path, name: str) -> dict[str, Any]:
    lines = (work / "runs" / name / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "validation"]
    found: dict[str, Any] = {"nats": {row["update"]: row["nll"] for row in rows}}
    for key, file in (("begun", f"{name}.begun.json"), ("scores", f"{name}.json")):
        if (work / file).exists():
            scores = json.loads((work / file).read_text("utf-8"))
            found[key] = {score["name"]: score["value"] for score in scores}
    return found


def table(record: dict[str, Any]) -> None:
    """Print the figures as a table."""
    print("| | updates | dev nats | BLEU | chrF | BLEU before the first update |\n|---|---|---|---|---|---|")
    for name, found in record["figures"].items():
        update, nats = list(found["nats"].items())[-1]
        begun = f"{found['begun']['BLEU']:.1f}" if "begun" in found else ""
        scores = found["scores"]
        print(f"| {name} | {int(update):,} | {nats:.3f} | {scores['BLEU']:.1f} | {scores['chrF2']:.1f} | {begun} |")


def main() -> None:
    """Run the experiment, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, help="folder of Tatoeba de-en")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    if options.table:
        table(json.loads(RESULTS.read_text("utf-8")))
    else:
        options.work.mkdir(parents=True, exist_ok=True)
        everything(options.work.absolute(), options.data and options.data.absolute())


if __name__ == "__main__":
    main()
