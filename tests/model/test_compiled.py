"""The compiled loops compared with float64 arithmetic, in every precision, on any number of threads."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ziggurat.model.attention.cache import KeyValueBlock
from ziggurat.model.fast import compiled
from ziggurat.model.fast.compiled import CompiledFeedForward, CompiledLinear, Precision

# With gcc the library must exist; a skip would hide a stale library or one that does not load.
pytestmark = pytest.mark.skipif(compiled._library is None and not shutil.which("gcc"), reason="there is no gcc")
PRECISIONS: list[Precision] = [p for p in ("float32", "bfloat16", "int8") if compiled.multiplies(p)]
LEVELS = {False: 127, True: 255}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_numbers(x: Tensor, precision: Precision, positive: bool = False) -> Tensor:
    """Return float64 rows as the products see them."""
    if precision == "int8":
        step = x.abs().amax(1, keepdim=True).double() / LEVELS[positive]
        return (x.double() / step + 0.5).floor() * step
    return x.to(getattr(torch, precision)).double()


def tolerance(x: Tensor, weight: Tensor, precision: Precision) -> float:
    """Return the tolerance for a sum in fp32; with bytes, one input may also round the other way, by half a step."""
    rounding = 1e-6 * math.sqrt(x.shape[1]) * float(x.abs().max() * weight.abs().max() * 4)
    return rounding + (float(x.abs().max() * weight.abs().max()) / 100 if precision == "int8" else 0.0)


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=60)
@given(
    rows=st.integers(0, 70),
    width=st.integers(1, 70),
    out=st.integers(1, 140),
    positive=st.booleans(),
    relu=st.booleans(),
    narrow=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
)
def test_a_linear_map_is_the_sum_of_products(
    precision: Precision, rows: int, width: int, out: int, positive: bool, relu: bool, narrow: bool, threads: int
) -> None:
    weight, bias, wide = drawn(out, width), drawn(out, seed=2), drawn(rows, width + 3, seed=1)
    x = (wide.abs() if positive else wide)[:, 1 : width + 1]  # rows that are not contiguous in memory
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = CompiledLinear(weight, bias, precision, positive=positive, relu=relu, narrow=narrow)(x)
    finally:
        torch.set_num_threads(before)
    assert found.dtype == (torch.bfloat16 if narrow else torch.float32)
    if rows:
        expected = as_numbers(x, precision, positive) @ as_numbers(weight, precision).T + bias.double()
        expected = expected.clamp(min=0) if relu else expected
        off = (found.double() - expected).abs() - (expected.abs() / 256 if narrow else 0)
        assert float(off.max()) <= tolerance(x, weight, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_depends_on_no_other_row_and_on_no_number_of_threads(precision: Precision) -> None:
    """Rows are divided among threads in two ways and computed up to six at a time; the sums are always the same."""
    layer, x = CompiledLinear(drawn(100, 50), drawn(100, seed=1), precision), drawn(500, 50, seed=2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = torch.cat([layer(x[row : row + 1]) for row in range(500)])
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for rows in (2, 13, 47, 500):
                assert torch.equal(layer(x[:rows]), expected[:rows]), (threads, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows", [3, 130])
def test_a_network_is_its_two_maps(precision: Precision, rows: int) -> None:
    first = CompiledLinear(drawn(70, 33), drawn(70, seed=1), precision, relu=True)
    second = CompiledLinear(drawn(20, 70, seed=2), None, precision, positive=True)
    x = drawn(2, rows, 33, seed=3)
    assert torch.equal(CompiledFeedForward(first, second)(x), second(first(x)))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("relu", [False, True])
def test_nan_is_propagated(precision: Precision, relu: bool) -> None:
    x = drawn(4, 40)
    x[1, 17] = math.nan
    found = CompiledLinear(drawn(8, 40, seed=1), None, precision, relu=relu)(x)
    assert found[1].isnan().all()
    assert found[[0, 2, 3]].isfinite().all()
    layer = CompiledLinear(torch.ones(3, 5), None, precision)
    for tiny in (0.0, 1e-39, 1e-37):  # a row of zeros, or almost zeros, still has a scale
        assert layer(torch.full((2, 5), tiny)).tolist() == [[pytest.approx(5 * tiny, abs=1e-30)] * 3] * 2
    x[1, 17] = -math.inf
    assert not CompiledLinear(drawn(8, 40, seed=1), None, precision, relu=relu)(x)[1].isfinite().all()


@pytest.mark.parametrize(("precision", "bits"), [("float32", 32), ("bfloat16", 16), ("int8", 8)])
def test_a_map_keeps_only_its_packed_matrix(precision: Precision, bits: int) -> None:
    """Even the smallest view would keep its base matrix alive for as long as the map exists."""
    layer = CompiledLinear(drawn(128, 64), None, precision)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in vars(layer).values() if isinstance(t, Tensor)}
    vectors = 3 if precision == "int8" else 1  # the bias; with bytes, scales and shifts
    assert sum(storage.nbytes() for storage in held.values()) == 128 * 64 * bits // 8 + vectors * 128 * 4


def test_unsupported_maps() -> None:
    layer = CompiledLinear(drawn(8, 40), None, "float32")
    for x in (drawn(2, 39), torch.empty(2, 40, device="meta")):
        with pytest.raises(ValueError, match="a map of 40 numbers on a CPU cannot take"):
            layer(x)
    with pytest.raises(ValueError, match="the second map's input must be the first one's output"):
        CompiledFeedForward(layer, layer)
    with pytest.raises(ValueError, match="between the maps"):
        CompiledFeedForward(
            CompiledLinear(drawn(8, 40), None, "float32", narrow=True), CompiledLinear(drawn(3, 8), None, "float32")
        )
    if "int8" in PRECISIONS:
        x = drawn(3, 40)
        below = CompiledLinear(drawn(8, 40), None, "int8", positive=True)
        assert torch.equal(below(x), below(x.clamp(min=0))), "a negative number counts as 0, not as the largest byte"


@pytest.mark.skipif(not PRECISIONS, reason="products are compiled for AVX-512")
def test_default_types_set_by_a_user_change_nothing() -> None:
    weight, bias, x, query = drawn(8, 40), drawn(8), drawn(3, 40), drawn(1, 2, 3, 16)
    expected, attended = CompiledLinear(weight, bias, PRECISIONS[-1])(x), None
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            assert torch.equal(CompiledLinear(weight, bias, PRECISIONS[-1])(x), expected)
            with torch.inference_mode():
                found = compiled.attend(query, [KeyValueBlock(query, query)], None)
        finally:
            torch.set_default_dtype(torch.float32)
        attended = found if attended is None else attended
        assert torch.equal(found, attended)


@settings(max_examples=60)
@given(
    sentences=st.integers(1, 9),
    beams=st.integers(1, 5),
    heads=st.sampled_from([1, 3, 8]),
    d_head=st.sampled_from([16, 32, 48, 64, 128]),
    entries=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    halves=st.booleans(),
    narrow_query=st.booleans(),
    hiding=st.sampled_from(["nothing", "by beam", "by sentence", "the same for all"]),
)
def test_attention_is_the_mean_by_the_softmax_of_products(
    sentences: int,
    beams: int,
    heads: int,
    d_head: int,
    entries: list[int],
    halves: bool,
    narrow_query: bool,
    hiding: str,
) -> None:
    dtype = torch.bfloat16 if halves else torch.float32
    query = (
        drawn(sentences, beams, 3 * heads * d_head)[..., : heads * d_head].unflatten(-1, (heads, -1)).transpose(1, 2)
    )
    # As in a cache: buffers with room for more entries than are read.
    keys, values = ([drawn(sentences, heads, 50, d_head, seed=s + 9 * n) for n in range(len(entries))] for s in (1, 2))
    key, value = (
        torch.cat([b[:, :, :n].to(dtype) for b, n in zip(part, entries, strict=True)], 2) for part in (keys, values)
    )
    bias = None
    if hiding != "nothing":
        rows = beams if hiding == "by beam" else 1
        hidden = drawn(1 if hiding == "the same for all" else sentences, 1, rows, key.shape[2], seed=3) > 0
        hidden[..., 0] = False
        bias = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
    logits = query.double() @ key.double().transpose(2, 3) / math.sqrt(d_head)
    weights = (logits if bias is None else logits + bias).softmax(-1)
    expected = weights @ value.double()
    if bias is not None and hiding == "by sentence":
        # They do not just have weight 0; they are never read, so the numbers of other hypotheses may be anything.
        at = 0
        for part, n in zip(keys, entries, strict=True):
            part[:, :, :n][bias[:, 0, 0, at : at + n].isinf()[:, None].expand(-1, heads, -1)] = math.nan
            at += n
    blocks = [
        KeyValueBlock(k.to(dtype)[:, :, :n], v.to(dtype)[:, :, :n])
        for k, v, n in zip(keys, values, entries, strict=True)
    ]
    with torch.inference_mode():
        assert compiled.attends(query, blocks[0].key, bias)
        found = compiled.attend(query, blocks, bias)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=1e-5)


@torch.inference_mode()
def test_attention_with_widely_spread_logits() -> None:
    """The exponential over its whole range: down to the smallest number, 0 below that, NaN for NaN."""
    gaps = torch.cat([torch.linspace(0, 87, 400), torch.tensor([88.0, 200.0, 1e5, 1e30])])
    key = torch.zeros(1, 1, len(gaps), 16)
    key[0, 0, :, 0] = -4 * gaps  # the query is 1, the scale a quarter
    query, value = torch.zeros(1, 1, 1, 16), torch.zeros_like(key)
    query[..., 0] = 1.0
    value[0, 0, :16] = torch.eye(16)
    for start in range(0, len(gaps) - 16, 16):
        order = torch.arange(len(gaps)).roll(-start)
        found = compiled.attend(query, [KeyValueBlock(key[:, :, order].contiguous(), value)], None)[0, 0, 0]
        weights = (-gaps[order].double()).softmax(0)[:16]
        assert torch.allclose(found.double(), weights, rtol=2e-5, atol=1e-38)  # a gap of 87 in fp32 is off by 4e-6
    query[..., 0] = math.nan
    assert compiled.attend(query, [KeyValueBlock(key, value)], None).isnan().all()


def test_unsupported_attention() -> None:
    query, bias = torch.zeros(2, 3, 1, 16), torch.zeros(2, 1, 1, 1)
    assert not compiled.attends(query, query, bias), "with gradients"
    with torch.inference_mode():
        assert compiled.attends(query, query, bias)
        assert not compiled.attends(query, query, bias.bfloat16())
        assert not compiled.attends(query.double(), query, None)
        assert not compiled.attends(torch.zeros(2, 3, 1, 24), query, None)
        for wrong in (bias.bfloat16(), torch.zeros(2, 1, 1, 2), torch.zeros(3, 1, 1, 1), torch.zeros(2, 1, 4, 1)):
            with pytest.raises(ValueError, match="a bias"):
                compiled.attend(query, [KeyValueBlock(query, query)], wrong)
        for key, value in ((query.double(), query.double()), (query, query.half()), (query[:, :2], query[:, :2])):
            with pytest.raises(ValueError, match=r"keys and values|queries, keys"):
                compiled.attend(query, [KeyValueBlock(key, value)], None)
        with pytest.raises(ValueError, match="dense"):
            compiled.attend(query, [KeyValueBlock(*[torch.zeros(2, 3, 1, 32)[..., ::2]] * 2)], None)


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_compiled.so", "compiled.c"):
        shutil.copy(compiled.LIBRARY.with_name(name), tmp_path / name)
    monkeypatch.setattr(compiled, "LIBRARY", tmp_path / "_compiled.so")
    assert compiled._load()[0] is not None
    with (tmp_path / "compiled.c").open("a") as source:
        source.write("/* changed */\n")
    library, problem = compiled._load()
    assert library is None
    monkeypatch.setattr(compiled, "_problem", problem)
    assert "another version" in compiled.notice()
    (tmp_path / "compiled.c").unlink()
    assert compiled._load()[0] is None
    (tmp_path / "damaged.so").write_bytes(b"\x7fELF")
    monkeypatch.setattr(compiled, "LIBRARY", tmp_path / "damaged.so")
    assert "cannot be used" in compiled._load()[1]
    monkeypatch.setattr(compiled, "LIBRARY", tmp_path / "nowhere.so")
    assert compiled._load() == (None, "was not compiled")


def test_it_is_used_where_possible_but_not_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.zeros(1, 2, 3, 32)
    with torch.no_grad():
        assert compiled.attends(query, query, None)
        assert compiled.attends(query, query.bfloat16(), torch.zeros(1, 1, 1, 3))
        assert not compiled.attends(query.double(), query, None)
        assert not compiled.attends(torch.zeros(1, 2, 3, 24), query, None)
    assert not compiled.attends(query, query, None)  # gradients may be needed
    for amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        if compiled._library is not None and compiled._library.supported(compiled._TYPES["float32"]):
            assert compiled.multiplies("float32")
        if compiled._library is not None and compiled._library.supported(compiled._TYPES["bfloat16"]):
            assert compiled.multiplies("bfloat16") is not amx
