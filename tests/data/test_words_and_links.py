"""The rule of words, the Pharaoh format, the error rate, and symmetrisation against plain loops."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.config.data import Symmetrisation
from ziggurat.data.aligner import (
    Link,
    WordRule,
    error_rate,
    format_links,
    parse_links,
    split_words,
    symmetrise,
    word_spans,
)
from ziggurat.system.errors import DataError

LINKS = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=12)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't stop, it's 3.5 m_2!", ["Don", "'", "t", "stop", ",", "it", "'", "s", "3", ".", "5", "m_2", "!"]),
        ("naïve cafe\u0301 हिन्दी", ["naïve", "cafe\u0301", "हिन्दी"]),
        ("東京へ行くABC コーヒー", ["東", "京", "へ", "行", "く", "ABC", "コー", "ヒー"]),
        ("a\u00a0b\u3000c\td", ["a", "b", "c", "d"]),
        (" ", []),
    ],
)
def test_words_end_at_white_space_and_punctuation(text: str, words: list[str]) -> None:
    assert split_words(text, "split") == words


def test_tokenised_text_is_split_only_at_blanks() -> None:
    assert split_words(" don 't\u00a0stop\t , ok ", "blanks") == ["don", "'t\u00a0stop", ",", "ok"]


@pytest.mark.slow
@given(st.text(), st.sampled_from(["split", "blanks"]))
def test_words_cover_all_but_white_space(text: str, rule: WordRule) -> None:
    spans = word_spans(text, rule)
    assert [text[first:end] for first, end in spans] == split_words(text, rule)
    covered = [place for first, end in spans for place in range(first, end)]
    assert covered == sorted(set(covered))
    left = "".join(character for place, character in enumerate(text) if place not in set(covered))
    assert not left or left.isspace()


@given(LINKS)
def test_the_format_is_read_as_it_was_written(links: set[Link]) -> None:
    line = format_links(links)
    assert parse_links(line, 5, 6, "here") == sorted(links)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("0-0 1", "not a word alignment"),
        ("0-0 -1-2", "not a word alignment"),
        ("0-0,1-1", "not a word alignment"),
        ("0:0", "not a word alignment"),
        ("٣-٣", "not a word alignment"),
        ("0-0 5-1", "source word 5, but the source has 5"),
        ("0-6", "target word 6, but the target has 6"),
        ("0-9999999999", "not a word alignment"),
    ],
)
def test_a_faulty_line_is_refused(line: str, complaint: str) -> None:
    with pytest.raises(DataError, match=r"^a\.align, line 3: .*" + complaint):
        parse_links(line, 5, 6, "a.align, line 3")


def test_the_error_rate_is_that_of_its_definition() -> None:
    # Two pairs; |A| = 4, |S| = 3, |A and S| = 2, |A and P| = 3.
    found = [[(0, 0), (1, 1), (2, 2)], [(0, 1)]]
    sure = [[(0, 0)], [(0, 1), (1, 0)]]
    possible = [[(1, 1)], []]
    score = error_rate(found, sure, possible)
    assert score == pytest.approx((1 - 5 / 7, 3 / 4, 2 / 3))
    assert error_rate(sure, sure, [[], []]).error_rate == 0


def plain_grow_diag(e2f: set[Link], f2e: set[Link], final: str) -> set[Link]:
    """Koehn et al. 2005 as its authors describe it: loops over all cells until nothing changes."""
    rows, columns = range(5), range(6)
    alignment = e2f & f2e
    union = e2f | f2e

    def aligned(source: int | None = None, target: int | None = None) -> bool:
        return any(source == s or target == t for s, t in alignment)

    changed = True
    while changed:
        changed = False
        for s, t in product(rows, columns):
            if (s, t) not in alignment:
                continue
            for ds, dt in ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)):
                new = s + ds, t + dt
                free = not aligned(source=new[0]) or not aligned(target=new[1])
                if free and new in union and new not in alignment:
                    alignment = alignment | {new}
                    changed = True
    for directional in (e2f, f2e) if final else ():
        for s, t in product(rows, columns):
            unlinked = [not aligned(source=s), not aligned(target=t)]
            if (s, t) in directional and (all(unlinked) if final == "and" else any(unlinked)):
                alignment = alignment | {(s, t)}
    return alignment


@given(LINKS, LINKS)
def test_symmetrisation_is_that_of_plain_loops(one: set[Link], other: set[Link]) -> None:
    assert symmetrise(one, other, "intersection") == one & other
    assert symmetrise(one, other, "union") == one | other
    assert symmetrise(one, other, "grow-diag") == plain_grow_diag(one, other, "")
    assert symmetrise(one, other, "grow-diag-final") == plain_grow_diag(one, other, "or")
    assert symmetrise(one, other, "grow-diag-final-and") == plain_grow_diag(one, other, "and")
    for how in get_args(Symmetrisation):
        assert one & other <= symmetrise(one, other, how) <= one | other
