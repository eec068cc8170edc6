"""Fake-quantised products, compared with integer arithmetic and with the int8 engine that translates with them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.int8_engines import ENGINES, engine
from tests.small import moved, small_config
from tests.train.batches import batches
from ziggurat.config.train import LossConfig
from ziggurat.model.build import build_model
from ziggurat.model.embedding import OutputProjection
from ziggurat.model.fast import packed as packed_maps
from ziggurat.model.fast.int8 import QuantisedEmbedding, quantise, quantised_linear, quantised_rows
from ziggurat.model.fast.packed import PackedOutput, pack, packed
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.objective import batch_loss

KINDS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"residual": "post"},
    "gelu": {"activation": "gelu"},
    "swiglu": {"activation": "swiglu", "norm": "rms"},
    "unit_length": {"norm": "scale", "embedding": {"unit_length": True}},
    "sub_ln": {"residual": "sub_ln"},
    "siamese": {"residual": "siamese"},
    "mudd": {"encoder": {"history": "mudd"}},
    "transparent": {"memory": "transparent"},
    "value residual": {"attention": {"value_residual": "learned"}},
    **{
        kind: {"decoder": {"attention": kind}}
        for kind in ("relative", "average", "simplified_average", "ssru", "merged", "merged_full", "merged_gated")
    },
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_steps(row: list[float]) -> tuple[list[int], float]:
    """Return a row in whole steps of |largest| / 127, and the step, in double precision."""
    step = max(1e-30, *map(abs, row)) / 127
    return [math.floor(number / step + 0.5) for number in row], step


@settings(max_examples=40)
@given(
    rows=st.integers(0, 5), width=st.integers(1, 9), out=st.integers(1, 4), bias=st.booleans(), scale=st.integers(-9, 9)
)
def test_products_are_integer_arithmetic(rows: int, width: int, out: int, bias: bool, scale: int) -> None:
    x, weight, b = drawn(rows, 2, width) * 10.0**scale, drawn(out, width, seed=1), drawn(out, seed=2)
    found = quantised_linear(x.double(), weight.double(), b.double() if bias else None)
    assert found.shape == (rows, 2, out)
    for row, ours in zip(x.double().flatten(0, 1).tolist(), found.flatten(0, 1).tolist(), strict=True):
        steps, step = in_steps(row)
        for number, y in enumerate(ours):
            of_weight, its = in_steps(weight[number].double().tolist())
            total = sum(a * c for a, c in zip(steps, of_weight, strict=True)) * step * its
            assert y == pytest.approx(total + (float(b[number]) if bias else 0.0), rel=1e-12, abs=1e-12 * step)


def test_gradients_are_those_of_the_rounded_numbers() -> None:
    x, weight, bias = (part.double().requires_grad_() for part in (drawn(2, 3, 8), drawn(5, 8, seed=1), drawn(5)))
    g = drawn(2, 3, 5, seed=3).double()
    quantised_linear(x, weight, bias).backward(g)
    with torch.no_grad():
        inputs, weights = (
            torch.tensor([[n * in_steps(row)[1] for n in in_steps(row)[0]] for row in part.view(-1, 8).tolist()])
            for part in (x, weight)
        )
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    flat = g.view(-1, 5)
    torch.testing.assert_close(x.grad.view(-1, 8), (flat @ weights.double()))
    torch.testing.assert_close(weight.grad, flat.t() @ inputs.double())
    torch.testing.assert_close(bias.grad, flat.sum(0))
    assert not torch.equal(x.grad.view(-1, 8), flat @ weight.detach())


def test_products_in_bf16_have_the_same_integers() -> None:
    x, weight = drawn(40, 64).requires_grad_(), drawn(32, 64, seed=1).requires_grad_()
    expected = quantised_linear(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        found = quantised_linear(x, weight)
    assert found.dtype == torch.bfloat16
    # Only the sums are rounded, to 8 bits; an ordinary product with factors in bf16 is off by more.
    assert float((found.float() - expected).detach().abs().max()) <= float(expected.detach().abs().max()) / 200
    found.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_non_finite_rows_are_propagated() -> None:
    x = drawn(3, 8)
    x[1, 2] = math.nan
    found = quantised_linear(x, drawn(4, 8, seed=1))
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()
    assert quantised_linear(torch.zeros(2, 8), drawn(4, 8), torch.ones(4)).tolist() == [[1.0] * 4] * 2


def test_a_table_of_bytes_is_the_rounded_table() -> None:
    table = drawn(9, 16)
    found = QuantisedEmbedding(table)(torch.tensor([[3, 0, 8]]))
    assert torch.equal(found, quantised_rows(table)[[3, 0, 8]][None])
    assert 0 < float((found - table[[3, 0, 8]]).abs().max()) <= float(table.abs().max()) / 254 * 1.0001


def logits(model: Seq2Seq) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(3, 40, (4, length), generator=generator) for length in (9, 7))
    mask = torch.arange(9) < torch.tensor([9, 6, 9, 3])[:, None]
    with torch.inference_mode():
        return model.logits(model(source, mask, target))


def small(kind: str) -> Seq2Seq:
    return moved(build_model(small_config(3, 2, d_model=32, d_ff=64, **KINDS[kind]), 40, 40).eval(), 0.05)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_computes_the_trained_scores(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(kind)
    plain, fake = logits(model), copy.deepcopy(model)
    quantise(fake)
    trained = logits(fake)
    with engine(name, monkeypatch):
        fast, usual = copy.deepcopy(fake), copy.deepcopy(model)
        pack(usual, "int8")
        # With all instructions of this CPU: nothing may be rounded to bf16, even where that is possible.
        monkeypatch.setattr(packed_maps, "available", lambda precision: True)
        pack(fast, "int8", as_trained=True)
        found, other = logits(fast), logits(usual)
    off, unlike = (found - trained).abs(), (other - trained).abs()
    if name == "compiled":  # its sums end with a fused operation, so a number sometimes rounds to the neighbouring byte
        assert float((off > 1e-5).float().mean()) < 0.1
        assert float(off.max()) < 0.1
    else:
        assert float(off.max()) < 1e-5
    # Without `as_trained` the scores are far off: networks have unsigned bytes inside, and embeddings are in fp32.
    assert float((unlike > 1e-5).float().mean()) > 0.9
    assert float(unlike.max()) > 1e-2
    assert float((plain - trained).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ENGINES)
def test_rows_of_tiny_numbers_become_zeros(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(4, 16) * torch.tensor([1.0, 1e-33, 1e-37, 0.0])[:, None]
    weight, bias = drawn(5, 16, seed=1) * torch.tensor([1.0, 1e-33, 1e-37, 0.0, 1e9])[:, None], torch.zeros(5)
    expected = quantised_linear(x, weight, bias)
    assert not expected[1:].any()
    assert not expected[:, 1:4].any()
    with engine(name, monkeypatch):
        torch.testing.assert_close(packed(weight, bias, "int8")(x), expected, atol=0, rtol=1e-6)


def test_a_shortlist_has_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, tokens = drawn(3, 2, 16), torch.tensor([4, 1, 11])
    output = OutputProjection(drawn(12, 16, seed=1), nn.Parameter(drawn(12, seed=2)))
    quantise(output)
    assert torch.equal(output.restricted(tokens)(hidden), output(hidden)[..., tokens])
    with engine("arithmetic", monkeypatch):
        fast = PackedOutput(output, "int8", as_trained=True)
        torch.testing.assert_close(fast.restricted(tokens)(hidden), output(hidden)[..., tokens])


@pytest.mark.parametrize("kind", ["pre", "ssru", "merged"])
def test_the_loss_is_that_of_the_scores(kind: str) -> None:
    """Training projects and computes the loss at once; validation and search do so in turn."""
    model = small(kind)
    quantise(model)
    (batch,) = batches([7])
    found = batch_loss(model, batch, LossConfig(), tokens=batch.target_tokens, sentences=7)
    scores = model.logits(model(batch.source, batch.source_mask, batch.target_in)).log_softmax(-1)
    gold = scores.gather(-1, batch.target_out[..., None])[..., 0][batch.target_mask]
    assert float(found.nll.detach()) == pytest.approx(-float(gold.detach().sum()), rel=1e-5)
    found.objective.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_names_and_parameters_stay() -> None:
    model = small("merged")
    before = dict(model.named_parameters())
    quantise(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)


@pytest.mark.slow  # half a minute of compiling
def test_compiled_layers_compute_the_same() -> None:
    model = small("ssru")
    quantise(model)
    (batch,) = batches([7])

    def gradients() -> list[Tensor]:
        model.zero_grad()
        batch_loss(model, batch, LossConfig(), tokens=31, sentences=7).objective.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = [gradient.clone() for gradient in gradients()]
    for stack in (model.encoder, model.decoder):
        for layer in stack.layers:
            layer.compile(dynamic=True, fullgraph=True, backend="aot_eager")
    for ours, plain in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(ours, plain)
    torch.compiler.reset()
