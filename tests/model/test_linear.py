"""Linear maps with both kernels compared with float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ziggurat.model import linear as module
from ziggurat.model.linear import Linear, linear, product

KERNELS = ["torch", "onednn"]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)


@contextmanager
def kernel(name: str) -> Iterator[None]:
    """Context in which products of any size go to oneDNN, or all of them to torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_onednn_is_faster", lambda: name == "onednn")
        patch.setattr(module, "_SMALL", 1)
        yield


@pytest.fixture(autouse=True)
def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the calls to oneDNN, because equal numbers would not show which kernel computed them."""
    calls: list[str] = []
    real = module._onednn
    monkeypatch.setattr(module, "_onednn", lambda *args: (calls.append("onednn"), real(*args))[1])
    return calls


@pytest.mark.parametrize(("width_in", "width_out"), [(24, 40), (40, 24), (7, 1)])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_a_linear_map_and_its_gradients(
    name: str, bias: bool, shape: tuple[int, ...], width_in: int, width_out: int, spied: list[str]
) -> None:
    x, weight = drawn(*shape, width_in), drawn(width_out, width_in, seed=1)
    b = drawn(width_out, seed=2) if bias else None
    above = drawn(*shape, width_out, seed=3)
    parts = [part for part in (x, weight, b) if part is not None]
    for part in parts:
        part.requires_grad_()
    expected = F.linear(x, weight, b)
    gradients = torch.autograd.grad(expected, parts, above)
    single = [part.detach().float().requires_grad_() for part in parts]
    with kernel(name):
        y = linear(*single)
        assert_near(y, expected)
        got = torch.autograd.grad(y, single, above.float())
    for mine, reference in zip(got, gradients, strict=True):
        assert mine.shape == reference.shape
        assert_near(mine, reference)
    assert len(spied) == (3 if name == "onednn" and x.numel() else 0)


@pytest.mark.parametrize("name", KERNELS)
def test_the_gradient_comes_in_any_layout(name: str) -> None:
    x, weight, above = drawn(4, 3, 8), drawn(6, 8, seed=1), drawn(3, 4, 6, seed=2).transpose(0, 1)
    single = [part.float().requires_grad_() for part in (x.transpose(0, 1).contiguous().transpose(0, 1), weight)]
    with kernel(name):
        got = torch.autograd.grad(linear(*single), single, above.float())
    assert_near(got[0], above @ weight)
    assert_near(got[1], torch.einsum("bto,bti->oi", above, x))


@pytest.mark.parametrize("name", KERNELS)
def test_frozen_parts_get_no_gradient(name: str) -> None:
    module = Linear(8, 6)
    module.weight.requires_grad_(False)
    with kernel(name):
        module(torch.randn(4, 8)).sum().backward()
        assert module.weight.grad is None
        assert module.bias.grad is not None
        assert_near(module.bias.grad, torch.full((6,), 4.0, dtype=torch.float64))
        with torch.no_grad():
            assert not module(torch.randn(4, 8)).requires_grad


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_transposed_views(name: str, turned: tuple[bool, bool]) -> None:
    a, b = drawn(7, 9), drawn(5, 9, seed=1)
    single = [f.t().contiguous().float().t() if t else f.float() for f, t in zip((a, b), turned, strict=True)]
    with kernel(name):
        assert_near(product(*single), a @ b.t())


@pytest.mark.parametrize("name", KERNELS)
def test_other_types_are_left_to_torch(name: str, spied: list[str]) -> None:
    x, weight = drawn(600, 64), drawn(64, 64, seed=1)
    with kernel(name):
        assert torch.equal(linear(x, weight), F.linear(x, weight))
        narrow = linear(x.bfloat16(), weight.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(linear(x.float(), weight.float()), narrow)
    assert spied == []


def test_it_is_torchs_module_with_the_same_values() -> None:
    torch.manual_seed(0)
    ours = Linear(8, 6)
    torch.manual_seed(0)
    theirs = nn.Linear(8, 6)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert torch.equal(ours.weight, theirs.weight)


class _Weights(TorchDispatchMode):
    """Records the weights passed to oneDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.given.append(args[1])
        return func(*args, **(kwargs or {}))


def test_no_product_is_left_to_the_plain_loop_of_onednn() -> None:
    """torch has only that loop for a matrix with gaps in both rows and columns, such as part of an LSTM's weight."""
    whole, x = drawn(40, 60).float().requires_grad_(), drawn(5, 24).float().requires_grad_()
    with _Weights() as seen, kernel("onednn"):
        y = linear(x, whole[:, :24])
        y.backward(torch.ones_like(y))
        product(y.detach(), whole.detach().t()[:3, :40])
    assert len(seen.given) == 4
    assert all(weight.is_contiguous() or weight.t().is_contiguous() for weight in seen.given)
    assert_near(y, drawn(5, 24).float().double() @ whole[:, :24].detach().double().T)


@pytest.mark.parametrize(
    ("capability", "vendor", "faster"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_onednn_is_chosen_only_on_amd_with_avx512(
    capability: str, vendor: str, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(module.Path, "read_text", lambda *_: f"vendor_id : {vendor}")
    assert module._onednn_is_faster.__wrapped__() is faster
