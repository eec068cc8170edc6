"""Perturbed test sets: pure functions of lines and seed, whose references a perfect system would still match."""

from __future__ import annotations

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.data.modifiers import TAGS
from ziggurat.evaluate.perturbations import PERTURBATIONS, Case, perturbed

SOURCES = [
    "Ein Hund, der z. B. bellt, rennt über die Straße.",
    "Zwei Kinder lesen ein altes Buch.",
    "",
    "Hallo! Wo ist die Brücke?",
    "42",
    "Das Haus steht am Fluss, und niemand wohnt dort; es regnet.",
]
REFERENCES = [
    "A dog that barks, say, runs over the street.",
    "Two children read an old book.",
    "",
    "Hello! Where is the bridge?",
    "42",
    "The house stands by the river, and nobody lives there; it rains.",
]
LANGUAGES = ("de", "en")


def cases(name: str, seed: int = 0) -> dict[tuple[int, ...], Case]:
    return {case.lines: case for case in perturbed(name, SOURCES, [REFERENCES], LANGUAGES, seed)}


LINES = st.lists(st.text(max_size=60).map(lambda text: text.replace("\n", " ")), min_size=1, max_size=9)


@given(st.sampled_from(sorted(PERTURBATIONS)), LINES, st.integers(0, 3))
def test_properties_that_hold_for_any_text(name: str, lines: list[str], seed: int) -> None:
    targets = [line.swapcase() for line in lines]
    found = perturbed(name, lines, [targets, lines], LANGUAGES, seed)
    again = perturbed(name, lines, [targets, lines], LANGUAGES, seed)
    assert [case.inputs for case in found] == [case.inputs for case in again]
    for case in found:
        assert case.inputs != tuple(lines[n] for n in case.lines)
        # The references are the desired output of a system whose unperturbed translations equal them.
        assert case.references[0] == case.ideal(" ".join(targets[n] for n in case.lines))
        assert case.references[1] == case.ideal(" ".join(lines[n] for n in case.lines))
    if name != "long" and len(lines) > 1:  # a line is perturbed as if it were alone, apart from its number
        alone = perturbed(name, ["", *lines[1:2]], [["", *targets[1:2]]], LANGUAGES, seed)
        assert [case.inputs for case in alone] == [case.inputs for case in found if case.lines == (1,)]


def test_capitals() -> None:
    upper, title = cases("caps"), cases("title")
    assert upper[(0,)].inputs == ("EIN HUND, DER Z. B. BELLT, RENNT ÜBER DIE STRASSE.",)
    assert upper[(1,)].references == ("TWO CHILDREN READ AN OLD BOOK.",)
    assert title[(1,)].inputs == ("Zwei Kinder Lesen Ein Altes Buch.",)
    assert (4,) not in upper  # nothing to change
    (turkish,) = perturbed("caps", ["bir ilk"], [["a first"]], ("tr", "en"), 0)
    assert (turkish.inputs, turkish.references) == (("BİR İLK",), ("A FIRST",))


def test_clauses_and_joined_lines() -> None:
    short = cases("short")
    assert short[(0,)].inputs == ("Ein Hund,", "der z. B. bellt,", "rennt über die Straße.")
    assert short[(3,)].inputs == ("Hallo!", "Wo ist die Brücke?")
    assert short[(5,)].inputs == ("Das Haus steht am Fluss,", "und niemand wohnt dort;", "es regnet.")
    assert set(short) == {(0,), (3,), (5,)}
    (few_letters,) = perturbed("short", ["Na, wir gehen; es ist 8, 9."], [["x"]], LANGUAGES, 0)
    assert few_letters.inputs == ("Na, wir gehen;", "es ist 8, 9.")
    (chinese,) = perturbed("short", ["我很高兴。今天天气非常好。"], [["x"]], ("zh", "en"), 0)
    assert chinese.inputs == ("我很高兴。", "今天天气非常好。")
    ((lines, case),) = cases("long").items()
    assert lines == (0, 1, 3, 4)  # without the blank line, two of four remain: too few
    assert case.inputs == (" ".join(SOURCES[n] for n in lines),)


@pytest.mark.parametrize("name", ["tags", "noise", "emoji", "untranslatable"])
def test_added_text_is_the_same_on_both_sides(name: str) -> None:
    added = set()
    for seed in range(20):
        for (number,), case in cases(name, seed).items():
            around = case.inputs[0].split(SOURCES[number])
            assert case.references == (REFERENCES[number].join(around),)
            added.add(tuple(around))
    assert len(added) > 8
    if name == "tags":
        assert added <= set(TAGS)
    else:
        assert {bool(before) for before, _ in added} == {True, False}  # in front and behind


def test_choices_depend_on_the_number_of_a_line() -> None:
    lines = [SOURCES[0]] * 8
    assert len({case.inputs for case in perturbed("emoji", lines, [lines], LANGUAGES, 0)}) > 1


def test_typing_errors_are_few_and_only_in_the_source() -> None:
    for seed in range(10):
        for (number,), case in cases("typos", seed).items():
            assert case.references == (REFERENCES[number],)
            assert abs(len(case.inputs[0]) - len(SOURCES[number])) <= 2
            kept = set(regex.findall(r"\w+", case.inputs[0])) & set(regex.findall(r"\w+", SOURCES[number]))
            assert len(kept) >= len(regex.findall(r"\w+", SOURCES[number])) - 4
