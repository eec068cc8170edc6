"""Runs for reports, written by hand: the files that training would leave, without training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.conftest import tiny_experiment
from ziggurat.config import Experiment, dump
from ziggurat.data.subword import save_tokenizers
from ziggurat.data.vocabulary import VocabularyTokenizer


def train_record(update: int, **values: Any) -> dict[str, Any]:
    """A record as training writes it."""
    base = {
        "kind": "train",
        "update": update,
        "time": 1.79e9 + update,
        "epoch": 0,
        "loss": 6.0,
        "nll": 5.5,
        "perplexity": 244.7,
        "learning_rate": 1e-3,
        "grad_norm": 1.5,
        "target_tokens_per_second": 2000.0,
        "source_tokens_per_second": 1900.0,
        "data_wait_share": 0.01,
        "skipped": 0,
        "spikes": 0,
        "rejected": 0,
        "out_of_memory": 0,
        "roll_backs": 0,
        "seconds": 0.5 * update,
        "target_tokens": 900 * update,
    }
    return {**base, **values}


def validation_record(update: int, **values: Any) -> dict[str, Any]:
    """A record of a validation."""
    base = {"kind": "validation", "update": update, "time": 1.79e9 + update, "nll": 5.0, "perplexity": 148.4}
    return {**base, "bleu": 1.5, "chrf": 14.0, "unfinished": 3, "seconds": 2.0, **values}


def write_run(
    folder: Path,
    metrics: Iterable[Mapping[str, Any]] = (),
    *,
    experiment: Experiment | None = None,
    log: Iterable[str] = (),
    vocabulary: bytes = b"a\n",
) -> Path:
    """Write a run without any checkpoint, whose target vocabulary is a plain list of tokens."""
    (folder / "checkpoints").mkdir(parents=True)
    if experiment is None:
        (folder / "data").mkdir()
        experiment = tiny_experiment(folder / "data")
    (folder / "config.yaml").write_text(dump(experiment), encoding="utf-8")
    tokenizer = VocabularyTokenizer(vocabulary)
    save_tokenizers(folder, tokenizer, tokenizer)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics), encoding="utf-8")
    (folder / "log.txt").write_text("".join(f"2026-11-22 04:03:08  {line}\n" for line in log), encoding="utf-8")
    return folder
