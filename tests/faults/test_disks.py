"""Disks that are too small for a verb: their sizes, which the campaign mounts one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.operations import Operation

disks = pytest.importorskip("experiments.faults.disks", reason="experiments/ is not next to the tests")


@pytest.mark.parametrize(("before", "after"), [(0, 1 << 20), (0, 0), (8192, 8192), (8192, 1 << 20), (1 << 20, 8192)])
def test_every_size_holds_the_existing_files(before: int, after: int) -> None:
    found = disks.sizes(before, after)
    assert all(size > 0 and before <= size <= max(4096, before, after) for size in found)  # 0 means no limit to tmpfs
    assert found[0] == max(4096, before)
    assert len(found) == (8 if after > 1 << 19 else 1)


@pytest.mark.slow  # it mounts file systems where permitted, which not every run of the suite should do
def test_disks_of_every_size_are_cleaned_up(tmp_path: Path) -> None:
    if not disks.mountable(tmp_path):
        pytest.skip("this process may not mount file systems")
    with disks._mounted(tmp_path / "disk") as disk:
        for size in disks.sizes(disks._used(disk), 1 << 20):
            disks._remount(disk, f"size={size}")
            disks._remount(disk, f"size={disks._ROOM}")


def test_an_operation_is_reported_relative_to_the_working_folder(tmp_path: Path) -> None:
    from experiments.faults.verbs import _shown

    assert _shown(Operation("write", str(tmp_path / "work" / "run" / "last")), tmp_path) == "write run/last"
