"""Plain text: white space kept byte for byte, protected text, and what the translator receives."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any

import pytest
import sentencex
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.text.fakes import Translate, identity, permuting, swapped, upper
from ziggurat.serve.text.paragraphs import plain_text
from ziggurat.serve.text.sentences import Link, Options, Result, SentenceRequests, SentenceTranslation, run, together
from ziggurat.serve.text.splitting import MAX_SENTENCE, protected, sentence_spans, sentencex_splitter
from ziggurat.system.errors import ConfigError

OPTIONS = Options(sentencex_splitter("en"))


def translated(text: str, translate: Translate, options: Options = OPTIONS) -> Result[str]:
    return run(plain_text(text, options), translate)


def asked_for(text: str, options: Options = OPTIONS) -> list[str]:
    """The sentences that reach the translator in the first round."""
    seen: list[str] = []

    def watch(sentences: list[str]) -> list[SentenceTranslation]:
        seen.extend(sentences)
        return identity(sentences)

    run(plain_text(text, options), watch)
    return seen


LETTERS = ["a", "B", "ä", "語", "。", ".", "!", "?", "1", "😀", "{0}"]
BLANKS = [" ", "  ", "\n", "\r\n", "\t", "\u2028", "\xa0"]
TEXTS = st.lists(st.sampled_from([*LETTERS, *BLANKS]), max_size=60).map("".join)


@given(TEXTS)
@settings(max_examples=100)
def test_nothing_but_sentences_changes(text: str) -> None:
    assert translated(text, identity).value == text
    changed = translated(text, upper).value
    assert changed == swapped(text)  # same length, other letters: every blank and sign stays in place


def test_sentences_are_translated_once_and_without_their_white_space() -> None:
    text = "  First one.  Second one!\r\n\r\n\tFirst one.\n"
    assert asked_for(text) == ["First one.", "Second one!"]


@pytest.mark.parametrize(
    ("text", "asked", "said"),
    [
        ("so\xadme hy\xadphens", "some hyphens", "SOME HYPHENS"),
        ("wo\u200brds \ufeffhere\u2060.", "words here.", "WORDS HERE."),
        ("\xada {0} b\xad", "a {0} b", "A {0} B"),
        ("ก\u200bข", "ก\u200bข", "ก\u200bข"),  # here it divides words
        ("می\u200cخواهم", "می\u200cخواهم", "می\u200cخواهم"),  # a sign of Persian
        ("https://a.b/c\xadd x", "https://a.b/c\xadd x", "https://a.b/c\xadd X"),  # an address stays
    ],
)
def test_hidden_characters_do_not_reach_the_model(text: str, asked: str, said: str) -> None:
    """They would divide words, and a translation has other words; only unchanged text keeps them."""
    assert asked_for(text) == [asked]
    assert translated(text, identity).value == text
    assert translated(text, upper).value == said


@pytest.mark.parametrize(
    "text",
    ["😀 🎉", "→ … —", "12.5 % 3/4", "https://example.org/a?b=c", "me@example.org", "{0} %s", "", " \n ", "👍🏽👩‍👩‍👧"],
)
def test_text_without_words_is_not_translated(text: str) -> None:
    assert asked_for(text) == []
    assert translated(text, upper).value == text


ITEMS = [
    *("{0}", "{{name}}", "%s", "%(count)d", "%1$s", "%.2f", "$HOME", "${user}", "%{name}", "[[name]]"),
    *("%dGB", "%sth", "%dh%02dm", "%.1fMB", "%lu", "%%", "%1%", "%<name>s", "%<PRIu64>", "%HOME%", "{% if x %}"),
    *("{# a remark #}", "<%= name %>", "<% if a { %>", "{b>", "<12}", "{/if}", "{#each a as b}", "{$x|date:'Y'}"),
    *("%Y", "%-H", "%-d", "%v", "%[1]d"),
    *("https://example.org/a_(b)?c=d", "www.example.org/x", "me.too@example.co.uk", "😀", "👩‍👩‍👧", "🇩🇪", "1️⃣"),
]


@pytest.mark.parametrize("item", ITEMS)
def test_each_kind_of_item_is_found_whole(item: str) -> None:
    text = f"See ({item}), or {item}."
    assert [text[i.start : i.end] for i in protected(text)] == [item, item]


PERCENTAGES = [
    "20%-a here",
    "20%-os",
    "%50si",
    "5 %of them",
    "50%sure",
    "my%20document",
    "%e2%80%99",
    "%GDP",
    "%of",
    "%day5",
]


@pytest.mark.parametrize("text", ["it costs $5", "{a, b", "a @ b", "© 2024 ™", "a {} b%", *PERCENTAGES])
def test_ordinary_signs_are_not_items(text: str) -> None:
    assert [text[i.start : i.end] for i in protected(text) if text[i.start : i.end] != "{}"] == []


@given(st.lists(st.sampled_from([*ITEMS, "one", "two", "Three", "four,"]), min_size=1, max_size=8), st.integers(0, 9))
@settings(max_examples=100)
def test_items_survive_whatever_the_translator_does(parts: list[str], seed: int) -> None:
    text = " ".join(["Words", *parts])
    wanted = Counter(part for part in parts if part in ITEMS)

    def items(said: str) -> Counter[str]:
        return Counter(said[i.start : i.end] for i in protected(said))

    for aligned in (True, False):
        options = Options(OPTIONS.split, aligned)
        # Translators that keep them, that change their letters, and that drop everything but letters.
        for change in (lambda w: w, lambda w: swapped(w), lambda w: re.sub(r"[^a-zA-Z]", "", w) or "x"):
            said = translated(text, permuting(seed, aligned=aligned, change=change), options).value
            assert items(said) == wanted
            positional = [i for i in parts if i in ("%s", "%.2f", "%dGB", "%sth", "%dh%02dm", "%.1fMB", "%lu", "%-d")]
            assert [said[i.start : i.end] for i in protected(said) if i.positional] == positional


CONVERSIONS = st.tuples(
    st.sampled_from(["%d", "%s", "%i", "%u", "%5.1f", "%.2f", "%02d", "%c", "%+d", "%-8s", "%ld"]),
    st.sampled_from(["", "%%", "个", ")", "%% (", "/%d"]),
)
GLUED = st.tuples(st.sampled_from(["%d", "%s", "%02d", "%.1f", "%u"]), st.sampled_from(["GB", "s", "x%d", "th", "ms"]))
FORMATS = st.one_of(GLUED, st.lists(CONVERSIONS.map("".join), min_size=1, max_size=3)).map("".join)


@given(st.lists(FORMATS | st.sampled_from(["words", "(more", "all%%", "One."]), max_size=6), st.integers(0, 9))
def test_a_translated_format_takes_the_arguments_of_its_source(parts: list[str], seed: int) -> None:
    text = " ".join(parts)
    wanted = re.findall(r"%[-+0]?[\d.]*l?[dsiufc]", text.replace("%%", ""))
    for change in (lambda w: w, lambda w: swapped(w), lambda w: re.sub(r"[^a-zA-Z]", "", w) or "x"):
        said = translated(text, permuting(seed, change=change)).value
        assert re.findall(r"%[-+0]?[\d.]*l?[dsiufc]", said.replace("%%", "")) == wanted
        assert len(said % ((7,) * len(wanted))) >= len(parts)  # Python reads it as C does


def test_a_lost_item_is_restored_by_the_alignment_and_counted() -> None:
    def without_items(sentences: list[str]) -> list[SentenceTranslation]:
        said = {"Open {0} now.": "Jetzt öffnen.", "Open now.": "Jetzt öffnen."}
        links = [Link(5, 8, 0, 5), Link(0, 4, 6, 12), Link(8, 9, 12, 13)]
        return [SentenceTranslation(said[s], links) for s in sentences]

    outcome = translated("Open {0} now.", without_items)
    # Either "Open" or "now" must be on the wrong side of it, because there is no word between them.
    assert outcome.value in ("Jetzt {0} öffnen.", "{0} Jetzt öffnen.", "Jetzt öffnen {0}.")
    assert outcome.notices == {"protected_again": 1}

    def in_order(sentences: list[str]) -> list[SentenceTranslation]:
        return [
            SentenceTranslation("Öffne jetzt.", [Link(0, 4, 0, 5), Link(5, 8, 6, 11), Link(8, 9, 11, 12)])
            for _ in sentences
        ]

    assert translated("Open {0} now.", in_order).value == "Öffne {0} jetzt."


def test_without_alignment_segments_are_translated() -> None:
    def loses(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation(s.replace("{0}", "").upper()) for s in sentences]

    outcome = translated("open {0} now.", loses, Options(OPTIONS.split, aligned=False))
    assert outcome.value == "OPEN {0} NOW."


def test_a_stretch_without_full_stops_is_cut_between_words() -> None:
    text = "word " * 2000
    spans = sentence_spans(text, lambda whole: [whole])
    assert max(end - start for start, end in spans) <= MAX_SENTENCE
    assert all(text[start:end].startswith("word") and text[start:end].endswith("word") for start, end in spans)
    assert sum(text[start:end].count("word") for start, end in spans) == 2000


def test_no_sentence_ends_inside_an_item() -> None:
    text = "Go to www.example.org/a.B now. Then rest."
    assert asked_for(text) == ["Go to www.example.org/a.B now.", "Then rest."]
    whole = sentence_spans("ab cd", lambda text: [text[:3], text[3:]], [(1, 4)])
    assert whole == [(0, 5)]


def test_lone_surrogates_do_not_reach_the_splitter() -> None:
    assert translated("a\ud800b. Next", identity).value == "a\ud800b. Next"


@pytest.mark.parametrize("blank", ["\xa0", "\u2009", "\u202f", "\u3000", "\u2028"])
def test_wide_blanks_before_a_full_stop_do_not_stop_the_splitter(blank: str) -> None:
    """French has one before ! and ?; sentencex itself panics on them."""
    text = f"Quoi{blank}? Rien{blank}. B{blank}."
    expected = [f"Quoi{blank}?", f"Rien{blank}.", f"B{blank}."]
    assert sentencex_splitter("fr")(text) == [f"{expected[0]} ", f"{expected[1]} ", expected[2]]


def test_a_panic_of_the_splitter_leaves_a_paragraph_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panics(language: str, text: str) -> list[str]:
        raise PanicException

    monkeypatch.setattr("sentencex.segment", panics)
    sentencex_splitter.cache_clear()
    assert asked_for("One. Two.", Options(sentencex_splitter("en"))) == ["One. Two."]
    sentencex_splitter.cache_clear()


def test_a_long_paragraph_is_split_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """sentencex takes quadratic time for unclosed quotes, and blocks the interpreter meanwhile."""
    segment, given_ = sentencex.segment, list[int]()

    def watched(language: str, text: str) -> Any:
        given_.append(len(text))
        return segment(language, text)

    monkeypatch.setattr("sentencex.segment", watched)
    sentencex_splitter.cache_clear()
    split = sentencex_splitter("en")
    ordinary = "".join(f"Mr. Word no. {n} says {'so ' * (n % 9)}again! " for n in range(1500))
    assert split(ordinary) == list(segment("en", ordinary))
    for hostile in ("“a " * 20_000, "a" * 30_000, " " * 30_000, "a. " + "b" * 30_000, "a. " * 15_000):
        given_.clear()
        assert "".join(split(hostile)) == hostile
        assert max(given_) <= 10_000
        assert sum(given_) < 2 * len(hostile) + 10_000
    words = [sentence.split() for sentence in split("“word " * 20_000)]
    assert {word for each in words for word in each} == {"“word"}  # no sentence is cut
    sentencex_splitter.cache_clear()


def test_sentences_from_scripts_without_blanks_are_separated_by_blanks() -> None:
    def english(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation("One.") for _ in sentences]

    assert translated("第一句。第二句。", english, Options(sentencex_splitter("zh"))).value == "One. One."
    assert translated("第一句。第二句。", identity, Options(sentencex_splitter("zh"))).value == "第一句。第二句。"


def test_without_sentencex_there_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(ConfigError, match=r"sentencex.*ziggurat-mt\[serve\]"):
        sentencex_splitter("q-not-cached")


def test_together_gives_each_task_its_own_answers() -> None:
    def counting(name: str, rounds: int) -> SentenceRequests[list[str]]:
        said = []
        for number in range(rounds):
            answers = yield [f"{name}{number}"] * (number + 1)
            assert len(answers) == number + 1
            said.append(answers[0].text)
        return said

    sizes = []

    def translate(sentences: list[str]) -> list[SentenceTranslation]:
        sizes.append(len(sentences))
        return [SentenceTranslation(s.upper()) for s in sentences]

    assert run(together([counting("a", 2), counting("b", 0), counting("c", 3)]), translate) == [
        ["A0", "A1"],
        [],
        ["C0", "C1", "C2"],
    ]
    assert sizes == [2, 4, 3]


@pytest.mark.parametrize(
    "unit", ["{", "%", "a@", "http://a", "$a", "[[", "👍\u200d", "a.", "(", ")", "\"'", "x@a.b", "% d"]
)
def test_time_is_linear(unit: str) -> None:
    """A quadratic pattern would take minutes."""
    assert protected(unit * 50_000) is not None
    translated(unit * 3_000, identity)
