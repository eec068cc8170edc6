"""Vocabulary files: the lines of fairseq's dictionaries, of subword-nmt's lists and of plain ones, by one parser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.data.vocabulary import VocabularyTokenizer, listing, read_listing


@pytest.mark.parametrize(
    ("line", "token"),
    [
        ("the 9", "the"),
        ("the", "the"),
        ("the\t-3.25", "the"),
        ("the 9\r", "the"),
        ("the  9", "the"),
        (" the 9 ", "the"),
        ("a b 9", "a b"),
        ("a b", "a"),
        ("5 5", "5"),
        ("the -1", "the"),
        ("the 1 #fairseq:overwrite", "the"),
        ("#fairseq:overwrite 1", "#fairseq:overwrite"),
        ("\u00a0 3", "\u00a0"),
        ("\u3000", "\u3000"),
        ("a\u2028b 3", "a\u2028b"),
    ],
)
def test_the_token_of_a_line(line: str, token: str) -> None:
    assert [one.token for one in read_listing(line.encode())] == [token]
    assert VocabularyTokenizer(f"{line}\nx 1\n".encode()).pieces([0, 1]) == [token, "x"]


def test_a_token_that_replaces_another_is_one_token() -> None:
    content = b"the 1\ns 1\nthe 3 #fairseq:overwrite\n"
    assert [(one.line, one.token, one.replaces) for one in read_listing(content)][2] == (3, "the", True)
    assert VocabularyTokenizer(content).size == 2 + 4


TOKENS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), min_size=1).filter(
    lambda token: token == token.strip(" ") and not token.startswith("\ufeff")
)


@given(st.lists(TOKENS, unique=True, min_size=1))
def test_written_lists_are_read_back(tokens: list[str]) -> None:
    assert [one.token for one in read_listing(listing(tokens))] == tokens
    tokenizer = VocabularyTokenizer(listing(tokens))
    assert VocabularyTokenizer(tokenizer.content()).pieces(range(tokenizer.size)) == tokenizer.pieces(
        range(tokenizer.size)
    )
