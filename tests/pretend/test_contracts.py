"""What training and search ask of an accelerator: how often they wait for it, what they copy, what they launch.

An update and a step of a search wait once (docs/scaling.md).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.composition import model
from tests.pretend.conftest import LINES, opened
from tests.small import merged, small_config
from tests.test_composition import OPTIONS, PAIRS, VOCABULARY, named, padded_batch, stepwise
from tools.pretend_device import NAME, Counts, counted
from ziggurat.config import ModelConfig
from ziggurat.config.train import GuidedAlignmentConfig, LossConfig, OptimiserConfig
from ziggurat.model.build import build_model, parameter_roles
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.optim import Optimiser
from ziggurat.train.update import Parallel, train_update


def updated(
    config: ModelConfig, loss: LossConfig, *, double: bool = False, precision: str = "fp32"
) -> tuple[Seq2Seq, Counts]:
    """Return a model and the counts of its second update; in the first, optimisers create their state."""
    built = build_model(config, VOCABULARY, VOCABULARY, seed=5)
    built = (built.double() if double else built).to(NAME)
    built.train()
    optimiser = Optimiser(built, parameter_roles(built), OptimiserConfig())
    batch, parallel = padded_batch().to(NAME), Parallel(built, loss, precision)
    for _ in range(2):
        with counted() as counts:
            assert train_update(parallel, [batch], optimiser, rate=1e-2, clip_norm=1.0).finite
    return built, counts


def quick() -> list[dict[str, Any]]:
    """Return a few of the pairs, with each kind of attention, history, memory and positions among them."""
    axes = [f"{stack}.{part}" for stack in ("encoder", "decoder") for part in ("attention", "history")]
    axes += ["memory", "embedding.positions"]
    left = {(axis, case[axis]) for case in PAIRS for axis in axes}
    chosen = []
    while left:
        chosen.append(max(PAIRS, key=lambda case: len(left & {(axis, case[axis]) for axis in axes})))
        left -= {(axis, chosen[-1][axis]) for axis in axes}
    return chosen


QUICK = quick()
CASES = [
    pytest.param(case, id=named(case), marks=() if case in QUICK else pytest.mark.slow) for case in [*PAIRS, *OPTIONS]
]


@pytest.mark.parametrize("choices", CASES)
def test_an_update_waits_once_and_a_decoder_stays_on_the_device(choices: dict[str, Any]) -> None:
    # In float64, because a few of them overflow without any norm.
    built, counts = updated(model(choices), LossConfig(alignment=GuidedAlignmentConfig()), double=True)
    assert counts.waits.total() == 1
    assert counts.to_device == Counter()

    with counted() as counts:
        steps, whole = stepwise(built, padded_batch().to(NAME))
    done = ~steps.isnan()
    torch.testing.assert_close(steps[done].cpu(), whole[done].cpu(), atol=1e-10, rtol=1e-10)
    assert counts.waits.total() <= 2  # for the sentences' lengths, at each of two admissions


KINDS: dict[str, dict[str, Any]] = {
    "post": {"residual": "post"},
    "pre": {"residual": "pre"},
    "dlcl": {"encoder": {"history": "dlcl"}, "decoder": {"history": "dlcl"}},
    "merged": {"decoder": {"attention": "merged"}},
    "ssru": {"decoder": {"attention": "ssru"}},
}
LAUNCHES = {
    ("post", "fp32"): (38, 63),
    ("pre", "fp32"): (38, 63),
    ("dlcl", "fp32"): (59, 84),
    ("merged", "fp32"): (38, 62),
    ("ssru", "fp32"): (38, 84),
    ("post", "bf16"): (61, 103),
    ("pre", "bf16"): (61, 103),
}
"""LAUNCHES is the number of operators that a third layer adds, forward and backward: (encoder, decoder)."""


@pytest.mark.parametrize(("kind", "precision"), LAUNCHES)
def test_a_layer_launches_no_more_than_it_did(kind: str, precision: str) -> None:
    def launches(encoder: int, decoder: int) -> int:
        dropout = {"dropout": {"attention": 0.1, "activation": 0.1, "residual": 0.1}}
        config = small_config(encoder, decoder, **merged(KINDS[kind], dropout))
        return updated(config, LossConfig(), precision=precision)[1].launches

    two = launches(2, 2)
    most = LAUNCHES[kind, precision]
    assert launches(3, 2) - two <= most[0]
    assert launches(2, 3) - two <= most[1]


@pytest.mark.parametrize(
    "options",
    [
        {"beam_size": 1},
        {"beam_size": 4},
        {"beam_size": 4, "n_best": 3, "length_penalty": {"kind": "lingvo", "coverage": 0.2}},
        {"beam_size": 4, "diverse_groups": 2},
        {"beam_size": 4, "alignments": True},
        {"beam_size": 2, "min_length": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
        {"beam_size": 3, "banned": ["kref", "Tha skotha", "Tha kref", "Kras krounei krar"]},
        {"endings": "fairseq", "beam_size": 3},
        {"endings": "marian", "beam_size": 3},
        {"constraints": [["krar"], [], ["shan", "droul"]], "beam_size": 3},
        {"prefixes": ["Tha", "", "kref"], "beam_size": 2},
    ],
    ids=str,
)
def test_a_search_finds_the_same_and_waits_once_a_step(options: dict[str, Any], runs: tuple[Path, Path]) -> None:
    expected = opened("cpu", runs[0]).translate(LINES, **options)
    translator = opened(NAME, runs[0])
    with counted() as counts:
        found = translator.translate(LINES, **options)
    assert [t.text for t in found] == [t.text for t in expected]
    steps = sum(n for place, n in counts.waits.items() if "hypotheses.py" in place)
    assert steps > 5
    assert counts.waits.total() - steps <= 1  # for the lengths of the one batch
