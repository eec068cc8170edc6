"""Devices: choosing one, and what an accelerator can do that a CPU cannot.

Everything that depends on the kind of accelerator is decided here, so that NVIDIA's and AMD's GPUs ("cuda"), Intel's
("xpu") and other backends take the same path through the rest of the package, which distinguishes only CPUs from
everything else. Features with no counterpart elsewhere stay where they are used: CUDA graphs
(ziggurat.train.cuda_graphs) and packed sequences of flash attention (ziggurat.model.attention.cache).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ziggurat.system.errors import ConfigError


def default_device() -> torch.device:
    """Return the accelerator of this machine, or the CPU if it has none that can be used (`usable_device`)."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if device is None or device.type == "mps" else torch.device(device.type)


def usable_device(name: str, setting: str) -> torch.device:
    """Return the device of that name; `auto` is the GPU if there is one, otherwise the CPU.

    On a GPU, cuDNN's attention kernel is switched off. Raises ConfigError, which names `setting`, when the device
    cannot be used, as Apple's GPUs cannot: they have no float64, in which searches and some layers compute.
    """
    device = default_device() if name == "auto" else _named(name, setting)
    if device.type == "cuda":
        # torch 2.11 and later, with CUDA 13, prefers it on Hopper and Blackwell. It makes a plan for each new shape (25
        # ms to half a second, as measured by others), and batches have thousands of shapes; it refuses a bias that
        # needs a gradient, as relative positions do; and with a bias its gradients may be NaN
        # (github.com/pytorch/pytorch/issues/196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def _named(name: str, setting: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type == "mps":
            raise RuntimeError("Apple's GPUs have no float64, in which a search adds log-probabilities")
        # torch.device accepts the name of a GPU that does not exist; only querying its memory shows that.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"`{setting}: {name}` cannot be used: {reason}; `cpu` always can") from None
    return device


def runtime(device: torch.device) -> Any:
    """Return the module of an accelerator, such as `torch.cuda`; None for a CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def device_name(device: torch.device) -> str:
    """Return the product name of an accelerator if PyTorch knows it, otherwise the kind of the device."""
    name = getattr(runtime(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


_stands_in = False


@contextmanager
def cpu_standing_in() -> Iterator[None]:
    """Context in which CPU tensors are handled like those of an accelerator, for simulations without one."""
    global _stands_in
    before, _stands_in = _stands_in, True
    try:
        yield
    finally:
        _stands_in = before


def has_cpu_kernels(x: torch.Tensor) -> bool:
    """Return whether operators made for CPUs should handle this tensor."""
    return x.device.type == "cpu" and not _stands_in


def has_bf16(device: torch.device) -> bool:
    """Return whether an accelerator computes in bfloat16 natively, without emulation; False for a CPU."""
    module = runtime(device)
    if device.type != "cuda":
        return module is not None and getattr(module, "is_bf16_supported", bool)()
    with module.device(device):  # torch queries the current one, which is the first
        return bool(module.is_bf16_supported(including_emulation=False))


def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile makes kernels for a device; other backends register themselves with it."""
    from torch._dynamo.device_interface import get_registered_device_interfaces  # slow to import, and seldom needed

    return device.type in dict(get_registered_device_interfaces())


def copies_aside(device: torch.device) -> bool:
    """Return whether copies from page-locked memory can overlap with other work, on a separate stream."""
    return hasattr(runtime(device), "Stream")


def make_current(device: torch.device) -> None:
    """Make an accelerator the default for PyTorch calls that do not name a device."""
    if device.index is not None and hasattr(runtime(device), "set_device"):
        runtime(device).set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished all queued work; does nothing for a CPU."""
    if device.type != "cpu":
        runtime(device).synchronize(device)


def free_cache(device: torch.device) -> None:
    """Release the accelerator memory that PyTorch has cached for future tensors."""
    if device.type != "cpu":
        runtime(device).empty_cache()


def memory_in_use(device: torch.device) -> int:
    """Return the bytes of tensors on an accelerator, 0 where PyTorch does not count them."""
    module = runtime(device)
    return int(module.memory_allocated(device)) if hasattr(module, "memory_allocated") else 0


def random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores torch's random state, on the CPU and on `device`, at its end."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    # fork_rng defaults to all GPUs, some of which belong to other processes.
    return torch.random.fork_rng(devices=[device], device_type=device.type)
