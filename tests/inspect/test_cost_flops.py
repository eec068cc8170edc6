"""Arithmetic per token compared with the papers' formulas, written here by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ziggurat.config import Experiment
from ziggurat.config.recipes import load_named
from ziggurat.inspect.cost import forward_flops, training_flops
from ziggurat.inspect.ledger import Ledger, Product
from ziggurat.inspect.machine import BatchShape, simulate_update

D, F, H, S, T, V = 16, 24, 2, 7, 5, 30
CPU = torch.device("cpu")


def experiment(*overrides: str) -> Experiment:
    sizes = [f"model.d_model={D}", f"model.d_ff={F}", f"model.heads={H}", "model.preset=null"]
    depth = ["model.encoder.layers=3", "model.decoder.layers=2", "training.batch.accumulate=1"]
    return load_named("transformer-base", [*sizes, *depth, "training.precision=fp32", *overrides])


def rnmt(*overrides: str) -> Experiment:
    sizes = [f"model.d_model={D}", f"model.heads={H}", "model.encoder.layers=3", "model.decoder.layers=3"]
    return load_named("transparent-en-de-rnmt-512-6-8", [*sizes, "training.batch.accumulate=1", *overrides])


# Multiplications of one token: a map [a, b] takes a b. Attention to n positions: n d for logits, n d for the context.
SELF, CROSS, FFN = 4 * D * D, 2 * D * D, 2 * D * F
PLAIN = {
    "encoder": 3 * (SELF + FFN),
    "encoder_attention": 3 * 2 * S * D,
    "memory": 2 * 2 * D * D,
    "decoder": 2 * (SELF + CROSS + FFN),
    "decoder_attention": 2 * (2 * T * D + 2 * S * D),
    "output": V * D,
}
CASES: dict[str, tuple[list[str], dict[str, float]]] = {
    "post": ([], {}),
    "pre": (["model.residual=pre"], {}),
    "hyper": (
        ["model.residual=hyper", "model.wiring.streams=2", "model.wiring.dynamic=false"],
        # Two streams are mixed in every sub-layer: [streams, streams] x [streams, d].
        {"encoder": PLAIN["encoder"] + 6 * 2 * 2 * D, "decoder": PLAIN["decoder"] + 6 * 2 * 2 * D},
    ),
    "dlcl": (["model.encoder.history=dlcl", "model.decoder.history=dense"], {}),
    "transparent": (["model.memory=transparent"], {}),
    "swiglu": (["model.activation=swiglu"], {part: PLAIN[part] - n * FFN + n * 3 * D * (2 * F // 3)
                                              for part, n in (("encoder", 3), ("decoder", 2))}),
    "average": (
        ["model.decoder.attention=average", "model.attention.average_gate=true", "model.attention.average_ffn=false"],
        {"decoder": 2 * (4 * D * D + CROSS + FFN), "decoder_attention": 2 * 2 * S * D},
    ),
    "simplified_average": (
        ["model.decoder.attention=simplified_average"],
        {"decoder": 2 * (2 * D * D + CROSS + FFN), "decoder_attention": 2 * 2 * S * D},
    ),
    "ssru": (
        ["model.decoder.attention=ssru"],
        {"decoder": 2 * (2 * D * D + CROSS + FFN), "decoder_attention": 2 * 2 * S * D},
    ),
    "merged": (
        ["model.decoder.attention=merged", "model.attention.share_value=true"],
        {"decoder": 2 * (3 * D * D + FFN), "decoder_attention": 2 * 2 * S * D},
    ),
    "merged_full": (["model.decoder.attention=merged_full"], {}),
    "relative": (
        ["model.encoder.attention=relative", "model.attention.relative_clip=4"],
        {"encoder": PLAIN["encoder"] + 3 * 9 * D},
    ),
    "int8": (["training.quantise=int8"], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_forward_is_as_counted_by_hand(name: str) -> None:
    overrides, other = CASES[name]
    found = forward_flops(experiment(*overrides), (V, V), S, T)
    expected = {part: 2 * count for part, count in {**PLAIN, **other}.items()}
    assert {part: getattr(found, part) for part in expected} == pytest.approx(expected)


def test_rnmt_is_as_counted_by_hand() -> None:
    found = forward_flops(rnmt(), (V, V), S, T)

    def cell(inputs: int, length: int) -> float:
        """Return the operations of a cell at a step; before the first step the state is 0, and the product with it is
        omitted.
        """
        return 4 * D * (inputs + D * (length - 1) / length)

    assert found.encoder == pytest.approx(2 * (2 * (cell(D, S) + 2 * cell(2 * D, S)) + 2 * D * D))
    assert found.encoder_attention == 0
    # The memory: its projection, and the map of each head's keys.
    head = D // H
    assert found.memory == pytest.approx(2 * (D * D + D * head))
    # The first layer runs cell by cell, which also multiplies the zero state; its attention runs once more at the
    # start.
    asked = (T + 1) / T
    first, query = 4 * D * (2 * D + D), asked * (D * D + D * head)
    assert found.decoder == pytest.approx(2 * (first + 2 * cell(2 * D, T) + query))
    assert found.decoder_attention == pytest.approx(2 * asked * 2 * S * D)
    assert found.output == 2 * V * 2 * D


def training(config: Experiment, shape: BatchShape) -> tuple[Any, Any]:
    forward = forward_flops(config, (V, V), shape.source, shape.target)
    update = simulate_update(config, (V, V), shape, CPU)
    return forward, training_flops(forward, update, shape.sentences * shape.target)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_takes_three_times_the_products_and_recomputation_one_more(precision: str) -> None:
    shape = BatchShape(3, S, T)
    shallow = ["model.encoder.layers=1", "model.decoder.layers=1", f"training.precision={precision}"]
    forward, found = training(experiment(*shallow), shape)
    # Each product has two gradients; those of keys and values reach the encoder.
    assert (found.encoder, found.decoder) == pytest.approx((3 * forward.encoder, 3 * forward.decoder))
    assert found.encoder_attention == pytest.approx(3 * forward.encoder_attention)
    # The loss also multiplies the summed matrix by each state, without a backward pass.
    assert found.output == pytest.approx(3 * forward.output + 2 * D)
    forward, found = training(experiment(*shallow, "training.recompute.encoder=1"), shape)
    # The last map of each layer is not recomputed, because no gradient needs it.
    assert 3.5 * forward.encoder < found.encoder <= 4 * forward.encoder
    assert found.decoder == pytest.approx(3 * forward.decoder)


def test_operations_are_those_of_values_too() -> None:
    """It runs on real tensors, with in-place, transposed and batched kernels, with and without oneDNN."""
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    batched = torch.randn(3, 4, 6)
    with Ledger() as ledger:
        _ = a @ b
        torch.zeros(4, 5).addmm_(a, b)
        _ = torch.bmm(batched, torch.randn(3, 6, 2))
        _ = torch.mv(a, torch.ones(6))
        torch.zeros(3, 4, 4).baddbmm_(batched, batched.mT)
        q = torch.randn(2, 2, 300, 8, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    counts = ledger.work[""].operations
    assert counts[Product(torch.float32, batched=False)] == 2 * (2 * 4 * 6 * 5)
    small = 2 * 3 * 4 * 6 * 2 + 2 * 4 * 6 + 2 * 3 * 4 * 6 * 4
    assert counts[Product(torch.float32, batched=True)] == small + (2 + 5) * 2 * (2 * 2 * 300 * 300 * 8)
