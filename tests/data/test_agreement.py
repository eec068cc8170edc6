"""Numbers, marks and addresses that must be on both sides of a pair."""

from __future__ import annotations

import sys
import unicodedata
from collections import Counter
from itertools import product

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.data.cleaning.filters import (
    addresses_differ,
    email_addresses,
    number_share,
    numbers,
    unmatched_marks,
    web_addresses,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Am 3. Mai 1994 um 07:30 Uhr", ["3", "1994", "7", "30"]),
        ("1.234.567 Euro, 1,234,567 euros, 1 234 567 F, 1’234’567 Fr.", 4 * ["1234567"]),
        ("1\u202f234", ["1234"]),
        ("3,5 Grad", ["3", "5"]),
        ("1,23,4", ["1", "23", "4"]),  # not a group of three
        ("12345,678", ["12345", "678"]),  # no thousands separator before it
        ("١٢٣٤ 一二 ２０", ["1234", "20"]),
        ("000 und 007", ["0", "7"]),
        ("kein Wort", []),
    ],
)
def test_numbers_are_reported_by_their_digits(text: str, found: list[str]) -> None:
    assert numbers(text) == Counter(found)


def test_digits_that_python_does_not_know_yet_are_not_numbers() -> None:
    """Check all digits in the newer Unicode tables of `regex`."""
    digits = regex.findall(r"\p{Nd}", "".join(map(chr, range(sys.maxunicode + 1))))
    values = [unicodedata.digit(digit, None) for digit in digits]
    assert numbers(" x ".join(digits)) == Counter(str(value) for value in values if value is not None)


@pytest.mark.parametrize(
    ("source", "target", "share"),
    [
        ("12 Hunde", "twelve dogs", 1.0),  # may be a word
        ("13 Hunde", "thirteen dogs", 0.0),
        ("1.500 von 300", "300 of 1,500", 1.0),
        ("1994 und 1995", "1994", 2 / 3),
        ("20 20 20", "20", 0.5),
        ("3 von 700", "3 of 800", 0.5),  # 2 of 4: the small ones agree
        ("", "", 1.0),
    ],
)
def test_share_of_numbers_in_common(source: str, target: str, share: float) -> None:
    assert number_share(source, target) == pytest.approx(share)
    assert number_share(target, source) == pytest.approx(share)


@given(st.lists(st.integers(0, 10**7)), st.lists(st.integers(0, 10**7)))
def test_share_of_numbers_by_its_definition(first: list[int], second: list[int]) -> None:
    left, alone, common = list(second), [], 0
    for number in first:
        if number in left:
            left.remove(number)
            common += 2
        else:
            alone.append(number)
    wrong = sum(number > 12 for number in alone + left)
    wanted = common / (common + wrong) if wrong else 1.0
    texts = (" x ".join(map(str, numbers_)) for numbers_ in (first, second))
    assert number_share(*texts) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("source", "target", "unmatched"),
    [
        ("Ja?", "Yes?", 0),
        ("本当?", "Really？", 0),
        ("はい。", "Yes.", 0),
        ("„So“, sagte er.", '"So," he said.', 0),
        ("Ja!", "Yes.", 2),
        ("Er sagte: ja", "He said yes", 1),
        ("Um 7.30 (Ortszeit): ...", "At 7:30 (local time): …", 0),
        ("(a", "a", 1),
        ("Wer? Wo? Wann?", "Who?", 2),
        ("Yes; it is so; we know.", "Ja, es ist so, wir wissen es.", 0),
        ("Πώς σε λένε; Νίκο;", "What is your name? Nick?", 0),
        ("Πώς σε λένε\u037e", "What is your name?", 0),
        ("Πώς σε λένε;", "What is your name.", 2),
    ],
)
def test_marks_without_a_counterpart(source: str, target: str, unmatched: int) -> None:
    assert unmatched_marks(source, target) == unmatched
    assert unmatched_marks(target, source) == unmatched


def test_marks_of_different_sorts_do_not_match() -> None:
    sorts = [".。", "?？", "!！", ":：", "…", '"“', "([）"]
    for first, second in product(sorts, sorts):
        for mark, other in product(first, second):
            assert unmatched_marks(f"ja {mark}", f"yes {other}") == (0 if first == second else 2), (mark, other)


@given(st.text("ab@.-_ é", max_size=30))
def test_email_addresses_are_those_the_plain_pattern_finds(text: str) -> None:
    plain = regex.findall(r"[\p{L}\p{N}._%+-]+@[\p{L}\p{N}-]+(?:\.[\p{L}\p{N}-]+)+", text)
    assert email_addresses(text) == Counter(found.lower() for found in plain)


def test_a_long_word_takes_no_quadratic_time() -> None:
    assert not email_addresses("a" * 1_000_000 + "@")


def test_addresses() -> None:
    text = "Siehe https://Example.org/a?b=1. Oder (www.test.de/x), Post an Max.Muster+1@mail.example.com!"
    assert web_addresses(text) == Counter(["https://example.org/a?b=1", "www.test.de/x"])
    assert email_addresses(text) == Counter(["max.muster+1@mail.example.com"])
    sources = ["www.a.de", "www.a.de", "kein", "www.a.de und www.a.de", "a.b"]
    targets = ["www.A.de", "www.b.de", "none", "www.a.de", "c"]
    assert addresses_differ(sources, targets, web_addresses, ".").tolist() == [False, True, False, True, False]
    drop = addresses_differ(["a@b.de", "x"], ["a@b.de", "c@d.de"], email_addresses, "@")
    assert drop.dtype == np.bool_
    assert drop.tolist() == [False, True]
