"""The public surface is unchanged: help, explanations, /spec, JSON keys, parameter names, Python names."""

from __future__ import annotations

import pytest

from tools.surface import PARTS, differences

AT_ONCE = ("help.txt", "parameters.txt", "python.txt", "spec.json")


@pytest.mark.parametrize(
    "name", [name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.slow) for name in PARTS]
)
def test_the_surface_is_unchanged(name: str) -> None:
    unlike = differences(name)
    assert not unlike, "\n".join(["meant? `python -m tools.surface --write` keeps it", *unlike[:40]])
