"""Texts that `evaluate` is given cut into subword pieces are told, in every way that they come in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat

PLAIN = "the dog sleeps now\nhe came home\n"
CUT = [
    "▁the ▁dog ▁sle eps ▁now\n▁he ▁came ▁home\n",
    "the dog sle@@ eps now\nhe ca@@ me home\n",
    "the dog sle￭ eps now\nhe came￭ home\n",
]


@pytest.mark.parametrize("cut", CUT)
@pytest.mark.parametrize("which", ["hypothesis", "reference"])
@pytest.mark.parametrize("compared", [False, True])
def test_pieces_are_told(ziggurat: Ziggurat, tmp_path: Path, cut: str, which: str, compared: bool) -> None:
    files = {name: tmp_path / name for name in ("hypothesis", "reference")}
    for name, path in files.items():
        path.write_text(cut if name == which else PLAIN)
    system = "--compare" if compared else "--hypothesis"
    result = ziggurat("evaluate", system, files["hypothesis"], "--reference", files["reference"], "--metrics", "chrf")
    assert result.status == 0
    warnings = [line for line in result.err.splitlines() if "subword pieces" in line]
    assert len(warnings) == 1
    assert f"{files[which]}: 2 of 2 lines" in " ".join(warnings[0].split())


def test_plain_text_is_not(ziggurat: Ziggurat, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(PLAIN)
    assert "pieces" not in ziggurat("evaluate", "--hypothesis", tmp_path / "a", "--reference", tmp_path / "a").err
