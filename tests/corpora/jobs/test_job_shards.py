"""The files that a stage leaves for a shard, and where shards end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.corpora.jobs.launchers import StageFiles, cut
from ziggurat.system.errors import DataError


@given(st.lists(st.integers(1, 7), max_size=30), st.integers(1, 12), st.sets(st.integers(0, 20)))
def test_a_shard_ends_with_the_item_that_fills_it(weights: list[int], size: int, wanted: set[int]) -> None:
    whole = list(cut(weights, size, lambda index: True, start=4, weight=lambda item: item))
    assert [item for shard in whole for item in shard.items] == weights
    assert [shard.index for shard in whole] == list(range(4, 4 + len(whole)))
    assert [shard.first for shard in whole] == [sum(sum(s.items) for s in whole[:n]) for n in range(len(whole))]
    assert all(sum(shard.items) - shard.items[-1] < size for shard in whole)
    assert all(sum(shard.items) >= size for shard in whole[:-1])
    some = list(cut(weights, size, wanted.__contains__, start=4, weight=lambda item: item))
    assert some == [shard for shard in whole if shard.index in wanted]


def test_a_shard_is_complete_or_absent(tmp_path: Path) -> None:
    files = StageFiles(tmp_path, "translated", "plan")
    assert files.complete(3) is None
    content = "1\ta b\tc\n2\t\u2028\t\u0085d\n".encode()
    manifest = files.write(3, content, read=4, kept=2, dropped={"empty": 2}, input="sum")
    assert files.complete(3) == manifest
    assert files.finished() == [manifest]
    assert files.read(manifest) == content
    assert StageFiles(tmp_path, "translated", "other").complete(3) is None
    assert StageFiles(tmp_path, "filtered", "plan").complete(3) is None

    described = files.path(3).with_suffix(".json")
    content = described.read_bytes()
    for damaged in (b"", content[:-20], b"{}", b"[]"):
        described.write_bytes(damaged)
        assert files.complete(3) is None
    described.write_bytes(content)
    files.path(3).write_bytes(b"1\ta b\tX\n2\t\xe2\x80\xa8\t\xc2\x85d\n")  # the same length as before
    assert files.complete(3) == manifest
    with pytest.raises(DataError, match=r"00000003.tsv: damaged"):
        files.read(manifest)
    files.path(3).write_bytes(b"1")
    assert files.complete(3) is None
    files.path(3).unlink()
    assert files.complete(3) is None


def test_a_shard_that_cannot_be_read_is_not_called_absent(tmp_path: Path) -> None:
    files = StageFiles(tmp_path, "translated", "plan")
    files.write(3, b"a", read=1, kept=1, dropped={})
    described = files.path(3).with_suffix(".json")
    described.unlink()
    os.mkfifo(described)
    with pytest.raises(DataError, match=r"00000003.json: "):
        files.complete(3)
