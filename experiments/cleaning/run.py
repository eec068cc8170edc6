"""Which score tells wrong pairs from right ones: lexicon and length, or dual conditional cross-entropy? And the rules?

Noise of five kinds is planted into a corpus that is taken for clean. Every step writes a file to the work folder and is
skipped where that is there, so the same command goes on after it was stopped:

    python experiments/cleaning/run.py --data data --work WORK --pairs 30000 --out results/tatoeba-30k.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.files import write_atomically

KINDS = ("misaligned", "wrong language", "untranslated", "cut short", "shuffled")
"""Another pair's target; a French sentence; the source; the first half of the target; its words in any order."""
NOISE = 0.2
SEED = 7
UPDATES = {"forward": 800, "backward": 800}


def lines(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def planted(data: Path, count: int) -> tuple[list[str], list[str], NDArray[np.int64]]:
    """Return both sides of `count` pairs of Tatoeba de-en with noise, and the kind of each pair: 0 for a right one."""
    generator = np.random.default_rng(SEED)
    sources, targets = (lines(data / f"tatoeba-de-en/train.{side}.gz") for side in ("de", "en"))
    strange = lines(data / "tatoeba-fr-en/train.fr.gz")
    chosen = generator.permutation(len(sources))[:count]
    source, target = [sources[n] for n in chosen], [targets[n] for n in chosen]
    right = list(target)
    kinds = np.zeros(len(source), np.int64)
    for order, place in enumerate(generator.permutation(len(source))[: int(NOISE * len(source))]):
        kind = order % len(KINDS)
        words = right[place].split()
        made = {
            "misaligned": lambda: right[int(generator.integers(len(right)))],
            "wrong language": lambda: strange[int(generator.integers(len(strange)))],
            "untranslated": lambda at=place: source[at],
            "cut short": lambda words=words: " ".join(words[: max(1, len(words) // 2)]),
            "shuffled": lambda words=words: " ".join(generator.permutation(words).tolist()),
        }[KINDS[kind]]()
        if made != right[place]:  # one word has one order only
            target[place], kinds[place] = made, kind + 1
    return source, target, kinds


class Work:
    """The folder of a run, whose finished files are kept.

    Args:
        folder: made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def array(self, name: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return what `make` returned, now or in an earlier call of the script."""
        path = self.folder / f"{name}.npy"
        if not path.exists():
            began = time.perf_counter()
            part = path.with_suffix(".part.npy")
            np.save(part, make())
            write_atomically(path.with_suffix(".seconds"), f"{time.perf_counter() - began:.0f}".encode())
            part.rename(path)
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        return np.load(path, allow_pickle=False)

    def seconds(self, name: str) -> int:
        """Return the seconds that an array took."""
        return int((self.folder / f"{name}.seconds").read_text())


def classifier(source: list[str], target: list[str]) -> NDArray[np.float64]:
    """Return the pair score of each pair, learnt from these."""
    from ziggurat.cleaning.pair_score import PairScorer

    return PairScorer.train(zip(source, target, strict=True)).scores(source, target)


def entropies(work: Work, direction: str, sides: tuple[list[str], list[str]]) -> NDArray[np.float64]:
    """Return the cross-entropy per token of each target given its source, by a small model trained on all pairs."""
    folder = work.folder / direction
    folder.mkdir(exist_ok=True)
    for name, texts in zip(("source", "target"), sides, strict=True):
        write_atomically(folder / f"train.{name}", "".join(f"{text}\n" for text in texts).encode())
        write_atomically(folder / f"dev.{name}", "".join(f"{text}\n" for text in texts[:300]).encode())
    layers = {"layers": 2}
    settings: dict[str, Any] = {
        "data": {
            "source_language": "de", "target_language": "en", "store": str(folder / "store"),
            "train": [{"source": str(folder / "train.source"), "target": str(folder / "train.target")}],
            "dev": [{"source": str(folder / "dev.source"), "target": str(folder / "dev.target")}],
            "subword": {"vocabulary_size": 4000},
        },
        "model": {
            "d_model": 128, "d_ff": 512, "heads": 4, "residual": "pre", "encoder": layers, "decoder": layers,
            "dropout": {"residual": 0.1},
        },
        "training": {
            "threads": 1, "batch": {"max_tokens": 2048}, "schedule": {"peak": 3e-3, "warmup_updates": 100},
            "stop": {"updates": UPDATES[direction]}, "tensorboard": False,
            "validation": {"every_updates": 200, "decode": False}, "checkpoint": {"every_updates": 100, "keep_last": 2},
            "diagnostics": {"every_updates": None},
        },
    }  # fmt: skip
    write_atomically(folder / "model.yaml", json.dumps(settings).encode())  # JSON is YAML
    run = folder / "run"
    ziggurat(folder, "prepare", "model.yaml")
    begin = (
        ["train", "--run", str(run), "--resume"]
        if (run / "checkpoints").is_dir()
        else ["train", "model.yaml", "--run", str(run)]
    )
    ziggurat(folder, *begin)
    scored = ziggurat(
        folder, "score", str(run), "--which", "last", "--source", "train.source", "--target", "train.target",
        "--threads", "1", "--json",
    )  # fmt: skip
    records = [json.loads(line) for line in scored.splitlines()]
    return np.array([-np.mean(record["token_log_probabilities"]) for record in records])


def ziggurat(folder: Path, *arguments: str) -> str:
    """Run a verb in `folder`; return its output."""
    command = [sys.executable, "-m", "ziggurat", *arguments]
    return subprocess.run(command, check=True, cwd=folder, stdout=subprocess.PIPE, text=True).stdout


def dual(forward: NDArray[np.float64], backward: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the adequacy of Junczys-Dowmunt (2018), equation 1: exp(-(|A - B| + (A + B) / 2))."""
    return np.exp(-(np.abs(forward - backward) + (forward + backward) / 2))


def judged(scores: NDArray[np.float64], kinds: NDArray[np.int64], limit: float) -> dict[str, Any]:
    """Return how well `scores` < `limit` finds what was planted: precision, recall; the area under the curve."""
    dropped = scores < limit
    ranks = np.argsort(np.argsort(scores, kind="stable"), kind="stable")
    right = ranks[kinds == 0]
    areas = {}
    for number, kind in enumerate(KINDS, start=1):
        wrong = np.sort(scores[kinds == number])
        below = np.searchsorted(wrong, scores[kinds == 0], "left") + np.searchsorted(wrong, scores[kinds == 0], "right")
        areas[kind] = round(float(below.mean() / 2 / len(wrong)), 4)
    area = (right.sum() - len(right) * (len(right) - 1) / 2) / (len(right) * int((kinds > 0).sum()))
    return {
        "limit": round(float(limit), 4),
        "dropped": int(dropped.sum()),
        "precision": round(float((kinds[dropped] > 0).mean()), 4),
        "recall": round(float(dropped[kinds > 0].mean()), 4),
        "recall_by_kind": {kind: round(float(dropped[kinds == n].mean()), 4) for n, kind in enumerate(KINDS, 1)},
        # Precision by kind: of what is dropped among right pairs and those of this kind, the share of the latter.
        "precision_by_kind": {
            kind: round(float(dropped[kinds == n].sum() / max(1, dropped[(kinds == n) | (kinds == 0)].sum())), 4)
            for n, kind in enumerate(KINDS, 1)
        },
        "right_dropped": round(float(dropped[kinds == 0].mean()), 4),
        "area": round(float(area), 4),
        "area_by_kind": areas,
    }


def rules(source: list[str], target: list[str]) -> NDArray[np.int64]:
    """Return for each pair the number of the rule that drops it, 0 for none; the rules of RULES with their defaults."""
    from ziggurat.config.filters import FilterConfig
    from ziggurat.data.cleaner import predicates

    settings = FilterConfig.model_validate(
        {"identical": True, "max_length_ratio": 3, "languages": {}, "agreement": {"numbers": 0.5, "punctuation": 2}}
    )
    found = np.zeros(len(source), np.int64)
    names = []
    for number, (name, predicate) in enumerate(predicates(settings, ("de", "en")), start=1):
        names.append(name)
        for start in range(0, len(source), 10_000):
            block = slice(start, start + 10_000)
            drop = predicate(source[block], target[block])
            found[block] = np.where(drop & (found[block] == 0), number, found[block])
    print("rules:", names)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with tatoeba-de-en and tatoeba-fr-en")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is computed once")
    parser.add_argument("--pairs", type=int, default=30_000)
    parser.add_argument("--no-dual", action="store_true", help="leave the two models out")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    source, target, kinds = planted(options.data, options.pairs)
    work = Work(options.work)
    planted_pairs = int((kinds > 0).sum())
    result: dict[str, Any] = {
        "pairs": len(source),
        "planted": dict(zip(KINDS, np.bincount(kinds)[1:].tolist(), strict=True)),
    }

    def at_rate(scores: NDArray[np.float64]) -> float:
        return float(np.sort(scores)[planted_pairs])

    if not options.no_dual:
        forward = work.array("forward", lambda: entropies(work, "forward", (source, target)))
        backward = work.array("backward", lambda: entropies(work, "backward", (target, source)))
        scores = dual(forward, backward)
        result["dual cross-entropy"] = {
            "as many as planted": judged(scores, kinds, at_rate(scores)),
            "seconds": work.seconds("forward") + work.seconds("backward"),
        }
    scores = work.array("classifier", lambda: classifier(source, target))
    result["lexicon and length"] = {
        "as many as planted": judged(scores, kinds, at_rate(scores)),
        "0.5": judged(scores, kinds, 0.5),
        "seconds": work.seconds("classifier"),
    }
    dropped = work.array("rules", lambda: rules(source, target)) > 0
    result["rules"] = judged(np.where(dropped, 0.0, 1.0), kinds, 0.5)
    result["rules, then lexicon and length"] = judged(np.where(dropped, 0.0, scores), kinds, 0.5)
    write_atomically(options.out, (json.dumps(result, indent=1) + "\n").encode())
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
