"""IBM Model 1 against plain loops, and the shortlist's file."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from ziggurat.data import hmm
from ziggurat.data.hmm import translation_table
from ziggurat.data.shortlist import ShortlistTable, _candidates, read_shortlist, write_shortlist
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.system.errors import ConfigError, DataError

SOURCE = VocabularyTokenizer(b"haus\nhund\ndas\n")
TARGET = VocabularyTokenizer(b"house\ndog\nthe\na\n")


def plain_model_1(sources: list[list[int]], targets: list[list[int]], iterations: int) -> dict[tuple[int, int], float]:
    """Brown et al. 1993, one pair and one token at a time; the empty piece is -1."""
    t: dict[tuple[int, int], float] = defaultdict(lambda: 0.25)
    for _ in range(iterations):
        counts: dict[tuple[int, int], float] = defaultdict(float)
        totals: dict[int, float] = defaultdict(float)
        for source, target in zip(sources, targets, strict=True):
            for e in target:
                norm = sum(t[f, e] for f in [-1, *source])
                for f in [-1, *source]:
                    counts[f, e] += t[f, e] / norm
                    totals[f] += t[f, e] / norm
        t = defaultdict(float, {(f, e): value / totals[f] for (f, e), value in counts.items()})
    return t


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_model_1_is_that_of_plain_loops(iterations: int) -> None:
    draw = random.Random(iterations)
    sources = [[draw.randrange(5) for _ in range(draw.randrange(6))] for _ in range(12)]
    targets = [[draw.randrange(4) for _ in range(draw.randrange(6))] for _ in range(12)]
    rows = translation_table(
        *([np.array(i, np.int32) for i in s] for s in (sources, targets)), 6, 4, iterations=iterations
    )
    expected = plain_model_1(sources, targets, iterations)
    found = {
        (piece if piece < 6 else -1, int(e)): p
        for piece, row in enumerate(rows)
        for e, p in zip(row.ids, row.probabilities, strict=True)
    }
    assert found == pytest.approx({pair: p for pair, p in expected.items() if p}, rel=1e-9)
    assert not len(rows[5].ids)  # occurs in no source


def test_counts_of_rare_words_are_the_same_without_a_vector_of_all_words() -> None:
    generator = np.random.default_rng(0)
    ids, shares = generator.integers(0, 90_000, 400), generator.random(400)
    shares[:20] = 0.0
    for size in (100_000, 16_000):  # without, and with one
        found, sums = hmm._sums(ids % size, shares, size)
        expected = np.bincount(ids % size, shares, size)
        assert found.tolist() == expected.nonzero()[0].tolist()
        assert sums.tolist() == expected[found].tolist()


def test_only_the_best_stay_between_iterations() -> None:
    pairs = ([np.array([0])] * 3, [np.array([0, 1]), np.array([0, 2]), np.array([0])])
    row = translation_table(*pairs, 1, 3, iterations=3, top=1)[0]
    assert row.ids.tolist() == [0]


def test_candidates_are_the_best_above_the_floor() -> None:
    rows = translation_table([np.array([0])], [np.array([2, 2, 2, 1, 1, 0])], 1, 3, iterations=1)
    assert _candidates(rows[:1], [3], 3, 2, 0.0).tolist() == [[3, 2, 1]]
    assert _candidates(rows[:1], [0], 3, 2, 0.4).tolist() == [[0, 2, 3]]


def table(candidates: list[list[int]]) -> ShortlistTable:
    from ziggurat.data import shortlist

    names = (shortlist._fingerprint(SOURCE), shortlist._fingerprint(TARGET))
    return ShortlistTable(np.array(candidates, np.int32), np.array([TARGET.eos, TARGET.unk], np.int32), names)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "list"
    written = table([[i % TARGET.size, TARGET.size] for i in range(SOURCE.size)])
    write_shortlist(path, written)
    read = read_shortlist(path, SOURCE, TARGET)
    assert read.candidates.tolist() == written.candidates.tolist()
    assert read.always.tolist() == written.always.tolist()


def test_the_same_table_makes_the_same_file(tmp_path: Path) -> None:
    """Try twenty times: safetensors orders three metadata keys at random, in six ways."""
    path, found = tmp_path / "list", set()
    for _ in range(20):
        write_shortlist(path, table([[0]] * SOURCE.size))
        found.add(path.read_bytes())
    assert len(found) == 1


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "list"
    with pytest.raises(DataError, match="no such file"):
        read_shortlist(path, SOURCE, TARGET)
    write_shortlist(path, table([[0]] * SOURCE.size))
    with pytest.raises(ConfigError, match="for another source vocabulary"):
        read_shortlist(path, VocabularyTokenizer(b"haus\ndas\nhund\n"), TARGET)
    with pytest.raises(ConfigError, match="for another target vocabulary"):
        read_shortlist(path, SOURCE, VocabularyTokenizer(b"house\ndog\nthe\n"))
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    with pytest.raises(DataError, match="damaged"):
        read_shortlist(path, SOURCE, TARGET)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="checksum"):
        read_shortlist(path, SOURCE, TARGET)
    path.write_bytes(content.replace(b'"checksum"', b'"remark__"'))  # as in a file without a checksum
    assert read_shortlist(path, SOURCE, TARGET).candidates.tolist() == [[0]] * SOURCE.size
    for wrong in ([[TARGET.size + 1]] * SOURCE.size, [[-1]] * SOURCE.size, [[0]]):
        write_shortlist(path, table(wrong))
        with pytest.raises(DataError, match="damaged"):
            read_shortlist(path, SOURCE, TARGET)
