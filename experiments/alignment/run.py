"""Alignment error rates of `ziggurat align`, fast_align and eflomal, trained on the same pairs.

`python experiments/alignment/run.py --data shared/data --peers PEERS --out JSON en-fr ja-en ro-en babel`

PEERS holds the programs fast_align, atools and eflomal-align; without it only ours is run. All read the same text,
lower-cased and tokenised: first the gold pairs, then the training corpus, as in the shared tasks.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ziggurat.config.data import Symmetrisation
from ziggurat.data.aligner import (
    Aligner,
    Link,
    error_rate,
    parse_links,
    split_words,
)
from ziggurat.data.babel import generate_aligned

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from measuring import commit  # noqa: E402

ATOOLS = {"intersection": "intersect"}  # the other names are the same
PEER_METHODS = ("grow-diag-final-and", "grow-diag", "intersection", "union")
BABEL_SEED = 1


class Task(NamedTuple):
    """Training pairs, of which the first have gold alignments."""

    pairs: list[tuple[str, str]]
    sure: list[set[Link]]
    possible: list[set[Link]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the gold alignments and corpora")
    parser.add_argument("--peers", type=Path, help="folder of fast_align, atools and eflomal-align")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("tasks", nargs="+", choices=["en-fr", "ja-en", "ro-en", "babel"])
    asked = parser.parse_args()
    found: dict[str, Any] = {
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "tasks": {},
    }
    for name in asked.tasks:
        task = babel() if name == "babel" else gold_task(asked.data, name)
        results = {"pairs": len(task.pairs), "gold": len(task.sure), "ours": ours(task)}
        if asked.peers is not None:
            with tempfile.TemporaryDirectory() as folder:
                results |= peers(task, asked.peers, Path(folder))
        found["tasks"][name] = results
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, json.dumps(results, indent=1))


def gold_task(data: Path, name: str) -> Task:
    """Return the gold pairs of one language pair, followed by its training corpus."""
    stem = data / "alignment" / name.replace("-", "")
    pairs: list[tuple[str, str]] = []
    gold: tuple[list[set[Link]], list[set[Link]]] = ([], [])
    texts, links = (stem.with_suffix(suffix).read_text().splitlines() for suffix in (".src-tgt", ".gold"))
    for text, line in zip(texts, links, strict=True):
        source, target = (" ".join(side.lower().split()) for side in text.split("|||"))
        words = len(source.split()), len(target.split())
        sides: tuple[set[Link], set[Link]] = (set(), set())
        for entry in line.split():
            sure = "p" not in entry
            i, j = map(int, entry.replace("p", "-").split("-"))
            if 1 <= i <= words[0] and 1 <= j <= words[1]:  # a few links of ja-en point outside
                sides[0 if sure else 1].add((i - 1, j - 1))
        pairs.append((source, target))
        for kept, side in zip(gold, sides, strict=True):
            kept.append(side)
    corpora = {"en-fr": ("tatoeba-fr-en", "en", "fr"), "ja-en": ("tanaka-en-ja", "ja", "en")}
    if name in corpora:
        folder, *languages = corpora[name]
        sides_of = (lines(data / folder / f"train.{language}.gz") for language in languages)
        pairs.extend(zip(*sides_of, strict=True))
    return Task([pair for pair in pairs if all(pair)], *gold)


def lines(path: Path) -> Iterator[str]:
    """Yield the lines of a corpus, lower-cased and split by our rule (words of tokenised text stay as they are)."""
    tokenised = "tanaka" in str(path)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield " ".join(line.split() if tokenised else split_words(line.lower(), "split"))


def babel() -> Task:
    """Return 20,000 pairs of the embedded language pair; the first 500 are compared."""
    pairs = list(generate_aligned(20_000, BABEL_SEED))
    texts = [tuple(" ".join(split_words(t.lower(), "split")) for t in (pair.low, pair.high)) for pair in pairs]
    return Task(texts, [p.sure for p in pairs[:500]], [p.possible for p in pairs[:500]])  # type: ignore[arg-type]


def ours(task: Task) -> dict[str, Any]:
    """Train and align with our aligner."""
    began = time.perf_counter()
    aligner = Aligner.train(task.pairs, "blanks")
    some = task.pairs[: len(task.sure)]
    seconds = time.perf_counter() - began
    sources, targets = [source for source, _ in some], [target for _, target in some]

    def aligned(how: Symmetrisation) -> list[set[Link]]:
        return aligner.align(sources, targets, how)

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": round(seconds, 1),
        "peak_mib": round(peak),
        **scored(task, {h: aligned(h) for h in get_args(Symmetrisation)}),
    }


def peers(task: Task, programs: Path, folder: Path) -> dict[str, Any]:
    """Train and align with fast_align (-d -o -v, as its README advises) and eflomal (its defaults)."""
    text, forward, backward = folder / "text", folder / "forward", folder / "backward"
    text.write_text("".join(f"{source} ||| {target}\n" for source, target in task.pairs))
    results = {}

    def fast_align() -> None:
        for path, more in ((forward, []), (backward, ["-r"])):
            with path.open("w") as out:
                command: list[str | Path] = [programs / "fast_align", "-i", text, "-d", "-o", "-v", *more]
                subprocess.run(command, stdout=out, stderr=subprocess.DEVNULL, check=True)

    def eflomal() -> None:
        command: list[str | Path] = [
            programs / "eflomal-align",
            "-i",
            text,
            "-f",
            forward,
            "-r",
            backward,
            "--overwrite",
        ]
        path = f"{programs}:{os.environ['PATH']}"
        subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, check=True)

    for name, align in {"fast_align": fast_align, "eflomal": eflomal}.items():
        began = time.perf_counter()
        align()
        seconds = round(time.perf_counter() - began, 1)
        merged = {how: atools(programs, forward, backward, how, len(task.sure)) for how in PEER_METHODS}
        results[name] = {"seconds": seconds, **scored(task, merged)}
    return results


def atools(programs: Path, forward: Path, backward: Path, how: str, pairs: int) -> list[set[Link]]:
    """Return the alignment of two directions, symmetrised by fast_align's own program."""
    command: list[str | Path] = [programs / "atools", "-i", forward, "-j", backward, "-c", ATOOLS.get(how, how)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [set(parse_links(line, None, None, "atools")) for line in done.stdout.splitlines()[:pairs]]


def scored(task: Task, merged: dict[Any, list[set[Link]]]) -> dict[str, Any]:
    """Return AER, precision and recall of each method, in per cent."""
    rounded: Callable[[float], float] = lambda share: round(100 * share, 2)  # noqa: E731
    return {how: list(map(rounded, error_rate(found, task.sure, task.possible))) for how, found in merged.items()}


if __name__ == "__main__":
    main()
