"""Texts given to `evaluate` in pieces, in another format, or with leftovers of another program are refused or
reported.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat
from ziggurat.cli.scored_text import check_scored
from ziggurat.system.errors import DataError

PLAIN = "the dog sleeps now\nhe came home\n"
CUT = [
    "▁the ▁dog ▁sle eps ▁now\n▁he ▁came ▁home\n",
    "the dog sle@@ eps now\nhe ca@@ me home\n",
    "the dog sle￭ eps now\nhe came￭ home\n",
]


def messages_about(text: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the notices about a file with this text."""
    check_scored("file", text.splitlines())
    return [one for one in " ".join(capsys.readouterr().err.split()).split("warning: ") if one]


@pytest.mark.parametrize("cut", CUT)
def test_pieces_are_reported(cut: str, capsys: pytest.CaptureFixture[str]) -> None:
    (warning,) = messages_about(cut, capsys)
    assert warning.startswith("file: 2 of 2 lines cut into subword pieces")


OTHER_FORMS = {
    "n-best list": "0 ||| the dog ||| -0.5\n0 ||| a dog ||| -0.7\n",
    "fairseq": "H-0\t-0.5\tthe dog\nH-1\t-0.2\the came\n",
    "all of fairseq": "S-0\tder Hund\nT-0\tthe dog\nH-0\t-0.5\tthe dog\nD-0\t-0.5\tthe dog\nP-0\t-0.1\n",
    "JSON": '{"text": "the dog"}\n{"text": "he came"}\n',
    "SGM": '<refset setid="x" srclang="any">\n<seg id="1">the dog</seg>\n',
    "XML": '\n<?xml version="1.0"?>\n<dataset>\n',
    "TMX": '<tmx version="1.4">\n<body>\n',
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_forms_are_refused(form: str) -> None:
    with pytest.raises(DataError, match=r"^file: is "):
        check_scored("file", OTHER_FORMS[form].splitlines())


@pytest.mark.parametrize("which", ["hypothesis", "reference"])
@pytest.mark.parametrize("verb", [["compare"], ["evaluate", "--hypothesis"]], ids=["compare", "evaluate"])
def test_both_verbs_look_at_both_files(ziggurat: Ziggurat, tmp_path: Path, verb: list[str], which: str) -> None:
    files = {name: tmp_path / name for name in ("hypothesis", "reference")}
    call = [*verb, files["hypothesis"], "--reference", files["reference"], "--metrics", "chrf"]
    for text in (CUT[0], OTHER_FORMS["JSON"]):
        for name, path in files.items():
            path.write_text(text if name == which else PLAIN)
        result = ziggurat(*call)
        assert (result.status == 0) == (text == CUT[0])
        assert " ".join(result.err.split()).count(f"{files[which]}: ") == 1
        assert f"{files[which]}: {'2 of 2 lines' if text == CUT[0] else 'is '}" in " ".join(result.err.split())


LEFT = {
    "entities": ("it&apos;s a dog", "entities"),
    "Moses": ("a &#91; dog &#93;", "entities"),
    "mojibake": ("cafÃ© au lait", "decoded wrongly"),
    "CSV": ('"the dog"', "quotation marks"),
    "escapes": ("the dog\\n", "escapes"),
    "tags": ("<2de> the dog", "language tag"),
    "blank": ("", "blank"),
    "tabs": ("1\tthe dog", "with tabs"),
}


@pytest.mark.parametrize("left", LEFT)
def test_leftovers_of_other_programs_are_reported(left: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, message = LEFT[left]
    (warning,) = messages_about(f"{line}\n" * 3 + "he came\n", capsys)
    assert warning.startswith("file: 3 of 4 lines")
    assert message in warning


def test_normal_forms_that_differ_are_reported(ziggurat: Ziggurat, tmp_path: Path) -> None:
    texts = {"nfc": "caf\u00e9\nplain\n", "nfd": "cafe\u0301\nplain\n", "plain": "cafe\nplain\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for first in texts:
        for second in texts:
            found = ziggurat("evaluate", "--hypothesis", tmp_path / first, "--reference", tmp_path / second)
            messages_about = "1 of 2 lines (the first: 1) have" in " ".join(found.err.split())
            assert messages_about == ("nfd" in (first, second) and first != second)


ORDINARY = [
    "the dog",
    "1 | 2",
    "H-bomb",
    "{x} and {y}",
    '"No," he said, "never."',
    "[1] note",
    "x < y && y > z",
    "<b>a</b>",
]


@pytest.mark.parametrize("text", ["the dog", *ORDINARY])
def test_ordinary_text_gets_no_notice(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert messages_about(f"{text}\n" * 4, capsys) == []
