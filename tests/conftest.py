"""Fixtures shared by the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the public corpora beside the repository; tests that need it are skipped where it is missing."""
    if not SHARED_DATA.is_dir():
        pytest.skip("corpora not present: no ../shared/data beside the repository")
    return SHARED_DATA
