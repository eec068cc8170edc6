"""Near-duplicates: sketches compared with exact similarities, the table with a plain loop."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.data.cleaning.held_out import BANDS, NearDuplicates, folded, rows_for, sketches

ROWS = rows_for(0.8)
LINES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=20)


@given(st.lists(LINES, max_size=6), st.booleans())
def test_folding_by_its_definition(texts: list[str], digits: bool) -> None:
    classes = "LMN" if digits else "LM"
    wanted = ["".join(c for c in text.casefold() if unicodedata.category(c)[0] in classes) for text in texts]
    assert folded(texts, digits=digits) == wanted


def _grams(source: str, target: str) -> set[tuple[int, str]]:
    """Return the sequences of four characters, as the module describes them."""
    found = set()
    for side, text in enumerate((source, target)):
        letters = "".join(c for c in text.casefold() if unicodedata.category(c)[0] in "LM")
        marked = f"\x02\x02\x02{letters}\x03"
        found |= {(side, marked[n : n + 4]) for n in range(len(marked) - 3)}
    return found


def _similarity(first: tuple[str, str], second: tuple[str, str]) -> float:
    one, other = _grams(*first), _grams(*second)
    return len(one & other) / len(one | other)


def test_bands_agree_as_often_as_the_similarity_predicts() -> None:
    """The probability that bands of one row are equal is the Jaccard similarity, over many pairs of pairs."""
    generator = np.random.default_rng(0)
    letters = np.array([*"abcdefghijklmnop"])
    pairs, changed = [], []
    for _ in range(3000):
        text = generator.choice(letters, 24)
        other = text.copy()
        other[generator.permutation(24)[: int(generator.integers(1, 5))]] = generator.choice(letters)
        side = "".join(generator.choice(letters, 8))
        pairs.append(("".join(text), side))
        changed.append(("".join(other), side))
    exact = np.array([_similarity(a, b) for a, b in zip(pairs, changed, strict=True)])
    for rows in (1, 2):
        one, two = (sketches([s for s, _ in of], [t for _, t in of], rows) for of in (pairs, changed))
        assert one.shape == (3000, BANDS)
        equal = (one == two).mean(1)
        for low, high in ((0.2, 0.5), (0.5, 0.7), (0.7, 1.0)):
            chosen = (exact >= low) & (exact < high)
            assert chosen.sum() > 100
            # Five standard deviations of 8 draws each, at most.
            assert abs(equal[chosen].mean() - (exact[chosen] ** rows).mean()) < 5 * 0.5 / np.sqrt(chosen.sum())
    one, two = (sketches([s for s, _ in of], [t for _, t in of], ROWS) for of in (pairs, changed))
    common = (one == two).sum(1)[:300]
    assert (common == 1).any()
    found = [NearDuplicates(1 << 12).add(np.stack([one[n], two[n]])).tolist() for n in range(300)]
    assert found == [[False, number >= 2] for number in common.tolist()]


def test_case_digits_punctuation_and_blanks_do_not_count() -> None:
    near = NearDuplicates(1 << 16)
    first = near.add(sketches(["Am 3. Mai kam er an.", "Ein Hund."], ["He came on May 3.", "A dog."], ROWS))
    second = near.add(sketches(["am 4 mai  KAM er an", "Ein Hund."], ["he came, on may 17!", "A cat."], ROWS))
    assert first.tolist() == [False, False]
    assert second.tolist() == [True, False]
    exchanged = near.add(sketches(["He came on May 3.", "A dog."], ["Am 3. Mai kam er an.", "Ein Hund."], ROWS))
    assert exchanged.tolist() == [False, False], "source and target are distinguished"


def test_pairs_without_letters_are_never_found() -> None:
    near = NearDuplicates(1 << 16)
    assert not near.add(sketches(["1", "1", "!", "!"], ["2", "2", "?", "?"], ROWS)).any()


@pytest.mark.parametrize("similarity", [0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_half_of_the_pairs_of_the_given_similarity_are_found(similarity: float) -> None:
    rows = rows_for(similarity)

    def found(of: float, rows: int) -> float:
        """Return the probability that two of the bands are equal, by summing the binomial distribution."""
        equal = of**rows
        return sum(
            float(np.prod([(BANDS - k) / (k + 1) for k in range(n)])) * equal**n * (1 - equal) ** (BANDS - n)
            for n in range(2, BANDS + 1)
        )

    assert found(similarity, rows) >= 0.5 > found(similarity, rows + 1)
    assert found(similarity - 0.25, rows) < 0.5 * found(similarity, rows)


WORDS = st.lists(st.sampled_from(["der", "die", "Hund", "Katze", "läuft", "schläft", "weit", "12"]), max_size=6)
PAIRS = st.lists(st.tuples(WORDS.map(" ".join), WORDS.map(" ".join)), max_size=30)


@pytest.mark.slow
@given(PAIRS, st.lists(st.integers(0, 30), max_size=4), st.sampled_from([64, 1 << 14]))
def test_table_by_a_plain_loop_however_the_pairs_are_divided(
    pairs: list[tuple[str, str]], cuts: list[int], memory: int
) -> None:
    """This holds even if the table is so small that later pairs overwrite earlier ones."""
    sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
    places = memory // (2 * BANDS)
    tables = [dict[int, int]() for _ in range(BANDS)]
    wanted = []
    for source, target in pairs:
        keys = sketches([source], [target], ROWS)[0].tolist()
        common = 0
        for table, key in zip(tables, keys, strict=True) if any(keys) else ():
            mark = max(1, key >> 48)
            common += table.get(key % places) == mark
            table[key % places] = mark
        wanted.append(common >= 2)
    near, found = NearDuplicates(memory), list[bool]()
    size = near._table.nbytes
    for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), len(pairs)], strict=True):
        found += near.add(sketches(sources[first:last], targets[first:last], ROWS)).tolist()
    assert found == wanted
    assert near._table.nbytes == size <= memory


def test_text_that_is_the_same_is_always_found_and_other_text_is_not() -> None:
    generator = np.random.default_rng(1)
    letters = np.array([*"abcdefghijklmnopqrstuvwxyz"])
    texts = ["".join(generator.choice(letters, 40)) for _ in range(4000)]
    near = NearDuplicates(8 << 20)
    assert not near.add(sketches(texts, texts, ROWS)).any()
    assert near.add(sketches(texts, texts, ROWS)).all()
