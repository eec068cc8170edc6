"""The pretend accelerator refuses what a GPU refuses, computes what the CPU computes, and counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.pretend_device import NAME, counted, present
from ziggurat.model.accelerator import (
    copies_aside,
    default_device,
    device_name,
    has_bf16,
    memory_in_use,
    random_state_kept,
)

HERE = NAME


def there(*shape: int) -> Tensor:
    return torch.rand(*shape, device=HERE)


@pytest.mark.parametrize(
    "mix",
    [
        lambda: there(3) + torch.rand(3),
        lambda: torch.rand(3) * there(3),
        lambda: there(2, 3) @ torch.rand(3, 2),
        lambda: F.embedding(torch.tensor([1]), there(3, 2)),
        lambda: F.scaled_dot_product_attention(there(1, 2, 3, 4), there(1, 2, 3, 4), torch.rand(1, 2, 3, 4)),
        lambda: torch.cat([there(2), torch.rand(2)]),
        lambda: there(3).index_select(0, torch.tensor([1])),
        lambda: torch.rand(3)[there(3) > 0.5],
        lambda: there(3).masked_fill(torch.tensor([True, False, True]), 0.0),
        lambda: torch.rand(3).add_(there(3)),
        lambda: nn.Linear(3, 2).to(HERE)(torch.rand(3)),
    ],
)
def test_two_devices_do_not_mix(mix: Callable[[], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mix()


def test_operations_that_need_the_host_are_refused() -> None:
    with pytest.raises(TypeError, match="numpy"):
        there(3).numpy()
    with pytest.raises(TypeError, match="numpy"):
        np.asarray(there(3))
    with pytest.raises(RuntimeError, match="pin"):
        there(3).pin_memory()
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=HERE, generator=torch.Generator())
    with pytest.raises(RuntimeError):
        torch.rand(3, generator=torch.Generator(HERE)).add_(there(3))


def test_a_tensor_like_one_of_the_device_may_be_the_host_s() -> None:
    assert not torch.zeros_like(there(3), device="cpu").numpy().any()


def test_a_number_of_the_host_is_an_argument() -> None:
    assert (there(3).zero_() + torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("ask", "waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: bool((x > 2).any()), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 0.5], 1),
        (lambda x: x.unique(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: f"{x[0]:.2f}", 1),
        (lambda x: x.to("cpu", non_blocking=True), 1),  # into memory that is not page-locked
        (lambda x: torch.empty(4).pin_memory().copy_(x, non_blocking=True), 0),
        (lambda x: torch.where(x > 0.5, x, 0.0), 0),
        (lambda x: x.masked_fill(x > 0.5, 0.0), 0),
        (lambda _: torch.tensor([1.0], device=HERE), 1),
        (lambda _: torch.zeros(4).to(HERE), 1),
        (lambda _: torch.zeros(4).to(HERE, non_blocking=True), 0),
        (lambda x: x[torch.tensor([1])], 1),
        (lambda x: x.view(2, 2).t(), 0),
    ],
)
def test_waiting_is_counted(ask: Callable[[Tensor], object], waits: int) -> None:
    x = there(4)
    with counted() as counts:
        ask(x)
    assert counts.waits.total() == waits


def test_copies_are_counted_with_their_bytes() -> None:
    with counted() as counts:
        x = torch.arange(6, dtype=torch.int32).to(HERE)
        x[torch.tensor([1, 2])]  # PyTorch copies the index
        x.tolist()
    assert (counts.to_device.total(), counts.bytes_to_device) == (2, 24 + 16)
    assert (counts.from_device.total(), counts.bytes_from_device) == (1, 24)


def test_views_and_allocations_launch_nothing() -> None:
    x = there(2, 3, 4)
    with counted() as counts:
        torch.empty(5, device=HERE)
        x.transpose(0, 1)[1:].unsqueeze(0).expand(3, -1, -1, -1).unbind(1)
        x.view(6, 4).t().detach()
    assert counts.launches == 0
    with counted() as counts:
        x.transpose(0, 1).reshape(-1).add_(1)
    assert counts.operators == {"clone": 1, "add_": 1}


def test_a_layer_computes_and_learns_as_on_the_cpu() -> None:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.rand(2, 5, 16)
    layer(x).square().sum().backward()
    expected = {name: (p.detach().clone(), p.grad) for name, p in layer.named_parameters()}
    layer.zero_grad()
    layer.to(HERE)(x.to(HERE)).square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.device.type == NAME
        torch.testing.assert_close(p.detach().cpu(), expected[name][0], atol=0, rtol=0)
        assert p.grad is not None
        torch.testing.assert_close(p.grad.cpu(), expected[name][1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_attention_is_one_kernel_each_way(dropout: float) -> None:
    query, key, value = (there(2, 2, 5, 4).requires_grad_() for _ in range(3))
    bias = torch.zeros(5, 5, device=HERE).masked_fill(torch.ones(5, 5, device=HERE).triu(1) > 0, -torch.inf)
    state = torch.get_device_module(HERE).get_rng_state()
    with counted() as counts:
        out = F.scaled_dot_product_attention(query, key, value, bias, dropout)
        found = torch.autograd.grad(out.sum(), (query, key, value))
    assert (counts.operators["attention"], counts.operators["attention_backward"]) == (1, 1)
    assert counts.operators["bmm"] == 0
    operands = [x.detach().cpu().requires_grad_() for x in (query, key, value)]
    torch.default_generator.set_state(state)
    plain = F.scaled_dot_product_attention(*operands, bias.cpu(), dropout)
    torch.testing.assert_close(out.detach().cpu(), plain.detach())
    for ours, theirs in zip(found, torch.autograd.grad(plain.sum(), operands), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def test_random_numbers_are_a_sequence_of_the_device() -> None:
    torch.manual_seed(3)
    with random_state_kept(torch.device(HERE)):
        first, of_the_cpu = there(5), torch.rand(5)
        other = there(5)
    assert not first.equal(other)
    assert there(5).equal(first)
    assert torch.rand(5).equal(of_the_cpu)
    drawn = [torch.rand(5, device=HERE, generator=torch.Generator(HERE).manual_seed(2)) for _ in range(2)]
    assert drawn[0].equal(drawn[1])


def test_casts_are_those_of_a_gpu() -> None:
    x = there(3, 3)
    with torch.autocast(NAME, dtype=torch.bfloat16):
        product = x @ x
        assert product.dtype == torch.bfloat16
        assert torch.softmax(product, -1).dtype == F.layer_norm(product, (3,)).dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_memory_is_that_of_living_tensors() -> None:
    before = memory_in_use(torch.device(HERE))
    with counted() as counts:
        x = there(100)
        views = [x[:10], x.view(10, 10)]
        assert memory_in_use(torch.device(HERE)) == before + 400
        x = x + 1
        assert memory_in_use(torch.device(HERE)) == before + 800
        del views
        assert memory_in_use(torch.device(HERE)) == before + 400
    assert counts.peak == before + 800


def test_tied_weights_stay_tied_where_a_model_moves() -> None:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    both = nn.ModuleList([one, other]).to(HERE)
    assert one.weight is other.weight
    assert len(list(both.parameters())) == 3


def test_the_package_takes_it_for_a_gpu_only_while_it_is_present() -> None:
    here, cpu = default_device(), torch.device("cpu")
    assert here.type == NAME
    assert has_bf16(here)
    assert copies_aside(here)
    assert device_name(here) != NAME
    assert not copies_aside(cpu)
    assert not has_bf16(cpu)


def test_it_leaves_torch_unchanged() -> None:
    generator = torch.Generator
    with present():
        assert torch.rand(2).pin_memory().is_pinned()
    assert torch.Generator is generator
