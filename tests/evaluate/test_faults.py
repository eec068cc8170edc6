"""Faults of translations: empty, copied, untranslated, repeated, and exact matches."""

from __future__ import annotations

import pytest

from ziggurat.evaluate.comparison import copied, count_outputs, empty, exact, repeated, untranslated

SOURCE = ["der", "alte", "Mann", "sieht", "Anna", "."]
REFERENCE = ["the", "old", "man", "sees", "Anna", "."]


@pytest.mark.parametrize(
    ("output", "kinds"),
    [
        ("the old man sees Anna .", {"exact"}),
        ("", {"empty"}),
        ("der alte Mann sieht Anna .", {"copied", "untranslated"}),
        ("the alte Mann sieht Anna .", {"untranslated"}),  # 3 of 5 words
        ("the old man sieht Anna .", set()),
        ("Anna . . . .", set()),  # the reference has Anna too; a full stop is not a word
        (". . .", set()),
        ("the the old man sees Anna .", {"repeated"}),
        ("the old man sees Anna sees Anna .", {"repeated"}),
        ("the old man the old man .", {"repeated"}),
        ("the man the old man .", set()),
        ("a b c d a b c d", {"repeated"}),
        ("a b c d e a b c d e", set()),  # five words: too long to be intended
    ],
)
def test_kinds(output: str, kinds: set[str]) -> None:
    counts = count_outputs([REFERENCE], [[[output.split()]]], [SOURCE])
    assert {count.key for count in counts if count.systems[0].mean} == kinds
    assert all(count.lines == (((1,),) if count.key in kinds else ((),)) for count in counts)


def test_faults_that_the_reference_shares_do_not_count() -> None:
    twice = ["had", "had", "enough"]
    assert not repeated(twice, twice, [])
    assert repeated(twice, ["enough"], [])
    name = ["Anna"]
    assert not copied(name, name, name)
    assert not untranslated(name, name, name)
    assert untranslated(["Anna", "Anna"], name, ["Anna", "Anna"])  # once more than in the reference
    assert not empty([], [], ["x"])
    assert not exact([], [], [])


def test_counts_over_seeds_and_without_sources() -> None:
    reference = [["x"], ["y"], ["z"]]
    outputs = [[["x"], [], []], [["x"], ["y"], []]]
    counts = {count.key: count for count in count_outputs(reference, [outputs, [reference]], None)}
    assert sorted(counts) == ["empty", "exact", "repeated"]
    assert counts["empty"].systems[0].values == (2, 1)
    assert counts["empty"].systems[1].values == (0,)
    assert counts["empty"].lines == ((2, 3), ())
    assert counts["exact"].systems[0].mean == 1.5
