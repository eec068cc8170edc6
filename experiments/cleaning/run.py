"""Compares scores that separate wrong pairs from right ones: lexicon and length, dual cross-entropy, and rules.

Noise of six kinds is planted in a corpus that is assumed clean. Every step writes a file to the work folder and is
skipped if the file exists, so the same command resumes after it was stopped:

    python experiments/cleaning/run.py tatoeba --data data --work WORK --pairs 30000 --out results/tatoeba.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.system.files import write_atomically

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from measuring import commit, processor  # noqa: E402

KINDS = ("misaligned", "wrong language", "untranslated", "cut short", "shuffled", "other words")
"""KINDS are the target of another pair; a French sentence; the source; the first half of the target; its words in
random order; and the target with a third of its words replaced by words of other targets.

The score of lexicon and length is not trained on French, nor on the last kind.
"""
NOISE = 0.2
SEED = 7
UPDATES = 1000


class Pairs(NamedTuple):
    """Both sides of a corpus with noise, and the kind of each pair: 0 for a right one."""

    source: list[str]
    target: list[str]
    kinds: NDArray[np.int64]


CORPORA = {
    "tatoeba": (("tatoeba-de-en/train",), ("tatoeba-fr-en/train.fr",)),
    "news": (("news-de-en/train",), ("testsets/newstest2013.fr", "testsets/newstest2014.en-fr.fr")),
}
"""CORPORA are the files of a corpus, without the language, and files of similar French text."""


def lines(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def planted(data: Path, corpus: str, count: int) -> Pairs:
    """Return `count` pairs of a German-English corpus, NOISE of them wrong."""
    generator = np.random.default_rng(SEED)
    (name,), french = CORPORA[corpus]
    sources, targets = (lines(data / f"{name}.{side}.gz") for side in ("de", "en"))
    strange = [line for file in french for line in lines(data / f"{file}.gz")]
    chosen = generator.permutation(len(sources))[:count]
    source, target = [sources[n] for n in chosen], [targets[n] for n in chosen]
    right = list(target)
    vocabulary = [word for text in right for word in text.split()]
    kinds = np.zeros(len(source), np.int64)

    def exchanged(words: list[str]) -> str:
        found = list(words)
        for place in generator.permutation(len(words))[: max(1, round(len(words) / 3))]:
            found[place] = vocabulary[int(generator.integers(len(vocabulary)))]
        return " ".join(found)

    for order, place in enumerate(generator.permutation(len(source))[: int(NOISE * len(source))]):
        kind = order % len(KINDS)
        words = right[place].split()
        made = {
            "misaligned": lambda: right[int(generator.integers(len(right)))],
            "wrong language": lambda: strange[int(generator.integers(len(strange)))],
            "untranslated": lambda at=place: source[at],
            "cut short": lambda words=words: " ".join(words[: max(1, len(words) // 2)]),
            "shuffled": lambda words=words: " ".join(generator.permutation(words).tolist()),
            "other words": lambda words=words: exchanged(words),
        }[KINDS[kind]]()
        if made != right[place]:  # a single word has only one order
            target[place], kinds[place] = made, kind + 1
    return Pairs(source, target, kinds)


class Work:
    """The folder of a run, whose finished files are kept.

    Args:
        folder: created if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def array(self, name: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return the result of `make`, now or from an earlier call of the script."""
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
        """Return the seconds that it took to make an array."""
        return int((self.folder / f"{name}.seconds").read_text())


def classifier(source: list[str], target: list[str]) -> NDArray[np.float64]:
    """Return the pair score of each pair, learnt from these pairs."""
    from ziggurat.data.cleaning.pair_score import PairScorer

    return PairScorer.train(zip(source, target, strict=True)).scores(source, target)


def entropies(folder: Path, taught: Sequence[Sequence[str]], scored: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """Return the cross-entropy per token of each target in `scored` given its source, under a small model of
    `taught`.
    """
    folder.mkdir(exist_ok=True)
    for side, (own, others) in zip(("source", "target"), zip(taught, scored, strict=True), strict=True):
        for part, texts in (("train", own), ("dev", own[:300]), ("scored", others)):
            write_atomically(folder / f"{part}.{side}", "".join(f"{text}\n" for text in texts).encode())
    settings: dict[str, Any] = {
        "data": {
            "source_language": "de", "target_language": "en", "store": str(folder / "store"),
            "train": [{"source": str(folder / "train.source"), "target": str(folder / "train.target")}],
            "dev": [{"source": str(folder / "dev.source"), "target": str(folder / "dev.target")}],
            "subword": {"vocabulary_size": 4000},
        },
        "model": {
            "d_model": 128, "d_ff": 512, "heads": 4, "residual": "pre", "encoder": {"layers": 2},
            "decoder": {"layers": 2}, "dropout": {"residual": 0.1},
        },
        "training": {
            "threads": 1, "batch": {"max_tokens": 2048}, "schedule": {"peak": 3e-3, "warmup_updates": 100},
            "stop": {"updates": UPDATES}, "tensorboard": False,
            "validation": {"every_updates": 500, "decode": False}, "checkpoint": {"every_updates": 100, "keep_last": 2},
            "diagnostics": {"every_updates": None},
        },
    }  # fmt: skip
    write_atomically(folder / "model.yaml", json.dumps(settings).encode())  # JSON is YAML
    run = folder / "run"
    ziggurat(folder, "prepare", "model.yaml")
    begin = ["--run", str(run), "--resume"] if (run / "checkpoints").is_dir() else ["model.yaml", "--run", str(run)]
    ziggurat(folder, "train", *begin)
    found = ziggurat(
        folder, "score", str(run), "--which", "last", "--source", "scored.source", "--target", "scored.target",
        "--threads", "1", "--json",
    )  # fmt: skip
    records = [json.loads(line) for line in found.splitlines()]
    return np.array([-np.mean(record["token_log_probabilities"]) for record in records])


def crossed(folder: Path, sides: tuple[list[str], list[str]]) -> NDArray[np.float64]:
    """Return the cross-entropy of each target under a model of the other half of the pairs."""
    half = np.random.default_rng(SEED).permutation(len(sides[0])) % 2
    found = np.zeros(len(half))
    for number in (0, 1):
        taught, scored = (
            [[text for text, own in zip(side, half == which, strict=True) if own] for side in sides]
            for which in (number, 1 - number)
        )
        found[half != number] = entropies(folder.with_name(f"{folder.name}-{number}"), taught, scored)
    return found


def ziggurat(folder: Path, *arguments: str) -> str:
    """Run a verb in `folder`; return its output."""
    command = [sys.executable, "-m", "ziggurat", *arguments]
    return subprocess.run(command, check=True, cwd=folder, stdout=subprocess.PIPE, text=True).stdout


def dual(forward: NDArray[np.float64], backward: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the adequacy of Junczys-Dowmunt (2018), equation 1: exp(-(|A - B| + (A + B) / 2))."""
    return np.exp(-(np.abs(forward - backward) + (forward + backward) / 2))


def judged(scores: NDArray[np.float64], kinds: NDArray[np.int64], limit: float) -> dict[str, Any]:
    """Return how well `scores` < `limit` finds the planted pairs: precision, recall, and the area under the curve."""
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
        # Precision by kind: among the dropped pairs that are right or of this kind, the share of this kind.
        "precision_by_kind": {
            kind: round(float(dropped[kinds == n].sum() / max(1, dropped[(kinds == n) | (kinds == 0)].sum())), 4)
            for n, kind in enumerate(KINDS, 1)
        },
        "right_dropped": round(float(dropped[kinds == 0].mean()), 4),
        "area": round(float(area), 4),
        "area_by_kind": areas,
    }


RULES = {"identical": True, "max_length_ratio": 3, "languages": {}, "agreement": {"numbers": 0.5, "punctuation": 2}}


def rules(pairs: Pairs) -> dict[str, NDArray[np.bool_]]:
    """Return for each rule in RULES the pairs that it drops, regardless of the others."""
    from ziggurat.config.data import FilterConfig
    from ziggurat.data.cleaning.cleaner import predicates

    found = {}
    for name, predicate in predicates(FilterConfig.model_validate(RULES), ("de", "en")):
        blocks = [slice(start, start + 10_000) for start in range(0, len(pairs.source), 10_000)]
        found[name] = np.concatenate([predicate(pairs.source[block], pairs.target[block]) for block in blocks])
    return {name: drop for name, drop in found.items() if drop.any()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", choices=list(CORPORA))
    parser.add_argument("--data", type=Path, required=True, help="folder with the corpora")
    parser.add_argument("--work", type=Path, required=True, help="folder for intermediate results")
    parser.add_argument("--pairs", type=int, default=30_000)
    parser.add_argument("--no-dual", action="store_true", help="leave out the models")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    pairs = planted(options.data, options.corpus, options.pairs)
    source, target, kinds = pairs
    work = Work(options.work)
    wrong = int((kinds > 0).sum())
    result: dict[str, Any] = {
        "corpus": options.corpus,
        "pairs": len(source),
        "planted": dict(zip(KINDS, np.bincount(kinds)[1:].tolist(), strict=True)),
        "seed": SEED,
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores, {processor()}",
    }

    def at_rate(scores: NDArray[np.float64]) -> dict[str, Any]:
        return judged(scores, kinds, float(np.sort(scores)[wrong]))

    names = ("right", *KINDS)
    dropping = rules(pairs)
    dropped = np.any(list(dropping.values()), axis=0)
    result["rules"] = {
        "settings": RULES,
        "all": judged(np.where(dropped, 0.0, 1.0), kinds, 0.5),
        "share dropped by rule": {
            rule: {name: round(float(drop[kinds == number].mean()), 4) for number, name in enumerate(names)}
            for rule, drop in dropping.items()
        },
    }
    scores = work.array("classifier", lambda: classifier(source, target))
    result["lexicon and length"] = {
        "as many as planted": at_rate(scores),
        "0.5": judged(scores, kinds, 0.5),
        "seconds": work.seconds("classifier"),
        "rules first, as many as planted": at_rate(np.where(dropped, -1 + 1e-3 * scores, scores)),
        "rules first, 0.5": judged(np.where(dropped, 0.0, scores), kinds, 0.5),
    }
    for name, how in () if options.no_dual else (("same pairs", entropies), ("other half", crossed)):
        parts = [
            work.array(
                f"{direction} {name}",
                lambda sides=sides, direction=direction, how=how, name=name: (
                    how(work.folder / f"{direction} {name}", sides, sides)
                    if how is entropies
                    else how(work.folder / f"{direction} {name}", sides)
                ),
            )
            for direction, sides in (("forward", (source, target)), ("backward", (target, source)))
        ]
        scores = dual(*parts)
        result[f"dual cross-entropy, models of the {name}"] = {
            "as many as planted": at_rate(scores),
            "rules first, as many as planted": at_rate(np.where(dropped, -1 + 1e-3 * scores, scores)),
            "updates of each model": UPDATES,
            "seconds": sum(work.seconds(f"{direction} {name}") for direction in ("forward", "backward")),
        }
        write_atomically(options.out, (json.dumps(result, indent=1) + "\n").encode())
    write_atomically(options.out, (json.dumps(result, indent=1) + "\n").encode())
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
