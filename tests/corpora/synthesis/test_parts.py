"""Monolingual files as shards of lines."""

from __future__ import annotations

import gzip
import lzma
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.corpora.jobs.launchers import cut
from ziggurat.corpora.synthesis import lines
from ziggurat.corpora.synthesis.lines import MAX_CHARACTERS, count_lines, raw_lines, readable_lines
from ziggurat.system.errors import DataError


@given(data=st.binary(max_size=60).map(lambda b: b.replace(b"a", b"\n")), block=st.integers(1, 9))
@settings(max_examples=200)
def test_only_line_feeds_end_lines_wherever_blocks_end(data: bytes, block: int) -> None:
    pieces = [data[i : i + block] for i in range(0, len(data), block)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "byte_blocks", lambda path: iter(pieces))
        found = list(raw_lines(Path("any")))
    expected = data.split(b"\n")
    assert found == (expected[:-1] if expected[-1] == b"" else expected)


def test_a_line_too_long_to_keep_is_none_and_counts_as_one_line(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a\n" + b"x" * 3_000_000 + b"\nb\n" + b"y" * 4 * MAX_CHARACTERS + b"\n" + b"z" * 100_000)
    assert list(raw_lines(path)) == [b"a", None, b"b", b"y" * 4 * MAX_CHARACTERS, None]


def test_compressed_files_are_unpacked_and_follow_each_other(tmp_path: Path) -> None:
    packers = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress, "": bytes}
    files = []
    for number, (suffix, pack) in enumerate(packers.items()):
        files.append(tmp_path / f"{number}{suffix}")
        files[-1].write_bytes(pack(f"\ufeff{number}a\n{number}b".encode()))
    assert count_lines(files) == 8
    found = list(cut(readable_lines(files), 3, lambda index: True))
    assert [[line.text for line in s.items] for s in found] == [["0a", "0b", "1a"], ["1b", "2a", "2b"], ["3a", "3b"]]
    assert [(s.index, s.first) for s in found] == [(0, 0), (1, 3), (2, 6)]
    (second,) = cut(readable_lines(files), 3, lambda index: index == 1)
    assert second == found[1]


def test_lines_of_other_parts_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many parts reads the whole input, and decoding takes ten times as long as reading."""
    (tmp_path / "text").write_text("".join(f"line {n}\n" for n in range(1000)))
    decoded: list[bytes | None] = []
    readable = lines.readable
    monkeypatch.setattr(lines, "readable", lambda raw, **more: (decoded.append(raw), readable(raw, **more))[1])
    (shard,) = cut(readable_lines([tmp_path / "text"], [tmp_path / "text"]), 10, lambda index: index == 50)
    assert not decoded
    sent = pickle.loads(pickle.dumps(shard))
    assert [(line.text, line.reason, line.reference) for line in sent.items] == [
        (f"line {n}", None, f"line {n}") for n in range(500, 510)
    ]
    assert len(decoded) == 20


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mono.gz"
    path.write_bytes(gzip.compress(b"a\n" * 1000)[:-9])
    with pytest.raises(DataError, match=r"mono\.gz: the compressed data ends early"):
        count_lines([path])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(path: Path) -> Iterator[bytes]:
        for _ in range(100):
            yield b"some words\n" * 2_000

    monkeypatch.setattr(lines, "byte_blocks", blocks)
    tracemalloc.start()
    seen = sum(len(s.items) for s in cut(readable_lines([Path("any")]), 1000, lambda index: index % 50 == 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == 4_000
    assert peak < 500_000  # 2 MB were read
