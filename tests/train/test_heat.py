from __future__ import annotations

import numpy as np
import pytest

from ziggurat.train.trackers import BLANK, draw


def test_ends_middle_blank_and_beyond() -> None:
    image = draw([[0.0, 0.5, 1.0], [None, -3.0, 7.0]])
    side = image.shape[0] // 2
    assert image.dtype == np.uint8
    assert image.shape == (2 * side, 3 * side, 3)
    low, middle, high = (68, 1, 84), (33, 144, 141), (253, 231, 37)  # viridis at 0, 1/2 and 1
    expected = [[low, middle, high], [BLANK, low, high]]
    assert image[side // 2 :: side, side // 2 :: side].tolist() == [[list(c) for c in row] for row in expected]


def test_colours_between_two_of_the_scale_are_mixed() -> None:
    assert draw([[1 / 16]])[0, 0].tolist() == [
        round((a + b) / 2) for a, b in zip((68, 1, 84), (71, 44, 122), strict=True)
    ]


def test_short_rows_end_blank() -> None:
    image = draw([[1.0], [1.0, 1.0]])
    assert tuple(image[0, -1]) == BLANK
    assert tuple(image[-1, -1]) != BLANK


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (36, 240), (60, 12), (1, 700)])
def test_images_stay_small(rows: int, columns: int) -> None:
    height, width, _ = draw([[0.5] * columns] * rows).shape
    assert max(height, width) <= max(480, rows, columns)
    assert (height // rows) == (width // columns) >= 1
