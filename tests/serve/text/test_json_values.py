"""JSON values: those that only programs read stay; half a character is refused with its key."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.text.fakes import identity, upper
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Options, Result, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.system.errors import DataError

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")


def translated(content: object, name: str = "a.json") -> Result[bytes]:
    return run(document(json.dumps(content).encode(), name, SETTINGS), upper)


FOR_PROGRAMS = [
    *(
        "/usr/local/bin",
        "./a/b",
        "../x",
        "~/.bashrc",
        "C:\\Users\\x",
        "images/logo.png",
        "icon-2x.png",
        "src/main/app.py",
    ),
    *(
        "menu.title",
        "app.menu.file.open",
        "someKeyName",
        "some_key",
        "SOME_KEY",
        "_x_y",
        "btn--large",
        "block__el--mod",
    ),
    *("btn btn-primary", "fa fa-home", "col col-md-6 col-lg", "#fff 10px solid", "#fff", "10px", "rgba(0, 0, 0, 0.5)"),
    *("1px solid #ccc", "margin: 1px; color: red", "color: #fff;", "550e8400-e29b-41d4-a716-446655440000"),
    *(
        "d41d8cd98f00b204e9800998ecf8427e",
        "iVBORw0KGgoAAAANSUhEUgAAAAUA",
        "aGVsbG8gd29ybGQ=",
        "data:image/png;base64,AAAA",
    ),
    *("2020-01-01T00:00:00Z", "2020-01-01T10:00:00.5+02:00", "P3DT4H", "PT15M", "YYYY-MM-DD", "dd/MM/yyyy", "HH:mm"),
    *("text/html", "application/vnd.api+json", "v1.2.3-beta.1", "1.0.0-rc1", "en-US", "zh-Hans", "zh_Hant_TW"),
]
FOR_PEOPLE = [
    *(
        "Hello",
        "Hello world.",
        "and/or",
        "he/she",
        "/month",
        "well-known",
        "sign-in",
        "state-of-the-art",
        "log-in log-out",
    ),
    *("e.g.", "a.m", "U.S.A", "file(s)", "50% left", "10px margin around", "Note: do this; then that", "fa-home", "OK"),
    *("Mm, hmm", "JavaScript", "GitHub", "Saved.Reload", "Yes/No", "I", "Price: 10px", "Wait--what", "decade", "No.1"),
    *("Donaudampfschifffahrtsgesellschaft", "{{a}} b", "%s files", "größer_als kleiner", "some_key is missing"),
]


@pytest.mark.parametrize("value", FOR_PROGRAMS)
def test_values_for_programs_stay_and_are_counted(value: str) -> None:
    outcome = translated({"text": "Words", "menu": {"other": [value]}})
    assert json.loads(outcome.value) == {"text": "wORDS", "menu": {"other": [value]}}
    assert outcome.notices == {"for_programs": 1}
    assert outcome.notices.places["for_programs"] == "key menu.other"


@pytest.mark.parametrize("value", FOR_PEOPLE)
def test_values_for_people_are_translated(value: str) -> None:
    outcome = translated({"menu": value})
    assert json.loads(outcome.value)["menu"] != value
    assert "for_programs" not in outcome.notices


@given(st.lists(st.from_regex(r"\A[A-Z]?[a-z]{1,12}\Z"), min_size=1, max_size=6), st.sampled_from(["", ".", "!", ":"]))
def test_plain_words_are_for_people(words: list[str], end: str) -> None:
    outcome = translated({"a": " ".join(words) + end})
    assert "for_programs" not in outcome.notices


def test_files_of_known_shape_determine_what_is_text() -> None:
    outcome = translated({"@@locale": "en", "title": "some_key", "@title": {"type": "text"}}, "a.arb")
    assert json.loads(outcome.value)["title"] == "SOME_KEY"


@pytest.mark.parametrize(
    "part",
    [
        "a",
        "aA",
        "a_",
        "a.",
        "a-",
        "--",
        "/a",
        "1px ",
        "a:1px;",
        "0",
        "AAAA",
        "yy/",
        "#fff ",
        "ab ab-",
        "rgb(1",
        " ",
        "P1D",
    ],
)
def test_no_value_takes_more_than_linear_time(part: str) -> None:
    def seconds(times: int) -> float:
        content = json.dumps({"a": part * times}).encode()
        begin = time.process_time()
        run(document(content, "a.json", SETTINGS), identity)
        return time.process_time() - begin

    assert seconds(40_000) < 12 * seconds(10_000) + 0.5


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ('{"a": "bad \\ud83d x"}', "`a`"),
        ('{"menu": {"title": ["fine", "\\uDE00"]}}', "`menu.title.1`"),
        ('{"fine": "\\ud83d\\ude00", "b": "\\ude00\\ud83d"}', "`b`"),
        ('{"a": {"key\\ud83d": 1}}', "`a.key"),
        ('["\\ud83d\\ud83d\\ude00"]', "`0`"),
        ('"\\udc00"', "its text"),
        ('{"a\\nb": "\\uD800"}', "`a\\nb`"),
    ],
)
def test_half_a_character_is_refused_with_its_key(content: str, key: str) -> None:
    with pytest.raises(DataError, match=rf"a\.json: {re.escape(key)}.*half of a character"):
        run(document(content.encode(), "a.json", SETTINGS), identity)


def test_whole_characters_of_two_halves_are_read() -> None:
    assert json.loads(run(document(b'{"a": "So \\ud83d\\ude00"}', "a.json", SETTINGS), upper).value) == {"a": "sO 😀"}
