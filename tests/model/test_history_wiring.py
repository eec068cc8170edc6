"""Histories in whole encoders and decoders (Wang et al. 2019; Bapna et al. 2018; Li et al. 2020)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.sentences import MASK, SOURCE, TARGET, built
from ziggurat.model.attention.cache import padding_mask
from ziggurat.model.layers import SourceView
from ziggurat.model.seq2seq import Seq2Seq


def hidden(model: Seq2Seq) -> tuple[Tensor, Tensor]:
    """Return the memory of the first decoder layer and the decoder's output."""
    memory = model.encode(SOURCE, MASK)
    return memory.of(0), model.decode(TARGET, memory)


def one_hot(history: str, **choices: Any) -> Seq2Seq:
    return built(encoder__history=history, decoder__history=history, combination__start="last", **choices)


@pytest.mark.parametrize("residual", ["pre", "post", "layer_scale", "hyper"])
@pytest.mark.parametrize("unit", ["layer", "sublayer"])
@pytest.mark.parametrize("history", ["dlcl", "top_only"])
def test_dlcl_of_the_last_layer_alone_without_inner_norms_is_bitwise_the_plain_model(
    history: str, unit: str, residual: str
) -> None:
    wired = one_hot(history, residual=residual, combination__norm="none", combination__unit=unit)
    for got, expected in zip(hidden(wired), hidden(built(residual=residual)), strict=True):
        assert torch.equal(got, expected)


def test_dlcl_of_the_last_layer_alone_with_inner_norms_is_not_plain_pre_norm() -> None:
    for got, expected in zip(hidden(one_hot("dlcl", residual="pre")), hidden(built(residual="pre")), strict=True):
        assert (got - expected).abs().max() > 1e-2


@pytest.mark.parametrize("residual", ["post", "admin", "deepnorm"])
def test_dlcl_of_the_last_layer_alone_is_plain_post_norm_but_for_epsilon(residual: str) -> None:
    wired, plain = (
        make(residual=residual, layer_norm_epsilon=1e-10)
        for make in (lambda **choices: one_hot("dlcl", **choices), built)
    )
    for got, expected in zip(hidden(wired), hidden(plain), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-7, rtol=0)


def test_dlcl_with_all_weights_one_is_the_dense_sum_of_layers() -> None:
    model = built(residual="pre", encoder__history="dense", combination__norm="none")
    outputs, view = [model.source_embedding(SOURCE)], SourceView(padding_mask(MASK, torch.float64))
    for layer in model.encoder.layers:  # type: ignore[union-attr]
        outputs.append(layer(sum(outputs), view))
    expected = model.encoder.final_norm(sum(outputs))  # type: ignore[operator]
    torch.testing.assert_close(hidden(model)[0], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("residual", ["pre", "post"])
def test_gradient_reaches_the_embedding_from_every_consumer(residual: str) -> None:
    model = built(residual=residual, encoder__history="dlcl")
    weight = model.encoder.history.weight  # type: ignore[union-attr]
    (hidden(model)[0] * torch.randn(16, generator=torch.Generator().manual_seed(1)).double()).sum().backward()
    assert weight.grad[:, 0].all()  # every row's weight of y_0 affects the loss
    assert torch.equal(weight.grad, weight.grad.tril())
    assert model.source_embedding.tokens.weight.grad[SOURCE[MASK]].any(1).all()  # type: ignore[union-attr]


def test_every_decoder_layer_has_its_own_memory() -> None:
    model = built(residual="post", memory="transparent")
    weight = model.encoder.transparent.weight  # type: ignore[union-attr]
    assert weight.shape == (3, 4)  # decoder layers, embedding and encoder layers
    with torch.no_grad():
        weight.copy_(1e3 * torch.eye(4)[:3])
    outputs: list[Tensor] = []
    memory = model.encode(SOURCE, MASK)
    model.encode(SOURCE, MASK, outputs)
    for layer, state in enumerate([model.source_embedding(SOURCE), *outputs[:2]]):
        torch.testing.assert_close(memory.of(layer), state, atol=1e-10, rtol=0)
