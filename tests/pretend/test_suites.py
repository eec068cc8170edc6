"""Folders of the suite also pass on the pretend accelerator, which `auto` chooses there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["test_composition.py", "test_unequal_depths.py", "model", "train", "translate", "inspect", "serve"]
)
def test_a_part_of_the_suite_passes_on_it(part: str) -> None:
    """They run in a process that has the device from the start; tests about a CPU say so (`pytest.mark.cpu`)."""
    command = [sys.executable, "-m", "pytest", "--pretend", "-p", "no:cacheprovider", f"tests/{part}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:]
