"""Texts that `evaluate` is given in pieces, in another form, or with what another program left are refused or told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat

PLAIN = "the dog sleeps now\nhe came home\n"
CUT = [
    "▁the ▁dog ▁sle eps ▁now\n▁he ▁came ▁home\n",
    "the dog sle@@ eps now\nhe ca@@ me home\n",
    "the dog sle￭ eps now\nhe came￭ home\n",
]


@pytest.mark.parametrize("cut", CUT)
@pytest.mark.parametrize("which", ["hypothesis", "reference"])
@pytest.mark.parametrize("compared", [False, True])
def test_pieces_are_told(ziggurat: Ziggurat, tmp_path: Path, cut: str, which: str, compared: bool) -> None:
    files = {name: tmp_path / name for name in ("hypothesis", "reference")}
    for name, path in files.items():
        path.write_text(cut if name == which else PLAIN)
    verb = ["compare"] if compared else ["evaluate", "--hypothesis"]
    result = ziggurat(*verb, files["hypothesis"], "--reference", files["reference"], "--metrics", "chrf")
    assert result.status == 0
    warnings = [line for line in result.err.splitlines() if "subword pieces" in line]
    assert len(warnings) == 1
    assert f"{files[which]}: 2 of 2 lines" in " ".join(warnings[0].split())


def test_plain_text_is_not(ziggurat: Ziggurat, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(PLAIN)
    assert "pieces" not in ziggurat("evaluate", "--hypothesis", tmp_path / "a", "--reference", tmp_path / "a").err


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
@pytest.mark.parametrize("which", ["hypothesis", "reference"])
@pytest.mark.parametrize("compared", [False, True])
def test_other_forms_are_refused(ziggurat: Ziggurat, tmp_path: Path, form: str, which: str, compared: bool) -> None:
    files = {name: tmp_path / name for name in ("hypothesis", "reference")}
    text = OTHER_FORMS[form]
    for name, path in files.items():
        path.write_text(text if name == which else "a dog\n" * text.count("\n"))
    verb = ["compare"] if compared else ["evaluate", "--hypothesis"]
    result = ziggurat(*verb, files["hypothesis"], "--reference", files["reference"], "--metrics", "chrf")
    assert result.status != 0
    assert f"{files[which]}: is " in " ".join(result.err.split())


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
@pytest.mark.parametrize("which", ["hypothesis", "reference"])
def test_what_others_left_is_told(ziggurat: Ziggurat, tmp_path: Path, left: str, which: str) -> None:
    files = {name: tmp_path / name for name in ("hypothesis", "reference")}
    line, said = LEFT[left]
    for name, path in files.items():
        path.write_text((f"{line}\n" * 3 if name == which else "the dog\n" * 3) + "he came\n")
    found = ziggurat("evaluate", "--hypothesis", files["hypothesis"], "--reference", files["reference"])
    assert found.status == 0
    (warning,) = [one for one in " ".join(found.err.split()).split("warning: ") if one]
    assert warning.startswith(f"{files[which]}: 3 of 4 lines")
    assert said in warning


def test_normal_forms_that_differ_are_told(ziggurat: Ziggurat, tmp_path: Path) -> None:
    texts = {"nfc": "caf\u00e9\nplain\n", "nfd": "cafe\u0301\nplain\n", "plain": "cafe\nplain\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for first in texts:
        for second in texts:
            found = ziggurat("evaluate", "--hypothesis", tmp_path / first, "--reference", tmp_path / second)
            told = "1 of 2 lines (the first: 1) have" in " ".join(found.err.split())
            assert told == ("nfd" in (first, second) and first != second)


ORDINARY = ["1 | 2", "H-bomb", "{x} and {y}", '"No," he said, "never."', "[1] note", "x < y && y > z", "<b>a</b>"]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_is_scored_in_silence(ziggurat: Ziggurat, tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(f"{text}\n" * 4)
    found = ziggurat("evaluate", "--hypothesis", tmp_path / "a", "--reference", tmp_path / "a")
    assert (found.status, found.err) == (0, "")
