"""R-Drop: its definition by plain loops, and the same loss however an update is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.small import small_config
from tests.test_composition import padded_batch
from ziggurat.config.train import GuidedAlignmentConfig, LossConfig
from ziggurat.model.build import build_model
from ziggurat.model.dropout import Dropout
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.loss import Labels, r_drop_loss
from ziggurat.train.objective import batch_loss

MASK = torch.tensor([[True] * 4, [True, True, False, False], [True, True, True, False]])


def loss_config(alpha: float = 5.0, **more: Any) -> LossConfig:
    return LossConfig.model_validate({"r_drop": alpha, **more})


def model(dropout: float = 0.3, **choices: Any) -> Seq2Seq:
    config = small_config(2, 1, dropout={"residual": dropout, "embedding": dropout, "transparent": 0.0}, **choices)
    return build_model(config, 20, 20).double()


def divergences(hidden: Tensor, weight: Tensor, bias: Tensor) -> list[list[float]]:
    """Return KL(P || Q) + KL(Q || P) of each position in the first half of `hidden` and the same position in the
    second.
    """
    found = []
    for one, other in zip(*hidden.chunk(2), strict=True):
        row = []
        for states in zip(one, other, strict=True):
            logits = [[float(state @ weight[v] + bias[v]) for v in range(len(weight))] for state in states]
            p, q = ([math.exp(x) / math.fsum(map(math.exp, row)) for x in row] for row in logits)
            there = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            back = math.fsum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
            row.append(there + back)
        found.append(row)
    return found


@pytest.mark.parametrize("chunk", [4, 1024])
@pytest.mark.parametrize("normalisation", ["tokens", "sentence_mean", "sentence_sum"])
def test_it_follows_the_paper_and_ignores_padding(normalisation: str, chunk: int) -> None:
    """Liang et al. 2021: alpha / 2 (KL(P || Q) + KL(Q || P)) plus the sum of two cross-entropies, halved."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((6, 4, 5), (7, 5), (7,))
    )
    config = loss_config(normalisation=normalisation, chunk_tokens=chunk)
    found = r_drop_loss(
        hidden, weight, Labels(torch.zeros(3, 4).long(), MASK, 9), config, tokens=30, sentences=8, bias=bias
    )
    rows = divergences(hidden.detach(), weight.detach(), bias.detach())
    counted = [[x for x, real in zip(row, mask, strict=True) if real] for row, mask in zip(rows, MASK, strict=True)]
    expected = {
        "tokens": sum(map(sum, counted)) / 30,
        "sentence_mean": sum(sum(row) / len(row) for row in counted) / 8,
        "sentence_sum": sum(map(sum, counted)) / 8,
    }[normalisation]
    assert float(found.detach()) == pytest.approx(5 / 4 * expected, rel=1e-12)
    assert torch.autograd.gradcheck(
        lambda h, w, b: r_drop_loss(
            h, w, Labels(torch.zeros(3, 4).long(), MASK, 9), config, tokens=30, sentences=8, bias=b
        ),
        (hidden, weight, bias),
    )


def test_two_passes_without_dropout_are_one() -> None:
    """This includes inter-similarity and guided alignment; evaluation has no dropout, and makes one pass."""
    batch = padded_batch()
    more = {"inter_sim": 0.3, "alignment": GuidedAlignmentConfig()}
    plain, double = loss_config(0.0, **more), loss_config(**more)
    built = model(0.0).train()
    once, twice = (batch_loss(built, batch, config, tokens=30, sentences=7) for config in (plain, double))
    for name in ("objective", "nll", "alignment"):
        torch.testing.assert_close(getattr(twice, name), getattr(once, name), rtol=1e-12, atol=1e-12)
    calls = []
    built.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    for mode in (True, False):
        batch_loss(built.train(mode), batch, double, tokens=30, sentences=7)
    assert calls == [6, 3]


def test_both_passes_have_their_own_dropout_and_count_alike() -> None:
    batch, built = padded_batch(), model()
    for module in built.modules():
        if isinstance(module, Dropout):
            module.exact = True
    built.train()
    seen: list[Tensor] = []
    built.decoder.register_forward_hook(lambda _, inputs, output: seen.append(output))
    torch.manual_seed(1)
    double = batch_loss(built, batch, loss_config(), tokens=30, sentences=7)
    (hidden,) = seen
    first, second = hidden.chunk(2)
    assert not torch.equal(first, second)
    labels = Labels(batch.target_out, batch.target_mask, batch.target_tokens)
    apart = r_drop_loss(hidden, built.output.weight, labels, loss_config(), tokens=30, sentences=7)
    assert float(apart.detach()) > 1e-3
    torch.manual_seed(1)
    near = batch_loss(built, batch, loss_config(1e-12), tokens=30, sentences=7)
    torch.testing.assert_close(double.objective, near.objective + apart, rtol=1e-9, atol=0)
