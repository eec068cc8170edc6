"""Modifiers of pairs: what each does, and that word alignments stay correct."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.marked_pairs import KEYS, MARKS, check, check_apart, marked_pair
from ziggurat.config.modifiers import TYPO_KINDS, ModifiersConfig
from ziggurat.data.modifiers import MODIFIERS, PLACEHOLDERS, SOURCE, TYPOS, Edit, EditablePair, merged, moved, next_hit

ONLY: dict[str, dict[str, Any]] = {
    "no_end_punctuation": {},
    "upper_case": {},
    "title_case": {},
    "inline": {},
    "inline tags": {"placeholders": 0.0, "noise": 0.0},
    "terms": {},
    "terms obeyed": {"replace": 0.5},
    "terms turned": {"template": "<{trg}|{src}>"},
    "prefix": {"min_words": 1},
}
"""ONLY are modifiers, with their options, that leave all words in place."""


def modified(
    name: str, pair: EditablePair, rng: Random, options: dict[str, Any] | None = None, p: float = 1.0
) -> EditablePair:
    """Apply a modifier to a copy of a pair."""
    kind = name.split()[0]
    config = ModifiersConfig.model_validate({kind: {"probability": p, **(options or {})}})
    changed = pair.copy()
    MODIFIERS[kind](changed, getattr(config, kind), rng, 0, ("en", "de"))
    return changed


def check_modifier(name: str, rng: Random) -> bool:
    """Check one random pair; return whether it was changed."""
    letters = KEYS if name in TYPOS else MARKS
    # Replacing its only character would leave nothing to recognise the word by.
    pair = marked_pair(rng, letters, shortest=2 if name in ("nearby_char", "similar_char") else 1)
    if name in TYPOS:
        changed = pair.copy()
        if (edit := TYPOS[name](pair.texts[SOURCE], rng)) is not None:
            changed.edit(SOURCE, [edit])
    elif name == "merge":
        other = marked_pair(rng, (MARKS[0][10:], MARKS[1][10:]))
        pair = marked_pair(rng, (MARKS[0][:10], MARKS[1][:10]))
        changed = merged([pair, other])
        check(other, EditablePair(changed.texts[0], changed.texts[1], changed.links[len(pair.links) :]))
        changed.links = changed.links[: len(pair.links)]
    elif name == "noise":
        changed = modified(name, pair, rng)
        assert changed.texts[0] == changed.texts[1]
        words = changed.texts[0].split(" ")
        assert [changed.texts[0][slice(*source)] for source, _ in changed.links] == words
        assert all(source == target for source, target in changed.links)
        return True
    else:
        changed = modified(name, pair, rng, ONLY[name], p=rng.choice((0.3, 1.0)))
    check(pair, changed, letters)
    return changed.texts != pair.texts


EVERY = [*ONLY, "merge", "noise", *TYPO_KINDS]


@pytest.mark.parametrize("name", EVERY)
def test_alignments_stay_right(name: str) -> None:
    changed = sum(check_modifier(name, Random(seed)) for seed in range(300))
    assert changed > 20, "the check saw too few changed pairs"


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_alignments_stay_right_in_a_million_pairs(name: str) -> None:
    rng = Random(name)
    changed = sum(check_modifier(name, rng) for _ in range(1_000_000))
    assert changed > 100_000


@pytest.mark.parametrize("typos", [False, True])
def test_alignments_stay_right_through_several_modifiers(typos: bool) -> None:
    """Modifiers run in the order of training, typing errors in any order, since one may change two merged words."""
    order, letters = list(MODIFIERS), KEYS if typos else MARKS
    for seed in range(300):
        rng = Random(seed)
        pair = changed = marked_pair(rng, letters)
        for name in rng.sample(TYPO_KINDS, len(TYPO_KINDS)) if typos else ():
            if (edit := TYPOS[name](changed.texts[SOURCE], rng)) is not None:
                changed = changed.copy()
                changed.edit(SOURCE, [edit])
        for name in sorted(rng.sample(list(ONLY), 4), key=lambda name: order.index(name.split()[0])):
            if not typos or order.index(name.split()[0]) > order.index("typos"):
                changed = modified(name, changed, rng, ONLY[name], p=rng.choice((0.3, 1.0)))
                if name != "prefix":  # it comes last, and may copy and link a part of a word such as `<x/>`
                    check_apart(changed)
        if not typos:  # typing errors may leave nothing to recognise a word by
            check(pair, changed)


def test_words_without_characters_have_no_links() -> None:
    """A store has such links for a no-break space between blanks; a hint after one would start before it."""
    pair = EditablePair("a b", "A N B", [((0, 1), (0, 1)), ((2, 1), (2, 3)), ((2, 3), (4, 5))])
    assert modified("terms", pair, Random(1), {"template": "{src}<{trg}>"}).texts[0] == "a<A> b<B>"


def test_edits_out_of_order_are_refused() -> None:
    for edits in ([Edit(2, 3, ""), Edit(0, 1, "")], [Edit(0, 2, ""), Edit(1, 3, "")], [Edit(2, 1, "")]):
        with pytest.raises(ValueError, match="not in ascending order"):
            EditablePair("abcd", "").edit(SOURCE, edits)


@given(st.text("ab ", max_size=12), st.data())
def test_a_part_of_a_text_keeps_its_characters(text: str, data: st.DataObject) -> None:
    """The reference attaches a number to each character."""
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edits = [
        Edit(a, b, data.draw(st.text("XY", max_size=2))) for a, b in zip(borders[::2], borders[1::2], strict=False)
    ]
    numbered: list[tuple[str, int | None]] = [(c, n) for n, c in enumerate(text)]
    for edit in reversed(edits):
        inside = list(range(edit.first, edit.end))
        numbered[edit.first : edit.end] = [(c, inside[0] if inside else None) for c in edit.text]
    pair = EditablePair(text, "")
    spans = pair.edit(SOURCE, edits)
    assert pair.texts[SOURCE] == "".join(c for c, _ in numbered)
    assert [pair.texts[SOURCE][slice(*span)] for span in spans] == [edit.text for edit in edits]
    if text:
        first = data.draw(st.integers(0, len(text) - 1))
        end = data.draw(st.integers(first + 1, len(text)))
        inner = [e for e in edits if not (e.end <= first or e.first >= end)]
        whole = {n for e in inner for n in range(e.first, e.end)} | set(range(first, end))
        left = [place for place, (_, n) in enumerate(numbered) if n in whole]
        begin, stop = moved((first, end), edits)
        assert stop - begin >= len(left)
        if left:
            assert (begin, stop) == (left[0], left[-1] + 1) or any(e.first == e.end for e in inner)


SENTENCE = "Der Hund, »groß« und müde, schläft."
TRANSLATION = "The dog, “big” and tired, sleeps."


@pytest.mark.parametrize(
    ("name", "options", "source", "target"),
    [
        ("upper_case", {}, "DER HUND, »GROSS« UND MÜDE, SCHLÄFT.", "THE DOG, “BIG” AND TIRED, SLEEPS."),
        ("title_case", {}, "Der Hund, »Groß« Und Müde, Schläft.", "The Dog, “Big” And Tired, Sleeps."),
        ("no_end_punctuation", {}, SENTENCE[:-1], TRANSLATION[:-1]),
        (
            "terms",
            {},
            "Der __source__ Hund __target__ dog __done__, »__source__ groß __target__ big __done__« und müde, schläft.",
            TRANSLATION,
        ),
        ("terms", {"template": "{src}<{trg}>"}, "Der Hund<dog>, »groß<big>« und müde, schläft.", TRANSLATION),
    ],
)
def test_effects_of_modifiers(name: str, options: dict[str, Any], source: str, target: str) -> None:
    links = [((4, 8), (4, 7)), ((11, 15), (10, 13))]
    assert [SENTENCE[slice(*s)] for s, _ in links] == ["Hund", "groß"]
    pair = EditablePair(SENTENCE, TRANSLATION, links)
    assert modified(name, pair, Random(1), options).texts == [source, target]


def test_words_that_begin_with_a_digit_get_no_capital() -> None:
    pair = modified("title_case", EditablePair("in den (1980er) jahren, o2 x", "the 1980s, »3rd« b2b"), Random(1))
    assert pair.texts == ["In Den (1980er) Jahren, O2 X", "The 1980s, »3rd« B2b"]


def test_capitals_of_turkish() -> None:
    config = ModifiersConfig.model_validate({"upper_case": {"probability": 1.0}})
    pair = EditablePair("ılık bir iş", "nice big city")
    MODIFIERS["upper_case"](pair, config.upper_case, Random(1), 0, ("tr", "en"))
    assert pair.texts == ["ILIK BİR İŞ", "NICE BIG CITY"]


@pytest.mark.parametrize(
    ("source", "target", "cut"),
    [
        ("你好。", "Hello.", True),
        ("Τι είναι;", "What is it?", True),
        ("Halt!", "Stop.", False),
        ("Na ja...", "Well...", False),
        ("Nein", "No.", False),
        (".", ".", False),
        ("Was ?", "What ?", False),
    ],
)
def test_only_a_common_ending_is_cut(source: str, target: str, cut: bool) -> None:
    found = modified("no_end_punctuation", EditablePair(source, target), Random(1)).texts
    assert found == ([source[:-1], target[:-1]] if cut else [source, target])


@pytest.mark.parametrize("kind", TYPO_KINDS)
def test_typing_errors_are_small(kind: str) -> None:
    text, grown = "The aarrow book, on 23 tables", {"missing_char": -1, "skipped_space": -1, "unichar": -1}
    grown |= {"extra_char": 1, "random_space": 1, "repeated_char": 1}
    seen = set()
    for seed in range(40):
        edit = TYPOS[kind](text, Random(seed))
        if edit is None:
            continue
        pair = EditablePair(text, "")
        pair.edit(SOURCE, [edit])
        assert len(pair.texts[0]) - len(text) == grown.get(kind, 0)
        assert pair.texts[0] != text
        seen.add(pair.texts[0])
        if kind in ("char_swap", "skipped_space", "random_space"):
            letters = sorted(pair.texts[0].replace(" ", ""))
            assert letters == sorted(text.replace(" ", ""))
    assert len(seen) > 2


@given(st.text(max_size=30), st.randoms(use_true_random=False), st.sampled_from(TYPO_KINDS))
def test_typing_errors_take_any_text(text: str, rng: Random, kind: str) -> None:
    if (edit := TYPOS[kind](text, rng)) is not None:
        assert 0 <= edit.first <= edit.end <= len(text)
        assert text[edit.first : edit.end] != edit.text


@given(st.text(max_size=30), st.text(max_size=30), st.randoms(use_true_random=False))
def test_modifiers_take_any_text(source: str, target: str, rng: Random) -> None:
    for name in ("no_end_punctuation", "upper_case", "title_case", "typos", "inline", "terms", "prefix"):
        modified(name, EditablePair(source, target), rng)


def test_the_share_of_words_is_their_probability() -> None:
    """The number of skipped words is geometric, so n words contain a hit as often as n draws do."""
    rng = Random(3)
    numbers = [next_hit(rng.random(), 0.05) for _ in range(20_000)]
    for words in (1, 5, 20):
        share = sum(number < words for number in numbers) / len(numbers)
        assert abs(share - (1 - 0.95**words)) < 0.015
    pair = EditablePair(
        "a b c d e f g h i j", "A B C D E F G H I J", [((n, n + 1), (n, n + 1)) for n in range(0, 20, 2)]
    )
    hinted = 0
    for seed in range(2000):
        generator = Random(seed)
        config = ModifiersConfig.model_validate({"terms": {"probability": 0.2}})
        changed = pair.copy()
        MODIFIERS["terms"](changed, config.terms, generator, next_hit(generator.random(), 0.2), ("en", "de"))
        hinted += changed.texts[0].count("__target__")
    assert abs(hinted / 20_000 - 0.2) < 0.012


def test_each_kind_of_typing_error_has_its_own_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()
    for kind in TYPO_KINDS:
        monkeypatch.setitem(TYPOS, kind, lambda text, rng, kind=kind: made.update([kind]))
    rng = Random(1)
    for number, kind in enumerate(TYPO_KINDS):
        wanted = {**dict.fromkeys(TYPO_KINDS, 0.0), kind: 1.0, TYPO_KINDS[number - 1]: 0.3}
        made.clear()
        for _ in range(200):
            modified("typos", EditablePair("a b", "c d"), rng, wanted)
        assert made.keys() == {kind, TYPO_KINDS[number - 1]}
        assert made[kind] == 200
        assert 30 < made[TYPO_KINDS[number - 1]] < 90


LETTERS = EditablePair("a b c d e f g h", "A B C D E F G H", [((n, n + 1), (n, n + 1)) for n in range(0, 16, 2)])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_given_share_of_hints_are_random_words(share: float) -> None:
    left = 0
    for seed in range(200):
        hinted, translation = modified("terms", LETTERS, Random(seed), {"replace": share}).texts
        true = [word for word in LETTERS.texts[1].split() if word in translation.split()]
        assert [word for word in LETTERS.texts[1].split() if f"__target__ {word} __done__" in hinted] == true
        left += len(true)
    assert abs(left / 1600 - (1 - share)) <= (0.04 if 0 < share < 1 else 0)


def test_a_word_that_is_its_own_translation_gets_no_hint() -> None:
    pair = EditablePair("in Berlin", "at Berlin", [((0, 2), (0, 2)), ((3, 9), (3, 9))])
    assert modified("terms", pair, Random(1), {"template": "{src}<{trg}>"}).texts == ["in<at> Berlin", "at Berlin"]


@pytest.mark.parametrize("weights", [(6.0, 3.0, 1.0), (0.0, 1.0, 3.0), (0.0, 0.0, 0.5)])
def test_inserted_text_has_the_given_shares_of_kinds(weights: tuple[float, float, float]) -> None:
    kinds, found = ("tags", "placeholders", "noise"), Counter[str]()
    options = dict(zip(kinds, weights, strict=True))
    for seed in range(1000):
        text = modified("inline", EditablePair("a", "A", [((0, 1), (0, 1))]), Random(seed), options).texts[1]
        added = text.removeprefix("A ")
        found["tags" if added == text else "placeholders" if added in PLACEHOLDERS else "noise"] += 1
    for kind, weight in options.items():
        share = weight / sum(weights)
        assert abs(found[kind] / 1000 - share) <= (0.05 if 0 < share < 1 else 0)


@pytest.mark.parametrize(("shortest", "longest", "most"), [(2, 5, 6), (7, 9, 2), (3, 3, 1)])
def test_noise_has_the_given_number_and_lengths_of_words(shortest: int, longest: int, most: int) -> None:
    options = {"min_word_length": shortest, "max_word_length": longest, "max_words": most}
    found = [modified("noise", LETTERS, Random(seed), options).texts[0].split(" ") for seed in range(100)]
    assert {len(word) for words in found for word in words} == set(range(shortest, longest + 1))
    assert {len(words) for words in found} == set(range(1, most + 1))


@pytest.mark.parametrize(("least", "most"), [(2, 5), (1, 1), (6, 8)])
def test_a_prefix_has_the_requested_number_of_words(least: int, most: int) -> None:
    options = {"min_words": least, "max_words": most, "template": "{trg}|"}
    found = [modified("prefix", LETTERS, Random(seed), options).texts[0].split("|") for seed in range(60)]
    assert {len(words.split()) for words, _ in found} == set(range(least, most + 1))
    short = EditablePair("a", " ".join("A" * (least - 1)))
    assert modified("prefix", short, Random(1), options).texts == short.texts
