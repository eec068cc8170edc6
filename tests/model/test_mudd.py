"""MUDD compared with its equation, position by position in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.composition import model as small_model
from tests.model.stepping import draw, linear, randomised
from tests.small import moved
from ziggurat.config import ModelConfig
from ziggurat.model.attention.multihead import SelfAttention
from ziggurat.model.build import build_model
from ziggurat.model.depth import at_depth, deepening, grow_weights
from ziggurat.model.dropout import Dropout
from ziggurat.model.history.base import HistoryOptions
from ziggurat.model.history.state_dependent import Mudd
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import weights

D = 6
SOURCE, MASK = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([[True] * 3, [True, True, False]])


@torch.no_grad()
def mixtures(history: Mudd, outputs: list[Tensor]) -> Tensor:
    """Return [ways, batch, length, D] above the last of `outputs`, from the equation."""
    row = len(outputs) - 2
    inner, outer, bias = history.inner[row], history.outer[row], history.bias[row]
    found = torch.zeros(len(bias), *outputs[0].shape, dtype=torch.float64)
    for b in range(outputs[0].shape[0]):
        for t in range(outputs[0].shape[1]):
            y = outputs[-1][b, t]
            normed = y / math.sqrt(float((y * y).sum()) / D + 1e-6)
            hidden = [float(w @ normed) for w in inner]
            hidden = [h * 0.5 * (1 + math.erf(h / math.sqrt(2))) for h in hidden]
            for way in range(len(bias)):
                for k, source in enumerate(outputs):
                    at = way * len(outputs) + k
                    weight = float(bias[way, k]) + sum(float(outer[at, n]) * h for n, h in enumerate(hidden))
                    found[way, b, t] += weight * source[b, t]
    return found


def test_each_layer_reads_four_mixtures_and_the_output_is_one() -> None:
    options = HistoryOptions(3, D, lambda: torch.nn.LayerNorm(D), lambda: Dropout(0.0))
    history = randomised(Mudd(options))
    assert [p.shape for p in history.inner] == [(8, D), (12, D), (16, D)]
    outputs = [draw(2, 3, D, seed=n) for n in range(4)]
    state = history.start(outputs[0])
    first = history.read(state)
    assert first.attention is None
    assert first.stream is outputs[0]
    for depth in (1, 2, 3):
        state = history.push(state, outputs[depth])
        expected = mixtures(history, outputs[: depth + 1])
        found = history.read(state)
        torch.testing.assert_close(found.stream, expected[-1], atol=1e-12, rtol=0)
        torch.testing.assert_close(history(state), expected[-1], atol=1e-12, rtol=0)
        if depth == 3:
            assert found.attention is None
            continue
        assert found.attention is not None
        for mine, theirs in zip(found.attention, expected[:3], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_queries_keys_and_values_have_separate_inputs() -> None:
    module, inputs = randomised(SelfAttention(8, 2, Dropout(0.0))), [draw(2, 4, 8, seed=n) for n in range(3)]
    weight, bias = module.qkv_proj.weight, module.qkv_proj.bias
    assert isinstance(bias, Tensor)
    parts = [linear(x, weight[8 * n : 8 * n + 8], bias[8 * n : 8 * n + 8]) for n, x in enumerate(inputs)]
    projected = module._project(torch.stack(inputs), None)
    for mine, theirs in zip(projected, parts, strict=True):
        torch.testing.assert_close(mine.transpose(1, 2).flatten(2), theirs, atol=1e-12, rtol=0)
    same = torch.stack(inputs[:1] * 3)
    torch.testing.assert_close(module(same, None), module(inputs[0], None), atol=1e-12, rtol=0)


def _models(kind: str, layers: int = 3) -> tuple[ModelConfig, Seq2Seq]:
    config = small_model({"encoder.history": kind, "decoder.history": kind, "encoder.layers": layers})
    return config, build_model(config, 11, 11, seed=3).double().eval()


def test_it_starts_as_the_plain_stack() -> None:
    (_, plain), (_, mudd) = _models("latest"), _models("mudd")
    mudd.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(mudd(SOURCE, MASK, SOURCE), plain(SOURCE, MASK, SOURCE), atol=1e-12, rtol=0)
    for stack in (mudd.encoder, mudd.decoder):
        drawn = torch.cat([*stack.history.inner])  # type: ignore[operator, union-attr]
        assert drawn.std().item() == pytest.approx(16**-0.5, rel=0.1), "W_1 ~ N(0, 1/d): at 0 it would never be trained"


def test_growing_keeps_the_mixtures_inside() -> None:
    config, deep = _models("mudd", 4)
    before = at_depth(config, 3)
    shallow = moved(build_model(before, 11, 11).double(), 0.1)
    fresh = {name: p.clone() for name, p in deep.encoder.history.named_parameters()}
    grow_weights(deep, weights(shallow), deepening("g_top", before, config))
    for name, p in deep.encoder.history.named_parameters():
        part, row = name.split(".")
        kept = dict(shallow.encoder.history.named_parameters()).get(name) if int(row) < 2 else fresh[name]
        assert kept is not None
        assert torch.equal(p, kept), (part, row)
