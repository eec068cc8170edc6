"""Packed linear maps, compared with plain ones, and int8 with integer arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ziggurat.model.dropout import Dropout
from ziggurat.model.embedding import OutputProjection
from ziggurat.model.fast import compiled
from ziggurat.model.fast import packed as packed_module
from ziggurat.model.fast.compiled import Precision
from ziggurat.model.fast.packed import Int8Linear, PackedFeedForward, PackedLinear, PackedOutput, available, pack
from ziggurat.model.linear import FeedForward, Linear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
PRECISIONS: list[Precision] = [p for p in ("float32", "bfloat16", "int8") if available(p)]
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 2e-2}


@pytest.fixture(params=["compiled", "oneDNN"], autouse=True)
def _with_and_without_the_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "oneDNN":
        monkeypatch.setattr(compiled, "_library", None)
    elif not compiled.multiplies("float32"):
        pytest.skip("this CPU, or this installation, does not use the compiled loops")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_a_packed_map_is_the_map(precision: Precision, bias: bool) -> None:
    weight, x = drawn(24, 40), drawn(3, 5, 40, seed=1)
    b = drawn(24, seed=2) if bias else None
    expected = x @ weight.T + (b if b is not None else 0)
    found = packed_module.packed(weight, b, precision)(x)
    assert (found.shape, found.dtype) == (expected.shape, torch.float32)
    assert relative(found, expected) < TOLERANCE[precision]
    narrow = packed_module.packed(weight, b, precision, narrow=True)(x)
    assert narrow.dtype == (torch.float32 if precision == "float32" else torch.bfloat16)
    assert relative(narrow, expected) < 2e-2


@pytest.mark.skipif("int8" not in PRECISIONS, reason="this CPU has no VNNI")
@pytest.mark.parametrize("positive", [False, True])
@torch.no_grad()
def test_int8_is_integer_arithmetic(positive: bool) -> None:
    """Compute row by row: W and x in whole steps of |largest| / 127 (255 for non-negative values), with exact sums."""
    weight, bias = drawn(6, 20), drawn(6, seed=2)
    x = drawn(4, 20, seed=1).abs() if positive else drawn(4, 20, seed=1)
    found = Int8Linear(weight, bias, positive=positive)(x)
    levels = 255 if positive else 127
    for row in range(4):
        step = float(x[row].abs().max()) / levels
        steps_in = [math.floor(float(v) / step + 0.5) for v in x[row].double()]
        for out in range(6):
            size = float(weight[out].abs().max()) / 127
            steps_of = [round(float(v) / size) for v in weight[out].double()]
            total = sum(a * b for a, b in zip(steps_in, steps_of, strict=True))
            # A number halfway between two steps may round either way in single precision, by at most one step of one
            # factor.
            assert abs(float(found[row, out]) - (total * step * size + float(bias[out]))) <= 128 * step * size


@pytest.mark.skipif("int8" not in PRECISIONS, reason="this CPU has no VNNI")
@torch.no_grad()
def test_a_row_in_int8_does_not_depend_on_the_others() -> None:
    layer, x = Int8Linear(drawn(8, 32), drawn(8, seed=3)), drawn(5, 32, seed=1)
    together = layer(torch.cat([x, 1000 * drawn(3, 32, seed=4)]))
    for row in range(5):
        torch.testing.assert_close(layer(x[row : row + 1])[0], together[row], atol=1e-5, rtol=1e-5)
    assert torch.equal(layer(torch.zeros(1, 32))[0], layer.bias)


@pytest.mark.parametrize("kind", [PackedLinear, Int8Linear][: 1 + ("int8" in PRECISIONS)])
@torch.no_grad()
def test_the_library_sees_few_different_numbers_of_rows(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps a compiled kernel for each; the results equal those of the rows alone."""
    seen, padded = set(), packed_module._padded

    def watched(x: torch.Tensor) -> tuple[int, torch.Tensor]:
        count, rows = padded(x)
        seen.add(len(rows))
        assert count <= len(rows) <= count * 9 / 8
        return count, rows

    monkeypatch.setattr(packed_module, "_padded", watched)
    weight, bias, x = drawn(6, 20), drawn(6, seed=2), drawn(300, 20, seed=1)
    layer = kind(weight, bias)
    for rows in range(301):
        found = layer(x[:rows])
        assert found.shape == (rows, 6)
        assert rows == 0 or relative(found, nn.functional.linear(x[:rows], weight, bias)) < TOLERANCE["int8"]
    assert layer(x[:17].view(17, 1, 20)).shape == (17, 1, 6)
    assert len(seen) <= 16 + 8 * 5  # each size up to 15 has its own kernel; the sizes up to 300 span five octaves


@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_a_packed_network_is_the_network(precision: Precision) -> None:
    network, x = FeedForward(16, 64, "relu", Dropout(0.0)).eval(), drawn(2, 3, 16)
    expected = network(x)
    assert relative(PackedFeedForward(network, precision)(x), expected) < 2 * TOLERANCE[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_pack_replaces_only_supported_modules(precision: Precision) -> None:
    output = OutputProjection(nn.Parameter(drawn(30, 16)), None)
    gelu = FeedForward(16, 32, "gelu", Dropout(0.0))
    model = nn.ModuleDict({"map": Linear(16, 8), "output": output, "relu": FeedForward(16, 32, "relu", Dropout(0.0))})
    model["gelu"], model["norm"] = gelu, nn.LayerNorm(16)
    x = drawn(2, 16)
    before = {name: model[name](x) for name in model}
    pack(model, precision)
    kinds: type = Int8Linear if precision == "int8" else PackedLinear
    networks: type = PackedFeedForward
    if compiled.multiplies(precision):
        kinds, networks = compiled.CompiledLinear, compiled.CompiledFeedForward
    assert isinstance(model["map"], kinds)
    assert isinstance(model["output"], PackedOutput)
    assert isinstance(model["relu"], networks)
    assert isinstance(model["gelu"], FeedForward)
    assert isinstance(model["gelu"].in_proj, kinds)
    # A second map's input is never negative: all eight bits are for its magnitude.
    if isinstance(model["relu"], compiled.CompiledFeedForward):
        assert [bool(m.map.positive) for m in (model["relu"].first, model["relu"].second)] == [False, True]
    elif precision == "int8":
        assert (model["relu"].in_proj.positive, model["relu"].out_proj.positive) == (False, True)
    for name, expected in before.items():
        assert relative(model[name](x), expected) < 3 * TOLERANCE[precision], name
