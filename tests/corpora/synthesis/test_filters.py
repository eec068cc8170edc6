"""Lines and pairs that the filters drop, on cases counted by hand."""

from __future__ import annotations

import pytest

from ziggurat.corpora.synthesis.lines import MAX_CHARACTERS, PairFilter, readable


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"Ein Haus.", ("Ein Haus.", None)),
        (b"  Ein\t Haus. \r", ("Ein Haus.", None)),
        ("a\u2028b\u00a0c".encode(), ("a\u2028b\u00a0c", None)),  # neither line ends nor blanks: they stay
        (b"</s> <bt> <0x41>", ("</s> <bt> <0x41>", None)),
        (b"", ("", "empty")),
        (b" \t\r", ("", "empty")),
        ("\u3000\u00a0".encode(), ("", "empty")),
        (b"a\0b", ("", "nul")),
        (b"\xff\xfea\0", ("", "encoding")),
        (b"\xed\xa0\x80", ("", "encoding")),  # a surrogate
        (b"x" * MAX_CHARACTERS, ("x" * MAX_CHARACTERS, None)),
        (b"x" * (MAX_CHARACTERS + 1), ("", "too_long")),
        (None, ("", "too_long")),
    ],
)
def test_a_line_is_text_or_dropped_for_a_reason(raw: bytes | None, expected: tuple[str, str | None]) -> None:
    assert readable(raw) == expected


def test_only_a_files_first_line_loses_a_byte_order_mark() -> None:
    assert readable("\ufeffa".encode(), first_of_file=True) == ("a", None)
    assert readable("\ufeffa".encode()) == ("\ufeffa", None)


@pytest.mark.parametrize(
    ("text", "translation", "pieces", "expected"),
    [
        ("a b", "c d", (2, 3), None),  # 3 <= 1.5 * 2
        ("a b", "c d", (3, 2), None),
        ("a b", "c d", (4, 6), None),
        ("a b", "c d", (2, 4), "ratio"),
        ("a b", "c d", (4, 2), "ratio"),
        ("a b", "c d", (10, 10), None),
        ("a b", "c d", (10, 11), "too_long"),
        ("a b", "c d", (11, 10), "too_long"),
        ("a b", "c d", (11, 2), "too_long"),
        ("a b", "a b", (2, 2), "copy"),
        ("a b", "A b", (2, 2), None),
        ("a b", "", (2, 0), "empty"),
        ("a b", "\u3000", (2, 1), "empty"),
    ],
)
def test_a_pair_is_dropped_for_the_first_reason(
    text: str, translation: str, pieces: tuple[int, int], expected: str | None
) -> None:
    assert PairFilter(max_pieces=10, max_ratio=1.5, ratio_slack=0).reason(text, translation, *pieces) == expected


@pytest.mark.parametrize(("pieces", "dropped"), [((4, 11), False), ((11, 4), False), ((4, 12), True), ((40, 66), True)])
def test_the_ratio_of_short_sentences_has_slack(pieces: tuple[int, int], dropped: bool) -> None:
    """11 = 1.5 * 4 + 5."""
    assert (PairFilter().reason("a b", "c d", *pieces) == "ratio") == dropped
