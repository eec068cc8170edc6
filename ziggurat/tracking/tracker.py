"""What a tracker is: it takes figures and images of a run, by update."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.files import write_atomically

__all__ = ["FOLDER", "Pixels", "Tracker", "keep", "kept"]

Pixels = NDArray[np.uint8]
"""An image, [height, width, 3], red, green and blue from 0 to 255."""

FOLDER = "tracking"
"""Folder inside a run for what trackers keep there: the number of its run at each service, files of W&B."""


class Tracker(Protocol):
    """Takes what a run tells. It may raise anything and take its time: `Listener` sees to that."""

    def scalars(self, update: int, values: Mapping[str, float]) -> None:
        """Take figures by name, such as `train/loss`."""

    def image(self, update: int, name: str, pixels: Pixels) -> None:
        """Take an image, such as a heat map of layers."""

    def close(self) -> None:
        """Hand over what is left and end."""


def kept(run: Path, service: str) -> str | None:
    """Return the name under which the run is known to `service`, or None: a resumed run goes on under the same."""
    path = run / FOLDER / f"{service}.id"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def keep(run: Path, service: str, name: str) -> None:
    """Write down the name under which the run is known to `service`."""
    (run / FOLDER).mkdir(exist_ok=True)
    write_atomically(run / FOLDER / f"{service}.id", name.encode())
