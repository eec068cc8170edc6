from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.config.train import LossConfig
from ziggurat.model.embedding import OutputProjection
from ziggurat.train.loss import Labels, Smoothing, linear_cross_entropy, sequence_loss, smoothing_of
from ziggurat.train.objective import batch_loss


def gold(target: Tensor, mask: Tensor) -> Labels:
    return Labels(target, mask, int(mask.sum()))


def written_out(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    mask: Tensor,
    config: LossConfig,
    bias: Tensor | None = None,
) -> tuple[float, float]:
    """Return (objective, summed nll) in plain float64 loops, straight from the definitions."""
    vocabulary, e = weight.shape[0], config.label_smoothing
    sentences = []
    nll = 0.0
    entropy = 0.0
    for b in range(hidden.shape[0]):
        losses = []
        for t in range(hidden.shape[1]):
            if not mask[b, t]:
                continue
            logits = [float(hidden[b, t] @ weight[v]) for v in range(vocabulary)]
            if bias is not None:
                logits = [x + float(bias[v]) for v, x in enumerate(logits)]
            log_sum = math.log(sum(math.exp(x) for x in logits))
            gold = int(target[b, t])
            if config.smoothing == "uniform":
                q = [e / vocabulary + (1 - e) * (v == gold) for v in range(vocabulary)]
            else:
                q = [1 - e if v == gold else e / (vocabulary - 1) for v in range(vocabulary)]
            losses.append(-sum(q[v] * (logits[v] - log_sum) for v in range(vocabulary)))
            entropy = -sum(x * math.log(x) for x in q if x > 0)
            if config.subtract_entropy:
                losses[-1] -= entropy
            nll -= logits[gold] - log_sum
        sentences.append(losses)
    tokens = [x for losses in sentences for x in losses]
    objective = {
        "tokens": sum(tokens) / len(tokens),
        "sentence_mean": sum(sum(x) / len(x) for x in sentences) / len(sentences),
        "sentence_sum": sum(tokens) / len(sentences),
    }[config.normalisation]
    return objective, nll


def example(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(7, (3, 5), generator=generator)
    mask = torch.tensor([[True] * 5, [True] * 2 + [False] * 3, [True] * 4 + [False]])
    return hidden, weight, target, mask


def output_bias(seed: int = 5) -> Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("smoothing", ["uniform", "others"])
@pytest.mark.parametrize("normalisation", ["tokens", "sentence_mean", "sentence_sum"])
@pytest.mark.parametrize("subtract_entropy", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_loss_equals_its_definition_and_ignores_padding(
    smoothing: str, normalisation: str, subtract_entropy: bool, biased: bool
) -> None:
    hidden, weight, target, mask = example()
    bias = output_bias() if biased else None
    config = LossConfig.model_validate(
        {
            "smoothing": smoothing,
            "normalisation": normalisation,
            "subtract_entropy": subtract_entropy,
            "chunk_tokens": 4,
        }
    )
    objective, nll = written_out(hidden, weight, target, mask, config, bias)
    got = sequence_loss(hidden, weight, gold(target, mask), config, tokens=int(mask.sum()), sentences=3, bias=bias)
    assert float(got.objective) == pytest.approx(objective, abs=1e-12)
    assert float(got.nll) == pytest.approx(nll, abs=1e-10)
    # The content of padded positions must not matter.
    hidden[~mask], target[~mask] = 1e3, 0
    again = sequence_loss(hidden, weight, gold(target, mask), config, tokens=int(mask.sum()), sentences=3, bias=bias)
    assert float(again.objective) == float(got.objective)


@pytest.mark.parametrize("smoothing", ["uniform", "others"])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("biased", [True, False])
def test_gradients_equal_autograd_through_whole_logits(smoothing: str, chunk: int, biased: bool) -> None:
    hidden, weight, target, mask = example(1)
    config = LossConfig.model_validate({"smoothing": smoothing, "chunk_tokens": chunk})
    inputs = [hidden, weight, output_bias()] if biased else [hidden, weight]
    ours = [x.clone().requires_grad_() for x in inputs]
    sums = sequence_loss(
        ours[0],
        ours[1],
        gold(target, mask),
        config,
        tokens=int(mask.sum()),
        sentences=3,
        bias=ours[2] if biased else None,
    )
    (3 * sums.objective).backward()
    plain = [x.clone().requires_grad_() for x in inputs]
    logits = plain[0] @ plain[1].T + (plain[2] if biased else 0)
    log_p = F.log_softmax(logits, -1)[mask]
    q = smoothing_of(config, 7)
    loss = -(q.every * log_p.sum(-1) + q.gold * log_p.gather(1, target[mask][:, None])[:, 0]).mean()
    (3 * loss).backward()
    assert sums.objective.item() == pytest.approx(loss.item(), abs=1e-12)
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
def test_gradients_equal_finite_differences(frozen: int | None) -> None:
    """This holds whichever of hidden states, matrix and bias is trained; rows have different weights."""
    hidden, weight, target, mask = example(4)
    row_weight = torch.linspace(0.1, 1.0, int(mask.sum()), dtype=torch.float64)
    inputs = [hidden[mask], weight, output_bias()]
    for i, values in enumerate(inputs):
        values.requires_grad_(i != frozen)

    def loss(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, target[mask], row_weight, Smoothing(0.9, 0.1 / 7), 4, b)[0]

    assert torch.autograd.gradcheck(loss, inputs)


def test_a_bias_of_zero_changes_nothing() -> None:
    hidden, weight, target, mask = example(2)
    config = LossConfig()
    plain = sequence_loss(hidden, weight, gold(target, mask), config, tokens=11, sentences=3)
    biased = sequence_loss(
        hidden, weight, gold(target, mask), config, tokens=11, sentences=3, bias=torch.zeros(7, dtype=torch.float64)
    )
    assert torch.equal(plain.objective, biased.objective)
    assert torch.equal(plain.nll, biased.nll)


def test_the_model_s_output_bias_is_part_of_its_loss() -> None:
    hidden, weight, target, mask = example(3)
    output = OutputProjection(nn.Parameter(weight), nn.Parameter(output_bias()))
    batch: Any = SimpleNamespace(
        source=None,
        source_mask=None,
        target_in=None,
        target_out=target,
        target_mask=mask,
        target_tokens=int(mask.sum()),
    )

    class Model:
        """A model with only what the loss needs."""

        def __init__(self) -> None:
            self.output = output

        def __call__(self, *inputs: object) -> Tensor:
            return hidden

    model: Any = Model()
    got = batch_loss(model, batch, LossConfig(), tokens=11, sentences=3)
    objective, nll = written_out(hidden, weight.detach(), target, mask, LossConfig(), output_bias())
    assert float(got.objective) == pytest.approx(objective * int(mask.sum()) / 11, abs=1e-12)
    assert float(got.nll) == pytest.approx(nll, abs=1e-10)
    got.objective.backward()
    assert output.bias is not None
    assert output.bias.grad is not None


def test_uniform_smoothing_is_torchs() -> None:
    hidden, weight, target, mask = example(2)
    config = LossConfig(label_smoothing=0.3)
    got = sequence_loss(hidden, weight, gold(target, mask), config, tokens=int(mask.sum()), sentences=3)
    theirs = F.cross_entropy((hidden @ weight.T)[mask], target[mask], label_smoothing=0.3)
    torch.testing.assert_close(got.objective, theirs)


@settings(max_examples=50)
@given(e=st.floats(0, 0.99), vocabulary=st.integers(2, 50), kind=st.sampled_from(["uniform", "others"]))
def test_smoothed_target_is_a_distribution(e: float, vocabulary: int, kind: str) -> None:
    q = smoothing_of(LossConfig.model_validate({"label_smoothing": e, "smoothing": kind}), vocabulary)
    assert q.gold + vocabulary * q.every == pytest.approx(1.0)
    assert q.entropy(vocabulary) >= 0


def test_huge_logits_stay_finite() -> None:
    hidden, weight = torch.full((2, 4), 200.0), torch.randn(5, 4)
    loss, nll = linear_cross_entropy(
        hidden.requires_grad_(), weight.requires_grad_(), torch.tensor([0, 1]), torch.ones(2), Smoothing(0.9, 0.02), 8
    )
    loss.backward()
    assert torch.isfinite(nll)
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("biased", [True, False])
def test_bf16_autocast_stays_close(biased: bool) -> None:
    hidden, weight, target, mask = (x.float() if x.is_floating_point() else x for x in example(3))
    config, bias = LossConfig(), output_bias().float() + 100 if biased else None  # bf16 would round 100 by up to 0.25
    exact = sequence_loss(hidden, weight, gold(target, mask), config, tokens=11, sentences=3, bias=bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaf = weight.clone().requires_grad_()
        rough = sequence_loss(hidden, leaf, gold(target, mask), config, tokens=11, sentences=3, bias=bias)
    rough.objective.backward()
    assert rough.objective.dtype == torch.float32
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float32
    torch.testing.assert_close(rough.objective, exact.objective, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("smoothing", ["uniform", "others"])
@pytest.mark.parametrize("subtract_entropy", [True, False])
def test_tokens_that_the_bias_rules_out_do_not_affect_the_loss(smoothing: str, subtract_entropy: bool) -> None:
    """It is the loss over the other tokens only; if the gold token is ruled out there is none."""
    hidden, weight, target, mask = example(6)
    ruled_out, rest = torch.tensor([2, 5]), [0, 1, 3, 4, 6]
    bias = output_bias()
    bias[ruled_out] = -1e9
    assert bool(torch.isin(target[mask], ruled_out).any())
    config = LossConfig.model_validate(
        {"smoothing": smoothing, "subtract_entropy": subtract_entropy, "chunk_tokens": 4}
    )
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    got = sequence_loss(
        leaves[0],
        leaves[1],
        gold(target, mask),
        config,
        tokens=int(mask.sum()),
        sentences=3,
        bias=leaves[2],
        ruled_out=ruled_out,
    )
    got.objective.backward()
    counted = mask & ~torch.isin(target, ruled_out)
    renumbered = torch.tensor([rest.index(i) if i in rest else 0 for i in range(7)])[target]
    plain = [x.clone().requires_grad_() for x in (hidden, weight[rest], bias[rest])]
    wanted = sequence_loss(
        plain[0], plain[1], gold(renumbered, counted), config, tokens=int(mask.sum()), sentences=3, bias=plain[2]
    )
    wanted.objective.backward()
    torch.testing.assert_close(got.objective, wanted.objective)
    torch.testing.assert_close(got.nll, wanted.nll)
    gradients = [x.grad for x in leaves]
    assert all(g is not None for g in gradients)
    torch.testing.assert_close(gradients[0], plain[0].grad)
    for mine, other in zip(gradients[1:], plain[1:], strict=True):
        assert mine is not None
        assert bool((mine[ruled_out] == 0).all())
        torch.testing.assert_close(mine[rest], other.grad)


@pytest.mark.parametrize("frozen", [("weight",), ("weight", "bias"), ("bias",)])
def test_a_frozen_projection_has_no_gradient_and_the_rest_is_the_same(frozen: tuple[str, ...]) -> None:
    """In low-rank adaptation the product for the gradient of the matrix, a third of the arithmetic, is not computed."""
    generator = torch.Generator().manual_seed(2)
    smoothing = smoothing_of(LossConfig(), 9)
    target, row_weight = torch.tensor([1, 4, 8, 4]), torch.full((4,), 0.25, dtype=torch.float64)

    def gradients(*without: str) -> dict[str, Tensor | None]:
        generator.manual_seed(2)
        shapes = {"hidden": (4, 3), "weight": (9, 3), "bias": (9,)}
        parts = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(name not in without)
            for name, shape in shapes.items()
        }
        smoothed, _ = linear_cross_entropy(
            parts["hidden"], parts["weight"], target, row_weight, smoothing, 3, parts["bias"], torch.tensor([2, 5])
        )
        smoothed.backward()
        return {name: part.grad for name, part in parts.items()}

    whole, found = gradients(), gradients(*frozen)
    for name in whole:
        assert (found[name] is None) == (name in frozen)
        if name not in frozen:
            assert torch.equal(found[name], whole[name])  # type: ignore[arg-type]
