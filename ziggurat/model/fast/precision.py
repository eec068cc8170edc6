"""The fastest precision on this machine, found by timing one product in each.

CPU flags do not show it: among processors with AVX-512-BF16 and no AMX, some of Intel's run bf16 at half the speed of
fp32, and AMD's at twice that speed. Rates are measured once per process, in a tenth of a second, or a few seconds on a
processor that emulates bf16. They affect nothing unless a setting is `auto`.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch

from ziggurat.model.accelerator import has_bf16
from ziggurat.model.fast.compiled import Precision
from ziggurat.model.fast.packed import available, packed
from ziggurat.model.linear import linear
from ziggurat.system.errors import ConfigError

Widths = tuple[int, int]

_FAR = {"float32": 1e-4, "bfloat16": 0.01, "int8": 0.04}
"""Error of a product, relative to its norm, above which it is wrong: rounding causes 0.003 in bf16, 0.013 in int8."""
_TAIL_ROWS, _WIDEST, _TAIL = 77, 4096, 64
"""The number of rows in checked products, not a multiple of any kernel's block; the maximum number of columns of a
matrix; and the block size modulo which a narrowed matrix keeps its width, because kernels fail in the remainder."""
_WORTH = 1.15
"""Ratio of rates above which a precision counts as faster. Three measurements on one machine under load gave 1.87, 1.91
and 2.21: if the true ratio is near the threshold, the choice may differ between measurements."""
_SECONDS = 0.03
_ROWS = 256
_MOST = 1 << 22
"""Largest matrix that is timed: those of wider models are shrunk in both dimensions and get a quarter of the rows, so
that a call takes milliseconds."""


@functools.cache
def training_rates(widths: Widths) -> Mapping[str, float]:
    """Return the operations per second of one CPU thread, in a linear map forward and backward, in fp32 and bf16.

    `widths`: input and output of the map, d_model and d_ff of the model; in narrow models bf16 gains nothing.
    """
    rows, widths = _shape(widths)

    def update(dtype: torch.dtype) -> Callable[[], object]:
        x, w = (_like(n, widths[0]).to(dtype).requires_grad_() for n in (rows, widths[1]))
        gradient = _like(rows, widths[1]).to(dtype)

        def work() -> None:
            with torch.enable_grad():
                y = linear(x, w)
            torch.autograd.grad(y, (x, w), gradient)

        return work

    return _rates({"fp32": update(torch.float32), "bf16": update(torch.bfloat16)}, 6 * rows * math.prod(widths))


@functools.cache
def decoding_rates(widths: Widths) -> Mapping[str, float]:
    """Return the operations per second of one CPU thread in a packed linear map of `widths`, by precision.

    int8 is not tried: it is for users who accept that it changes translations, never chosen for speed alone.
    """
    rows, widths = _shape(widths)
    x, weight = _like(rows, widths[0]), _like(widths[1], widths[0])
    precisions: tuple[Precision, ...] = ("float32", "bfloat16")
    maps = {str(name): packed(weight, None, name) for name in precisions if available(name)}
    return _rates({name: functools.partial(each, x) for name, each in maps.items()}, 2 * rows * math.prod(widths))


def training_precision(
    device: torch.device, widths: Widths, maps: Callable[[], Iterable[Widths]]
) -> Literal["fp32", "bf16"]:
    """Return what `training.precision: auto` stands for: bf16 if it is faster, otherwise fp32, which is more exact.

    On a GPU it is bf16 if the hardware supports it; nothing is measured there. On a CPU it is fp32 if one of `maps()`,
    all maps of the model, is wrong in bf16; they are requested only if bf16 is faster.
    """
    if device.type == "cpu":
        worth = faster(training_rates(widths), "fp32") == "bf16"
        return "bf16" if worth and not wrong_maps(maps()) else "fp32"
    return "bf16" if has_bf16(device) else "fp32"


def wrong_maps(maps: Iterable[Widths]) -> list[str]:
    """Return which linear maps this CPU computes wrongly in bf16, forward or backward, and by how much.

    `maps` are their widths, input first; a map wider than 4,096 is tested in part, with the same remainder modulo 64.
    Kernels for some widths, on some processors, have had silent faults: oneDNN's with AMX if the inner width is not a
    multiple of 32 (its issue 5717), OpenVINO's on Zen 5 (its issue 38256). Products are compared with the same ones in
    fp32; training's random state is not touched.
    """
    return _told(maps, _error, _FAR["bfloat16"])


def wrong_packed(maps: Iterable[Widths], precision: Precision) -> list[str]:
    """Return which packed maps (ziggurat.model.fast.packed) this CPU computes wrongly in `precision`, and by how much.

    Works like `wrong_maps`, but translation's kernels differ from training's.
    """
    return _told(maps, functools.partial(_packed_error, precision), _FAR[precision])


def maps_of(model: torch.nn.Module) -> set[Widths]:
    """Return the widths of a model's linear maps, input first; embeddings count, as they may be output maps."""
    return {(tensor.shape[1], tensor.shape[0]) for tensor in model.parameters() if tensor.dim() == 2}


def _told(maps: Iterable[Widths], error: Callable[[int, int], float], far: float) -> list[str]:
    errors = {(a, b): error(_narrowed(a), _narrowed(b)) for a, b in sorted(set(maps))}
    return [f"{a} to {b} (off by {found:.0%})" for (a, b), found in errors.items() if not found < far]  # or NaN


def _narrowed(width: int) -> int:
    return width if width <= _WIDEST else _WIDEST - _TAIL + width % _TAIL


@functools.cache
def _packed_error(precision: Precision, wide_in: int, wide_out: int) -> float:
    x, weight, bias = _drawn((_TAIL_ROWS, wide_in), (wide_out, wide_in), (wide_out,))
    right = torch.nn.functional.linear(x, weight, bias)
    return float((packed(weight, bias, precision)(x) - right).norm() / right.norm())


@functools.cache
def _error(wide_in: int, wide_out: int) -> float:
    """Return the largest error of a linear map in bf16 and of its gradients, relative to their norm."""
    shapes = (_TAIL_ROWS, wide_in), (wide_out, wide_in), (wide_out,), (_TAIL_ROWS, wide_out)
    narrow = [values.bfloat16() for values in _drawn(*shapes)]
    pairs = zip(_products(narrow), _products([values.float() for values in narrow]), strict=True)
    return max(float((found.float() - right).norm() / right.norm()) for found, right in pairs)


def _drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=numbers) for shape in shapes]


def _products(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return a linear map's result and gradients, given its input, weight, bias and the gradient of its result."""
    *factors, gradient = values
    with torch.enable_grad():
        factors = [factor.requires_grad_() for factor in factors]
        y = linear(*factors)
    return y.detach(), *torch.autograd.grad(y, factors, gradient)


def settled(
    asked: Precision | Literal["auto"], device: torch.device, widths: Widths, maps: Iterable[Widths]
) -> Precision:
    """Return the translation precision that `asked` stands for: `auto` is bfloat16 if faster, otherwise float32.

    Nothing is measured for an explicit precision, or on a GPU. `maps` are all linear maps of the models; `auto` is
    float32 if this CPU computes one of them wrongly in bfloat16.

    Raises ConfigError for bfloat16 on a GPU that emulates it, and for a precision that this CPU computes wrongly.
    """
    if device.type != "cpu":
        if asked == "bfloat16" and not has_bf16(device):
            raise ConfigError(
                "`decoding.precision: bfloat16` needs a GPU that computes with it (NVIDIA's since Ampere); use float32"
            )
        return ("bfloat16" if has_bf16(device) else "float32") if asked == "auto" else asked
    if asked == "auto":
        narrow = faster(decoding_rates(widths), "float32") is not None and not wrong_packed(maps, "bfloat16")
        return "bfloat16" if narrow else "float32"
    if asked != "float32" and available(asked) and (wrong := wrong_packed(maps, asked)):
        raise ConfigError(
            f"`decoding.precision: {asked}`: this CPU computes maps of the model wrongly in it: {', '.join(wrong)}; "
            "the fault is in a library's kernels: use float32, or another machine"
        )
    return asked


def decoding_notice(
    asked: Precision | Literal["auto"], chosen: Precision, device: torch.device, widths: Widths, *, hints: bool = True
) -> str:
    """Return what `auto` has chosen, or that another precision except int8 is faster on this device; otherwise "".

    `hints`: False if another precision would not help; then nothing is measured for a hint.
    """
    if asked == "auto":
        return f"precision: {chosen}, chosen by `auto`"
    if hints and chosen == "float32" and has_bf16(device):
        return "this GPU is faster in bfloat16 than in float32: `precision=bfloat16`"
    if not hints or device.type != "cpu" or (other := faster(rates := decoding_rates(widths), chosen)) is None:
        return ""
    times = rates[other] / rates[chosen]
    return (
        f"{other} products are {times:.1f} times as fast as {chosen} on this CPU ({speeds(rates)}): `precision={other}`"
    )


def faster(rates: Mapping[str, float], than: str) -> str | None:
    """Return the precision with the highest rate if it is clearly faster than `than`, otherwise None."""
    best = max(rates, key=lambda name: rates[name])
    return best if than in rates and rates[best] > _WORTH * rates[than] else None


def precision_notice(chosen: str, device: torch.device, widths: Widths) -> str:
    """Return how fast the precisions of training are on a CPU, and which to choose if another is faster."""
    if device.type != "cpu":
        faster_in_bf16 = chosen == "fp32" and has_bf16(device)
        return "this GPU is faster in bf16 than in fp32: `training.precision=bf16` or `auto`" if faster_in_bf16 else ""
    rates = training_rates(widths)
    other, told = faster(rates, chosen), speeds(rates)
    if other is None:
        return f"products on this CPU: {told}; `training.precision: {chosen}`"
    times = rates[other] / rates[chosen]
    if chosen == "bf16":
        return f"WARNING: this CPU is slower in bf16 than in fp32 ({told}); choose `training.precision=fp32` or `auto`"
    return (
        f"{other} products are {times:.1f} times as fast on this CPU ({told}): `training.precision={other}` or `auto`"
    )


def speeds(rates: Mapping[str, float]) -> str:
    """Return rates in readable form, such as `fp32 138, bf16 69 GFLOP/s per thread`."""
    return ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in rates.items()) + " GFLOP/s per thread"


def _shape(widths: Widths) -> tuple[int, Widths]:
    """Return the rows and widths of the product that is measured for a map of `widths`."""
    shrunk = widths
    while math.prod(shrunk) > _MOST:
        shrunk = shrunk[0] // 2, shrunk[1] // 2
    return (_ROWS if math.prod(shrunk) <= _MOST // 4 else _ROWS // 4), shrunk


def _like(rows: int, width: int) -> torch.Tensor:
    """Return numbers of the size of activations, [rows, width], without touching the random state of training."""
    return torch.linspace(-1.0, 1.0, rows * width).view(rows, width)


def _rates(works: Mapping[str, Callable[[], object]], operations: int) -> dict[str, float]:
    """Return the operations per second of each work in its fastest call; a call takes `operations`.

    Calls alternate, the fastest counts, and one thread runs, so that it never waits for another: on a shared machine,
    threads that share a product occasionally take ten times as long, whatever the precision. For the same reason CPU
    time is measured: a choice that is kept for a whole run must not depend on what else was running.
    """
    fastest = dict.fromkeys(works, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for work in works.values():
            work()  # not timed, since the first call allocates memory and chooses kernels
        until = time.perf_counter() + _SECONDS
        while time.perf_counter() < until or float("inf") in fastest.values():
            for name, work in works.items():
                began = time.thread_time()
                work()
                fastest[name] = min(fastest[name], time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return {name: operations / seconds for name, seconds in fastest.items()}
