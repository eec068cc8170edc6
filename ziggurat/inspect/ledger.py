"""The ledger of a computation: memory alive, arithmetic and memory moved, recorded operator by operator.

It intercepts torch's operators as they run, even on tensors without values. Arithmetic counts only matrix products; all
other operators are measured by the bytes that they read and write.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ziggurat.model import lstm as recurrence
from ziggurat.model.fast import int8 as quantised


class Product(NamedTuple):
    """A kind of matrix product; each kind has a different speed.

    Attributes:
        dtype: type of the factors and of the result.
        batched: whether it is many small products in one call.
    """

    dtype: torch.dtype
    batched: bool


@dataclass
class OperatorWork:
    """The work of a computation.

    Attributes:
        operations: additions and multiplications, by kind of product.
        moved: bytes read and written by all other operators.
        calls: number of operators that computed something, unlike views.
    """

    operations: Counter[Product] = field(default_factory=Counter)
    moved: int = 0
    calls: int = 0

    @property
    def flops(self) -> int:
        """Additions and multiplications of all products."""
        return sum(self.operations.values())

    def add(self, other: OperatorWork) -> None:
        """Add the work of `other`."""
        self.operations += other.operations
        self.moved += other.moved
        self.calls += other.calls

    def scaled(self, share: float) -> OperatorWork:
        """Return the work for a batch `share` times as large: the same calls, each with `share` times the work."""
        operations = Counter({kind: round(share * count) for kind, count in self.operations.items()})
        return OperatorWork(operations, round(share * self.moved), self.calls)


_STEP_BY_STEP = {**recurrence.STEP_BY_STEP, **quantised.STEP_BY_STEP}
_inside: dict[Any, tuple[int, OperatorWork]] = {}
"""_inside caches peak memory and work inside ziggurat's operators, which depend only on the operator and its shapes."""


class Ledger(TorchDispatchMode):
    """A context that counts every operator, on tensors without values (FakeTensorMode) or on real ones.

    Memory counts each tensor storage once, from the operator that creates it until Python and autograd release it.
    Temporary memory inside a kernel is not counted, except for oneDNN's copies of transposed factors.

    Attributes:
        purpose: purpose of memory allocated now, a key of `live`; set by the code that runs the computation.
        phase: key of `work` for operators that run now, set in the same way.
        live: allocated bytes, by purpose.
        peak: largest number of allocated bytes at any time.
        at_peak: `live` at that time.
        work: work by phase.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.purpose = self.phase = ""
        self.live: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.work: dict[str, OperatorWork] = {}
        self._total = 0
        self._storages: dict[int, _Known] = {}

    def hold(self, tensors: Iterable[Tensor], purpose: str) -> None:
        """Count existing tensors for `purpose`; already counted ones are moved to it."""
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
        """Update the peak; `more` bytes are allocated inside the present operator."""
        if self._total + more > self.peak:
            self.peak = self._total + more
            self.at_peak = self.live.copy()
            self.at_peak[self.purpose] += more

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function in _STEP_BY_STEP:  # for example a whole recurrence in one operator, which hides its steps
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
        if (fresh or function._schema.is_mutable) and function not in _STEP_BY_STEP:
            self._count(function, args, options, result, outputs)
        return result

    def _purpose_of(self, function: Any, args: Any) -> str:
        """Return what an operator's result is for: `copies` for weights in another type, or the present one."""
        if function is torch.ops.aten._to_copy.default:
            known = self._storages.get(args[0].untyped_storage()._cdata)
            if known is not None and known.purpose == "weights":
                return "copies"
        return self.purpose

    def _count(self, function: Any, args: Any, options: dict[str, Any], result: Any, outputs: list[Tensor]) -> None:
        work = self.work.setdefault(self.phase, OperatorWork())
        work.calls += 1
        if flops := operations(function, args, options, result):
            work.operations[Product(outputs[0].dtype, _is_batched(function))] += flops
            return
        inputs = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
        work.moved += sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))

    def _look_inside(self, function: Any, args: Any) -> None:
        """Count the work inside one of ziggurat's operators, measured once for all calls with the same shapes."""
        key = (
            function,
            *((value.shape, value.dtype) if isinstance(value, Tensor) else value for value in tree_leaves(args)),
        )
        if key not in _inside:
            ledger = Ledger()
            with ledger:
                result = _STEP_BY_STEP[function](*args)
            del result
            _inside[key] = ledger.peak, ledger.work.get("", OperatorWork())
        peak, work = _inside[key]
        self._note(peak)
        self.work.setdefault(self.phase, OperatorWork()).add(work)


def _copied_inside(function: Any, args: Any) -> int:
    """Return the size of the copy that oneDNN's linear map makes of an input that is not contiguous."""
    if function._schema.name != "mkldnn::_linear_pointwise" or args[0].is_contiguous():
        return 0
    return int(args[0].numel() * args[0].element_size())


@dataclass
class _Known:
    """A live storage and its size in bytes; the weak reference's callback removes it from the ledger."""

    size: int
    purpose: str
    end: weakref.ref[torch.UntypedStorage]


# Operations of an operator

Formula = Callable[[Sequence[Any], dict[str, Any], Any], int]
"""(arguments, options, result) of a call -> number of operations."""


def _times_vector(matrix: Tensor) -> int:
    return 2 * matrix.numel()


def _attention(query: Sequence[int], keys: int, products: int) -> int:
    """Return the operations of `products` matrix products over all pairs of a query [..., d_head] and a key."""
    return 2 * products * math.prod(query) * keys


_OURS: dict[str, Callable[[Sequence[Any]], int]] = {
    "aten::mv": lambda a: _times_vector(a[0]),
    "aten::addmv": lambda a: _times_vector(a[1]),
    "mkldnn::_linear_pointwise": lambda a: 2 * a[0].numel() * a[1].shape[0],
    # Backward pass: recomputed logits, and the gradients of weights, values, queries and keys.
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda a: _attention(a[0].shape, a[1].shape[-2], 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda a: _attention(a[1].shape, a[2].shape[-2], 5),
    # Queries are [batch * queries, heads, d_head].
    "torch_attn::_varlen_attn": lambda a: _attention(a[0].shape, a[6], 2),
    "torch_attn::_varlen_attn_backward": lambda a: _attention(a[1].shape, a[9], 5),
}
"""_OURS maps operators missing in torch's table to their number of operations, given the arguments of a call."""


@cache
def _formula(function: torch._ops.OpOverload) -> Formula | None:
    name = function._schema.name.removesuffix("_")  # in-place variants count the same
    if (ours := _OURS.get(name)) is not None:
        return lambda args, options, result: ours(args)
    space, _, plain = name.partition("::")
    theirs = flop_registry.get(getattr(getattr(torch.ops, space), plain, function.overloadpacket))
    return theirs and (lambda args, options, result: int(theirs(*args, **options, out_val=result)))


def operations(function: torch._ops.OpOverload, args: Sequence[Any], options: dict[str, Any], result: Any) -> int:
    """Return the additions and multiplications in a call of `function`; 0 if it is not a matrix product.

    A product of [m, k] and [k, n] has 2 m k n. The formulas are torch's (torch.utils.flop_counter), extended by
    operators missing there. Only shapes matter, so tensors without values suffice.
    """
    formula = _formula(function)
    return 0 if formula is None else formula(args, options, result)


@cache
def _is_batched(function: torch._ops.OpOverload) -> bool:
    """Return True for many small products in one call, as in attention, which are slower than one of the same size."""
    name = function._schema.name.removesuffix("_")
    return name in ("aten::bmm", "aten::baddbmm", "aten::mv") or "attention" in name or "attn" in name
