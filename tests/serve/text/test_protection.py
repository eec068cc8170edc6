"""Text that a user wants to keep: patterns to protect and keys to leave."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.text.fakes import permuting, swapped, upper
from ziggurat.serve.config import ServeConfig
from ziggurat.serve.text.documents.kinds import KINDS, document, document_kind
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.paragraphs import plain_text
from ziggurat.serve.text.sentences import Options, Result, run
from ziggurat.serve.text.splitting import Item, Protection, protected, sentencex_splitter
from ziggurat.system.errors import ConfigError, DataError

CATASTROPHE = r"(?:a+)+(?=b)c|(a|a)+\1\1z"
"""CATASTROPHE is a pattern whose time doubles with every letter of a text `aaa...`."""


def text_of(text: str, *patterns: str) -> str:
    options = Options(sentencex_splitter("en"), protect=Protection(patterns))
    return run(plain_text(text, options), upper).value


def outcome(name: str, text: str, *patterns: str, leave: tuple[str, ...] = ()) -> Result[bytes]:
    options = Options(sentencex_splitter("en"), protect=Protection(patterns) if patterns else None)
    return run(document(text.encode(), name, Settings(options, "en", "de", leave=leave)), upper)


@pytest.mark.parametrize(
    ("text", "patterns", "said"),
    [
        ("The Acme Cloud is here.", ["Acme Cloud"], "tHE Acme Cloud IS HERE."),
        ("See AB-123 and CD-4.", [r"\b[A-Z]{2}-\d+\b"], "sEE AB-123 AND CD-4."),
        ("One ACME, two words.", ["(?i)acme"], "oNE ACME, TWO WORDS."),
        ("Acme Cloud", ["Acme Cloud"], "Acme Cloud"),  # nothing is left to translate
        ("Acme. Acme Cloud. So it is.", [r"Acme\. Acme Cloud\."], "Acme. Acme Cloud. sO IT IS."),
        ("At http://Acme.example/Acme now.", ["Acme"], "aT http://Acme.example/Acme NOW."),
        ("%s Acme %s", ["Acme %s"], "%s Acme %s"),
        ("A blank Acme here.", [r"\s*Acme\s*"], "a BLANK Acme HERE."),
        ("Some words.", ["", "x*"], "sOME WORDS."),
        ("Both Acme and Beta.", ["Acme", "Beta"], "bOTH Acme AND Beta."),
    ],
)
def test_text_that_matches_a_pattern_survives(text: str, patterns: list[str], said: str) -> None:
    assert text_of(text, *patterns) == said


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.html", "<p>The <b>Acme <i>Cloud</i></b> is.</p>", "<p>tHE <b>Acme <i>Cloud</i></b> IS.</p>"),
        ("a.html", "<p>The <b>Acme</b> Cloud is.</p>", "<p>tHE <b>Acme</b> Cloud IS.</p>"),
        ("a.md", "The *Acme* Cloud is.\n", "tHE *Acme* Cloud IS.\n"),
        ("a.json", '{"a": "The Acme Cloud is."}', '{"a": "tHE Acme Cloud IS."}'),
        ("a.po", 'msgid "The Acme Cloud"\nmsgstr ""\n', '#, fuzzy\nmsgid "The Acme Cloud"\nmsgstr "tHE Acme Cloud"\n'),
    ],
)
def test_only_text_for_people_is_searched(name: str, text: str, said: str) -> None:
    assert outcome(name, text, r"Acme\s+Cloud").value.decode() == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("%d%% done", "%d%% DONE"),
        ("Done: %d%%", "dONE: %d%%"),
        ("Open {scheme}{host} now", "oPEN {scheme}{host} NOW"),
        ("in {{a}}{{b}}{{c}}", "IN {{a}}{{b}}{{c}}"),
        ("pre{a}{b}post", "PRE{a}{b}POST"),
        ("got %s%s of it", "GOT %s%s OF IT"),
    ],
)
def test_adjacent_matches_stay_together(text: str, said: str) -> None:
    assert outcome("a.txt", text).value.decode() == said
    assert outcome("a.txt", text).notices["protected_again"]


@given(st.lists(st.sampled_from(["Acme", "X-1", "words", "more", "%s", "{0}", "Acme2"]), min_size=1, max_size=8))
def test_each_match_survives_as_often_as_it_occurred(words: list[str]) -> None:
    text, options = " ".join(words), Options(None, protect=Protection([r"\bAcme\b", r"X-\d"]))
    said = run(plain_text(text, options), permuting(5, change=lambda word: "" if word == "Acme" else swapped(word)))
    assert Counter(regex.findall(r"\bAcme\b|X-1", said.value)) == Counter(regex.findall(r"\bAcme\b|X-1", text))


def test_overlapping_stretches_are_one() -> None:
    items = protected("at http://a.b/c and {x} y", Protection([r"c and", r"\{x\} y"]))
    assert items == [Item(3, 19), Item(20, 25)]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(unclosed", "cannot be read: missing )"),
        ("a{3,1}", "cannot be read"),
        (r"\p{Nonsense}", "cannot be read"),
        ("(?:" * 20 + "a" + ")+" * 20, "6 repeated groups"),
        ("(?:(?:(?:a{1000}){1000}){1000})", "smaller counts"),
        ("a{1000000}", "smaller counts"),
        ("(?:[(]a{200}){1,200}", "smaller counts"),
        ("(?:[)x]{99}){0,999}", "smaller counts"),
        ("a" * 301, "300 characters"),
        ("(?R)", "calls itself"),
        ("(a(?1)?)", "calls itself"),
        ("(?P<x>a)(?&x)", "calls itself"),
    ],
)
def test_an_invalid_pattern_is_named(pattern: str, said: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError) as refused:
        Protection(["good", pattern])
    assert said in str(refused.value)
    assert pattern[:20] in str(refused.value)
    assert time.process_time() - began < 2


def test_a_configuration_with_such_a_pattern_is_refused_by_its_key() -> None:
    assert ServeConfig.model_validate({"protect": ["Acme"]}).protect == ["Acme"]
    with pytest.raises(ValueError, match="protect") as refused:
        ServeConfig.model_validate({"protect": ["("]})
    assert "missing )" in str(refused.value)


def test_a_slow_pattern_ends_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protection, "SECONDS", 0.3)
    began = time.process_time()
    with pytest.raises(DataError, match=r"more than 0\.3 seconds.*\(a\|a\)\+"):
        text_of("a" * 200 + " words", CATASTROPHE)
    assert time.process_time() - began < 10


def test_the_time_limit_covers_all_searches_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protection, "SECONDS", 0.5)
    lines = "\n".join(["a" * 16 + " words"] * 100_000)  # each search takes milliseconds
    with pytest.raises(DataError, match="patterns to protect"):
        text_of(lines, CATASTROPHE)


# Keys


@pytest.mark.parametrize(
    ("key", "left"),
    [
        ("id", {"id", "menu.id"}),
        ("menu", {"menu.id", "menu.text", "menu.deep.text"}),
        ("menu.deep", {"menu.deep.text"}),
        ("menu.*", {"menu.id", "menu.text", "menu.deep.text"}),
        ("*.text", {"menu.text", "menu.deep.text"}),
        ("te?t", {"menu.text", "menu.deep.text"}),
        ("none", set()),
    ],
)
def test_keys_of_json(key: str, left: set[str]) -> None:
    content = {"id": "a b", "menu": {"id": "a b", "text": "a b", "deep": {"text": "a b"}}}
    found = outcome("a.json", json.dumps(content), leave=(key,))
    said = json.loads(found.value)
    flat = {"id": said["id"], **{f"menu.{k}": v for k, v in said["menu"].items() if k != "deep"}}
    flat["menu.deep.text"] = said["menu"]["deep"]["text"]
    assert {path for path, value in flat.items() if value == "a b"} == left
    assert found.notices["left_by_key"] == len(left)


XLIFF = '<xliff version="1.2"><file><body><group id="g"><trans-unit id="u" resname="r"><source>Words here</source>'
XLIFF += "</trans-unit></group></body></file></xliff>"
TMX = '<tmx version="1.4"><header srclang="en"/><body><tu tuid="u"><tuv xml:lang="en"><seg>Words here</seg></tuv></tu>'
TMX += "</body></tmx>"
PO = 'msgctxt "c"\nmsgid "Words here"\nmsgstr ""\n\nmsgid "Others here"\nmsgstr ""\n'


@pytest.mark.parametrize(
    ("name", "text", "key", "place"),
    [
        ("a.xlf", XLIFF, "u", "unit u"),
        ("a.xlf", XLIFF, "r", "unit u"),
        ("a.xlf", XLIFF, "g", "unit g"),
        ("a.tmx", TMX, "u", "unit u"),
        ("a.po", PO, "c", "line 3"),
        ("a.po", PO, "Words*", "line 3"),
        ("a.xml", '<resources><string name="u">Words here</string></resources>', "u", "string u"),
        ("a.arb", '{"@@locale": "en", "u": "Words here"}', "u", "key u"),
    ],
)
def test_keys_of_other_kinds(name: str, text: str, key: str, place: str) -> None:
    assert document_kind(name).keyed
    found = outcome(name, text, leave=(key,))
    assert b"wORDS" not in found.value
    assert (found.notices["left_by_key"], found.notices.places["left_by_key"]) == (1, place)
    assert b"wORDS" in outcome(name, text, leave=("other",)).value


def test_kinds_without_keys_are_known() -> None:
    assert {kind.name for kind in KINDS if kind.keyed} == {"XLIFF", "TMX", "gettext", "JSON", "Android"}


@pytest.mark.parametrize(
    "pattern",
    [
        "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        r"\{9999999}",
        r"(?:\w{1,40}\.){1,8}\w{2,}",
        "x{,5}y{0}",
    ],
)
def test_ordinary_repetition_counts_are_accepted(pattern: str) -> None:
    Protection([pattern])
