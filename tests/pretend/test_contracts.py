"""What training and search ask of an accelerator: how often they wait for it, what they copy, what they launch.

An update and a step of a search wait once (docs/scaling.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.composition import model
from tests.pretend.conftest import LINES, opened, waits_of
from tests.small import merged, small_config
from tests.test_composition import OPTIONS, PAIRS, VOCABULARY, named, padded_batch, stepwise
from tools.pretend_device import NAME, Counts, counted
from ziggurat.config import ModelConfig
from ziggurat.config.train import GuidedAlignmentConfig, LossConfig, OptimiserConfig
from ziggurat.data.loader import SpecialIds, collate
from ziggurat.model.build import build_model, parameter_roles
from ziggurat.model.embedding import Rotary, SinusoidalPositions
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import train_update

SCALING = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"


def updated(
    config: ModelConfig, loss: LossConfig, *, double: bool = False, precision: str = "fp32", updates: int = 1
) -> tuple[Seq2Seq, Counts]:
    """Return a model after `updates`, and the counts of the last one; the first creates the optimisers' state."""
    built = build_model(config, VOCABULARY, VOCABULARY, seed=5)
    built = (built.double() if double else built).to(NAME)
    built.train()
    optimiser = Optimiser(built, parameter_roles(built), OptimiserConfig())
    batch, parallel = padded_batch().to(NAME), Parallel(built, loss, precision)
    for _ in range(updates):
        with counted() as counts:
            assert train_update(parallel, [batch], optimiser, rate=1e-2, clip_norm=1.0).finite
    return built, counts


def quick() -> list[dict[str, Any]]:
    """Return a few of the pairs that together have every kind of attention, history, memory and positions."""
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
    assert (counts.waits - counts.to_device).total() <= 2  # for the sentences' lengths, at each of two admissions


KINDS: dict[str, dict[str, Any]] = {
    "post-norm": {"residual": "post"},
    "pre-norm": {},
    "DLCL": {"encoder": {"history": "dlcl"}, "decoder": {"history": "dlcl"}},
    "merged attention": {"decoder": {"attention": "merged"}},
    "SSRU": {"decoder": {"attention": "ssru"}},
}
PRECISIONS = ("fp32", "bf16")


def documented() -> dict[str, list[int]]:
    """Return the table of launches by kind: those of an encoder layer and of a decoder layer, in fp32 and in bf16."""
    lines = [line for line in SCALING.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: [int(cell) for cell in cells] for name, *cells in rows if name in KINDS}


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        pytest.param(*case, marks=() if case in [("post-norm", "bf16"), ("DLCL", "fp32")] else pytest.mark.slow)
        for case in product(KINDS, PRECISIONS)
    ],
)
def test_each_further_layer_launches_the_documented_number_of_operators(kind: str, precision: str) -> None:
    def launches(encoder: int, decoder: int) -> int:
        dropout = {"dropout": {"attention": 0.1, "activation": 0.1, "residual": 0.1}}
        config = small_config(encoder, decoder, **merged(KINDS[kind], dropout))
        return updated(config, LossConfig(), precision=precision, updates=2)[1].launches

    two, first = launches(2, 2), 2 * PRECISIONS.index(precision)
    assert [launches(3, 2) - two, launches(2, 3) - two] == documented()[kind][first : first + 2]


def test_a_batch_takes_few_bytes_to_the_device() -> None:
    sides = [[np.arange(4, 4 + n, dtype=np.int32) for n in lengths] for lengths in ((5, 2, 1), (3, 6, 2))]
    batch = collate(*sides, np.arange(3), SpecialIds(0, 3, 0, 2, 3))
    with counted() as counts:
        batch.to(NAME)
    assert counts.to_device.total() == 5
    assert counts.bytes_to_device == 9 * batch.source.numel() + 17 * batch.target_in.numel()


@pytest.mark.parametrize(
    ("table", "read"),
    [
        (SinusoidalPositions(4, length=2), lambda table, x: x + table(3)),
        (Rotary(4, length=2), lambda table, x: table(x, 0)),
    ],
)
def test_a_table_of_positions_grows_on_the_device_and_stays_there(
    table: nn.Module, read: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    table, x = table.to(NAME), torch.ones(1, 1, 3, 4, device=NAME)
    copies = []
    for _ in range(2):
        with counted() as counts:
            read(table, x)
        copies.append(counts.to_device.total())
    assert copies == [1, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"beam_size": 1},
        {"beam_size": 4, "n_best": 3, "length_penalty": {"kind": "lingvo", "coverage": 0.2}, "alignments": True},
        {"beam_size": 4, "diverse_groups": 2},
        {"min_length": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "banned": ["kref", "Tha skotha"]},
        {"endings": "fairseq", "beam_size": 3},
        pytest.param({"endings": "marian", "beam_size": 3}, marks=pytest.mark.slow),
        {"constraints": [["krar"], [], ["shan", "droul"]], "beam_size": 3},
        {"prefixes": ["Tha", "", "kref"], "beam_size": 2},
    ],
    ids=str,
)
def test_a_search_finds_the_same_and_waits_once_per_step(options: dict[str, Any], run: Path) -> None:
    expected = opened("cpu", run).translate(LINES, **options)
    translator = opened(NAME, run)
    with counted() as counts:
        found = translator.translate(LINES, **options)
    assert [t.text for t in found] == [t.text for t in expected]
    steps, others = waits_of(counts)
    assert steps > 5
    assert others <= 1  # for the lengths of the one batch
    assert max(counts.to_device.values()) <= 2  # only where sentences enter or leave, not at each step
