"""Heat maps as images: one square for each value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ziggurat.tracking.tracker import Pixels

__all__ = ["BLANK", "draw"]

BLANK = (128, 128, 128)
"""Colour of a square without a value."""

_VIRIDIS = ((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129), (92, 200, 99))
_SCALE = np.array((*_VIRIDIS, (170, 220, 50), (253, 231, 37)), dtype=np.float64)
"""Nine colours of viridis, evenly spaced: dark blue for 0, yellow for 1. Colour-blind readers see their order, too."""

_SIDE, _LARGEST = 480, 16
"""Pixels of an image's longer side, if squares stay between 1 and 16 pixels wide."""


def draw(rows: Sequence[Sequence[float | None]]) -> Pixels:
    """Return shares from 0 to 1, the top row first, as an image; what is beyond takes the colour at that end.

    Rows may differ in length: what is missing at their ends is blank, as None is.
    """
    height, width = len(rows), max(map(len, rows))
    shares: NDArray[np.float64] = np.full((height, width), np.nan)
    for share, row in zip(shares, rows, strict=True):
        share[: len(row)] = [np.nan if value is None else value for value in row]
    place = np.clip(np.nan_to_num(shares), 0, 1) * (len(_SCALE) - 1)
    below = np.minimum(place.astype(np.intp), len(_SCALE) - 2)
    part = (place - below)[..., None]
    colours = _SCALE[below] * (1 - part) + _SCALE[below + 1] * part
    colours[np.isnan(shares)] = BLANK
    side = max(1, min(_LARGEST, _SIDE // max(height, width)))
    return colours.round().astype(np.uint8).repeat(side, 0).repeat(side, 1)
