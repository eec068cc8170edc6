"""Words and pieces of a text: links between words become links between pieces, checked by a walk through them."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vocabulary import SENTENCES, trained_tokenizer
from ziggurat.config.data import RegularisationConfig
from ziggurat.data.aligner import Link, split_words
from ziggurat.data.lines import UnicodeForm, normalise
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.data.word_links import LinkMapper, PieceUnits, WordCounter, link_spans
from ziggurat.system.errors import DataError

TOKENIZER = trained_tokenizer(SENTENCES, 330, ["<bt>"])
TEXT = st.text(st.sampled_from("aeinst .,'\t\u00a0\u2581\ufdd0ü語\u0301İﬁ…3"), max_size=14)


def owners(pieces: list[str], words: list[str]) -> list[set[int]]:
    """Return the words of which each piece has a character, by walking through the pieces, byte by byte if needed."""
    # The characters of all words in order, and the word of each; text between words is ignored.
    content = [(character, number) for number, word in enumerate(words) for character in word]
    found, at, read = [], 0, b""
    for piece in pieces:
        mine: set[int] = set()
        if piece == "\u2581":
            mine = {content[at][1]} if at < len(content) else set()
        elif piece.startswith("<0x"):
            assert at < len(content)
            read += bytes([int(piece[3:5], 16)])
            mine = {content[at][1]}
            if read == content[at][0].encode():
                at, read = at + 1, b""
        else:
            for character in piece.replace("\u2581", ""):
                assert content[at][0] == character
                mine.add(content[at][1])
                at += 1
        found.append(mine)
    assert at == len(content)
    return found


def array(ids: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(ids, np.int32)


def traced(text: str, links_to: WordCounter, tokenizer: SentencePieceTokenizer) -> tuple[list[tuple[int, int]], int]:
    return links_to.units(text, normalise([text], tokenizer.unicode)[0])


@given(st.data(), st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=4), st.booleans())
def test_every_piece_of_a_word_is_linked_to_every_piece_of_the_other(
    data: st.DataObject, texts: list[str], sampled: bool
) -> None:
    words = WordCounter("split", TOKENIZER)
    sides, spans, expected = ([], []), [], []  # type: ignore[var-annotated]
    for row, text in enumerate(texts):
        pair = text, data.draw(st.sampled_from(SENTENCES)) + "語"  # the vocabulary spells it in bytes
        split = [split_words(line, "split") for line in pair]
        links: list[Link] = data.draw(
            st.lists(st.tuples(*(st.integers(0, len(side) - 1) for side in split)), max_size=5)  # type: ignore[arg-type]
        )
        ids = TOKENIZER.encode(pair)
        if sampled:
            ids = TOKENIZER.sample(pair, [row, 7], RegularisationConfig(alpha=0.5))
        tag = data.draw(st.booleans())
        of_pieces = [owners(TOKENIZER.pieces(side), side_words) for side, side_words in zip(ids, split, strict=True)]
        cells = {
            (row, t, s + tag)
            for i, j in links
            for s, t in product(range(len(ids[0])), range(len(ids[1])))
            if i in of_pieces[0][s] and j in of_pieces[1][t]
        }
        expected += sorted(cells)
        sides[0].append(array([*[TOKENIZER.tags["<bt>"]] * tag, *ids[0]]))
        sides[1].append(array(ids[1]))
        found = [traced(line, words, TOKENIZER)[0] for line in pair]
        spans.append(np.array(link_spans(links, *found), np.int32).reshape(-1, 4))
    links_found = LinkMapper(TOKENIZER, TOKENIZER).piece_links(spans, *sides)
    assert list(zip(*(part.tolist() for part in links_found), strict=True)) == expected
    counts = {key: sum(cell[:2] == key for cell in expected) for key in {cell[:2] for cell in expected}}
    assert links_found.shares().tolist() == pytest.approx([1 / counts[cell[:2]] for cell in expected])


@given(TEXT, st.sampled_from(["none", "nfc", "nfkc"]))
def test_words_and_pieces_measure_a_text_alike(text: str, form: UnicodeForm) -> None:
    tokenizer = SentencePieceTokenizer(TOKENIZER.model, form)
    spans, total = traced(text, WordCounter("split", tokenizer), tokenizer)
    units = PieceUnits(tokenizer)
    ids = array(tokenizer.encode([text])[0])
    assert units.totals([ids]).tolist() == [total]
    words = split_words(text, "split")
    if not spans:
        assert not words or form != "none"
        return
    assert len(spans) == len(words)
    assert all(0 <= first <= end <= total for first, end in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    # The spelling of a word's pieces contains the normalised word.
    begin, end = units.find([ids], np.zeros(len(spans), np.int64), np.array(spans))
    for word, first, last in zip(words, begin, end, strict=True):
        bare = [tokenizer.decode(ids[first:last].tolist()), *normalise([word], form)]
        assert bare[1].replace(" ", "") in bare[0].replace(" ", "")


def test_normalisation_that_changes_lengths_moves_the_words_behind() -> None:
    words = WordCounter("split", SentencePieceTokenizer(TOKENIZER.model, "nfkc"))
    assert words.units("ﬁn … so", "fin ... so") == ([(0, 3), (3, 6), (6, 8)], 8)
    # A mark that composes with the preceding character across a word boundary, so nothing can be checked.
    assert words.units("a\u00a0\u0301b", "a \u0301b")[1] == 3


def test_words_of_segmented_text_are_those_that_its_pieces_spell() -> None:
    tokenizer = VocabularyTokenizer(b"ho@@\nuse\nbig\n", "none", ["<bt>"])
    words = WordCounter("split", tokenizer)
    line = "big  ho@@ use , ho@@"
    assert words.count(line) == 4
    assert words.plain(line) == "big house , ho"
    assert words.rule == "blanks"
    assert words.units(line, "big ho@@ use , ho@@") == ([(0, 1), (1, 3), (3, 4), (4, 5)], 5)
    assert (words.count(""), words.units("", "")) == (0, ([], 0))
    ids = array([tokenizer.tags["<bt>"], *tokenizer.encode([line])[0]])  # the comma is unknown
    units = PieceUnits(tokenizer)
    assert units.totals([ids]).tolist() == [5]
    spans = np.array([[1, 3], [3, 4]])
    assert [side.tolist() for side in units.find([ids], np.zeros(2, np.int64), spans)] == [[2, 4], [4, 5]]


def test_an_unknown_piece_hides_the_measure() -> None:
    units = PieceUnits(TOKENIZER)
    known = TOKENIZER.encode(["The dog"])[0]
    assert units.totals([array(known), array([*known, TOKENIZER.unk])])[1] < 0
    assert units.totals([array(known)]).tolist() == [6]


def test_links_beyond_the_text_are_refused() -> None:
    ids = [array(TOKENIZER.encode(["The dog"])[0])]
    mapper = LinkMapper(TOKENIZER, TOKENIZER)
    inside = mapper.piece_links([array([0, 3, 3, 6]).reshape(1, 4)], ids, ids)
    assert len(inside.row)
    for beyond in ([0, 7, 3, 6], [0, 3, 3, 7]):
        with pytest.raises(DataError, match="do not belong to its text"):
            mapper.piece_links([array(beyond).reshape(1, 4)], ids, ids)


def test_sampled_pieces_that_spell_something_else_have_no_links() -> None:
    mapper = LinkMapper(TOKENIZER, TOKENIZER)
    ids = [array(side) for side in TOKENIZER.encode(["The dog", "A dog"])]
    other = [ids[0], array([TOKENIZER.unk])]
    links = [np.zeros((2, 4), np.int32), np.zeros((1, 4), np.int32)]
    assert list(map(len, mapper.traceable(links, (ids, ids), (ids, other)))) == [2, 0]
    assert list(map(len, mapper.traceable(links, (ids, ids), (ids, ids)))) == [2, 1]
