"""A program in the place of eflomal: it has its options and links words in a way that a test can tell beforehand."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

__all__ = ["install"]

_HEAD = """#!{python}
import sys
places = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert list(places) == ["-s", "-t", "-f", "-r"], sys.argv
sides = [open(places[side], encoding="utf-8").read().split("\\n")[:-1] for side in ("-s", "-t")]
"""
_ENDS = """
# Source to target: the first words and the last words; back: the first words only.
with open(places["-f"], "w") as forward, open(places["-r"], "w") as backward:
    for source, target in zip(*sides, strict=True):
        source, target = source.split(), target.split()
        links = [(0, 0), (len(source) - 1, len(target) - 1)] if source else []
        print(*(f"{i}-{j}" for i, j in links), file=forward)
        print(*(f"{i}-{j}" for i, j in links[:1]), file=backward)
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str = _ENDS) -> None:
    """Put a program `eflomal-align` with this body first on the PATH; `places` and `sides` hold what it was given."""
    folder.mkdir(exist_ok=True)
    program = folder / "eflomal-align"
    program.write_text(_HEAD.format(python=sys.executable) + body)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
