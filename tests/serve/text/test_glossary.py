"""Terms: found where a plain search finds them, and counted in translations; hard ones are kept letter by letter."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.text.fakes import Translate, permuting, steps, swapped, upper
from ziggurat.serve.text.glossary import Tally, times
from ziggurat.serve.text.markup import html
from ziggurat.serve.text.paragraphs import aligned_text
from ziggurat.serve.text.sentences import Options, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.system.errors import DataError
from ziggurat.translate.terms import Term, Terms

OPTIONS = Options(sentencex_splitter("en"))
WORDS = ["ab", "b", "Ab", "c", "ab c", "c d", "D"]


@given(st.sets(st.sampled_from(WORDS)), st.text("abcdABCD .-", max_size=30))
def test_terms_are_found_as_whole_words(sources: set[str], text: str) -> None:
    terms = Terms([Term(source, "x") for source in sources])
    expected, begin = [], 0
    while begin < len(text):  # by regular expressions, the longest at each place
        here = [
            source
            for source in sources
            if re.compile(rf"(?<!\w){source}(?!\w)", re.IGNORECASE if source.islower() else 0).match(text, begin)
        ]
        if here:
            longest = max(here, key=lambda source: (len(source), not source.islower()))
            expected.append((begin, begin + len(longest), longest))
            begin += len(longest)
        else:
            begin += 1
    assert [(f.start, f.end, f.term.source) for f in terms.found(text)] == expected


@given(st.sets(st.sampled_from([*WORDS, "İb", "日本", "日", "b日", "a-b", "-a"])), st.text("aAbİ日本 .-", max_size=20))
def test_they_are_found_whatever_they_begin_with(sources: set[str], text: str) -> None:
    found = Terms([Term(source, "x") for source in sources]).found(text)
    alone = [(each.start, each.end) for source in sources for each in Terms([Term(source, "x")]).found(text)]
    assert {(each.start, each.end) for each in found} <= set(alone)
    assert {start for start, _ in alone} <= {place for each in found for place in range(each.start, each.end)}


def test_terms_that_begin_differently_cost_nothing() -> None:
    text = "some words of a text " * 20

    def cost(number: int) -> int:
        terms = Terms([Term(f"z{'y' * n}", "x") for n in range(number)] + [Term("words", "x")])
        return steps(lambda: terms.found(text))

    assert cost(190) == cost(1)


def test_terms_in_scripts_without_blanks() -> None:
    assert [(f.start, f.end) for f in Terms([Term("翻訳", "x")]).found("機械翻訳は翻訳。")] == [(2, 4), (5, 7)]


@pytest.mark.parametrize(
    ("target", "text", "soft", "hard"),
    [
        ("Hund", "Der Hund und die Hunde, Hunden, HUND; Hundehütte", 4, 1),
        ("rotes Haus", "in roten Hauses, rotes Haus", 2, 1),
        ("Wiese", "Wiesen Wiesel Wies Wie", 1, 0),
        ("翻訳", "機械翻訳", 1, 0),
        ("C++", "C++ und C", 1, 1),
        ("an", "an and ante", 1, 1),
        # other words with the same beginning
        ("Seite", "Ich bin seit gestern hier.", 0, 0),
        ("Allee", "Das sind alle.", 0, 0),
        ("Dichte", "Ich sehe dich, Dichter.", 0, 0),
        ("Gewinn", "Das Gewitter zog ab.", 0, 0),
        ("theme", "We saw them.", 0, 0),
        ("plant", "The plan was good.", 0, 0),
        ("plane", "The plan was good.", 0, 0),
        ("Banane", "Ich esse eine banana. Banana!", 0, 0),
        ("plan", "The plant, the plane, the plans", 1, 0),
        ("them", "The theme, the thematic, them", 1, 1),
        ("Reise", "Reis reis reiste Reiser Reisen", 1, 0),
        ("Leiter", "leite leiten Leitung Leiters", 1, 0),
        ("house", "hour houses household House", 2, 0),
        ("Kind", "Kinder Kindern kindisch Kinderei", 2, 0),
        # and the word itself with another ending
        ("city", "cities, City, citizens", 2, 0),
        ("box", "boxes boxer boxing", 2, 0),
        ("rotes", "rote roter rotem rot", 3, 0),
        ("rojo", "roja rojas rojos roja", 4, 0),
        ("gatto", "gatti gatta", 2, 0),
        ("книга", "книги книгу книгой книжка", 3, 0),
        ("план", "плана плану плантация", 2, 0),
        ("서울", "서울에서 서울은 서울 서울역", 3, 1),
        ("Straße", "STRASSE Strasse Straßen Straßenbahn", 3, 0),
        # however it is written
        ("C", "C++ und C# oder C", 1, 3),
        ("naïve", "nai\u0308ve na\u00efve", 2, 1),
        ("l\u2019eau", "l'eau L\u02bceau l\u2019eau", 3, 1),
    ],
)
def test_translations_that_count_as_applied(target: str, text: str, soft: int, hard: int) -> None:
    assert times(Term("x", target), text) == soft
    assert times(Term("x", target, "hard"), text) == hard


def test_two_terms_do_not_share_a_translation() -> None:
    tally, terms = Tally(), Terms([Term("dog", "Hund"), Term("hound", "Hund")])
    tally.count(terms.found("A dog, a dog and a hound."), "Ein Hund und ein Hund.")
    assert tally.found == {Term("dog", "Hund"): 2, Term("hound", "Hund"): 1}
    assert (tally.applied[Term("dog", "Hund")], tally.applied[Term("hound", "Hund")]) == (2, 0)


@pytest.mark.parametrize("bad", [[Term("", "a")], [Term("a", " ")], [Term("a\nb", "c")], [Term("a" * 201, "b")],
                                 [Term("a", "b"), Term("a", "c")], [Term("a", "\0")]])  # fmt: skip
def test_invalid_terms(bad: list[Term]) -> None:
    with pytest.raises(DataError, match="glossary"):
        Terms(bad)


def forgetting(sentences: list[str]) -> list[SentenceTranslation]:
    """A translator that changes all words, including terms, without an alignment."""
    return [SentenceTranslation(" ".join("yy" for _ in sentence.split())) for sentence in sentences]


TEXTS = st.lists(st.sampled_from(["dog", "Dog", "house", "{0}", "runs", "(dog)", "A", "big."]), max_size=9).map(
    " ".join
)
TRANSLATORS = [upper, permuting(3), permuting(4, change=swapped), forgetting]


@settings(max_examples=200)
@given(TEXTS, st.sampled_from(TRANSLATORS))
def test_hard_terms_come_out_letter_by_letter(text: str, translate: Translate) -> None:
    terms = Terms([Term("dog", "Straßen-Köter", "hard"), Term("big", "Ü", "hard")])
    tally = Tally()
    outcome = run(aligned_text(text, replace(OPTIONS, terms=terms, tally=tally)), translate)
    said = outcome.value.text
    for term in terms.terms:
        assert said.count(term.target) == len(re.findall(rf"(?<!\w){term.source}(?!\w)", text, re.IGNORECASE))
        assert tally.found[term] == tally.applied[term]
    assert said.count("{0}") == text.count("{0}")
    for link in outcome.value.links:
        assert 0 <= link.source_start <= link.source_end <= len(text)
        assert 0 <= link.target_start < link.target_end <= len(said)
    for link in outcome.value.links:
        if said[link.target_start : link.target_end] == "Straßen-Köter":
            assert text[link.source_start : link.source_end].lower() == "dog"


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(["<b>", "</b>", "dog", " ", "house", "big dog", "<i>do", "g</i>"]), max_size=8).map(
        "".join
    ),
    st.sampled_from(TRANSLATORS),
)
def test_hard_terms_in_markup(text: str, translate: Translate) -> None:
    tally = Tally()
    options = replace(OPTIONS, terms=Terms([Term("dog", "Köter", "hard")]), tally=tally)
    said = run(html(text, options), translate).value
    assert sorted(re.findall("<[^>]*>", said)) == sorted(re.findall("<[^>]*>", text))
    assert tally.applied == tally.found
    assert len(re.findall("K(?:<[^>]*>)*ö(?:<[^>]*>)*t(?:<[^>]*>)*e(?:<[^>]*>)*r", said)) == tally.found.total()


def test_a_translation_that_already_has_the_term_is_kept() -> None:
    def knows(sentences: list[str]) -> list[SentenceTranslation]:
        assert sentences == ["The dog runs."]
        return [SentenceTranslation("Der Köter rennt.")]

    terms = Terms([Term("dog", "Köter", "hard")])
    assert run(aligned_text("The dog runs.", replace(OPTIONS, terms=terms)), knows).value.text == "Der Köter rennt."
