"""Links from pieces to characters, with both kinds of tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vocabulary import SENTENCES, trained_tokenizer
from ziggurat.data.subword import Tokenizer
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.serve.text.alignment import control_pieces, piece_spans, rendered
from ziggurat.serve.text.sentences import Link
from ziggurat.translate.results import Alignment, Hypothesis, Translation

SPM = trained_tokenizer(SENTENCES, 400, ["<bt>"])
WORDS = VocabularyTokenizer(b"The\nlit@@\ntle\nhouse\ndog\n", tags=["<bt>"])


def translation(
    tokenizer: Tokenizer,
    source: str,
    target: str,
    hard: list[int],
    tag: str = "",
    soft: list[list[float]] | None = None,
) -> Translation:
    (source_ids, target_ids) = tokenizer.encode([source, target])
    tags = [tokenizer.tags[tag]] if tag else []
    pieces = tokenizer.pieces([*tags, *source_ids, tokenizer.eos])
    tokens = tokenizer.pieces(target_ids)
    alignment = Alignment(pieces, soft or [], hard)
    text = tokenizer.decode(target_ids)
    return Translation(source, [Hypothesis(text, 0.0, 0.0, tokens, [], True, alignment)])


@given(st.text(max_size=30))
@settings(max_examples=200)
def test_pieces_of_sentencepiece_cover_their_text(text: str) -> None:
    (ids,) = SPM.encode([text])
    spans = piece_spans(text, SPM.pieces(ids))
    if "\u2581" in text or "\ufdd0" in text:  # escaped on their way to pieces: no links
        return
    assert spans is not None
    # In order, and together all letters of the text.
    covered = sorted({place for start, end in spans for place in range(start, end)})
    assert {place for place, letter in enumerate(text) if not letter.isspace()} <= set(covered)
    full = [span for span in spans if span[0] < span[1]]
    assert full == sorted(full)


def test_every_letter_belongs_to_the_piece_that_spells_it() -> None:
    for sentence in SENTENCES:
        (ids,) = SPM.encode([sentence])
        pieces = SPM.pieces(ids)
        spans = piece_spans(sentence, pieces)
        assert spans is not None
        for (start, end), piece in zip(spans, pieces, strict=True):
            assert sentence[start:end] == piece.replace("\u2581", " ").strip()


def test_bytes_of_a_letter_are_that_letter() -> None:
    (ids,) = SPM.encode(["a 語 b"])
    pieces = SPM.pieces(ids)
    assert sum(piece.startswith("<0x") for piece in pieces) == 3
    spans = piece_spans("a 語 b", pieces)
    assert spans is not None
    assert [span for span, piece in zip(spans, pieces, strict=True) if piece.startswith("<0x")] == [
        (2, 3),
        (0, 0),
        (0, 0),
    ]


def test_subword_nmt_and_unknown_words() -> None:
    text = "The lit@@ tle mouse dog"  # as users of such a model write it
    (ids,) = WORDS.encode([text])
    assert WORDS.pieces(ids) == ["The", "lit@@", "tle", "<unk>", "dog"]
    assert piece_spans("The little mouse dog", WORDS.pieces(ids)) == [(0, 3), (4, 7), (7, 10), (11, 16), (17, 20)]
    assert piece_spans("The little dog", ["The", "<unk>", "<unk>"]) == [(0, 3), (4, 14), (0, 0)]
    assert piece_spans("The little dog", ["The", "house"]) is None
    assert piece_spans("The little dog", ["The", "lit@@"]) is None
    assert piece_spans("", []) == []


def test_links_survive_normalisation() -> None:
    assert piece_spans("ﬁne  Straße", ["▁fi", "n", "e", "▁stra", "s", "s", "e"]) == [
        (0, 1), (1, 2), (2, 3), (5, 9), (9, 10), (9, 10), (10, 11)
    ]  # fmt: skip
    assert piece_spans("cafe\u0301", ["▁caf", "é"]) == [(0, 3), (3, 5)]


@pytest.mark.parametrize("tokenizer", [SPM, WORDS], ids=["sentencepiece", "vocabulary"])
@pytest.mark.parametrize("tag", ["", "<bt>"])
def test_links_are_between_the_words(tokenizer: Tokenizer, tag: str) -> None:
    source = "The house"
    (ids,) = tokenizer.encode([source])
    pieces = tokenizer.pieces(ids)
    second = next(n for n, piece in enumerate(pieces) if n and (piece.startswith("\u2581") or tokenizer is WORDS))
    words = [int(number >= second) for number in range(len(pieces))]
    first = len([tag] if tag else [])
    # The target is the same text; each piece is aligned to the first piece of the other word.
    starts = [words.index(0), words.index(1)]
    hard = [first + starts[1 - word] for word in words]
    found = rendered(translation(tokenizer, source, source, hard, tag), control_pieces(tokenizer))
    assert found.links is not None
    for link in found.links:
        assert source[link.source_start] == ("h" if link.target_start < 4 else "T")


def test_source_pieces_without_a_strongest_link_are_linked_by_weight() -> None:
    soft = [[0.6, 0.3, 0.1], [0.7, 0.25, 0.05]]
    found = rendered(translation(WORDS, "The house", "dog The", [0, 0], soft=soft), control_pieces(WORDS))
    assert found.links == [Link(0, 3, 0, 3), Link(0, 3, 4, 7), Link(4, 9, 0, 3)]


def test_without_alignment_there_are_no_links() -> None:
    plain = Translation("The", [Hypothesis("dog", 0.0, 0.0, ["dog"], [], True)])
    assert rendered(plain).links is None
    assert rendered(plain).text == "dog"
    unlike = translation(WORDS, "The", "dog", [0])
    assert rendered(Translation("other", unlike.hypotheses)).links is None


def test_bytes_of_letters_side_by_side() -> None:
    pieces = ["<0xC3>", "<0xA9>", "<0xC3>", "<0xA8>"]
    assert piece_spans("éè", pieces) == [(0, 1), (0, 0), (1, 2), (0, 0)]
