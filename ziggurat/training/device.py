"""Where a model is trained."""

from __future__ import annotations

import torch

from ziggurat.errors import ConfigError

__all__ = ["training_device"]


def training_device(name: str) -> torch.device:
    """Return the device of `training.device`. Raises ConfigError when it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"`training.device: {name}` cannot be used: {reason}") from None
    return device
