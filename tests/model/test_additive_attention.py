"""Additive attention compared with its formula (Bahdanau et al. 2015), number by number (fp64)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.stepping import draw, randomised
from ziggurat.model.attention.cache import KeptWeights, padding_mask
from ziggurat.model.dropout import Dropout
from ziggurat.model.rnmt import AdditiveAttention
from ziggurat.model.roles import Role

BATCH, SOURCE, QUERIES, WIDTH, HEADS = 2, 5, 3, 8, 4
EXACT: dict[str, Any] = {"atol": 1e-10, "rtol": 0.0}
MASK = torch.arange(SOURCE) < torch.tensor([[5], [3]])


def attention(p: float = 0.0) -> AdditiveAttention:
    return randomised(AdditiveAttention(WIDTH, HEADS, Dropout(p, exact=True)))


@torch.no_grad()
def by_formula(module: AdditiveAttention, x: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the context and each head's weights: e_s = v^T tanh(K_s A + q B), softmax over real s, values K_s."""
    a = WIDTH // HEADS
    keys = memory @ module.k_proj.weight.T + module.k_proj.bias
    queries = x @ module.q_proj.weight.T + module.q_proj.bias
    context = torch.zeros(*x.shape, dtype=x.dtype)
    weights = torch.zeros(x.shape[0], HEADS, x.shape[1], memory.shape[1], dtype=x.dtype)
    for b in range(x.shape[0]):
        real = mask[b].nonzero()[:, 0].tolist()
        for h in range(HEADS):
            part = slice(h * a, (h + 1) * a)
            for j in range(x.shape[1]):
                energies = torch.stack(
                    [
                        module.score
                        @ torch.tanh(keys[b, s, part] @ module.key_map + queries[b, j, part] @ module.query_map)
                        for s in real
                    ]
                )
                share = energies.exp() / energies.exp().sum()
                weights[b, h, j, real] = share
                context[b, j, part] = sum(w * keys[b, s, part] for w, s in zip(share, real, strict=True))
    return context, weights


def test_context_and_weights_follow_the_formula() -> None:
    module, x, memory = attention(), draw(BATCH, QUERIES, WIDTH), draw(BATCH, SOURCE, WIDTH, seed=1)
    cache = module.remember(memory, padding_mask(MASK, torch.float64), kept=KeptWeights())
    context, weights = by_formula(module, x, memory, MASK)
    torch.testing.assert_close(module(x, cache), context, **EXACT)
    assert cache.weights is not None
    torch.testing.assert_close(cache.weights, weights.mean(1), **EXACT)
    assert float(cache.weights[1, :, 3:].detach().abs().max()) == 0.0


def test_queries_see_neither_each_other_nor_padding() -> None:
    module, x, memory = attention(), draw(BATCH, QUERIES, WIDTH), draw(BATCH, SOURCE, WIDTH, seed=1)
    padding = padding_mask(MASK, torch.float64)
    together = module(x, module.remember(memory, padding))
    for j in range(QUERIES):
        torch.testing.assert_close(
            module(x[:, j : j + 1], module.remember(memory, padding)), together[:, j : j + 1], **EXACT
        )
    memory[~MASK] = 1e3
    torch.testing.assert_close(module(x, module.remember(memory, padding)), together, **EXACT)


def test_without_padding_no_bias_is_needed() -> None:
    module, x, memory = attention(), draw(BATCH, QUERIES, WIDTH), draw(BATCH, SOURCE, WIDTH, seed=1)
    nothing = padding_mask(torch.ones(BATCH, SOURCE, dtype=torch.bool), torch.float64)
    torch.testing.assert_close(module(x, module.remember(memory, None)), module(x, module.remember(memory, nothing)))


def test_dropout_acts_on_the_weights() -> None:
    module, x, memory = attention(0.5), draw(1, 1, WIDTH), draw(1, SOURCE, WIDTH, seed=1)
    cache = module.remember(memory, None, kept=KeptWeights())
    kept = by_formula(module, x, memory, torch.ones(1, SOURCE, dtype=torch.bool))[1][0, :, 0]
    values = cache.value[0]
    module.train()
    torch.manual_seed(0)
    seen = set()
    for _ in range(40):
        context = module(x, cache).view(HEADS, -1)
        for h in range(HEADS):
            subsets = [
                (mask, (2 * kept[h] * torch.tensor([mask >> s & 1 for s in range(SOURCE)])) @ values[h])
                for mask in range(2**SOURCE)
            ]
            fits = [mask for mask, expected in subsets if torch.allclose(expected, context[h], atol=1e-10)]
            assert len(fits) == 1
            seen.add(fits[0])
    assert len(seen) > 20
    torch.testing.assert_close(cache.weights, kept.mean(0)[None, None], **EXACT)  # returned without dropout


def test_parameters_and_their_roles() -> None:
    module = AdditiveAttention(WIDTH, HEADS, Dropout(0.0))
    a = WIDTH // HEADS
    assert sum(p.numel() for p in module.parameters()) == 2 * (WIDTH**2 + WIDTH) + 2 * a * a + a
    roles = {slot.name: slot.role for slot in module.slots()}
    assert roles == {
        "k_proj.weight": Role.ATTENTION_KEY,
        "k_proj.bias": Role.BIAS,
        "q_proj.weight": Role.ATTENTION_QUERY,
        "q_proj.bias": Role.BIAS,
        "key_map": Role.ADDITIVE,
        "query_map": Role.ADDITIVE,
        "score": Role.ADDITIVE,
    }
    assert all(slot.cross for slot in module.slots())


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_the_inner_maps_are_shared_by_the_heads(heads: int) -> None:
    """Equal key and query heads give equal contexts."""
    module = randomised(AdditiveAttention(WIDTH, heads, Dropout(0.0)))
    a = WIDTH // heads
    with torch.no_grad():
        for linear in (module.k_proj, module.q_proj):
            linear.weight.copy_(linear.weight[:a].repeat(heads, 1))
            linear.bias.copy_(linear.bias[:a].repeat(heads))
    context = module(draw(1, 1, WIDTH), module.remember(draw(1, SOURCE, WIDTH, seed=1), None)).view(heads, a)
    torch.testing.assert_close(context, context[:1].expand(heads, a), **EXACT)
