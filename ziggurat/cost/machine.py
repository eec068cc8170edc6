"""How fast this machine is: a fraction of a second of products, of memory moved and of calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.cost.ledger import Ledger, Product, Work
from ziggurat.nn.dropout import Dropout
from ziggurat.nn.linear import linear

__all__ = ["Speed", "measure_speed", "seconds_of", "with_threads"]

_SECONDS = 0.06
"""How long each thing is repeated."""
_CALLS = 64


@dataclass(frozen=True)
class Speed:
    """What a device does in a second.

    Attributes:
        products: operations a second, by kind of product.
        moved: bytes a second that simple operators read and write.
        calls: operators a second, begun and recorded for the backward pass.
        waits: whether the time of a call adds to that of its work (a CPU), or passes beside it (a GPU).
    """

    products: Mapping[Product, float]
    moved: float
    calls: float
    waits: bool

    def seconds(self, work: Work) -> float:
        """Return how long `work` takes: of products, memory and calls, one after the other."""
        products = sum(count / self.products[kind] for kind, count in work.operations.items())
        busy, begun = products + work.moved / self.moved, work.calls / self.calls
        return busy + begun if self.waits else max(busy, begun)


def measure_speed(
    kinds: Iterable[Product], widths: tuple[int, int], device: torch.device, threads: int | None = None
) -> Speed:
    """Time products of each kind, an addition and a chain of calls on `device`.

    Args:
        kinds: of the products.
        widths: d_model and d_ff of the model: one product is that of a feed-forward network.
        device: a CPU or a GPU.
        threads: `training.threads`; the number is put back afterwards.
    """
    with with_threads(threads):
        return Speed(
            {kind: _batched(kind, device) if kind.batched else _matrix(kind, widths, device) for kind in kinds},
            _moved(device),
            _calls(device),
            waits=device.type == "cpu",
        )


@contextlib.contextmanager
def with_threads(threads: int | None) -> Iterator[None]:
    """Context with so many CPU threads; None: as many as there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the least time that `work` takes; the first time, which prepares things, does not count.

    One thread on a CPU is timed by the processor's clock, which other programs do not disturb.
    """
    work()
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    fastest, until = float("inf"), clock() + _SECONDS
    while clock() < until:
        _wait(device)
        began = clock()
        work()
        _wait(device)
        fastest = min(fastest, clock() - began)
    return fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matrix(kind: Product, widths: tuple[int, int], device: torch.device) -> float:
    rows = 512 if device.type == "cpu" else 4096
    x, weight = (torch.randn(n, widths[0], device=device, dtype=kind.dtype) for n in (rows, widths[1]))
    return 2 * rows * widths[0] * widths[1] / seconds_of(lambda: linear(x, weight), device)


def _batched(kind: Product, device: torch.device) -> float:
    """Products of attention: 32 positions, heads of width 64."""
    a, b = (torch.randn(256, 32, 64, device=device, dtype=kind.dtype) for _ in range(2))
    return 2 * 256 * 32 * 32 * 64 / seconds_of(lambda: torch.bmm(a, b.transpose(1, 2)), device)


def _moved(device: torch.device) -> float:
    """What is between the products: norm, activation, dropout, sum and softmax, forward and backward."""
    x = torch.randn(128, 32, 512, device=device, requires_grad=True)
    norm, dropout = torch.nn.LayerNorm(512, device=device), Dropout(0.1)

    def between() -> None:
        weights = torch.softmax(x.view(128, 16, 32, 32) + 1.0, dim=-1)
        dropout(torch.relu(norm(x)), dropout(weights).view_as(x)).sum().backward()
        x.grad = None

    with Ledger() as ledger:
        between()
    return ledger.work[""].moved / seconds_of(between, device)


def _calls(device: torch.device) -> float:
    start = torch.zeros(8, device=device, requires_grad=True)

    def chain() -> None:
        x: Tensor = start
        for _ in range(_CALLS):
            x = x * 1.0
        x.sum().backward()

    return 2 * _CALLS / seconds_of(chain, device)
