"""The interface of experiment trackers, their files inside a run, and heat maps as images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ziggurat.system.files import write_atomically

Pixels = NDArray[np.uint8]
"""An image, [height, width, 3], red, green and blue from 0 to 255."""

FOLDER = "tracking"
"""Folder inside a run for the files of trackers: the name of the run at each service, files of W&B."""


class Tracker(Protocol):
    """A receiver of figures and images from a run. It may raise errors and be slow: `Listener` handles both."""

    def scalars(self, update: int, values: Mapping[str, float]) -> None:
        """Take figures by name, such as `train/loss`."""

    def image(self, update: int, name: str, pixels: Pixels) -> None:
        """Take an image, such as a heat map of layers."""

    def close(self) -> None:
        """Send the rest and end."""


def kept(run: Path, service: str) -> str | None:
    """Return the name of the run at `service`, which a resumed run continues; None where there is none yet."""
    path = run / FOLDER / f"{service}.id"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def keep(run: Path, service: str, name: str) -> None:
    """Store the name of the run at `service`."""
    (run / FOLDER).mkdir(exist_ok=True)
    write_atomically(run / FOLDER / f"{service}.id", name.encode())


# Heat maps

BLANK = (128, 128, 128)
"""Colour of a cell without a value."""

_VIRIDIS = ((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129), (92, 200, 99))
_SCALE = np.array((*_VIRIDIS, (170, 220, 50), (253, 231, 37)), dtype=np.float64)
"""Nine colours of viridis, evenly spaced from dark blue (0) to yellow (1); colour-blind readers see their order."""

_SIDE, _LARGEST = 480, 16
"""Pixels of the longer side of an image, and of a cell at most; a cell has at least one pixel."""


def draw(rows: Sequence[Sequence[float | None]]) -> Pixels:
    """Return shares from 0 to 1, the top row first, as an image; values outside take the colour of the nearer end.

    Rows may differ in length: cells missing at their ends are blank, as are those of None.
    """
    height, width = len(rows), max(map(len, rows))
    shares: NDArray[np.float64] = np.full((height, width), np.nan)
    for share, row in zip(shares, rows, strict=True):
        share[: len(row)] = [np.nan if value is None else value for value in row]
    position = np.clip(np.nan_to_num(shares), 0, 1) * (len(_SCALE) - 1)
    below = np.minimum(position.astype(np.intp), len(_SCALE) - 2)  # at 1 the last colour is the one above
    part = (position - below)[..., None]
    colours = _SCALE[below] * (1 - part) + _SCALE[below + 1] * part
    colours[np.isnan(shares)] = BLANK
    side = max(1, min(_LARGEST, _SIDE // max(height, width)))
    return colours.round().astype(np.uint8).repeat(side, 0).repeat(side, 1)
