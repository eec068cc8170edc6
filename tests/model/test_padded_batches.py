"""Padded batches in the form for flash attention; its kernel needs a GPU, so a plain loop stands in for it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.small import moved, small_config
from ziggurat.model.attention import cache, multihead
from ziggurat.model.attention.cache import causal_mask, padding_mask
from ziggurat.model.attention.multihead import attend
from ziggurat.model.build import build_model
from ziggurat.model.dropout import Dropout
from ziggurat.model.seq2seq import Seq2Seq

REAL = torch.tensor([[True] * 4, [True] * 1 + [False] * 3, [True] * 3 + [False]])
EXACT = {"atol": 1e-10, "rtol": 0.0}


def loop(query: Tensor, key: Tensor, value: Tensor, cuts_q: Tensor, cuts_k: Tensor, max_q: int, max_k: int) -> Tensor:
    """Return the definition of `varlen_attn`: every sequence by itself, [rows, heads, d_head]."""
    assert cuts_q.dtype == cuts_k.dtype == torch.int32
    assert (cuts_q[0], cuts_q[-1], cuts_k[0], cuts_k[-1]) == (0, len(query), 0, len(key))
    outputs = []
    for (a, b), (c, d) in zip(pairwise(cuts_q.tolist()), pairwise(cuts_k.tolist()), strict=True):
        assert 0 <= b - a <= max_q
        assert 0 <= d - c <= max_k
        q, k, v = query[a:b].transpose(0, 1), key[c:d].transpose(0, 1), value[c:d].transpose(0, 1)
        outputs.append((torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Treat padded batches as on a GPU in bf16; every call adds (longest query, longest key) to the list."""
    seen: list[tuple[int, int]] = []

    def kernel(*args: Any) -> Tensor:
        seen.append(args[5:])
        return loop(*args)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(multihead, "EXPLICIT_MAX_LENGTH", 0)
    monkeypatch.setattr(multihead, "_flash_takes", lambda _query, dropout: dropout == 0.0)
    monkeypatch.setattr(multihead, "has_cpu_kernels", lambda _query: False)
    monkeypatch.setattr(cache, "_takes_bounds", lambda _device: True)
    return seen


def test_every_sentence_and_every_padding_is_a_sequence() -> None:
    own = cache.sequence_bounds(REAL)
    assert own.queries is own.keys
    assert own.keys.tolist() == [0, 4, 4, 5, 8, 11, 12]  # the first sentence has no padding: an empty sequence
    cross = cache.sequence_bounds(REAL, 2)
    assert cross.queries.tolist() == [0, 2, 2, 4, 4, 6, 6]  # the padding is never read
    assert torch.equal(cross.keys, own.keys)


@pytest.mark.parametrize(("sentences", "bounded"), [(32_767, True), (32_768, False)])
def test_a_batch_of_more_sequences_than_the_kernel_takes_has_a_bias(
    sentences: int, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_takes_bounds", lambda _device: True)
    hidden = padding_mask(torch.ones(sentences, 2, dtype=torch.bool), torch.float32)
    assert (hidden.bounds is not None) == bounded


@pytest.mark.parametrize("queries", [None, 2, 6])
def test_real_queries_see_real_keys_and_nothing_else(queries: int | None, calls: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    length = 4 if queries is None else queries
    shapes = [(3, 2, length, 8), (3, 2, 4, 8), (3, 2, 4, 8)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    hidden = padding_mask(REAL, torch.float64, queries)
    got = attend(*inputs, hidden, Dropout(0.0)).context
    assert calls == [(length, 4)]
    expected = attend(*inputs, hidden._replace(bounds=None), Dropout(0.0)).context
    real = REAL if queries is None else torch.ones(3, length, dtype=torch.bool)
    torch.testing.assert_close(got.transpose(1, 2)[real], expected.transpose(1, 2)[real], **EXACT)
    upstream = torch.randn(shapes[0], dtype=torch.float64) * real[:, None, :, None]
    for a, b in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_the_future_is_hidden_without_a_bias(calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    future = causal_mask(5, torch.float64, query.device)
    got = attend(query, key, value, future._replace(bias=torch.zeros(())), Dropout(0.0)).context
    monkeypatch.setattr(multihead, "has_cpu_kernels", lambda _query: True)
    torch.testing.assert_close(got, attend(query, key, value, future, Dropout(0.0)).context, **EXACT)
    assert not calls


def test_dropout_and_weights_need_the_bias(calls: list[tuple[int, int]]) -> None:
    query, key, value = (torch.randn(3, 2, 4, 8, dtype=torch.float64) for _ in range(3))
    hidden = padding_mask(REAL, torch.float64)
    assert attend(query, key, value, hidden, Dropout(0.0), need_weights=True).weights is not None
    attend(query, key, value, hidden, Dropout(0.5))
    assert not calls


@pytest.mark.parametrize(
    ("dtype", "d_head", "dropout", "taken"),
    [
        (torch.bfloat16, 64, 0.0, True),
        (torch.float16, 256, 0.0, True),
        (torch.float32, 64, 0.0, False),
        (torch.bfloat16, 64, 0.1, False),
        (torch.bfloat16, 20, 0.0, False),
        (torch.bfloat16, 264, 0.0, False),
    ],
)
def test_supported_inputs_of_the_kernel(dtype: torch.dtype, d_head: int, dropout: float, taken: bool) -> None:
    assert multihead._flash_takes(torch.empty(1, 1, 1, d_head, dtype=dtype), dropout) is taken


def test_a_cpu_does_not_cut_batches() -> None:
    assert padding_mask(REAL, torch.float32).bounds is None


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "relative": {"encoder": {"attention": "relative"}, "decoder": {"attention": "relative"}},
    "rotary": {"embedding": {"positions": "rotary"}},
    "scaled": {"attention": {"qk_norm": "l2", "query_scale": True}},
    "transparent": {"memory": "transparent"},
    "dlcl": {"encoder": {"history": "dlcl"}},
    **{kind: {"decoder": {"attention": kind}} for kind in ("average", "merged", "merged_full")},
}


def states_and_gradients(model: Seq2Seq) -> list[Tensor]:
    """Return hidden states at real target positions, and the gradients of all parameters."""
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(9, (3, length), generator=generator) for length in (4, 5))
    real = torch.tensor([[True] * 5, [True] * 2 + [False] * 3, [True] * 5])
    states = model(source, REAL, target)[real]
    upstream = torch.randn(states.shape, generator=generator, dtype=states.dtype)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(states, parameters, upstream, allow_unused=True)
    return [states.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("recompute", [None, 1])
@pytest.mark.parametrize("name", KINDS)
def test_models_compute_the_same_either_way(
    name: str, recompute: int | None, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_dropout = {"residual": 0.0, "embedding": 0.0, "transparent": 0.0}
    model = moved(build_model(small_config(2, 2, dropout=no_dropout, **KINDS[name]), 9, 9).double().train(), 0.3)
    model.encoder.recompute = model.decoder.recompute = recompute  # type: ignore[assignment]
    got = states_and_gradients(model)
    cross, own = calls.count((5, 4)), calls.count((4, 4))
    times = 1 if recompute is None else 2
    assert cross == 2 * times
    assert own == (0 if name == "relative" else 2 * times)
    monkeypatch.setattr(cache, "_takes_bounds", lambda _device: False)
    for a, b in zip(got, states_and_gradients(model), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_the_real_operator_accepts_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run torch's own `varlen_attn`, forward and backward, on tensors that have shapes but no values."""
    monkeypatch.setattr(multihead, "EXPLICIT_MAX_LENGTH", 0)
    monkeypatch.setattr(cache, "_takes_bounds", lambda _device: True)
    with FakeTensorMode():
        states = [torch.empty(3, n, 2, 8, dtype=torch.bfloat16, requires_grad=True) for n in (5, 4, 4)]
        hidden = padding_mask(torch.ones(3, 4, dtype=torch.bool), torch.float32, 5)
        context = attend(*(x.transpose(1, 2) for x in states), hidden, Dropout(0.0)).context
        assert context.shape == (3, 2, 5, 8)
        context.sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in states)


def test_stepwise_decoding_uses_biases(calls: list[tuple[int, int]]) -> None:
    model = build_model(small_config(1, 1), 9, 9).double().eval()
    memory = model.encode(torch.ones(3, 4, dtype=torch.long), REAL)
    calls.clear()
    state = model.start(2, 3)
    model.admit(memory, state)
    model.step(torch.ones(3, 2, dtype=torch.long), state)
    assert not calls
