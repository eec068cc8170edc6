"""Time that modifiers take: microseconds per pair in the loader, and their share of training time at T1's speed.

    python -m benchmarks.modifiers [--data FOLDER] [--batches 60] [--rounds 3] [--speed 3500] [--json]
    python -m benchmarks.train_speed --peer --shape T1 --modified --rounds 3      # training with and without

Multi30k en-de with word alignments. Batches of 4,096 tokens are loaded without training, with one modifier at a time
and with the mix of Firefox's teachers, and with none; figures are medians of interleaved rounds, in CPU time. A single
modifier is applied to all pairs (or to every tenth word), to measure the cost of a modified pair. The share is the
extra time for the mix divided by the training time of a pair at `--speed` target tokens/s (benchmarks/README.md has
that of T1).
Exit status 1 if it is above 3 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

FIREFOX: dict[str, Any] = {
    "upper_case": {"probability": 0.07},
    "title_case": {"probability": 0.05},
    "no_end_punctuation": {"probability": 0.2},
    "typos": {"probability": 0.05},
    "noise": {"probability": 0.0005},
    "inline": {"probability": 0.005, "tags": 0.0, "placeholders": 0.0},
}
"""FIREFOX are the modifiers for the teachers of Firefox's translations (mozilla/translations 4732dc9)."""

MERGED = {"merge": {"probability": 0.01}, "terms": {"probability": 0.01}, "prefix": {"probability": 0.02}}
LIMIT, TOKENS = 0.03, 4096


def loading(store: Path, modifiers: dict[str, Any], batches: int) -> tuple[float, float, float]:
    """Load batches of an epoch; return CPU seconds per pair, target tokens per pair, and the share of padding."""
    from ziggurat.config.data import DataConfig
    from ziggurat.config.train import BatchConfig
    from ziggurat.data.corpus import Store
    from ziggurat.data.loader import Loader, LoaderState

    opened = Store.open(store)
    section = {"source_language": "en", "target_language": "de", "store": str(store), "modifiers": modifiers}
    data = DataConfig.model_validate(section)
    batch = BatchConfig(max_tokens=TOKENS)
    loader = Loader(opened.train, opened.source, opened.target, batch, seed=1, data=data)
    loader.load(LoaderState(1))  # the plan and the first pages of the files
    began, pairs, tokens, real, room = time.thread_time(), 0, 0, 0, 0
    count = min(batches, len(loader.plan(LoaderState(1))))
    for number in range(count):
        for found in loader.load(LoaderState(1, number)):
            pairs, tokens = pairs + found.sentences, tokens + found.target_tokens
            real += found.target_tokens + found.source_tokens
            room += found.target_mask.numel() + found.source_mask.numel()
    return (time.thread_time() - began) / pairs, tokens / pairs, 1 - real / room


def main() -> None:
    from benchmarks.train_speed import prepared

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/multi30k"))
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--speed", type=float, default=3500.0, help="target tokens/s of training")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    store = prepared(options.data, aligned=True)
    every = {**FIREFOX, **MERGED, "inline": {"probability": 0.005}}
    mixes = {"none": {}, "Firefox": FIREFOX, "Firefox, merge, terms, prefix": {**FIREFOX, **MERGED}}
    mixes |= {f"all: {name}": {name: {**section, "probability": 1.0}} for name, section in every.items()}
    for name in ("inline", "terms"):  # their probability is per word: about one per sentence
        mixes[f"all: {name}"][name]["probability"] = 0.1
    runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in mixes}
    for _ in range(options.rounds):
        for name, modifiers in mixes.items():
            runs[name].append(loading(store, modifiers, options.batches))
    seconds = {name: statistics.median(run[0] for run in found) for name, found in runs.items()}
    of_pair = runs["none"][0][1] / options.speed
    shares = {name: (each - seconds["none"]) / of_pair for name, each in seconds.items()}
    if options.json:
        print(json.dumps({name: {"seconds": seconds[name], "share": shares[name]} for name in mixes}, indent=2))
    else:
        print(f"training takes {of_pair * 1e6:,.0f} us per pair at {options.speed:,.0f} target tokens/s")
        for name, each in seconds.items():
            padding, rate = runs[name][0][2], f"{1 / each:,.0f} pairs/s"
            print(f"{name:32} {each * 1e6:7.1f} us per pair  {rate:>16}  {shares[name]:6.2%}  padding {padding:.1%}")
    sys.exit(shares["Firefox"] > LIMIT)


if __name__ == "__main__":
    main()
