"""Attention written out position by position, and steps compared with whole sequences: shared by the attention
tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from ziggurat.model.attention.cache import LiveBeams, Mask, causal_mask
from ziggurat.model.attention.multihead import OwnAttention
from ziggurat.model.layers import WholeTarget

Module = TypeVar("Module", bound=nn.Module)
Logit = Callable[[Tensor, Tensor, int, int], float]
"""Logit maps (query, key, position of the query, position of the key) to a logit."""


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module: Module, seed: int = 0) -> Module:
    """Return `module` in double precision and evaluation mode, with no parameter at its neutral initial value."""
    module.double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def causal(length: int) -> Mask:
    return causal_mask(length, torch.float64, torch.device("cpu"))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return W x + b at every position, number by number."""
    y = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.float64)
    for out in range(weight.shape[0]):
        for channel in range(weight.shape[1]):
            y[..., out] += weight[out, channel] * x[..., channel]
        if bias is not None:
            y[..., out] += bias[out]
    return y


def weights_of(query: Tensor, keys: Tensor, at: int, seen: Sequence[int], logit: Logit | None = None) -> list[float]:
    """Return the softmax over the keys `seen` for the query at position `at`; `query` [d_head], `keys` [length,
    d_head].
    """
    root = math.sqrt(query.shape[0])
    logits = [float(query @ keys[j]) / root if logit is None else logit(query, keys[j], at, j) for j in seen]
    exponentials = [math.exp(value - max(logits)) for value in logits]
    return [value / sum(exponentials) for value in exponentials]


@torch.no_grad()
def attend_to_self(
    module: nn.Module,
    x: Tensor,
    seen: Callable[[int, int], Sequence[int]],
    logit: Logit | None = None,
    attended: Callable[[Tensor], Tensor] = lambda value: value,
) -> Tensor:
    """Return self-attention by its formula with the maps of `module`; `seen(sentence, position)` are the visible keys.

    `attended` returns the vector attended to for a value [d_head].
    """
    qkv, out, heads = module.get_submodule("qkv_proj"), module.get_submodule("out_proj"), module.heads
    d_model = x.shape[-1]
    query, key, value = (
        linear(x, qkv.weight[n * d_model : (n + 1) * d_model], qkv.bias[n * d_model : (n + 1) * d_model])
        for n in range(3)
    )
    context = torch.zeros_like(x)
    for sentence in range(x.shape[0]):
        for head in torch.arange(d_model).chunk(heads):
            keys = key[sentence][:, head]
            for i in range(x.shape[1]):
                sight = seen(sentence, i)
                weights = weights_of(query[sentence, i, head], keys, i, sight, logit)
                for j, weight in zip(sight, weights, strict=True):
                    context[sentence, i, head] += weight * attended(value[sentence, j, head])
    return linear(context, out.weight, out.bias)


def whole(x: Tensor, memory: Tensor, padding: Mask | None = None) -> WholeTarget:
    return WholeTarget(causal(x.shape[1]), memory, padding)


def assert_steps_equal_whole(module: OwnAttention, d_model: int, *, steps: int = 7) -> None:
    """Every step equals the last position of a whole pass, whichever hypotheses enter, leave or swap places."""
    for beams in (1, 2, 3):
        generator = torch.Generator().manual_seed(9)
        live = LiveBeams(beams, slots=4)
        cache = module.start(live)
        prefixes: list[Tensor] = []  # [beams, length, d_model] of each sentence
        for number in range(steps):
            if (count := (2, 0, 1, 2)[number % 4]) and len(prefixes) + count <= live.slots:
                cache.admit(live.admit(torch.ones(count, 3, dtype=torch.bool), torch.empty(0, dtype=torch.float64)))
                prefixes += [torch.empty(beams, 0, d_model, dtype=torch.float64)] * count
            live.begin()
            new = draw(len(prefixes), 1 if live.first else beams, d_model, seed=number)
            got = module.step(new, cache)
            live.end()
            assert got.shape == new.shape
            new, got = (part.expand(-1, beams, -1) for part in (new, got))
            for row, x in enumerate(new):
                prefixes[row] = torch.cat([prefixes[row], x[:, None]], dim=1)
                expected = module(prefixes[row], causal(prefixes[row].shape[1]))[:, -1]
                torch.testing.assert_close(got[row], expected, atol=1e-10, rtol=0)
            if number % 3 == 1:
                kept = torch.randperm(len(prefixes), generator=generator)[: max(1, len(prefixes) - 1)]
                cache.keep(live.keep(kept))
                prefixes = [prefixes[row] for row in kept]
            parents = torch.randint(beams, (len(prefixes), beams), generator=generator)
            live.follow(parents)
            cache.follow(parents)
            prefixes = [prefix[its] for prefix, its in zip(prefixes, parents, strict=True)]
