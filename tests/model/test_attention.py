from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.model.stepping import assert_steps_equal_whole, attend_to_self, draw, linear, randomised, weights_of
from ziggurat.model.attention import cache as cache_module
from ziggurat.model.attention import cache as live_module
from ziggurat.model.attention import multihead
from ziggurat.model.attention.cache import KeptWeights, LiveBeams, Mask, SelfAttentionCache, causal_mask, padding_mask
from ziggurat.model.attention.multihead import CrossAttention, SelfAttention, attend
from ziggurat.model.dropout import Dropout
from ziggurat.model.roles import Role, assign_roles

NO_DROPOUT = Dropout(0.0)


def reference(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Return softmax(q k / sqrt(d)) v, position by position; `allowed` [batch, queries, keys]."""
    batch, heads, queries, d_head = query.shape
    context = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                keys = [j for j in range(key.shape[2]) if allowed[b, i, j]]
                logits = [float(query[b, h, i] @ key[b, h, j]) / math.sqrt(d_head) for j in keys]
                total = sum(math.exp(x - max(logits)) for x in logits)
                for j, logit in zip(keys, logits, strict=True):
                    context[b, h, i] += math.exp(logit - max(logits)) / total * value[b, h, j]
    return context


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_both_kernels_equal_the_written_out_sum(explicit: bool, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihead, "EXPLICIT_MAX_LENGTH", 1000 if explicit else 0)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    hidden = padding_mask(mask, torch.float64)
    allowed = mask[:, None, :].expand(2, 5, 5)
    if causal:
        hidden = Mask(hidden.bias + causal_mask(5, torch.float64, torch.device("cpu")).bias)
        allowed = allowed & torch.ones(5, 5, dtype=torch.bool).tril()
    got = attend(query, key, value, hidden, NO_DROPOUT).context
    torch.testing.assert_close(got, reference(query, key, value, allowed), atol=1e-12, rtol=0)


def test_causal_mask_hides_exactly_the_future() -> None:
    bias = causal_mask(4, torch.float32, torch.device("cpu")).bias[0, 0]
    for i in range(4):
        for j in range(4):
            assert bias[i, j] == (0.0 if j <= i else -math.inf)


def test_the_returned_weights_are_those_used() -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, 2, 3, 4, dtype=torch.float64) for _ in range(3))
    context, weights = attend(query, key, value, None, NO_DROPOUT, need_weights=True)
    assert weights is not None
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 3, dtype=torch.float64))
    torch.testing.assert_close(weights @ value, context)


@pytest.mark.parametrize("explicit", [True, False])
def test_attention_dropout_acts_only_in_training(explicit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihead, "EXPLICIT_MAX_LENGTH", 1000 if explicit else 0)
    dropout = Dropout(0.5)
    torch.manual_seed(2)
    query, key, value = (torch.randn(2, 2, 6, 4) for _ in range(3))
    dropout.train()
    assert not torch.equal(
        attend(query, key, value, None, dropout).context, attend(query, key, value, None, dropout).context
    )
    dropout.eval()
    plain = attend(query, key, value, None, NO_DROPOUT).context
    torch.testing.assert_close(attend(query, key, value, None, dropout).context, plain)


def test_long_sequences_avoid_explicit_products_only_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, torch's only kernel with dropout is the slow one, which materialises everything."""
    monkeypatch.setattr(multihead, "EXPLICIT_MAX_LENGTH", 5)
    taken: list[float] = []
    genuine = torch.nn.functional.scaled_dot_product_attention

    def watched(*given: torch.Tensor, **options: float) -> torch.Tensor:
        taken.append(options["dropout_p"])
        return genuine(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watched)
    query, key, value = (torch.randn(1, 2, 6, 4) for _ in range(3))
    for dropout in (Dropout(0.5).train(), Dropout(0.5).eval(), Dropout(0.0).train()):
        attend(query, key, value, None, dropout)  # type: ignore[arg-type]
    assert taken == [0.0, 0.0], "evaluation, and a probability of 0"
    attend(*(each[:, :, :5] for each in (query, key, value)), None, Dropout(0.0))
    assert len(taken) == 2, "short ones"


def test_self_attention_is_the_written_out_sum_with_and_without_the_future() -> None:
    module, x = randomised(SelfAttention(6, 2, NO_DROPOUT)), draw(2, 4, 6)
    mask = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    for hidden, seen in (
        (padding_mask(mask, torch.float64), lambda b, i: range(int(mask[b].sum()))),
        (causal_mask(4, torch.float64, torch.device("cpu")), lambda b, i: range(i + 1)),
    ):
        torch.testing.assert_close(module(x, hidden), attend_to_self(module, x, seen), atol=1e-10, rtol=0)


def test_self_attention_steps_equal_whole_sequences() -> None:
    assert_steps_equal_whole(randomised(SelfAttention(6, 2, NO_DROPOUT)), 6, steps=20)


@torch.no_grad()
@pytest.mark.parametrize("project_out", [True, False])
def test_cross_attention_keeps_its_weights_only_on_request(project_out: bool) -> None:
    """The weights are those of one head or the mean over heads; without an output map, the context is returned."""
    module = randomised(CrossAttention(6, 4, 2, NO_DROPOUT, project_out=project_out))
    x, memory = draw(2, 3, 6), draw(2, 5, 4, seed=1)
    query = linear(x, module.q_proj.weight, module.q_proj.bias)
    key, value = linear(memory, module.kv_proj.weight, module.kv_proj.bias).split(6, dim=-1)
    context, of_heads = torch.zeros_like(x), torch.zeros(2, 2, 3, 5, dtype=torch.float64)
    for b in range(2):
        for i in range(3):
            for number, head in enumerate(torch.arange(6).chunk(2)):
                weights = weights_of(query[b, i, head], key[b][:, head], i, range(5))
                context[b, i, head] = sum(w * v for w, v in zip(weights, value[b][:, head], strict=True))
                of_heads[b, number, i] = torch.tensor(weights, dtype=torch.float64)
    if module.out_proj is not None:
        context = linear(context, module.out_proj.weight, module.out_proj.bias)
    wanted = {None: of_heads.mean(1), 0: of_heads[:, 0], 1: of_heads[:, 1]}
    for kept in (None, *map(KeptWeights, wanted)):
        cache = module.remember(memory, None, kept)
        torch.testing.assert_close(module(x, cache), context, atol=1e-10, rtol=0)
        if kept is None:
            assert cache.weights is None
        else:
            torch.testing.assert_close(kept.weights, wanted[kept.head], atol=1e-10, rtol=0)


def test_rows_of_fused_matrices_have_separate_roles() -> None:
    own = {slot.name: slot for slot in assign_roles(SelfAttention(6, 2, NO_DROPOUT))}
    cross = {slot.name: slot for slot in assign_roles(CrossAttention(6, 4, 2, NO_DROPOUT))}
    for part in (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE):
        slot = own[f"qkv_proj.weight[{part.value}]"]
        assert (slot.role, slot.values.shape, slot.fused_out, slot.cross) == (part, (6, 6), 18, False)
    for part in (Role.ATTENTION_KEY, Role.ATTENTION_VALUE):
        slot = cross[f"kv_proj.weight[{part.value}]"]
        assert (slot.role, slot.values.shape, slot.fused_out, slot.cross) == (part, (6, 4), 18, True)
    assert cross["q_proj.weight"].role is Role.ATTENTION_QUERY
    assert all(slot.cross for slot in cross.values())


def test_padding_of_the_memory_is_aligned() -> None:
    live = LiveBeams(2, slots=3)
    for lengths in ([3, 5], [9]):
        live.admit(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], torch.empty(0))
        bias = live.padding.bias
        assert bias.shape == (live.count, 1, 1, live.source)
        assert [stride % 8 for stride in bias.stride()] == [0, 0, 0, 1]
    assert (bias[:, 0, 0] == 0).sum(1).tolist() == [3, 5, 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # blocks of one size, read completely or in part
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), beams=st.integers(1, 3), steps=st.integers(1, 9))
def test_a_hypothesis_sees_only_its_own_past(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, data: st.DataObject, beams: int, steps: int
) -> None:
    """Whichever hypotheses enter, leave or swap places, the unmasked entries are those of the hypothesis itself."""
    for module in (cache_module, live_module):
        monkeypatch.setattr(module, "BLOCK", 3)
    monkeypatch.setattr(cache_module, "_DENSE_BLOCK", 3)
    live = LiveBeams(beams, slots=4)
    cache = SelfAttentionCache(live)
    history: list[list[list[float]]] = []
    for step in range(steps):
        space = live.slots - len(history)
        if new := data.draw(st.integers(0 if history else 1, space)) if space else 0:
            cache.admit(live.admit(torch.ones(new, 2, dtype=torch.bool), torch.empty(0)))
            history += [[[] for _ in range(beams)] for _ in range(new)]
        # In the very first step all beams get the same input.
        numbers = [
            [1.0 + 16 * step + 4 * row + (0 if live.first else beam) for beam in range(beams)]
            for row in range(len(history))
        ]
        history = [
            [[*old, x] for old, x in zip(row, its, strict=True)] for row, its in zip(history, numbers, strict=True)
        ]
        live.begin()
        key = torch.tensor(numbers, dtype=dtype)[:, None, : 1 if live.first else beams, None]
        blocks = cache.append(key, -key)
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*blocks, strict=True))
        mask = live.seen(keys.shape[2])
        hidden = torch.zeros(1) if mask is None else mask.bias
        hidden = hidden.expand(len(keys), 1, beams, keys.shape[2])
        for row, its in enumerate(history):
            for beam, past in enumerate(its):
                seen = hidden[row, 0, beam] == 0
                assert keys[row, 0, seen, 0].tolist() == past
                assert values[row, 0, seen, 0].tolist() == [-x for x in past]
                assert live.positions[row] == len(past) - 1
        live.end()
        if len(history) > 1 and data.draw(st.booleans()):
            kept = data.draw(st.permutations(range(len(history))))[: len(history) - 1]
            cache.keep(live.keep(torch.tensor(kept)))
            history = [history[row] for row in kept]
        parents = [data.draw(st.lists(st.integers(0, beams - 1), min_size=beams, max_size=beams)) for _ in history]
        live.follow(torch.tensor(parents))
        cache.follow(torch.tensor(parents))
        history = [[row[p] for p in its] for row, its in zip(history, parents, strict=True)]
