"""Runs with hand-made records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ziggurat.config import Experiment
from ziggurat.inspect.report.runs import Ending, ReportRun
from ziggurat.train.records import Record

N, M = 4, 3
KINDS = {
    "encoder.self_attn": N,
    "encoder.ffn": N,
    "decoder.self_attn": M,
    "decoder.cross_attn": M,
    "decoder.ffn": M,
}


EXPERIMENT = Experiment.model_validate(
    {
        "data": {
            "source_language": "qlo",
            "target_language": "qhi",
            "store": "store",
            "train": [{"source": "train.qlo", "target": "train.qhi"}],
        },
        "model": {"d_model": 16, "d_ff": 32, "heads": 2, "residual": "pre"},
    }
)
"""EXPERIMENT is the configuration of every run, apart from its depth and method."""


def stacks(encoder: float, decoder: float) -> dict[str, Any]:
    """Values that fall towards the bottom by a factor per layer."""
    return {"encoder": [encoder**i for i in reversed(range(N))], "decoder": [decoder**i for i in reversed(range(M))]}


def worth(shift: float) -> dict[str, Any]:
    """The measures of `ziggurat diagnose --layers`."""
    both = (("encoder", N), ("decoder", M))
    pairs = {stack: [[0.1 * abs(i - j) + shift for j in range(n)] for i in range(n)] for stack, n in both}
    return {
        "angular_distance": {
            stack: [[0.05 * abs(i - j) for j in range(n + 1)] for i in range(n + 1)] for stack, n in both
        },
        "causal_score": {stack: [[0.3 if j > i else None for j in range(n)] for i in range(n)] for stack, n in both},
        "permutation_score": pairs,
        "loss_without": pairs,
        "pruning_curve": {stack: [0.1 * n for n in range(layers)] for stack, layers in both},
        "pruning_bleu": {stack: [20.0 - n for n in range(layers)] for stack, layers in both},
        "effective_depth": {"encoder": 3.0, "decoder": 2.0},
        "logit_lens": {"nll": [6.0 - n for n in range(M + 1)], "agreement": [n / M for n in range(M + 1)]},
    }


def record(update: int, shift: float = 0.0) -> Record:
    """A record with all measures; no two of its numbers can be confused by accident."""
    by_type = {kind: [1 + shift + 0.01 * layer for layer in range(layers)] for kind, layers in KINDS.items()}
    values = {
        "nll": 6.0 - shift,
        "source_dependence": 0.5 * shift,
        "gradient_norm": {**stacks(0.5, 0.1), "embeddings": 2.0, "output": 3.0},
        "scaled_gradient_norm": {**stacks(0.9, 0.8), "embeddings": 2.0, "output": 3.0},
        "update_ratio": {**stacks(0.7, 0.6), "embeddings": 2.0, "output": 3.0},
        "beta_ln": by_type,
        "beta_rc": by_type,
        "beta": by_type,
        "variance": by_type,
        "r": {"encoder": 1.5 - shift, "decoder": 0.5},
        "output_change": stacks(0.3, 0.4),
        "residual_dependency": {
            stack: [[1 / (row + 2)] * (row + 2) for row in range(rows)]
            for stack, rows in (("encoder", 8), ("decoder", 9))
        },
        "history_weights": {"encoder": [[1 / (i + 1)] * (i + 1) for i in range(N + 1)]},
        "transparent_weights": [[0.1 * layer + shift / 100] * M for layer in range(N + 1)],
        "similarity": [[math.exp(-abs(i - j) / 4) for j in range(N + 1)] for i in range(N + 1)],
        "embedding_similarity": [math.exp(-i / 4) for i in range(1, N + 1)],
        "adjacent_similarity": [0.5 + 0.1 * i for i in range(N)],
        "inter_similarity": [0.1 * i for i in range(N + 1)],
        **worth(shift),
        "attention_entropy": {"encoder.self_attn": [2.0] * N, "decoder.cross_attn": [1.0] * M},
    }
    return Record(update, 0.0, {"encoder": N, "decoder": M}, values)


def run(
    name: str = "plain",
    colour: int = 0,
    *,
    train: list[dict[str, Any]] | None = None,
    validations: list[dict[str, Any]] | None = None,
    depth: list[Record] | None = None,
) -> ReportRun:
    """A run with these records."""
    ending = Ending(True, "ended: max_updates, after update 200")
    return ReportRun(name, Path(name), colour, EXPERIMENT, train or [], validations or [], depth or [], ending)


def trained(name: str = "plain", colour: int = 0) -> ReportRun:
    """A run that has everything."""
    train = [
        {
            "update": update,
            "nll": 6 - update / 100 - colour / 10,
            "grad_norm": 1.0 + update / 1000,
            "learning_rate": update / 1e5,
            "target_tokens_per_second": 5000.0 + colour * 1000 + update,
            "seconds": 36.0 * update,
        }
        for update in range(10, 210, 10)
    ]
    validations = [
        {"update": update, "nll": 6 - update / 110, "bleu": update / 10 + colour, "chrf": update / 5, "seconds": 2.0}
        for update in (100, 200)
    ]
    depth = [record(0), record(100, 0.2), record(200, 0.3)]
    return run(name, colour, train=train, validations=validations, depth=depth)
