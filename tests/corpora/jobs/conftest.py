"""Fixtures: jobs in this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.conftest import trained as trained
from tests.cli.conftest import ziggurat as ziggurat
from tests.corpora.synthesis.conftest import here
from ziggurat.corpora.jobs import launchers
from ziggurat.data.babel import generate


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process shards in this process, without waiting for the disk."""
    monkeypatch.setattr(launchers, "worker_pool", here)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Both sides of 25 pairs, one of which is blank."""
    folder = tmp_path_factory.mktemp("pairs")
    found = [*generate(12, seed=5), ("", ""), *generate(12, seed=6)]
    sides = folder / "text.qlo", folder / "text.qhi"
    for side, path in enumerate(sides):
        path.write_text("".join(pair[side] + "\n" for pair in found), encoding="utf-8")
    return sides
