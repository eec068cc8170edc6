"""Attention to target and memory in one sub-layer (Zhang et al. 2019)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.model.stepping import causal, draw, linear, randomised, weights_of, whole
from ziggurat.config import ModelConfig
from ziggurat.model.attention.cache import LiveBeams, LiveMemory, Mask, padding_mask
from ziggurat.model.attention.multihead import CrossAttention, SelfAttention
from ziggurat.model.attention.variants import (
    AverageAttention,
    MergedAttention,
    MergedAverageAttention,
    RelativeAttention,
    SimplifiedAverageAttention,
    causal_average,
)
from ziggurat.model.build import count_parameters as count
from ziggurat.model.dropout import Dropout
from ziggurat.model.layers import DecoderLayerCache
from ziggurat.model.linear import Linear, ShiftedLinear
from ziggurat.model.roles import Role, assign_roles
from ziggurat.system.errors import ConfigError

D_MODEL, HEADS, D_HEAD = 6, 2, 3
TOLERANCE = {"atol": 1e-10, "rtol": 0.0}


def cross_attention(d_memory: int = D_MODEL, *, shifted: bool = False, **more: Any) -> CrossAttention:
    make = ShiftedLinear if shifted else Linear
    dropout = more.pop("dropout", Dropout(0.0))
    return CrossAttention(D_MODEL, d_memory, HEADS, dropout, linear=make, **more)


def merged(
    *, share: bool = True, shifted: bool = False, d_memory: int = D_MODEL, p: float = 0
) -> MergedAverageAttention:
    cross = cross_attention(d_memory, shifted=shifted, project_out=False, dropout=Dropout(p))
    make = ShiftedLinear if shifted else Linear
    return randomised(MergedAverageAttention(cross, share_value=share, linear=make))


def unshared_twin(module: MergedAverageAttention) -> MergedAverageAttention:
    """Return the same function with a copy of the value map for the target."""
    twin = merged(share=False)
    assert twin.v_proj is not None
    with torch.no_grad():
        twin.cross.load_state_dict(module.cross.state_dict())
        twin.out_proj.load_state_dict(module.out_proj.state_dict())
        twin.v_proj.weight.copy_(module.cross.kv_proj.weight[D_MODEL:])
        twin.v_proj.bias.copy_(module.cross.kv_proj.bias[D_MODEL:])
    return twin


def zeroed_values(module: MergedAverageAttention) -> MergedAverageAttention:
    with torch.no_grad():
        for values in module.cross.kv_proj.parameters():
            values[D_MODEL:] = 0
    return module


KINDS = {
    "full": lambda: MergedAttention(SelfAttention(D_MODEL, HEADS, Dropout(0.0)), cross_attention()),
    "relative": lambda: MergedAttention(RelativeAttention(D_MODEL, HEADS, Dropout(0.0), clip=2), cross_attention(4)),
    "gated": lambda: MergedAttention(AverageAttention(D_MODEL, gate=True, ffn=None), cross_attention()),
    "average": merged,
    "average, wide memory": lambda: merged(share=False, d_memory=9),
    "average, shifted": lambda: merged(shifted=True),
    "average, own values, shifted": lambda: merged(share=False, shifted=True),
}


@pytest.mark.parametrize("share", [True, False])
def test_merged_attention_is_the_output_map_of_context_plus_average(share: bool) -> None:
    module = merged(share=share)
    cross = module.cross
    x, memory = draw(2, 4, D_MODEL, seed=1), draw(2, 5, D_MODEL, seed=2)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    with torch.no_grad():
        maps = cross.kv_proj
        query = linear(x, cross.q_proj.weight, cross.q_proj.bias)
        key = linear(memory, maps.weight[:D_MODEL], maps.bias[:D_MODEL])
        value = linear(memory, maps.weight[D_MODEL:], maps.bias[D_MODEL:])
        if module.v_proj is None:
            own = linear(x, maps.weight[D_MODEL:], maps.bias[D_MODEL:])
        else:
            own = linear(x, module.v_proj.weight, module.v_proj.bias)
        total = torch.zeros_like(x)
        for b in range(2):
            seen = range(int(mask[b].sum()))
            for i in range(4):
                for head in torch.arange(D_MODEL).chunk(HEADS):
                    weights = weights_of(query[b, i, head], key[b][:, head], i, seen)
                    total[b, i, head] += sum(w * value[b, j, head] for j, w in zip(seen, weights, strict=True))
                for k in range(i + 1):
                    total[b, i] += own[b, k] / (i + 1)
        expected = linear(total, module.out_proj.weight, module.out_proj.bias)
    got = module(x, whole(x, memory, padding_mask(mask, torch.float64)))
    torch.testing.assert_close(got, expected, **TOLERANCE)


def test_one_value_map_serves_both_paths() -> None:
    module, x, memory = merged(), draw(2, 4, D_MODEL, seed=1), draw(2, 5, D_MODEL, seed=2)
    assert sorted(name for name, _ in module.named_parameters()) == [
        *(f"cross.{name}_proj.{part}" for name in ("kv", "q") for part in ("bias", "weight")),
        *(f"out_proj.{part}" for part in ("bias", "weight")),
    ]
    torch.testing.assert_close(unshared_twin(module)(x, whole(x, memory)), module(x, whole(x, memory)), **TOLERANCE)
    nothing = zeroed_values(module)(x, whole(x, memory))
    torch.testing.assert_close(nothing, module.out_proj.bias.expand_as(nothing), **TOLERANCE)


def test_gradients_of_value_and_output_maps_sum_both_paths() -> None:
    module, x, memory = merged(), draw(2, 4, D_MODEL, seed=1), draw(2, 5, D_MODEL, seed=2)
    twin, target = unshared_twin(module), draw(2, 4, D_MODEL, seed=3)
    for each in (module, twin):
        (each(x, whole(x, memory)) * target).sum().backward()
    assert twin.v_proj is not None
    for part in ("weight", "bias"):
        shared = module.cross.kv_proj.get_parameter(part).grad
        of_memory, of_target = twin.cross.kv_proj.get_parameter(part).grad, twin.v_proj.get_parameter(part).grad
        assert shared is not None
        assert of_memory is not None
        assert of_target is not None
        torch.testing.assert_close(shared[D_MODEL:], of_memory[D_MODEL:] + of_target, **TOLERANCE)
        assert float(of_memory[D_MODEL:].abs().min()) > 1e-4
        assert float(of_target.abs().min()) > 1e-4

    cross = module.cross
    context = cross(x, cross.remember(memory, None))
    average = causal_average(linear(x, cross.kv_proj.weight[D_MODEL:], cross.kv_proj.bias[D_MODEL:]))
    paths = [torch.einsum("bto,bti->oi", target, path) for path in (context, average)]
    assert module.out_proj.weight.grad is not None
    torch.testing.assert_close(module.out_proj.weight.grad, paths[0] + paths[1], **TOLERANCE)


def test_merged_attention_without_memory_and_value_bias_is_simplified_average_attention() -> None:
    module = merged()
    with torch.no_grad():
        module.cross.kv_proj.bias[D_MODEL:] = 0
    saan = SimplifiedAverageAttention(D_MODEL).double()
    with torch.no_grad():
        saan.v_proj.weight.copy_(module.cross.kv_proj.weight[D_MODEL:])
        saan.v_proj.bias.zero_()
    saan.out_proj.load_state_dict(module.out_proj.state_dict())
    x, memory = draw(2, 4, D_MODEL), torch.zeros(2, 5, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(module(x, whole(x, memory)), saan(x, None), **TOLERANCE)


@pytest.mark.parametrize("kind", ["full", "relative", "gated"])
def test_other_merged_kinds_add_both_outputs(kind: str) -> None:
    module = randomised(KINDS[kind]())
    d_memory = module.cross.kv_proj.weight.shape[1]
    x, memory = draw(2, 4, D_MODEL, seed=1), draw(2, 5, d_memory, seed=2)
    expected = module.own(x, causal(4)) + module.cross(x, module.cross.remember(memory, None))
    torch.testing.assert_close(module(x, whole(x, memory)), expected, **TOLERANCE)
    assert module.cross.out_proj is not None


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_whole_sequences(kind: str) -> None:
    """Two sentences with re-ordered beams; then only the second is left."""
    module = randomised(KINDS[kind]())
    d_memory = module.cross.kv_proj.weight.shape[1]
    memory, mask = draw(2, 5, d_memory, seed=2), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    hidden = padding_mask(mask, torch.float64)
    beam, sentences = 3, [0, 1]
    live = LiveBeams(beam, 2)
    at = DecoderLayerCache(module.own.start(live), LiveMemory(live))
    rows = live.admit(mask, memory)
    at.own.admit(rows)
    at.cross.admit(module.cross.remember(memory, None), rows)
    prefixes = [torch.empty(beam, 0, D_MODEL, dtype=torch.float64)] * 2
    for number, parents in enumerate([[2, 0, 1], [1, 1, 0], [0, 0, 2], [0, 1, 2]]):
        new = draw(len(sentences), 1 if live.first else beam, D_MODEL, seed=number).expand(-1, beam, -1)
        prefixes = [torch.cat([prefix, x[:, None]], dim=1) for prefix, x in zip(prefixes, new, strict=True)]
        live.begin()
        got = module(new[:, : 1 if live.first else beam], at).expand(-1, beam, -1)
        live.end()
        for own, sentence, output in zip(prefixes, sentences, got, strict=True):
            sight = whole(own, memory[[sentence] * beam], Mask(hidden.bias[[sentence] * beam]))
            torch.testing.assert_close(output, module(own, sight)[:, -1], **TOLERANCE)
        if number == 1:
            at.keep(live.keep(torch.tensor([1])))
            prefixes, sentences = prefixes[1:], [1]
        following = torch.tensor(parents).expand(len(sentences), -1)
        live.follow(following)
        at.follow(following)
        prefixes = [prefix[parents] for prefix in prefixes]
    assert sentences == [1]


def test_a_shifted_map_shares_its_matrix() -> None:
    """Fixup: W_o (context + mean of W_v x + its shift), context from memory + shift."""
    module, x, memory = merged(shifted=True), draw(2, 4, D_MODEL, seed=1), draw(2, 5, D_MODEL, seed=2)
    values = linear(x, module.cross.kv_proj.weight[D_MODEL:], None)
    context = module.cross(x, module.cross.remember(memory, None))
    expected = linear(context + causal_average(values) + module.out_proj.shift, module.out_proj.weight, None)
    torch.testing.assert_close(module(x, whole(x, memory)), expected, **TOLERANCE)


def test_a_shift_of_the_memory_equals_the_same_shift_of_the_target() -> None:
    """So the target needs no separate shift: both pass through the same matrix, with weights that sum to 1."""
    module, x, memory = merged(shifted=True), draw(2, 4, D_MODEL, seed=1), draw(2, 5, D_MODEL, seed=2)
    before = module(x, whole(x, memory))
    shift = module.cross.kv_proj.shift.detach().clone()
    with torch.no_grad():
        module.cross.kv_proj.shift.zero_()
        module.cross.q_proj.shift -= shift  # the query must not change
    torch.testing.assert_close(module(x + shift, whole(x + shift, memory)), before, **TOLERANCE)


def test_dropout_acts_only_on_the_weights_of_the_memory() -> None:
    """Training and evaluation agree only if the memory's values are zero."""
    module, x = merged(p=0.5), draw(2, 4, D_MODEL)
    with torch.no_grad():
        module.cross.kv_proj.bias.zero_()
    torch.manual_seed(0)
    for memory, agree in ((torch.zeros(2, 5, D_MODEL, dtype=torch.float64), True), (draw(2, 5, D_MODEL), False)):
        evaluated, trained = module.eval()(x, whole(x, memory)), module.train()(x, whole(x, memory))
        assert torch.allclose(trained, evaluated, atol=1e-10, rtol=0) is agree


def test_sizes_are_those_of_the_paper() -> None:
    """MAtt has 4d^2 + 4d parameters, like an encoder's self-attention; merged with self-attention it has 8d^2 + 8d."""
    d = D_MODEL
    assert count(merged()) == 4 * d * d + 4 * d == count(SelfAttention(d, HEADS, Dropout(0.0)))
    assert count(merged(share=False)) == 5 * d * d + 5 * d
    assert count(KINDS["full"]()) == 8 * d * d + 8 * d
    assert count(KINDS["gated"]()) == 8 * d * d + 6 * d


def test_every_parameter_has_its_role() -> None:
    """The shared value map belongs to the cross-attention; nothing is counted twice."""
    for kind, make in KINDS.items():
        slots = {slot.name: slot for slot in assign_roles(make())}
        if "average" in kind:
            value = slots["cross.kv_proj.weight[attention_value]"]
            assert (value.role, value.fused_out, value.cross) == (Role.ATTENTION_VALUE, 3 * D_MODEL, True)
            assert slots["out_proj.weight"].role is Role.ATTENTION_OUT
    own = {slot.name: slot for slot in assign_roles(merged(share=False))}["v_proj.weight"]
    assert (own.role, own.fused_out, own.cross) == (Role.ATTENTION_VALUE, 3 * D_MODEL, False)


def test_one_map_for_two_widths_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`model\.attention\.share_value` .* encoder \(9\) and decoder \(6\)"):
        merged(share=True, d_memory=9)
    wide: dict[str, Any] = {
        "d_model": 8,
        "heads": 2,
        "encoder": {"d_model": 12},
        "decoder": {"attention": "merged"},
        "embedding": {"sharing": "decoder"},
    }
    with pytest.raises(ValidationError, match=r"`attention\.share_value` .* set it to false"):
        ModelConfig.model_validate(wide)
    ModelConfig.model_validate({**wide, "attention": {"share_value": False}})
    ModelConfig.model_validate({**wide, "decoder": {"attention": "merged_full"}})


def test_gradients() -> None:
    module, memory = merged(), draw(1, 2, D_MODEL, seed=2)

    def run(x: Tensor, memory: Tensor, *_: Tensor) -> Tensor:
        return module(x, whole(x, memory))

    inputs = (draw(1, 3, D_MODEL).requires_grad_(), memory.requires_grad_(), *module.parameters())
    assert torch.autograd.gradcheck(run, inputs)
