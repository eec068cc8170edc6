from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.model.histories import D, layers, stirred, stream
from tests.small import small_config
from ziggurat.model.build import build_model
from ziggurat.model.history.kinds import Transparent
from ziggurat.model.roles import Role, assign_roles

N, J = 4, 3


def states(count: int = N + 1) -> list[Tensor]:
    return [stream(seed=10 + i) for i in range(count)]


def written_out(weight: Tensor, kept: Tensor, sources: list[Tensor]) -> list[Tensor]:
    """z_j = sum_i s_ij h^i; `kept` [readers, sources] is dropout's factor for logits."""
    memories = []
    for j in range(len(weight)):
        logits = [float((weight[j, i] + 1 / len(sources)) * kept[j, i]) for i in range(len(sources))]
        total = sum(math.exp(logit) for logit in logits)
        memories.append(sum(math.exp(logit) / total * h for logit, h in zip(logits, sources, strict=True)))
    return memories


def test_mixtures_equal_the_written_out_formula() -> None:
    merge = stirred(Transparent(N + 1, J, 0.4)).eval()
    expected = written_out(merge.weight.detach(), torch.ones(J, N + 1), states())
    torch.testing.assert_close(list(merge(states())), expected, atol=1e-10, rtol=0)


def test_dropout_sets_logits_with_their_constant_to_zero_in_training() -> None:
    merge = stirred(Transparent(N + 1, J, 0.4)).train()
    torch.manual_seed(3)
    got = merge(states())
    torch.manual_seed(3)
    kept = F.dropout(torch.ones(J, N + 1, dtype=torch.float64), 0.4)
    assert {round(float(factor), 6) for factor in kept.flatten()} == {0.0, round(1 / 0.6, 6)}
    torch.testing.assert_close(list(got), written_out(merge.weight.detach(), kept, states()), atol=1e-10, rtol=0)


def test_weights_over_encoder_layers_sum_to_1_and_start_uniform() -> None:
    merge = Transparent(N + 1, J, 0.1)
    torch.testing.assert_close(merge.eval().mixtures(), torch.full((J, N + 1), 1 / (N + 1)))
    merge.train()
    torch.testing.assert_close(stirred(merge).mixtures().sum(1), torch.ones(J).double(), atol=1e-10, rtol=0)
    assert [(s.role, s.values.shape) for s in assign_roles(merge)] == [(Role.WIRING, (J, N + 1))]


@pytest.mark.parametrize("training", [False, True])
def test_a_single_source_is_returned_unchanged(training: bool) -> None:
    merge = stirred(Transparent(1, J, 0.5)).train(training)
    for memory in merge([stream()]):
        assert torch.equal(memory, stream())


def test_a_very_large_logit_on_the_last_layer_gives_the_plain_memory() -> None:
    merge = stirred(Transparent(N + 1, J, 0.1)).eval()
    with torch.no_grad():
        merge.weight[:, -1] = 1e3
    x = [stream()]
    for layer in layers(N):
        x.append(layer(x[-1]))
    for memory in merge(x):
        torch.testing.assert_close(memory, x[-1], atol=1e-10, rtol=0)


def test_evaluation_is_deterministic_and_training_is_not() -> None:
    merge = stirred(Transparent(N + 1, J, 0.5))
    assert torch.equal(merge.eval().mixtures(), merge.mixtures())
    assert not torch.equal(merge.train().mixtures(), merge.mixtures())


def test_at_the_start_every_state_has_the_same_direct_gradient() -> None:
    merge = Transparent(N + 1, J, 0.1).double().eval()
    copies = [h.clone().requires_grad_() for h in states()]
    directions = [stream(seed=30 + j) for j in range(J)]
    loss = sum((direction * memory).sum() for direction, memory in zip(directions, merge(copies), strict=True))
    gradients = torch.autograd.grad(loss, copies)
    for gradient in gradients:
        torch.testing.assert_close(gradient, sum(directions) / (N + 1), atol=1e-10, rtol=0)


def test_gradients_equal_those_of_the_formula() -> None:
    merge = stirred(Transparent(N + 1, J, 0.0))
    sources = [h.requires_grad_() for h in states()]

    def memories(weight: Tensor, *h: Tensor) -> Tensor:
        return torch.stack(torch.func.functional_call(merge, {"weight": weight}, (list(h),)))

    assert torch.autograd.gradcheck(memories, [merge.weight, *sources])


def test_a_wrong_number_of_states_is_an_error() -> None:
    with pytest.raises(ValueError):
        Transparent(N + 1, J, 0.1)(states(N))


def test_growth_keeps_logits_and_gives_added_layers_a_small_share() -> None:
    old, new = stirred(Transparent(N + 1, J, 0.1)).eval(), Transparent(N + 3, J, 0.1).double().eval()
    after = new.extend({"weight": old.weight}, N)
    assert torch.equal(after["weight"][:, : N + 1], old.weight)
    new.load_state_dict(after)
    torch.testing.assert_close(new.mixtures()[:, : N + 1], 0.95 * old.mixtures(), atol=1e-10, rtol=0)
    torch.testing.assert_close(
        new.mixtures()[:, N + 1 :], torch.full((J, 2), 0.025, dtype=torch.float64), atol=1e-10, rtol=0
    )


def test_all_memories_keep_shape_and_dtype() -> None:
    low = [h.bfloat16() for h in states()]
    memories = Transparent(N + 1, J, 0.1)(low)
    assert [(m.shape, m.dtype) for m in memories] == [((2, 3, D), torch.bfloat16)] * J


def test_parallel_streams_are_mixed_at_the_size_of_one() -> None:
    """With hyper-connections, a layer's state is the mean of its streams; a sum would be several times too large."""
    sizes = []
    source, mask = torch.randint(4, 20, (3, 7)), torch.ones(3, 7, dtype=torch.bool)
    for streams in (1, 4):
        config = small_config(3, 2, residual="hyper", memory="transparent", wiring={"streams": streams})
        model = build_model(config, 20, 20, seed=1).eval()
        outputs: list[Tensor] = []
        model.encode(source, mask, outputs)
        sizes.append(torch.stack(outputs).norm(dim=-1).mean())
    torch.testing.assert_close(sizes[1], sizes[0], rtol=0.3, atol=0)
