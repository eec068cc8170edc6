"""Multi30k with 10,000 pairs, without and with the other 19,000 English sentences as back-translated text.

    python experiments/back-translation/run.py WORK --data MULTI30K            # everything, step by step
    python experiments/back-translation/run.py WORK --data MULTI30K --table    # the figures as a table

WORK holds texts, stores, runs and results. Finished parts are not repeated, so a run that was cut off resumes.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
PAIRS = 10_000
"""PAIRS is the number of sentence pairs that stay pairs; only the English side of the rest is used."""
SEEDS = (1, 2, 3)
SYSTEMS = ("baseline", "bt-beam")
"""SYSTEMS are the baseline without back-translation, and systems with it, one per method."""


@dataclass(frozen=True)
class Study:
    """The folders of one experiment, and its training length if it differs from that of base.yaml."""

    work: Path
    data: Path
    updates: int | None = None

    def text(self, name: str) -> str:
        """Return the path of a text."""
        return str(self.work / "text" / name)

    def run(self, name: str) -> Path:
        """Return the folder of a training run."""
        return self._folder("runs", name) / name

    def outputs(self, name: str) -> Path:
        """Return the file of a system's translations of the test set."""
        return self._folder("outputs", name) / f"{name}.en"

    def _folder(self, kind: str, name: str) -> Path:
        of_updates = f"-{self.updates}" if self.updates and not name.startswith("reverse") else ""
        return self.work / f"{kind}{of_updates}"


def ziggurat(*arguments: str | Path) -> None:
    """Run a verb; a failure ends the experiment."""
    print("ziggurat", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "ziggurat", *map(str, arguments)], check=True)


def write_texts(study: Study) -> None:
    """Cut Multi30k into pairs and monolingual text, and unpack the test set."""
    folder = study.work / "text"
    folder.mkdir(parents=True, exist_ok=True)

    def lines(name: str) -> Iterator[str]:
        with gzip.open(study.data / f"{name}.gz", "rt", encoding="utf-8", newline="\n") as file:
            yield from file

    for language in ("de", "en"):
        pairs = itertools.islice(lines(f"train.{language}"), PAIRS)
        (folder / f"parallel.{language}").write_text("".join(pairs), encoding="utf-8")
        (folder / f"test.{language}").write_text("".join(lines(f"test_2016_flickr.{language}")), encoding="utf-8")
    rest = itertools.islice(lines("train.en"), PAIRS, None)
    (folder / "monolingual.en").write_text("".join(rest), encoding="utf-8")


def prepare(study: Study, name: str, source: str, target: str, extra: list[dict[str, Any]]) -> Path:
    """Write a system's configuration and store; return the configuration. All share the baseline's pieces."""
    config = yaml.safe_load((HERE / "base.yaml").read_text(encoding="utf-8"))
    pairs = {"source": study.text(f"parallel.{source}"), "target": study.text(f"parallel.{target}")}
    dev = {"source": str(study.data / f"val.{source}.gz"), "target": str(study.data / f"val.{target}.gz")}
    stores = study.work / "stores"
    config["data"] |= {
        "source_language": source,
        "target_language": target,
        "store": str(stores / name),
        "train": [pairs, *extra],
        "dev": [dev],
    }
    if name != "baseline":
        config["data"]["subword"] = {"kind": "existing", "source_model": str(stores / "baseline" / "joint.spm")}
    path = study.work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    ziggurat("prepare", path)
    return path


def train(study: Study, config: Path, name: str, seed: int) -> None:
    """Train one model; its result is the average of its last checkpoints."""
    run = study.run(f"{name}-{seed}")
    if (run / "averaged").exists():
        return
    began = time.monotonic()
    if any(run.glob("checkpoints/*")):  # cut off earlier
        ziggurat("train", "--run", run, "--resume")
    else:
        length = [f"training.stop.updates={study.updates}"] if study.updates and name != "reverse" else []
        ziggurat("train", config, "--run", run, f"training.seed={seed}", *length)
    print(f"{run.name}: {time.monotonic() - began:.0f} s", flush=True)


def evaluate(study: Study, name: str, seed: int) -> None:
    """Translate the test set."""
    output = study.outputs(f"{name}-{seed}")
    output.parent.mkdir(exist_ok=True)
    if not output.exists():
        test = ("--input", study.text("test.de"), "--output", output)
        ziggurat("translate", study.run(f"{name}-{seed}"), *test, "--which", "averaged", "--threads", "1")


def back_translate(study: Study, method: str) -> list[dict[str, Any]]:
    """Translate the English text into German; return the corpus as an entry of `data.train`."""
    folder = study.work / f"synthetic-{method}"
    text = ("--input", study.text("monolingual.en"), "--out", folder, "--method", method, "--threads", "1")
    ziggurat("backtranslate", study.run("reverse-1"), *text, "--which", "averaged", "--tag", "<bt>")
    corpora: list[dict[str, Any]] = yaml.safe_load((folder / "corpus.yaml").read_text(encoding="utf-8"))["data"][
        "train"
    ]
    return corpora


def everything(study: Study, systems: list[str]) -> None:
    """Make every missing part."""
    write_texts(study)
    baseline = prepare(study, "baseline", "de", "en", [])
    train(study, prepare(study, "reverse", "en", "de", []), "reverse", 1)
    configs = {"baseline": baseline}
    for name in systems:
        if name != "baseline":
            configs[name] = prepare(study, name, "de", "en", back_translate(study, name.removeprefix("bt-")))
    for seed, name in itertools.product(SEEDS, systems):
        train(study, configs[name], name, seed)
        evaluate(study, name, seed)


def table(study: Study) -> None:
    """Print BLEU of each seed and system, and the paired bootstrap of each system against the baseline."""
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest

    def read(path: Path) -> list[str]:
        return path.read_text(encoding="utf-8").splitlines()

    references = [read(study.work / "text" / "test.en")]
    found = [name for name in SYSTEMS if all(study.outputs(f"{name}-{seed}").exists() for seed in SEEDS)]
    scores: dict[str, list[float]] = {name: [] for name in found}
    records = []
    for seed in SEEDS:
        systems = [(name, read(study.outputs(f"{name}-{seed}"))) for name in found]
        metric = BLEU(references=references)
        signatures, results = PairedTest(systems, {"BLEU": metric}, None, test_type="bs", n_samples=1000)()
        for name, result in zip(found, results["BLEU"], strict=True):
            scores[name].append(result.score)
            interval = {"mean": result.mean, "ci": result.ci}
            records.append({"seed": seed, "system": name, "bleu": result.score, "p": result.p_value, **interval})
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    document = json.dumps({"signature": str(signatures["BLEU"]), "scores": records}, indent=1) + "\n"
    (results / f"{study.updates or 'base'}.json").write_text(document, encoding="utf-8")
    print(signatures["BLEU"])
    print("\n| seed |" + "".join(f" {name} |" for name in found) + "\n" + "|---" * (len(found) + 1) + "|")
    for seed in SEEDS:
        cells = [r for r in records if r["seed"] == seed]
        shown = [f"{r['bleu']:.2f}" + ("" if r["p"] is None else f" (p = {r['p']:.4f})") for r in cells]
        print(f"| {seed} | " + " | ".join(shown) + " |")
    print("| mean | " + " | ".join(f"{mean(scores[name]):.2f}" for name in found) + " |")


def main() -> None:
    """Run the experiment, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k: train.de.gz and so on")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="only these, separated by commas")
    parser.add_argument("--updates", type=int, help="per run, except the reverse model's; default: base.yaml's")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    study = Study(options.work.absolute(), options.data.absolute(), options.updates)
    if options.table:
        table(study)
    else:
        everything(study, options.systems.split(","))


if __name__ == "__main__":
    main()
