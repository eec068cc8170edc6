"""Milliseconds per step of beam search with and without a lexical shortlist, interleaved in one run.

python -m benchmarks.shortlist [--json]

Random weights, 6+6 layers of width 512; 64 sentences of 25 tokens, 4 beams, 15 tokens each; each source token allows
100 random target tokens (Zipf's law), and 100 more are allowed everywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

from ziggurat.config.model import ModelConfig
from ziggurat.data.shortlist import ShortlistTable
from ziggurat.model.build import build_model
from ziggurat.model.fast.compiled import Precision
from ziggurat.model.fast.packed import available, make_fast
from ziggurat.translate.scorers import ModelScorer, Shortlist
from ziggurat.translate.search import search
from ziggurat.translate.settings import SearchSettings, Sentence

SENTENCES, LENGTH, STEPS, BEAMS, CANDIDATES = 64, 25, 15, 4, 100
EOS = 3


def table(vocabulary: int) -> Shortlist:
    """Return a shortlist with tokens distributed as in text, rank r with probability ~ 1 / r, so that sentences share
    some.
    """
    draw = np.random.default_rng(1)
    weights = 1 / np.arange(1, vocabulary + 1)
    drawn = draw.choice(vocabulary, (vocabulary, CANDIDATES), p=weights / weights.sum()).astype(np.int32)
    always = np.arange(CANDIDATES, dtype=np.int32)
    return Shortlist(ShortlistTable(drawn, always, ("", "")), vocabulary)


def measure(vocabulary: int, precision: Precision, rounds: int) -> dict[str, float]:
    """Return milliseconds per step, median over the rounds, without and with the shortlist."""
    sizes = {"d_model": 512, "d_ff": 2048, "heads": 8, "encoder": {"layers": 6}, "decoder": {"layers": 6}}
    model = build_model(ModelConfig.model_validate(sizes), vocabulary, vocabulary).eval()
    make_fast(model, precision)
    scorers = {"whole": ModelScorer(model), "shortlist": ModelScorer(model, table(vocabulary))}
    draw = np.random.default_rng(2)
    weights = 1 / np.arange(1, vocabulary - 3)
    ids = 4 + draw.choice(vocabulary - 4, (SENTENCES, LENGTH - 1), p=weights / weights.sum())
    sentences = [Sentence([*row, EOS], STEPS, STEPS) for row in ids.tolist()]
    settings = SearchSettings(BEAMS, 1, bos=2, eos=EOS, forbidden=(0, 2))
    times: dict[str, list[float]] = {name: [] for name in scorers}
    for _ in range(rounds + 1):
        for name, scorer in scorers.items():
            began = time.perf_counter()
            search(scorer, sentences, settings)
            times[name].append((time.perf_counter() - began) / (STEPS + 1) * 1000)
    return {name: statistics.median(rows[1:]) for name, rows in times.items()}


def main() -> None:
    """Print a line for each vocabulary and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    precisions: list[Precision] = ["float32", *(p for p in ("bfloat16", "int8") if available(p))]
    for vocabulary in (8_000, 32_000):
        for precision in precisions:
            found = measure(vocabulary, precision, options.rounds)
            if options.json:
                print(json.dumps({"vocabulary": vocabulary, "precision": precision, "ms_per_step": found}), flush=True)
                continue
            said = "   ".join(f"{name} {ms:6.1f} ms ({found['whole'] / ms:.2f})" for name, ms in found.items())
            print(f"V {vocabulary:>6,}  {precision:<8}  {said}", flush=True)


if __name__ == "__main__":
    main()
