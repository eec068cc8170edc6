"""Writes a small set of this version's files: `python -m tests.golden.make tests/golden/v1` (tests/golden/README.md).

A set is made only once, by the version whose name it has; later versions must open it unchanged. Everything is done by
verbs of the command line, on sentences of the embedded language pair.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ziggurat.cli import main
from ziggurat.config import Experiment, dump
from ziggurat.data.aligner import format_links
from ziggurat.data.babel import AlignedPair, generate_aligned

UPDATES = 400
"""UPDATES is the number of updates of the run; its only checkpoint is from the last one."""

RESUMED_UPDATES = 408
"""RESUMED_UPDATES is the update of `expected/resumed.safetensors`, to which training continued in a copy."""

PAIRS, DEV_PAIRS, SHOWN = 12, 4, 12

EXPORTS = ("plain", "ctranslate2", "huggingface", "onnx")


def experiment() -> Experiment:
    """Return a post-norm model of a few thousand parameters, which learns two dozen short sentences by heart.

    So the best translation wins by a margin that no order of summation can reverse.
    """
    return Experiment.model_validate(
        {
            "data": {
                "source_language": "qlo",
                "target_language": "qhi",
                "store": "store",
                "train": [
                    {"source": "corpus/train.qlo", "target": "corpus/train.qhi", "alignment": "corpus/train.align"}
                ],
                "dev": [{"source": "corpus/dev.qlo", "target": "corpus/dev.qhi"}],
                "subword": {"vocabulary_size": 80, "byte_fallback": False},
            },
            "model": {
                "d_model": 12,
                "d_ff": 16,
                "heads": 2,
                "residual": "post",
                "encoder": {"layers": 2},
                "decoder": {"layers": 1},
                "dropout": {"residual": 0.0, "embedding": 0.0},
                "embedding": {"zero_start": True, "positions": "learned", "max_positions": 32},
            },
            "training": {
                "batch": {"max_tokens": 300},
                "loss": {"label_smoothing": 0.0, "alignment": {"weight": 0.3, "head": 2}},
                "schedule": {"peak": 2e-2, "warmup_updates": 20},
                "validation": {"every_updates": UPDATES // 2, "decode": False},
                "checkpoint": {"every_updates": UPDATES, "keep_last": 1, "keep_best": 0},
                "stop": {"updates": UPDATES},
                "diagnostics": {"every_updates": UPDATES, "max_share": None},
                "tensorboard": False,
                "log_every_updates": UPDATES // 4,
            },
            "decoding": {"max_length": {"extra": 5}, "length_penalty": {"kind": "power", "alpha": 1.0}},
        }
    )


def verb(*arguments: str) -> None:
    """Run one verb; raise SystemExit when it fails."""
    try:
        main(arguments)
    except SystemExit as stop:
        if stop.code:
            raise


def write_corpora(pairs: Sequence[AlignedPair]) -> None:
    """Write `corpus/` in the current folder."""
    Path("corpus").mkdir()
    for split, part in (("train", pairs[:PAIRS]), ("dev", pairs[PAIRS:])):
        for side, language in enumerate(("qlo", "qhi")):
            Path(f"corpus/{split}.{language}").write_text("".join(f"{pair[side]}\n" for pair in part))
    Path("corpus/train.align").write_text("".join(f"{format_links(pair.sure)}\n" for pair in pairs[:PAIRS]))


def make() -> None:
    """Write a whole set into the current folder, with relative paths only, so that it can be anywhere."""
    short = (pair for pair in generate_aligned(20_000, seed=5) if len(pair.low.split()) <= 5)
    pairs = [next(short) for _ in range(PAIRS + DEV_PAIRS)]
    write_corpora(pairs)
    Path("config.yaml").write_text(dump(experiment()))
    verb("prepare", "config.yaml")
    verb("train", "config.yaml", "--run", "run")
    verb("average", "run", "--last", "1")
    verb("grow", "run", "--layers", "3", "--out", "grown")
    verb("shortlist", "store", "-o", "shortlist.safetensors", "--best", "5", "--frequent", "20")
    for target in EXPORTS:
        verb("export", "run", "--to", target, "--out", target, "--verify", "corpus/train.qlo")
    Path("expected").mkdir()
    Path("expected/sources.txt").write_text("".join(f"{pair[0]}\n" for pair in pairs[:SHOWN]))
    said: dict[str, dict[str, Any]] = {"translations": {}, "alignments": {}}
    for model in ("run", "grown", "ctranslate2"):
        verb("translate", model, "--json", "-i", "expected/sources.txt", "-o", "out", "alignments=true")
        lines = [json.loads(line) for line in Path("out").read_text().splitlines()]
        said["translations"][model] = [[line["text"], round(line["score"], 6)] for line in lines]
        said["alignments"][model] = [" ".join(map(str, line["alignment"]["hard"])) for line in lines]
        Path("out").unlink()
    for name, of_models in said.items():
        Path(f"expected/{name}.json").write_text(json.dumps(of_models, indent=1, ensure_ascii=False) + "\n")
    with tempfile.TemporaryDirectory() as copies:
        copy = Path(copies) / "run"
        shutil.copytree("run", copy, symlinks=True)
        verb("train", "--run", str(copy), "--resume", f"training.stop.updates={RESUMED_UPDATES}")
        shutil.copy(copy / "last" / "model.safetensors", "expected/resumed.safetensors")
    log = Path("run/log.txt")
    log.write_text(log.read_text().replace(f"{Path.cwd()}/", ""))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir()
    os.chdir(folder)
    torch.set_num_threads(1)
    make()
