"""Speed of the whole encoding pass of `ziggurat prepare` compared with SentencePiece's own encoder.

    python -m benchmarks.prepare_rate [--pairs 200000] [--threads 2] [--rounds 3] [--source F --target F] [--json]

They take turns in this process, with the same sentences, model and threads. SentencePiece gets lists of
strings in memory and returns lists of ids; `prepare` reads two files, checks and normalises, filters,
segments, and writes the store's files with fsync. Prints the median sentences per second of each and the ratio.
Exit status 1 if the ratio is below 0.6.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import sentencepiece

from benchmarks.prepare_memory import write_corpus
from ziggurat.config.data import DataConfig
from ziggurat.data.encoding import encode_corpora, store_block
from ziggurat.data.inputs import count_pairs, find_corpora
from ziggurat.data.prepare import prepare
from ziggurat.data.subword import load_tokenizers
from ziggurat.data.table import TableWriter

LIMIT_RATIO = 0.6


def silent(phase: str, done: int, total: int | None) -> None:
    """Show no progress."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200_000, help="size of the generated corpus")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", help="text file to use instead of a generated one (with --target)")
    parser.add_argument("--target")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.source and options.target:
            paths = Path(options.source), Path(options.target)
        else:
            paths = write_corpus(folder, options.pairs)
        config = DataConfig.model_validate({
            "source_language": "a", "target_language": "b", "store": str(folder / "store"),
            "train": [{"source": str(paths[0]), "target": str(paths[1])}],
            "subword": {"sample_pairs": 20_000},
        })  # fmt: skip
        prepare(config, threads=options.threads)
        tokenizers = load_tokenizers(folder / "store")
        own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "store" / "joint.spm"))
        sides = [path.read_text("utf-8").removesuffix("\n").split("\n") for path in paths]
        seconds: dict[str, list[float]] = {"sentencepiece": [], "prepare": []}
        for number in range(options.rounds):
            started = time.perf_counter()
            for side in sides:
                own.encode(side, out_type=int, num_threads=options.threads)
            seconds["sentencepiece"].append(time.perf_counter() - started)
            corpora = find_corpora(config)
            count_pairs(corpora, silent)
            (folder / str(number)).mkdir()
            started = time.perf_counter()
            writer = TableWriter(folder / str(number), "train", has_text=False)
            for block in encode_corpora(corpora, config, tokenizers, options.threads, silent):
                store_block(block, corpora[0], config, tokenizers[0], writer)
            writer.close()
            seconds["prepare"].append(time.perf_counter() - started)
    rates = {name: 2 * len(sides[0]) / statistics.median(times) for name, times in seconds.items()}
    ratio = rates["prepare"] / rates["sentencepiece"]
    if options.json:
        print(json.dumps({"sentences": 2 * len(sides[0]), "sentences_per_second": rates, "ratio": ratio}))
    else:
        for name, rate in rates.items():
            print(f"{name:>14}: {rate:>10,.0f} sentences/s on {options.threads} threads")
        print(f"ratio {ratio:.2f} (limit {LIMIT_RATIO})")
    raise SystemExit(0 if ratio >= LIMIT_RATIO else 1)


if __name__ == "__main__":
    main()
