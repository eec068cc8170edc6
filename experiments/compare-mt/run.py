"""Ziggurat's tables by buckets compared with compare-mt's on the same outputs; prints the largest differences.

`python experiments/compare-mt/run.py --compare-mt PYTHON --reference FILE --train-target FILE --out JSON OUTPUT...`
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ziggurat.cli.output import input_stream
from ziggurat.evaluate.comparison import System, compare
from ziggurat.evaluate.scores import BleuWords
from ziggurat.translate.text_lines import read_lines

THEIRS = Path(__file__).with_name("theirs.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare-mt", required=True, help="Python of an environment with compare-mt 0.2.10")
    parser.add_argument("--reference", required=True)
    parser.add_argument("--train-target", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("outputs", nargs="+", help="outputs, one per seed")
    asked = parser.parse_args()
    reference, train_target = read(asked.reference), read(asked.train_target)
    outputs = [read(path) for path in asked.outputs]
    ours = our_figures(reference, outputs, train_target)
    theirs = their_figures(asked.compare_mt, reference, outputs, train_target)
    names = [Path(path).stem for path in asked.outputs]
    found = {"outputs": names, "differences": differences(ours, theirs)}
    for side, figures in (("ours", ours), ("theirs", theirs)):
        found[side] = {key: value for key, value in figures.items() if key != "ngrams"}  # too many to keep
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(*found["differences"], sep="\n")


def read(path: str) -> list[str]:
    """Return the lines of a text file, compressed or not."""
    return list(read_lines(*input_stream(path)))


def our_figures(
    reference: Sequence[str], outputs: Sequence[Sequence[str]], train_target: Sequence[str]
) -> dict[str, Any]:
    """Return our figures in the format of theirs.py."""
    systems = [System(str(number), [output]) for number, output in enumerate(outputs)]
    shown = 1_000_000  # all n-grams
    found = compare(systems, [reference], None, train_target, metrics=["bleu"], resamplings=1, trials=1, examples=shown)
    tables = {table.key: table for table in found.buckets}

    def by_output(key: str, scale: float) -> list[dict[str, Any]]:
        return [
            {
                b.label: b.systems[n].mean if b.size is None else [b.size, b.systems[n].mean * scale]
                for b in tables[key].buckets
                if b.size is not None or b.systems[n].mean
            }
            for n in range(len(outputs))
        ]

    with_first = [table for table in found.ngrams if table.left == "0"]
    return {
        "accuracy-by-frequency": by_output("accuracy-by-frequency", 0.01),
        "bleu-by-length": by_output("bleu-by-length", 1.0),
        "length-difference": by_output("length-difference", 1.0),
        "ngrams": [
            {n.ngram: [n.left, n.right, n.score] for n in (*table.more_in_left, *table.more_in_right)}
            for table in with_first
        ],
    }


def their_figures(
    python: str, reference: Sequence[str], outputs: Sequence[Sequence[str]], train_target: Sequence[str]
) -> dict[str, Any]:
    """Return compare-mt's figures for the same words."""
    words = BleuWords()
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, lines in [
            ("ref", reference),
            ("train", train_target),
            *((f"o{n}", o) for n, o in enumerate(outputs)),
        ]:
            paths.append(Path(folder, name))
            paths[-1].write_text("".join(" ".join(words(line)) + "\n" for line in lines), encoding="utf-8")
        answer = Path(folder, "answer.json")
        command = [python, "-I", THEIRS, paths[0], paths[1], answer, *paths[2:]]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return one line per table: how many figures each side has, and the largest difference."""
    lines = []
    for key in theirs:
        mine, other = flat(ours[key]), flat(theirs[key])
        largest = max((abs(mine[k] - other[k]) for k in mine.keys() & other.keys()), default=0.0)
        only = len(mine.keys() ^ other.keys())
        lines.append(f"{key}: {len(other)} figures, {only} on one side only, largest difference {largest:.3g}")
    return lines


def flat(value: Any, place: tuple[str, ...] = ()) -> dict[tuple[str, ...], float]:
    """Return the numbers in a JSON value by path."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat(inner, (*place, key)).items()}
    if isinstance(value, list):
        return {k: v for key, inner in enumerate(value) for k, v in flat(inner, (*place, str(key))).items()}
    return {place: float(value)}


if __name__ == "__main__":
    sys.exit(main())
