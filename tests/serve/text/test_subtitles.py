"""Subtitles are read as players read them: no cue is lost, no line of a cue becomes empty, skips are reported."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.text.fakes import Translate, identity, permuting, swapped, upper
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Link, Options, Result, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")


def read(name: str, text: str, translate: Translate = upper) -> tuple[list[str], Result[bytes]]:
    asked: list[str] = []

    def watched(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return translate(sentences)

    return asked, run(document(text.encode(), name, SETTINGS), watched)


TIMES = "00:00:01,000 --> 00:00:02,000\n"


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (f"1\n{TIMES}The first.\n2\n{TIMES}The second.\n\n3\n{TIMES}Third.\n", ["The first.", "The second.", "Third."]),
        (f"{TIMES}The first.\n{TIMES}The second.\n", ["The first.", "The second."]),
        (f"1\n{TIMES}The first.\n\nMore of it.\n\n2\n{TIMES}Second.\n", ["The first.", "More of it.", "Second."]),
        (f"1\n{TIMES}\nThe text.\n", ["The text."]),
        (f"1\n\n{TIMES}The text.\n", ["The text."]),
        (f" 1 \n{TIMES}The text.\n\n\n2\n{TIMES}\n\n3\n{TIMES}Other.\n", ["The text.", "Other."]),
        (f"1\n{TIMES}It costs\n20\n\n2\n{TIMES}Other.\n", ["It costs\n20", "Other."]),
        (f"1\n{TIMES}A --> B here.\n", ["A --> B here."]),
        (f"1\r\n{TIMES[:-1]}\r\nThe first.\r\n2\r\n{TIMES[:-1]}\r\nMore.\r\n", ["The first.", "More."]),
    ],
)
def test_cues_of_subrip(text: str, asked: list[str]) -> None:
    found, outcome = read("a.srt", text)
    assert found == asked
    assert not outcome.notices
    assert outcome.value.decode().upper() == text.upper().replace("A --> B", "A → B")
    assert read("a.srt", text, identity)[1].value == text.encode()


@pytest.mark.parametrize(
    "times",
    [
        "00:00:01:000 --> 00:00:02:000",
        "00:00:01,0000 --> 00:00:02,0000",
        "00:00:01 --> 00:00:02",
        "0:0:1,000 --> 0:0:2,000",
        "00: 00: 01,000 --> 00: 00: 02,000",
        "00:00:01.5-->00:00:02.5",
        "1:02,5 --> 1:03,5",
        "00;00;01;10 --> 00;00;02;10",
        "\ufeff00:00:01,000 --> 00:00:02,000 X1:10 X2:20",
    ],
)
def test_times_that_players_accept(times: str) -> None:
    for text in (f"1\n{times}\nThe dog.\n2\n{times}\nThe cat.\n", f"{times}\nThe dog.\n\n{times}\nThe cat.\n"):
        asked, outcome = read("a.srt", text)
        assert asked == ["The dog.", "The cat."]
        assert not outcome.notices


@pytest.mark.parametrize("times", ["00:00:01 -> 00:00:02", "1s --> 2s", "00:01 — 00:02", "{0}{25}"])
def test_times_that_are_not_understood_are_reported(times: str) -> None:
    asked, outcome = read("a.srt", f"1\n{times}\nThe dog runs.\n")
    assert set(outcome.notices) & {"times_unread", "no_cues"} or asked == ["The dog runs."]
    assert bool(outcome.notices) == bool(outcome.notices.places)
    assert times in outcome.value.decode()


@pytest.mark.parametrize(
    ("text", "asked", "notices"),
    [
        ("WEBVTT\n\n00:01.000 --> 00:02.000\n \nhere we go\n", ["here we go"], {}),
        ("WEBVTT\n\n00:01.000 --> 00:02.000\none\n \ntwo\n", ["one", "two"], {}),
        ("WEBVTT\nKind: captions\n00:01.000 --> 00:02.000\none\n", ["one"], {}),
        ("WEBVTT\n\n00:01.000 --> 00:02.000\none\n00:02.000 --> 00:03.000\ntwo\n", ["one", "two"], {}),
        ("WEBVTT\n\nNOTE a remark\nof two\n\nid\n00:01.000 --> 00:02.000\none\n", ["one"], {}),
        ("WEBVTT\n\n00:01.000 --> 00:02.000\none\n\nlost text\n", ["one"], {"not_shown": 1}),
        ("WEBVTT\n\n1s --> 2s\none\n", ["one"], {"times_unread": 1}),
        ('WEBVTT\n\n00:01.000 --> 00:02.000\n{"a": "text"}\n', [], {"nothing_to_translate": 1, "data_cues": 1}),
        ("WEBVTT\n\n00:01.000 --> 00:02.000\ns.jpg#xywh=0,0,1,1\n", [], {"nothing_to_translate": 1, "data_cues": 1}),
        ("WEBVTT\n\n00:01.000 --> 00:02.000\none\n\n00:02.000 --> 00:03.000\n[1]\n", ["one"], {"data_cues": 1}),
    ],
)
def test_cues_of_webvtt(text: str, asked: list[str], notices: Mapping[str, int]) -> None:
    found, outcome = read("a.vtt", text)
    assert found == asked
    assert outcome.notices == notices
    assert read("a.vtt", text, identity)[1].value == text.encode()


def answers(said: str) -> Translate:
    def one(text: str) -> SentenceTranslation:
        return SentenceTranslation(said, [Link(0, len(text), 0, len(said))] if said else [])

    return lambda sentences: [one(sentence) for sentence in sentences]


@pytest.mark.parametrize("said", ["Wort", "a --> b", "a\n\nb", "", "0", "a -->", "--> b"])
@pytest.mark.parametrize("body", ["one\ntwo", "<i>one\ntwo</i>", "- one\n- two", "one\n<b>two</b>\nthree"])
def test_no_translation_ends_a_cue_or_makes_times(said: str, body: str) -> None:
    for name, head in (("a.srt", "1\n"), ("a.vtt", "WEBVTT\n\n")):
        times = TIMES if name == "a.srt" else TIMES.replace(",", ".")
        text = read(name, f"{head}{times}{body}\n\n{times}end\n", answers(said))[1].value.decode()
        cue = text.removeprefix(head + times).partition(times)[0]
        assert "-->" not in cue
        assert "\n\n" not in cue.rstrip("\n")
        assert not said.strip() or not cue.startswith("\n")


def unlinked(seed: int) -> Translate:
    """Return links like those of a model, with some words linked to nothing."""
    whole = permuting(seed, change=swapped)

    def one(sentence: str) -> SentenceTranslation:
        (found,) = whole([sentence])
        return SentenceTranslation(found.text, [link for n, link in enumerate(found.links or ()) if n % 3 != seed % 3])

    return lambda sentences: [one(sentence) for sentence in sentences]


LINES = st.lists(
    st.sampled_from(
        ("one two", "Three.", "<i>four", "five</i> six", "seven, eight", "<v Ann>nine", "<c.x>", "ten</b>")
    ),
    min_size=1,
    max_size=3,
)


@given(st.lists(LINES, min_size=1, max_size=5), st.booleans(), st.integers(0, 5), st.sampled_from(["a.srt", "a.vtt"]))
@settings(max_examples=100)
def test_any_cues_keep_their_number_and_have_no_empty_line(
    cues: list[list[str]], apart: bool, seed: int, name: str
) -> None:
    times = TIMES if name == "a.srt" else TIMES.replace(",", ".")
    text = "".join(
        f"{n}\n{times}" + "\n".join(lines) + ("\n\n" if apart else "\n") for n, lines in enumerate(cues, start=1)
    )
    text = text if name == "a.srt" else f"WEBVTT\n\n{text}"
    said = read(name, text, unlinked(seed))[1].value.decode()
    assert re.findall(r"\d+\n.*-->.*\n", said) == re.findall(r"\d+\n.*-->.*\n", text)
    bodies = re.split(r"\d+\n.*-->.*\n", said)[1:]
    for body, lines in zip(bodies, cues, strict=True):
        words = re.sub(r"<[^>]*>|\W", "", body)
        assert sorted(words.lower()) == sorted(re.sub(r"<[^>]*>|\W", "", "".join(lines)).lower())
        assert not body.startswith("\n")
        assert "\n\n" not in body.rstrip("\n")


@pytest.mark.parametrize(
    "times",
    [
        "-00:00:01,000 --> 00:00:02,000",
        "[00:00:03,000 --> 00:00:04,000]",
        "# 00:00:03,000 --> 00:00:04,000",
        "2 00:00:03,000 --> 00:00:04,000",
        "Cue 2: 00:00:03,000 --> 00:00:04,000",
        "00:00:03,000 -->\n00:00:04,000",
        "00:00:03,000\n--> 00:00:04,000",
        "00:00:03,000 ==> 00:00:04,000",
        "00:00:03,000 --&gt; 00:00:04,000",
        "00:00:03,000 00:00:04,000",
        "00:00:03,000 - 00:00:04,000",
        "(0:03 --> 0:04)",
        "00:00:03,000 » 00:00:04,000",
    ],
)
@pytest.mark.parametrize("number", ["2\n", ""])
def test_lines_of_times_are_never_text(times: str, number: str) -> None:
    text = f"1\n{TIMES}The dog.\n\n{number}{times}\nThe cat.\n"
    asked, outcome = read("a.srt", text)
    assert asked == ["The dog.", "The cat."]
    assert outcome.value.decode() == text.replace("The dog", "tHE DOG").replace("The cat", "tHE CAT")
    assert outcome.notices == ({} if times.startswith("-00") else {"times_unread": 1})


@pytest.mark.parametrize(
    "line", ["Open from 10:00 to 11:00", "10:00-11:00", "We won 3:2, 2:1 and 1:0", "a --> b", "5 -> 6"]
)
def test_text_that_mentions_times_is_text(line: str) -> None:
    asked, outcome = read("a.srt", f"1\n{TIMES}Here it is\n{line}\n")
    assert asked == [f"Here it is\n{line}"]
    assert not outcome.notices


@pytest.mark.parametrize("name", ["a.srt", "a.vtt"])
@pytest.mark.parametrize(
    ("rest", "reported"), [("Hello there", 1), ("X1:10 X2:20", 0), ("align:start line:0", 0), ("- Hello", 1)]
)
def test_text_in_the_line_of_times_is_reported(name: str, rest: str, reported: int) -> None:
    head = "1\n00:00:01.000 --> 00:00:02.000 " if name == "a.srt" else "WEBVTT\n\n00:01.000 --> 00:02.000 "
    outcome = read(name, f"{head}{rest}\nThe dog.\n")[1]
    assert outcome.notices == ({"not_shown": 1} if reported else {})
    assert rest in outcome.value.decode()


@pytest.mark.parametrize("name", ["a.srt", "a.vtt"])
@pytest.mark.parametrize(
    "body",
    [
        "<v Fred>Hi there.\n<v Mary>Hello you.",
        "Hi there.\n<i>Hello you.",
        "Hi there</i>\nHello you",
        "One\n<c.red>Two",
        "<b>One\n</b><i>Two\nThree",
        "</i>One\nTwo",
        "One\nTwo<i>",
        "<i>One.\n<b>\nTwo",
    ],
)
def test_a_line_end_next_to_an_unpaired_tag_stays(name: str, body: str) -> None:
    head = f"1\n{TIMES}" if name == "a.srt" else f"WEBVTT\n\n{TIMES.replace(',', '.')}"
    assert read(name, f"{head}{body}\n")[1].value.decode() == head + re.sub(
        r"(<[^>]*>)|([^<>]+)", lambda m: m[1] or swapped(m[2]), f"{body}\n"
    )


@pytest.mark.parametrize(
    ("body", "asked", "said"),
    [
        ("see<br/>here", ["see\nhere"], "SEE<br/>HERE"),
        ("see<br>Here", ["see\nHere"], "SEE<br>hERE"),
        ("see\\Nhere and\\hthere", ["see\nhere and there"], "SEE\\NHERE AND\\hTHERE"),
        ("one\\ntwo", ["one two"], "ONE\\nTWO"),
        ("<i>one\\Ntwo</i>", ["one\ntwo"], "<i>ONE\\NTWO</i>"),
        ("{\\an8}one\\N{\\i1}two", ["one\ntwo"], "{\\an8}ONE\\N{\\i1}TWO"),
    ],
)
def test_ends_of_lines_inside_a_line_of_subrip(body: str, asked: list[str], said: str) -> None:
    found, outcome = read("a.srt", f"1\n{TIMES}{body}\n")
    assert found == asked
    assert outcome.value.decode() == f"1\n{TIMES}{said}\n"


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ("<ruby>漢<rt>kan</rt>字<rt>ji</rt></ruby> is", "漢字 is"),
        ("<ruby>base<rt>sign</ruby> here", "base here"),
        ("<ruby.x>ba<rt.loud>one<rt>two</rt></ruby>", "ba"),
        ("one <ruby>two<rt>three <b>four</b></rt></ruby>", "one two"),
        ("one<rt>two", "onetwo"),
    ],
)
def test_signs_above_words_of_webvtt_stay(body: str, asked: str) -> None:
    found, outcome = read("a.vtt", f"WEBVTT\n\n00:01.000 --> 00:02.000\n{body}\n")
    assert "".join(found) == asked or found == ["one", "two"]
    signs = re.findall("<rt[^<]*(?:<b>four</b>)?", body)
    assert found == ["one", "two"] or all(sign in outcome.value.decode() for sign in signs)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("Kind: captions\nLanguage: en", "Kind: captions\nLanguage: de"),
        ("Language: en-GB\r", "Language: de\r"),
        ("language : en", "language : de"),
        ("Language: fr", "Language: fr"),
        ("Language: en and more", "Language: en and more"),
        ("Language: [version]", "Language: [version]"),
        ("00:00.000 --> 00:01.000\nLanguage: en", "00:00.000 --> 00:01.000\nlANGUAGE: EN"),
    ],
)
def test_the_header_of_webvtt_states_the_language_of_the_translation(head: str, said: str) -> None:
    cue = "\n\n00:01.000 --> 00:02.000\n"
    _, outcome = read("a.vtt", f"WEBVTT\n{head}{cue}Hello\n")
    assert outcome.value.decode() == f"WEBVTT\n{said}{cue}hELLO\n"
