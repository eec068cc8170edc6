"""Damage to any file in any kind of folder is refused with the file's name, or has no effect."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "experiments" / "faults" / "flips.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="experiments/ is not next to the tests")


@pytest.fixture(scope="module")
def flips() -> ModuleType:
    specification = importlib.util.spec_from_file_location("experiments_faults_flips", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # its dataclasses look up their module there
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_sample_of_damage_in_this_process(flips: ModuleType, tmp_path: Path) -> None:
    counts = flips.campaign(flips.subjects(tmp_path, exports=False), per_file=2, isolated=False)
    assert {kind: count.failures for kind, count in counts.items()} == {kind: [] for kind in counts}
    for kind, count in counts.items():
        assert count.refused > 10, kind
        assert count.harmless < count.refused / 2, kind


def test_the_campaign_counts_what_a_careless_reader_does(flips: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")

    def careless(folder: Path) -> object:
        content = (folder / "file").read_bytes()
        if len(content) > 10:
            raise ValueError("longer")
        yield content[:5]

    flips.READERS["careless"] = careless
    count = flips.campaign([flips.Subject("k", "careless", tmp_path)], isolated=False)["k"]
    assert count.tried == count.refused + count.harmless + len(count.failures)
    assert count.silent
    assert count.harmless
    assert len(count.internal) == 2, "one byte longer, and the file that is gone"
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_positions_depend_only_on_the_seed(flips: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 40)
    found = [list(flips.damages(tmp_path, 20, random.Random(seed))) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
def test_every_kind_of_folder_in_a_child(flips: ModuleType, tmp_path: Path) -> None:
    for package in ("ctranslate2", "onnxruntime", "onnxscript", "transformers"):
        pytest.importorskip(package)
    counts = flips.campaign(flips.subjects(tmp_path), per_file=16)
    assert {kind: count.failures for kind, count in counts.items()} == {kind: [] for kind in counts}
    assert sum(count.tried for count in counts.values()) > 1000
