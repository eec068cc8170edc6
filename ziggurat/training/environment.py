"""With what a run was trained: versions and machine, written beside its configuration at every start."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import torch

from ziggurat import __version__
from ziggurat.data.files import write_atomically
from ziggurat.models.device import usable_device
from ziggurat.models.directory import ENVIRONMENT_FILE

__all__ = ["environment", "keep_environment"]


def keep_environment(run: Path, device: str, processes: int) -> None:
    """Write `environment.json` of the run; an earlier start's is replaced."""
    content = json.dumps(environment(device, processes), indent=1)
    write_atomically(run / ENVIRONMENT_FILE, content.encode())


def environment(device: str, processes: int) -> dict[str, str]:
    """Return versions and machine, by name; `device` is the value of `training.device`."""
    place = usable_device(device, "training.device")
    threads = torch.get_num_threads()
    found = {
        "ziggurat": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": platform.system(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
        "threads": str(threads),
    }
    return found | ({"processes": str(processes)} if processes > 1 else {})


def _processor() -> str:
    """Return the processor's name; Python knows only its architecture on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
