"""The device of a model, by the name that a setting gives, and torch's random state there."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ziggurat.system.errors import ConfigError


def usable_device(name: str, setting: str) -> torch.device:
    """Return the device of that name; `auto` is the GPU where there is one, else the CPU.

    On a GPU cuDNN's kernel for attention is switched off. Raises ConfigError, which names `setting`, when the device
    cannot be used.
    """
    if name == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        device = _named(name, setting)
    if device.type == "cuda":
        # On Hopper and Blackwell it is torch's first choice (2.11 and later, with CUDA 13). It makes a plan for each
        # new shape (others measured 25 ms to half a second), and batches have thousands of shapes; it refuses a bias
        # that needs a gradient, as relative positions do; and with a bias its gradients may be NaN
        # (github.com/pytorch/pytorch/issues/196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def _named(name: str, setting: str) -> torch.device:
    try:
        device = torch.device(name)
        # torch.device accepts the name of a GPU that is not there; only its memory tells.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"`{setting}: {name}` cannot be used: {reason}; `cpu` always can") from None
    return device


def random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores torch's random state, on the CPU and on `device`, at its end."""
    # Of all GPUs, fork_rng's default, some are those of other processes.
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
