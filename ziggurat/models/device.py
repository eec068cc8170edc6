"""Where a model runs."""

from __future__ import annotations

import torch

from ziggurat.errors import ConfigError

__all__ = ["usable_device"]


def usable_device(name: str, setting: str) -> torch.device:
    """Return the device of that name; `auto` is the GPU where there is one, else the CPU.

    Raises ConfigError, which names `setting`, when it cannot be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"`{setting}: {name}` cannot be used: {reason}; `cpu` always can") from None
    return device
