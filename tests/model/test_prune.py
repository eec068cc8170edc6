"""Models without some of their layers: what they compute, and what cannot be left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.small import moved, small_config
from ziggurat.config import ModelConfig
from ziggurat.config.depth import LeftOut, unprunable
from ziggurat.model.build import assemble, build_model
from ziggurat.model.depth import prune
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import load_weights, weights
from ziggurat.system.errors import ConfigError

SOURCE, MASK = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([[True] * 3, [True, True, False]])
TARGET = torch.tensor([[1, 4, 8], [1, 9, 2]])


class Passing(nn.Module):
    def forward(self, x: Tensor, *view: Any) -> Tensor:
        return x


def without(config: ModelConfig, left_out: LeftOut) -> tuple[Seq2Seq, Seq2Seq]:
    """The pruned model, and the whole one with layers replaced by the identity."""
    whole = moved(build_model(config, 11, 11).double(), 0.2).eval()
    smaller, tensors = prune(config, weights(whole), left_out)
    pruned = assemble(smaller, 11, 11).double().eval()
    load_weights(pruned, tensors, "pruned")
    for stack, numbers in ((whole.encoder, left_out.encoder), (whole.decoder, left_out.decoder)):
        for number in numbers:
            stack.layers[number - 1] = Passing()
    return pruned, whole


@pytest.mark.parametrize(
    "choices",
    [
        {"residual": "pre"},
        {"residual": "deepnorm", "init": {"kind": "deepnorm"}},
        {"residual": "peri", "memory": "transparent"},
        {"residual": "layer_scale", "memory": "transparent", "decoder": {"attention": "merged"}},
        {"encoder": {"ranges": [{"layers": 2, "residual": "post"}]}},
        {"residual": "hyper", "wiring": {"streams": 2}},
        {"transfer": {"width": 4, "encoder_layers": 2, "decoder_layers": 2}},
    ],
    ids=str,
)
def test_a_layer_that_is_left_out_passes_on_its_input(choices: dict[str, Any]) -> None:
    config = small_config(5, 4, **choices)
    pruned, whole = without(config, LeftOut(frozenset({2, 4}), frozenset({1, 3})))
    assert (len(pruned.encoder.layers), len(pruned.decoder.layers)) == (3, 2)
    memory = pruned.encode(SOURCE, MASK)
    expected = whole.encode(SOURCE, MASK)
    # There is a memory for every remaining decoder layer.
    states = expected.states if len(expected.states) == 1 else [expected.states[1], expected.states[3]]
    for got, wanted in zip(memory.states, states, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)
    torch.testing.assert_close(pruned.decode(TARGET, memory), whole.decode(TARGET, expected), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("choices", "text", "key"),
    [
        ({}, "encoder.6", "encoder.layers"),
        ({}, "encoder.2000000", "encoder.layers"),
        ({}, "decoder.3,decoder.2-999999999", "decoder.layers"),
        ({}, "decoder.1-4", "decoder.layers"),
        ({"encoder": {"history": "dlcl"}}, "encoder.2", "encoder.history"),
        ({"residual": "ln_scaling"}, "encoder.2", "residual"),
        ({"residual": "keel"}, "encoder.1", "residual"),
        ({"attention": {"value_residual": "half"}}, "encoder.1", "attention.value_residual"),
        ({"encoder": {"ranges": [{"layers": 2, "residual": "post"}]}}, "encoder.1-2", "encoder.ranges"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_left_out_are_refused_with_the_reason(
    choices: dict[str, Any], text: str, key: str
) -> None:
    config, left_out = small_config(5, 4, **choices), LeftOut.parse(text)
    assert f"model.{key}" in [problem.key for problem in unprunable(config, left_out)]
    with pytest.raises(ConfigError, match="cannot be left out"):
        prune(config, {}, left_out)


def test_layers_by_name() -> None:
    assert LeftOut.parse("encoder.5-7, decoder.3,encoder.1") == ({1, 5, 6, 7}, {3})
    for wrong in ("", "encoder", "encoder.0", "encoder.3-2", "memory.1", "encoder.1;decoder.2", "encoder.1-"):
        with pytest.raises(ConfigError, match="--without-layers"):
            LeftOut.parse(wrong)


def test_rnmt_has_no_layers_to_leave_out() -> None:
    config = ModelConfig.model_validate(
        {"family": "rnmt", "embedding": {"positions": "none", "sharing": "none"}, "dropout": {"activation": 0.0}}
    )
    assert unprunable(config, LeftOut(frozenset({1})))[0].key == "model.family"
