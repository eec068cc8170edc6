"""A pretend accelerator: `torch.device("pretend")`, whose tensors live in the CPU's memory and behave as on a GPU.

    from tools import pretend_device

    with pretend_device.present(), pretend_device.counted() as counts:
        ...
    counts.launches, counts.waits, counts.to_device

It refuses what a GPU refuses: an operator on tensors of two devices, a generator of another device, `.numpy()`. It
counts what costs time on a GPU: launched operators, copies in both directions and their bytes, and the moments when the
CPU waits for the device, be it for a number (`item`, `tolist`, `bool`, `nonzero`, a mask as an index) or for a copy
that is not `non_blocking`.
benchmarks/README.md explains what this can show and what it cannot.

A tensor of the device wraps a tensor of the CPU. Operators reach `_launch` through `__torch_dispatch__`; those without
a tensor of the device (factories) reach it through a fallback of the dispatch key that PyTorch reserves for third-party
backends. The alternatives are worse: a backend in C++ needs a compiler and a minute before the first test, fake tensors
have no values, without which no search ends, and a dispatch mode also sees the CPU's tensors but not those in
autograd's threads.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_CPU = torch.device("cpu")
_LIBRARIES: list[torch.library.Library] = []
"""_LIBRARIES keeps the registrations alive, since they cannot be undone; it is empty before the first `present`."""
_here = False


@dataclass
class Counts:
    """What happened on the device.

    Attributes:
        operators: launched operators by name. Views and allocations launch nothing.
        waits: moments when the CPU waited, by the innermost line of the package and the operator.
        to_device, from_device: copies, likewise.
        bytes_to_device, bytes_from_device: their bytes.
        peak: most bytes of tensors on the device at any one time, including those made before.
    """

    operators: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    to_device: Counter[str] = field(default_factory=Counter)
    from_device: Counter[str] = field(default_factory=Counter)
    bytes_to_device: int = 0
    bytes_from_device: int = 0
    peak: int = 0

    @property
    def launches(self) -> int:
        """Number of launched operators."""
        return self.operators.total()


_counting: list[Counts] = []
_lock = threading.RLock()  # finalizers of tensors may run while it is held


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count what happens on the device inside the block, in all threads."""
    counts = Counts(peak=_memory.bytes)
    with _lock:
        _counting.append(counts)
    try:
        yield counts
    finally:
        with _lock:
            _counting[:] = [other for other in _counting if other is not counts]


def _place(name: str) -> str:
    """Return the innermost line of the package in the call stack, and the operator."""
    frame = sys._getframe()
    while (above := frame.f_back) is not None:
        frame = above
        if "/ziggurat/" in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename.rpartition('/ziggurat/')[2]}:{frame.f_lineno} {name}"
    return name


class _Memory:
    """Bytes of the storages that the device's tensors use."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._holders: Counter[int] = Counter()

    def enter(self, key: int, size: int) -> None:
        """Record that a tensor uses a storage."""
        with _lock:
            self._holders[key] += 1
            if self._holders[key] == 1:
                self.bytes += size
                self.peak = max(self.peak, self.bytes)
                for counts in _counting:
                    counts.peak = max(counts.peak, self.bytes)

    def leave(self, key: int, size: int) -> None:
        """Record that a tensor no longer does."""
        with _lock:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.bytes -= size


_memory = _Memory()


class _Hold:
    """A tensor's claim to its storage, which ends with the tensor. A weak reference would rule out `swap_tensors`."""

    def __init__(self, raw: Tensor) -> None:
        storage = raw.untyped_storage()
        self._storage = storage._cdata, storage.nbytes()
        _memory.enter(*self._storage)

    def __del__(self) -> None:
        _memory.leave(*self._storage)


class PretendTensor(Tensor):
    """A tensor on the pretend device; `raw` is the CPU's tensor that holds its values."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> PretendTensor:  # noqa: D102
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw
        self._hold = _Hold(raw)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of the device."""
        return _launch(func, *args, **(kwargs or {}))

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the CPU's tensor; a wrapper's own would not show which tensors share memory."""
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        """Return the address of the CPU's tensor, for comparison only."""
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        """Return the values after one copy; PyTorch's own method refuses subclasses."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse, as for a tensor on a GPU."""
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy")

    def record_stream(self, stream: Any) -> None:
        """Do nothing: memory is freed when nothing refers to it."""

    def __repr__(self, **_: Any) -> str:
        return f"{NAME}:{self.raw!r}"

    def __format__(self, specification: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), specification)


class _Generator(torch.Generator):
    """`torch.Generator` that also knows the pretend device, on which it draws the CPU's numbers."""

    ours: ClassVar[set[int]] = set()
    """ours are the addresses of the device's generators: operators get another Python object for the same one."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        kind = torch.device(device)
        self = super().__new__(cls, _CPU if kind.type == NAME else kind)
        self.kind = kind
        if kind.type == NAME:
            cls.ours.add(self._cdata)
        return self

    @property
    def device(self) -> torch.device:
        """Device whose tensors it fills."""
        return self.kind

    def __del__(self) -> None:
        self.ours.discard(self._cdata)


_WAIT = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
    "is_nonzero", "bincount", "histc",
}  # fmt: skip
"""_WAIT names the operators whose result, or the size of it, the CPU needs before it continues."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_FREE = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh", "set_", "resize_",
    "_unsafe_view", "_reshape_alias",
}  # fmt: skip
"""_FREE names the operators that launch nothing, besides views."""


def _launch(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Check an operator as a GPU would, run it on the CPU's tensors, and count it."""
    if torch.is_inference_mode_enabled():  # a wrapper around a tensor made in this mode cannot be used outside it
        with torch.inference_mode(mode=False), torch.no_grad():
            return _launch(func, *args, **kwargs)
    name = func._schema.name.partition("::")[2]
    if name == "scaled_dot_product_attention":  # in inference mode operators arrive undecomposed
        return _attention(*args, **kwargs)
    if _has_kernel(func, "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)
    if func.namespace == "ziggurat" and _has_kernel(func, "CompositeExplicitAutograd"):  # in Python, for every device
        return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
    if name == "_to_copy":
        return _copied(func, args[0], kwargs)
    if name in ("copy_", "_copy_from"):
        into, source = args[:2] if name == "copy_" else (args[1], args[0])
        return _copied_into(into, source, kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != NAME:  # like one of the device's
        return func(*tree_map(_raw, args), **kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    _check(func, name, tensors, args, kwargs)
    _count(func, name, args, kwargs)
    if kwargs.get("device") is not None:
        kwargs = kwargs | {"device": _CPU}
    raw_args, raw_kwargs = tree_map(_raw, args), tree_map(_raw, kwargs)
    own = {id(tensor.raw): tensor for tensor in tensors if isinstance(tensor, PretendTensor)}
    draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
    with _drawn_from_device() if draws else contextlib.nullcontext():
        out = func(*raw_args, **raw_kwargs)
    for tensor in own.values():
        if tensor.shape != tensor.raw.shape:
            raise NotImplementedError(f"{func} changes the shape of a tensor of the pretend device in place")
    return tree_map(lambda leaf: _wrapped(leaf, own), out)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return lists, tuples and dictionaries with `function` of each leaf; PyTorch's takes half of a test's time."""
    kind = type(tree)
    if kind is list or kind is tuple:
        return kind([tree_map(function, value) for value in tree])
    if kind is dict:
        return {key: tree_map(function, value) for key, value in tree.items()}
    return function(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of lists, tuples and dictionaries."""
    kind = type(tree)
    if kind is dict:
        tree = tuple(tree.values())
    elif kind is not list and kind is not tuple:
        return [tree]
    return [leaf for value in tree for leaf in tree_leaves(value)]


@cache
def _has_kernel(func: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _wrapped(leaf: Any, own: dict[int, PretendTensor]) -> Any:
    """Return the operand itself if an operator returned it, as those whose names end in `_` do."""
    if not isinstance(leaf, Tensor):
        return leaf
    return own[id(leaf)] if id(leaf) in own else PretendTensor(leaf)


def _raw(leaf: Any) -> Any:
    return leaf.raw if isinstance(leaf, PretendTensor) else leaf


def _check(func: Any, name: str, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what a GPU refuses."""
    if func.namespace not in ("aten", "prims", "c10d", "_c10d_functional"):
        raise NotImplementedError(f"{func}: there is no kernel for the pretend device")
    indices = set(map(id, tree_leaves(args[1]))) if name in _INDEXING else set()
    for tensor in tensors:
        of_another = not isinstance(tensor, PretendTensor)
        if of_another and tensor.dim() == 0 and torch.Tag.pointwise in func.tags:
            continue  # a single number on the CPU becomes an argument of the kernel
        if of_another and id(tensor) in indices and isinstance(args[0], PretendTensor):
            continue  # PyTorch copies it, and `_count` counts that
        if of_another:
            shapes = [f"{'pretend' if isinstance(t, PretendTensor) else 'cpu'} {list(t.shape)}" for t in tensors]
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {', '.join(shapes)}")
    generator = kwargs.get("generator")
    if generator is not None and generator._cdata not in _Generator.ours:
        raise RuntimeError(f"{func}: expected a generator of the device {NAME}, but found {generator.device}")


def _count(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Count an operator on the device, and a wait if the CPU waits for its result."""
    if not _counting:
        return
    indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)] if name in _INDEXING else []
    foreign = [index for index in indices if not isinstance(index, PretendTensor)]
    waits = name in _WAIT or bool(foreign) or any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    waits |= name == "repeat_interleave" and kwargs.get("output_size") is None
    place = _place(name) if waits else name
    with _lock:
        for counts in _counting:
            if not (name in _FREE or _is_view(func) or name == "_local_scalar_dense"):
                counts.operators[name] += 1
            if waits:
                counts.waits[place] += 1
            for index in foreign:
                counts.to_device[place] += 1
                counts.bytes_to_device += index.nbytes


@cache
def _is_view(func: Any) -> bool:
    """Return whether an operator returns views of its operands."""
    returned = func._schema.returns
    return bool(returned) and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)


def _copied(func: Any, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Return a copy of a tensor on the requested device, which is the tensor's own by default."""
    to = torch.device(kwargs["device"]) if kwargs.get("device") is not None else tensor.device
    place = kwargs | {"device": _CPU} if "device" in kwargs else kwargs
    out = func(_raw(tensor), **place)
    _moved(tensor, to.type, kwargs.get("non_blocking", False), out)
    return PretendTensor(out) if to.type == NAME else out


def _copied_into(into: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """Copy the values of a tensor into another one."""
    _raw(into).copy_(_raw(source))
    _moved(source, into.device.type, non_blocking, into)
    return into


def _moved(source: Tensor, to: str, non_blocking: bool, into: Tensor) -> None:
    """Count a copy. Between devices it waits, unless it is `non_blocking` and, to the CPU, into pinned memory."""
    if not _counting:
        return
    moves = source.device.type != to
    place = _place("copy") if moves else "copy"
    with _lock:
        for counts in _counting:
            if moves and not (non_blocking and (to == NAME or into.is_pinned())):
                counts.waits[place] += 1
            if not moves:
                counts.operators["copy"] += 1
            elif to == NAME:
                counts.to_device[place] += 1
                counts.bytes_to_device += source.nbytes
            else:
                counts.from_device[place] += 1
                counts.bytes_from_device += source.nbytes


# Random numbers: the device has its own sequence.

_numbers = torch.Generator()


@contextlib.contextmanager
def _drawn_from_device() -> Iterator[None]:
    """Let the CPU's default generator draw the device's numbers inside the block."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(_numbers.get_state())
    try:
        yield
    finally:
        _numbers.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


class _Stream:
    """A stream or an event: everything runs in order here, so there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def wait_event(self, event: _Stream) -> None:
        pass

    wait_stream = wait_event

    def synchronize(self) -> None:
        with _lock:
            for counts in _counting:
                counts.waits[_place("synchronize")] += 1


class _Module:
    """`torch.pretend`, the counterpart of `torch.cuda`, with the functions that the package calls."""

    Stream = Event = _Stream

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return _here

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def device_count(self) -> int:
        return 8 * int(_here)  # for up to eight processes, each of which counts its device as the first

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stream(self, stream: _Stream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def synchronize(self, device: Any = None) -> None:
        _Stream().synchronize()

    def get_device_name(self, device: Any = None) -> str:
        return "pretend accelerator"

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self, device: Any = None) -> int:
        return _memory.bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        return _memory.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        _memory.peak = _memory.bytes

    def manual_seed_all(self, seed: int) -> None:
        _numbers.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> Tensor:
        return _numbers.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        _numbers.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False


# Attention, which on a GPU is one kernel forward and one backward.


class _Attention(torch.autograd.Function):
    """`scaled_dot_product_attention`; backward computes it again, with the same random numbers.

    Until then it keeps what flash attention keeps: its operands, its result and a sum of weights per row.
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, bias: Any, options: dict[str, Any]) -> PretendTensor:  # type: ignore[override]
        ctx.options, ctx.numbers = options, _numbers.get_state()
        out = _launched("attention", partial(_attend, options=options), query, key, value, bias)
        sums = PretendTensor(torch.empty(query.shape[:-1]))
        ctx.save_for_backward(query, key, value, bias, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        def gradients(upstream: Tensor, *operands: Tensor | None) -> tuple[Tensor | None, ...]:
            now = _numbers.get_state()
            _numbers.set_state(ctx.numbers)
            with torch.enable_grad():
                leaves = [
                    None if each is None else each.detach().requires_grad_(each.is_floating_point())
                    for each in operands
                ]
                out = _attend(*leaves, options=ctx.options)
            _numbers.set_state(now)
            asked = [leaf for leaf, needed in zip(leaves, ctx.needs_input_grad, strict=False) if needed]
            found = iter(torch.autograd.grad(out, asked, upstream))
            return tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:4])

        return *_launched("attention_backward", gradients, gradient, *ctx.saved_tensors[:4]), None


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    with _drawn_from_device():
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, bias, **options)


def _launched(name: str, kernel: Callable[..., Any], *operands: Tensor | None) -> Any:
    """Return the result of one of the pretend device's own kernels on the CPU's tensors."""
    for operand in operands:
        if isinstance(operand, Tensor) and not isinstance(operand, PretendTensor):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found one on the CPU")
    with _lock:
        for counts in _counting:
            counts.operators[name] += 1
    return tree_map(lambda leaf: _wrapped(leaf, {}), kernel(*map(_raw, operands)))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return _Attention.apply(query, key, value, attn_mask, options)


# Automatic casts, as on CUDA, for the operators that the package uses.


class _Casts(threading.local):
    """Parameters with their narrow copies, by address: each is cast once in the outermost context."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def narrow(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor cast to `dtype`."""
        if not (tensor.is_leaf and tensor.requires_grad and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        if id(tensor) not in self.kept:
            self.kept[id(tensor)] = tensor, tensor.to(dtype)
        return self.kept[id(tensor)][1]


_casts = _Casts()
_clear_autocast_cache = torch.clear_autocast_cache


def _forget_casts() -> None:
    _casts.kept.clear()
    _clear_autocast_cache()


_NARROW = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "scaled_dot_product_attention", "conv1d")
_WIDE = (
    "softmax.int", "log_softmax.int", "_softmax", "_log_softmax", "layer_norm", "rms_norm", "nll_loss",
    "cross_entropy_loss", "exp", "log", "pow.Tensor_Scalar", "norm.ScalarOpt_dim", "cumsum", "sum", "sum.dim_IntList",
    "logsumexp", "prod", "rsqrt", "reciprocal",
)  # fmt: skip


def _cast(operator: Any, wide: bool) -> Callable[..., Any]:
    """Return a kernel that casts an operator's operands and then calls it without further casts."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if wide else torch.get_autocast_dtype(NAME)

        def one(leaf: Any) -> Any:
            fits = isinstance(leaf, Tensor) and leaf.device.type == NAME and leaf.is_floating_point()
            if not fits or leaf.dtype in (dtype, torch.float64):
                return leaf
            return leaf.to(dtype) if wide else _casts.narrow(leaf, dtype)

        with torch._C._ExcludeDispatchKeyGuard(key):
            return operator(*tree_map(one, args), **tree_map(one, kwargs))

    return kernel


def _pin_memory(tensor: Tensor) -> Tensor:
    if tensor.device != _CPU:
        raise RuntimeError(f"cannot pin a tensor of {tensor.device}: only dense CPU tensors can be pinned")
    pinned = tensor.clone()
    pinned.is_page_locked = True  # type: ignore[attr-defined]
    return pinned


# Several processes: the counterpart of NCCL, over gloo.


class _Group(dist.ProcessGroup):
    """A process group that hands the CPU's tensors to gloo, with the operations that DDP needs."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors: Any, options: Any = None) -> dist.Work:
        return self._sent("allreduce", tensors, options or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, options: Any = None) -> dist.Work:
        return self._sent("broadcast", tensors, options or dist.BroadcastOptions())

    def allgather(self, into: Any, tensors: Any, options: Any = None) -> dist.Work:
        return self._sent("allgather", into, tensors)

    def barrier(self, options: Any = None) -> dist.Work:
        return self._gloo.barrier()

    def _sent(self, name: str, *operands: Any) -> dist.Work:
        work = getattr(self._gloo, name)(*tree_map(_raw, operands))
        return _create_work_from_future(work.get_future().then(lambda _: operands[0]))


_FOREACH_TYPES: list[list[type]] = [_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types]
"""_FOREACH_TYPES are PyTorch's lists of the types that operators on many tensors at once accept."""


@contextlib.contextmanager
def present() -> Iterator[None]:
    """Give the machine the device inside the block, where `auto` then chooses it.

    Meanwhile this patches the parts of PyTorch that a backend in Python cannot reach: `torch.Generator`, page-locked
    memory, and how modules move.
    """
    global _here
    _register()
    swap = torch.__future__
    before = torch.Generator, Tensor.pin_memory, Tensor.is_pinned, torch.clear_autocast_cache
    swapped, was_here = swap.get_swap_module_params_on_conversion(), _here
    torch.Generator = _Generator  # type: ignore[misc]
    Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]
    Tensor.is_pinned = lambda tensor: getattr(tensor, "is_page_locked", False)  # type: ignore[method-assign, assignment]
    torch.clear_autocast_cache = _forget_casts
    for types in _FOREACH_TYPES:
        types.append(PretendTensor)
    swap.set_swap_module_params_on_conversion(True)  # otherwise `to` would untie tied weights
    _here = True
    try:
        # Autograd has one thread for each device that existed at the first backward pass of the process.
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _here = was_here
        for types in _FOREACH_TYPES:
            types.remove(PretendTensor)
        torch.Generator, Tensor.pin_memory, Tensor.is_pinned, torch.clear_autocast_cache = before  # type: ignore[misc, method-assign]
        swap.set_swap_module_params_on_conversion(swapped)


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """The answers to what PyTorch asks a backend in C++."""

    def is_available(self) -> bool:
        return _here

    def has_primary_context(self, device: int) -> bool:
        return _here

    def is_built(self) -> bool:
        return True


def _register() -> None:
    """Register the device with PyTorch; a second call does nothing."""
    if _LIBRARIES:
        return
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module(), hook=_Hooks())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_launch, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # `torch.tensor` copies with Python's dispatch off, so a fallback would not be reached.
    aten.impl("copy_", lambda into, source, non_blocking=False: _copied_into(into, source, non_blocking), "PrivateUse1")
    for name in ("arange", "arange.start", "arange.start_step", "randperm", "randperm.generator"):
        aten.impl(name, partial(_launch, _operator(name)), "PrivateUse1")  # otherwise PyTorch resizes an empty tensor
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        aten.impl("scaled_dot_product_attention", _attention, key)
    for names, wide in ((_NARROW, False), (_WIDE, True)):
        for name in names:
            aten.impl(name, _cast(_operator(name), wide), "AutocastPrivateUse1")
    dist.Backend.register_backend(NAME, _Group, devices=[NAME])
    _LIBRARIES.extend((every, aten))


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")
