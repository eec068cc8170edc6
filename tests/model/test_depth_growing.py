"""Depth Growing (Wu et al. 2019): two modules in each stack, compared with its equations in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.composition import model as small_model
from tests.composition import refusal
from tests.model.sentences import MASK, SOURCE, TARGET, V, built
from tests.model.test_stacks import decoder_layer, encoder_layer, ln
from tests.small import moved
from ziggurat.config.depth import LeftOut, unprunable
from ziggurat.model.build import build_model
from ziggurat.model.depth import at_depth, deepening, grow_weights
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import weights

P = 2
CHOICES: dict[str, Any] = {
    "encoder.history": "cross_module",
    "decoder.history": "cross_module",
    "memory": "hierarchical",
    "combination.period": P,
    "encoder.layers": 3,
    "decoder.layers": 4,
}


def growing_model(residual: str) -> Seq2Seq:
    choices = {**CHOICES, "residual": residual}
    return moved(built(**{key.replace(".", "__"): value for key, value in choices.items()}), 0.2)


def final_output(x: Tensor, stack: Any) -> Tensor:
    return x if stack.final_norm is None else ln(x, stack.final_norm)


@pytest.mark.parametrize("residual", ["pre", "post"])
def test_the_upper_modules_read_the_embedding_and_each_its_own_memory(residual: str) -> None:
    """h1 = enc1(x), h2 = enc2(h1 + LN(x)); s1 = dec1(y, h1), s2 = dec2(s1 + LN(y), h2)."""
    model: Any = growing_model(residual)
    x = model.source_embedding(SOURCE)
    h = x
    for layer in model.encoder.layers[:P]:
        h = encoder_layer(residual, layer)(h)
    memories = [final_output(h, model.encoder)] * P
    h = h + ln(x, model.encoder.history.norm)
    for layer in model.encoder.layers[P:]:
        h = encoder_layer(residual, layer)(h)
    memories += [final_output(h, model.encoder)] * P
    outputs: list[Tensor] = []
    memory = model.encode(SOURCE, MASK, outputs)
    assert len(outputs) == 3
    for reader, expected in enumerate(memories):
        torch.testing.assert_close(memory.of(reader), expected, atol=1e-10, rtol=0)
    y = model.target_embedding(TARGET)
    s = y
    for number, layer in enumerate(model.decoder.layers):
        if number == P:
            s = s + ln(y, model.decoder.history.norm)
        s = decoder_layer(residual, layer, memories[number])(s)
    torch.testing.assert_close(model.decode(TARGET, memory), final_output(s, model.decoder), atol=1e-10, rtol=0)


def test_a_shallow_model_is_plain_and_lives_on_in_the_grown_one() -> None:
    deep = small_model({**CHOICES, "encoder.layers": 3, "decoder.layers": 3})
    before = at_depth(deep, P, P)
    shallow = moved(build_model(before, V, V, seed=1), 0.1).eval()
    assert not [name for name, _ in shallow.named_parameters() if "history" in name]
    plain = build_model(small_model({"encoder.layers": P, "decoder.layers": P}), V, V, seed=1)
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in shallow.named_parameters()]
    grown = build_model(deep, V, V, seed=2).eval()
    grow_weights(grown, weights(shallow), deepening("random", before, deep))
    assert torch.equal(grown.get_parameter("encoder.history.norm.weight"), torch.ones(deep.d_model))
    lower = grown.encode(SOURCE, MASK).of(0)
    torch.testing.assert_close(lower, shallow.encode(SOURCE, MASK).of(0), atol=0, rtol=0)
    moved(grown, 0.1)
    deeper = small_model({**CHOICES, "encoder.layers": 4, "decoder.layers": 4})
    more = build_model(deeper, V, V, seed=2)
    grow_weights(more, weights(grown), deepening("random", deep, deeper))
    for name in ("encoder.history.norm.weight", "decoder.history.norm.bias"):
        assert torch.equal(more.get_parameter(name), grown.get_parameter(name))


@pytest.mark.parametrize(
    "choices",
    [
        {"encoder.history": "dlcl"},
        {"residual": "siamese"},
        {"decoder.layers": 2},
        {"combination.unit": "sublayer"},
    ],
    ids=str,
)
def test_memories_that_are_unread_or_not_an_output_are_refused(choices: dict[str, Any]) -> None:
    reason = refusal({**CHOICES, **choices})
    assert reason is not None
    assert reason.problems[0].key == "memory"


def test_layers_cannot_be_left_out() -> None:
    config = small_model({"memory": "hierarchical", "combination.period": P})
    assert [problem.key for problem in unprunable(config, LeftOut.parse("decoder.2"))] == ["model.memory"]
