"""Invariants of every kind: single steps equal whole targets, padding has no effect, the future is hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.composition import AXES, covering, model
from tests.small import moved
from tests.test_composition import VOCABULARY, padded_batch, stepwise
from ziggurat.model.build import build_model
from ziggurat.model.seq2seq import Seq2Seq

# Every value of every axis once, the other axes at their defaults.
KINDS: list[dict[str, Any]] = [
    {"residual": "admin", axis: value} if value == "admin" and axis == "init.kind" else {axis: value}
    for axis, values in AXES.items()
    for value in values
]
DYNAMIC = {"residual": "hyper", "wiring.dynamic": True}
CASES = [*covering(1), DYNAMIC, *(pytest.param(choices, marks=pytest.mark.slow) for choices in KINDS)]
"""CASES has every value, combined with others in the quick suite, and in the slow suite also alone."""


def built(choices: dict[str, Any]) -> Seq2Seq:
    """A small model in fp64 whose wiring has been moved away from its neutral initial values."""
    return moved(build_model(model(choices), VOCABULARY, VOCABULARY, seed=3).double().eval(), 0.1)


def named(choices: dict[str, Any]) -> str:
    return ",".join(f"{axis}={value}" for axis, value in choices.items())


@torch.no_grad()
def logits(network: Seq2Seq, source: Tensor, mask: Tensor, target_in: Tensor) -> Tensor:
    return network.logits(network.decode(target_in, network.encode(source, mask)))


@pytest.mark.parametrize("choices", CASES, ids=named)
def test_steps_equal_the_whole_target(choices: dict[str, Any]) -> None:
    """During the steps sources are padded, hypotheses swap places and a sentence leaves."""
    steps, whole = stepwise(built(choices), padded_batch())
    done = ~steps.isnan()
    torch.testing.assert_close(steps[done], whole[done], atol=1e-10, rtol=0)


@pytest.mark.parametrize("choices", CASES, ids=named)
def test_padding_changes_no_real_position(choices: dict[str, Any]) -> None:
    network, batch = built(choices), padded_batch()
    before = logits(network, batch.source, batch.source_mask, batch.target_in)
    source = F.pad(batch.source, (0, 3), value=7)  # the content of padding must not matter
    mask = F.pad(batch.source_mask, (0, 3), value=False)
    after = logits(network, source, mask, F.pad(batch.target_in, (0, 2), value=9))
    torch.testing.assert_close(after[:, :6], before, atol=1e-10, rtol=0)
    hidden = batch.source.masked_fill(~batch.source_mask, 5)
    torch.testing.assert_close(logits(network, hidden, batch.source_mask, batch.target_in), before, atol=1e-10, rtol=0)


@pytest.mark.parametrize("choices", CASES, ids=named)
def test_a_token_reaches_only_its_own_and_later_positions(choices: dict[str, Any]) -> None:
    network, batch = built(choices), padded_batch()
    before = logits(network, batch.source, batch.source_mask, batch.target_in)
    for position in range(6):
        changed = batch.target_in.clone()
        changed[:, position] = (changed[:, position] + 3) % VOCABULARY
        after = logits(network, batch.source, batch.source_mask, changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], atol=1e-12, rtol=0)
        if choices.get("residual") != "none":  # three layers without residuals let almost nothing through
            assert ((after - before)[:, position:].abs().amax(dim=(0, 2)) > 1e-9).all()
