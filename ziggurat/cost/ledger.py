"""What a computation takes, written down operator by operator: memory alive, arithmetic, memory moved."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ziggurat.cost.products import is_batched, operations
from ziggurat.nn.recurrence import STEP_BY_STEP

__all__ = ["Ledger", "Product", "Work"]


class Product(NamedTuple):
    """A kind of matrix product, which has a speed of its own.

    Attributes:
        dtype: of the factors.
        batched: many small ones in one call.
    """

    dtype: torch.dtype
    batched: bool


@dataclass
class Work:
    """What was done.

    Attributes:
        operations: additions and multiplications, by kind of product.
        moved: bytes that all other operators read and wrote.
        calls: operators that computed something; views do not.
    """

    operations: Counter[Product] = field(default_factory=Counter)
    moved: int = 0
    calls: int = 0

    @property
    def flops(self) -> int:
        """Additions and multiplications of all products."""
        return sum(self.operations.values())

    def add(self, other: Work) -> None:
        """Add what `other` counts."""
        self.operations += other.operations
        self.moved += other.moved
        self.calls += other.calls

    def scaled(self, share: float) -> Work:
        """Return the work on a batch `share` times as large: no more calls, each of them with more to do."""
        operations = Counter({kind: round(share * count) for kind, count in self.operations.items()})
        return Work(operations, round(share * self.moved), self.calls)


_inside: dict[Any, tuple[int, Work]] = {}
"""Operator of ours and shapes -> the most bytes alive inside, and the work: they depend on nothing else."""


class Ledger(TorchDispatchMode):
    """A context that counts what happens in it: with tensors that have no values (FakeTensorMode), or real ones.

    Memory is that of tensors, each storage once, from the operator that made it until Python and autograd let go of
    it. What a kernel takes for itself while it runs is unseen, but for oneDNN's copies of transposed factors.

    Attributes:
        purpose: what memory that is made now is for, a key of `live`; set by whoever runs the computation.
        phase: key of `work` for what is done now; likewise.
        live: bytes alive, by purpose.
        peak: the most bytes alive at any time.
        at_peak: `live` then.
        work: by phase.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.purpose = self.phase = ""
        self.live: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.work: dict[str, Work] = {}
        self._total = 0
        self._storages: dict[int, _Known] = {}

    def hold(self, tensors: Iterable[Tensor], purpose: str) -> None:
        """Count tensors made before, or count those already known as being for `purpose`."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = self._storages.get(storage._cdata)
            if known is None:
                self._enter(storage, purpose)
            else:
                self.live[known.purpose] -= known.size
                self.live[purpose] += known.size
                known.purpose = purpose
        self._note(0)

    def _enter(self, storage: torch.UntypedStorage, purpose: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._storages[key] = _Known(size, purpose, weakref.ref(storage, lambda _: self._leave(key)))
        self.live[purpose] += size
        self._total += size

    def _leave(self, key: int) -> None:
        known = self._storages.pop(key)
        self.live[known.purpose] -= known.size
        self._total -= known.size

    def _note(self, more: int) -> None:
        """Compare with the peak; `more` bytes are alive inside the present operator."""
        if self._total + more > self.peak:
            self.peak = self._total + more
            self.at_peak = self.live.copy()
            self.at_peak[self.purpose] += more

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function in STEP_BY_STEP:
            self._look_inside(function, args)
        result = function(*args, **options)
        if function.is_view:
            return result
        outputs = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in self._storages]
        for tensor in fresh:
            self._enter(tensor.untyped_storage(), self._purpose_of(function, args))
        if fresh:
            self._note(_copied_inside(function, args))
        if (fresh or function._schema.is_mutable) and function not in STEP_BY_STEP:
            self._count(function, args, options, result, outputs)
        return result

    def _purpose_of(self, function: Any, args: Any) -> str:
        """Return what the result of an operator is for: copies of weights in another type are for themselves."""
        if function is torch.ops.aten._to_copy.default:
            known = self._storages.get(args[0].untyped_storage()._cdata)
            if known is not None and known.purpose == "weights":
                return "copies"
        return self.purpose

    def _count(self, function: Any, args: Any, options: dict[str, Any], result: Any, outputs: list[Tensor]) -> None:
        work = self.work.setdefault(self.phase, Work())
        work.calls += 1
        if flops := operations(function, args, options, result):
            work.operations[Product(outputs[0].dtype, is_batched(function))] += flops
            return
        inputs = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
        work.moved += sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))

    def _look_inside(self, function: Any, args: Any) -> None:
        """Count what an operator of ours does inside; once for all calls with the same shapes."""
        key = (
            function,
            *((value.shape, value.dtype) if isinstance(value, Tensor) else value for value in tree_leaves(args)),
        )
        if key not in _inside:
            ledger = Ledger()
            with ledger:
                made = STEP_BY_STEP[function](*args)
            del made
            _inside[key] = ledger.peak, ledger.work.get("", Work())
        peak, work = _inside[key]
        self._note(peak)
        self.work.setdefault(self.phase, Work()).add(work)


def _copied_inside(function: Any, args: Any) -> int:
    """Return the bytes of the copy that oneDNN's linear map makes of its input where that is transposed."""
    if function._schema.name != "mkldnn::_linear_pointwise" or args[0].is_contiguous():
        return 0
    return int(args[0].numel() * args[0].element_size())


@dataclass
class _Known:
    """A storage that is alive.

    Attributes:
        size: in bytes.
        purpose: what it is for.
        end: calls when it is gone.
    """

    size: int
    purpose: str
    end: weakref.ref[torch.UntypedStorage]
