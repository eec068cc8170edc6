"""The pretend accelerator, for the tests that use it and not beyond them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.pretend_device import present


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with present():
        yield
