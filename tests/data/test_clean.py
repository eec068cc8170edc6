from __future__ import annotations

import re
import unicodedata
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.config.data import FilterConfig
from ziggurat.data.cleaning import filters as clean
from ziggurat.data.cleaning.cleaner import Cleaner
from ziggurat.data.lines import UnicodeForm, is_blank, normalise
from ziggurat.system.errors import ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \t\r\n\u00a0\u3000é\u0301ﬁ"), max_size=20)


@given(st.lists(TEXT, max_size=8), st.sampled_from(["none", "nfc", "nfkc"]))
def test_normalise_equals_its_definition_and_is_idempotent(texts: list[str], form: UnicodeForm) -> None:
    """The shortcut for whole lists must agree with the plain definition, applied to one text at a time."""

    def plain(text: str) -> str:
        text = text.replace("\n", " ")
        text = text if form == "none" else unicodedata.normalize(form.upper(), text)  # type: ignore[arg-type]
        return re.sub(r"[ \t\r]+", " ", text).strip(" ")

    assert normalise(texts, form) == [plain(text) for text in texts]
    assert normalise(normalise(texts, form), form) == normalise(texts, form)


@pytest.mark.parametrize(
    "texts", [["a ", "b"], ["a", " b"], [" a", "b"], ["a", "b "], ["a  b"], ["a\tb"], ["a\rb"], [" "]]
)
def test_each_kind_of_extra_blank_is_found(texts: list[str]) -> None:
    """The shortcut looks for every kind of extra blank; each must be enough by itself."""
    assert normalise(texts, "none") == [" ".join(text.split()) for text in texts]


def test_other_white_space_is_text() -> None:
    line = "a\u00a0b\u202fc\u3000d\u2028e\x0bf\x85g"
    assert normalise([f" \t{line} \r", "x"], "nfc") == [line, "x"]
    assert normalise(["a\u00a0\u3000b"], "nfkc") == ["a b"]


@pytest.mark.parametrize(
    ("source", "target", "dropped"),
    [
        ("a", "b", False),
        ("", "b", True),
        ("a", "", True),
        ("\u00a0\u3000", "b", True),
        ("\u200b", "b", True),
        ("b", "\ufeff \u3000\u200f", True),
        ("\0", "b", False),  # `nul` counts it
        ("\u200bb", "b", False),
    ],
)
def test_empty(source: str, target: str, dropped: bool) -> None:
    assert clean.empty([source], [target]).tolist() == [dropped]


INVISIBLE = (
    "\u200b\u200c\u200d\u2060\ufeff\ufffe\u00ad\u200e\u200f\u202a\u202c\u202e\u2066\u2069\u061c\ufe00\ufe0e\ufe0f\u180b\u180e"
    "\u034f\u3164\u115f\u1160\uffa0\u2800\u17b4\u17b5\u2061\u2063\u206f\U000e0001\U000e0067\U000e007f\U000e0100\U0001d173\U0001bca0"
    " \t\u00a0\u1680\u2003\u2009\u202f\u205f\u3000\u2028\u2029\x85\x07\x1b\x7f"
)


@given(st.text(st.sampled_from(INVISIBLE), max_size=12), st.characters(categories=["L", "N", "P", "Sm", "Sc"]))
def test_invisible_text_is_blank_whatever_characters_it_has(blank: str, seen: str) -> None:
    assert is_blank(blank)
    assert clean.empty(["a", blank], [blank, "a"]).all()
    if seen not in INVISIBLE:
        assert not is_blank(blank + seen + blank)


def test_pairs_with_an_invisible_side_are_counted_as_empty() -> None:
    blank = ["\u200b", "\ufeff", "\u2060", "\u200d", "\u00ad", "\u200e", "\ufe0f", "\u034f", "\u3164", "\u2800"]
    for cleaner in (Cleaner(FilterConfig()), Cleaner.only_empty()):
        counts: Counter[str] = Counter()
        left, right, _ = cleaner.clean([*blank, "a"], [*"bcdefghijk", "b"], counts)
        assert (left, right, counts) == (["a"], ["b"], {"empty": 10})


def test_visible_characters_are_text() -> None:
    """Joiners are part of emoji and Persian words; Arabic number signs and a lone accent are visible."""
    shown = [
        "\u200d👩\u200d💻",
        "❤️",
        "می\u200cخواهم",
        "\u0600",
        "\u0301",
        "\ufffd",
        "。",
        "ㅤ한",
        "🏴\U000e0067",
        "\ufffc",
    ]
    assert not any(map(is_blank, shown))


def test_nul_and_control_characters() -> None:
    assert clean.nul(["a", "a\0", "c"], ["x", "y", "\0"]).tolist() == [False, True, True]
    sides = ["tab\tonly", "bell\x07", "ok", "nel\x85", "ls\u2028"], ["a", "b", "esc\x1b[31m", "d", "e"]
    assert clean.control_characters(*sides).tolist() == [False, True, True, True, False]


def test_tags_of_html_drop_a_pair() -> None:
    sources = ["Ein Hund", "<p>Ein Hund</p>", "a < b", "Ein Hund", "<tr> Bir köpek", "<3"]
    targets = ["a dog", "a dog", "a > b", "a<br>dog", "a dog", "love"]
    assert clean.markup(sources, targets).tolist() == [False, True, False, True, False, False]


def test_too_long_counts_characters_of_the_longer_side() -> None:
    assert clean.too_long(["äää", "äääa", "a"], ["a", "a", "aaaa"], limit=3).tolist() == [False, True, True]


@given(st.lists(st.tuples(st.text("ab \u3000", max_size=12), st.text("ab \u3000", max_size=12))), st.integers(1, 4))
def test_too_many_words_counts_words_separated_by_white_space(pairs: list[tuple[str, str]], limit: int) -> None:
    def words(text: str) -> int:
        return sum(a != " " and b == " " for a, b in pairwise(text.replace("\u3000", " ") + " ")) if text else 0

    expected = [words(source) > limit or words(target) > limit for source, target in pairs]
    sides = [source for source, _ in pairs], [target for _, target in pairs]
    assert clean.too_many_words(*sides, limit=limit).tolist() == expected


def test_length_ratio_counts_words_or_characters() -> None:
    pairs = [
        ("one two three", "a b c d e f", False),  # 2.0 in words
        ("one two three", "a b c d e f g", True),
        ("これは長い", "this is a long line of words", True),  # 5 against 28 characters
        ("これは長い文ですね", "this is long now", False),  # 9 against 16
        ("x", "y", False),
    ]
    sources, targets, expected = zip(*pairs, strict=True)
    assert clean.length_ratio(sources, targets, limit=2.0).tolist() == [*expected]
    assert clean.length_ratio(targets, sources, limit=2.0).tolist() == [*expected], "the sides are equal"


def test_wrong_script() -> None:
    latin, kana = clean.script_pattern("Latin", "k"), clean.script_pattern("Han+Hiragana+Katakana", "k")
    texts = ["plain text", "смешанный x", "123 !?", "日本のテスト"]
    filtered = clean.wrong_script(texts, texts, source_pattern=latin, target_pattern=None, share=0.5)
    assert filtered.tolist() == [False, True, False, True]
    filtered = clean.wrong_script(texts, texts, source_pattern=None, target_pattern=kana, share=0.5)
    assert filtered.tolist() == [True, True, False, False]
    with pytest.raises(ConfigError, match="k: 'Klingonese' is not a Unicode script"):
        clean.script_pattern("Klingonese", "k")


@given(st.lists(st.lists(st.integers(0, 60), max_size=30), max_size=12))
def test_hash_set_equals_a_set(blocks: list[list[int]]) -> None:
    known: set[int] = set()
    hashes = clean.HashSet()
    for block in blocks:
        # Hashes near 0, near the largest, and in between.
        as_hashes = [(value, (1 << 64) - 1 - value, value << 58)[value % 3] for value in block]
        seen = hashes.add(np.array(as_hashes, np.uint64))
        expected = []
        for value in block:
            expected.append(value in known)
            known.add(value)
        assert seen.tolist() == expected
        assert len(hashes) == len(known)


def test_looking_up_a_hash_takes_few_steps_however_many_there_are() -> None:
    hashes, generator = clean.HashSet(), np.random.default_rng(0)
    for _ in range(200):
        hashes.add(generator.integers(0, 1 << 64, 500, dtype=np.uint64))
    assert len(hashes) == 100_000
    for runs in hashes._parts:
        assert all(len(later) * 8 < len(earlier) for earlier, later in pairwise(runs))


def test_pair_hashes_keep_the_sides_apart() -> None:
    hashes = clean.pair_hashes(["a b", "a", "a b"], ["c", "b c", "c"])
    assert hashes[0] == hashes[2] != hashes[1]


def test_each_pair_is_counted_once_under_the_first_reason() -> None:
    limits = {"max_characters": 10, "max_words": 4, "max_length_ratio": 3}
    switches = dict.fromkeys(("identical", "duplicates", "control_characters", "markup"), True)
    reasons = {
        ("gut", "good"): None,
        ("", "x"): "empty",
        ("a\0", "b"): "nul",
        ("x" * 11, "y\x07"): "too_long",
        ("a", "abcd"): "length_ratio",
        ("same", "same"): "identical",
        ("bel\x07", "bell"): "control_characters",
        ("<b>f</b>", "f"): "length_ratio",
        ("<b>f</b>", "fett"): "markup",
        ("a b c d e", "a"): "too_many_words",
        ("a b c d", "a b c d e"): "too_many_words",
        ("ende", "end"): None,
    }
    counts: Counter[str] = Counter()
    pairs = [*reasons, ("gut", "good")]  # duplicates are handled elsewhere
    sources, targets = ([*side] for side in zip(*pairs, strict=True))
    left, right, kept = Cleaner(FilterConfig.model_validate(limits | switches)).clean(sources, targets, counts)
    assert (left, right) == (["gut", "ende", "gut"], ["good", "end", "good"])
    assert kept.nonzero()[0].tolist() == [0, 11, 12]
    assert counts == Counter(filter(None, reasons.values()))


def test_development_pairs_are_dropped_only_when_empty() -> None:
    counts: Counter[str] = Counter()
    sources = ["x" * 5000, "", "a\0"]
    left, _, _ = Cleaner.only_empty().clean(sources, ["y", "y", "y"], counts)
    assert left == ["x" * 5000, "a\0"]
    assert counts == {"empty": 1}


def test_filters_are_off_when_null() -> None:
    counts: Counter[str] = Counter()
    pairs = ["x" * 50_000, "a", "a"], ["y", "a", "a"]
    left, _, _ = Cleaner(FilterConfig(max_characters=None)).clean(*pairs, counts)
    assert len(left) == 3
    assert not counts
