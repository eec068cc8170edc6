"""`translate --document`: a document in and a document out, with the verb's engine."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat
from tests.serve.text.files import docx, members, odt
from ziggurat.serve.text.alignment import control_pieces, rendered
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Options, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.translate.translator import load_translator

SHORT = ["max_length.limit=6", "beam_size=2"]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text("<p>Su <b>divusim</b> ne gokun.</p>\n<p>Madona {0} dogun 😀</p>\n", encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_verb_gives_the_document_that_the_library_gives(
    ziggurat: Ziggurat, trained: Path, page: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.html"
    status, said, errors = ziggurat("translate", trained, *SHORT, "--document", page, "--output", out)
    assert (status, said) == (0, "")
    assert re.search(r"out\.html: \d+ sentences in ", errors)
    translator = load_translator(trained, device="cpu", max_length={"limit": 6}, beam_size=2, alignments=True)
    control = control_pieces(translator.source_tokenizer)

    def translate(sentences: list[str]) -> list[SentenceTranslation]:
        return [rendered(t, control) for t in translator.translate(sentences)]

    settings = Settings(Options(sentencex_splitter("qlo")), "qlo", "qhi")
    outcome = run(document(page.read_bytes(), "page.html", settings), translate)
    assert out.read_bytes() == outcome.value
    text = out.read_text(encoding="utf-8")
    assert [text.count(part) for part in ("<b>", "</b>", "<p>", "{0}", "😀")] == [1, 1, 2, 1, 1]
    assert "Madona" not in text


@pytest.mark.slow
def test_several_documents_go_into_a_folder(ziggurat: Ziggurat, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(docx())
    (tmp_path / "b.odt").write_bytes(odt())
    out = tmp_path / "out"
    names = ["--document", tmp_path / "a.docx", "--document", tmp_path / "b.odt", "--output", out]
    out.write_text("a file")
    status, _, errors = ziggurat("translate", trained, *SHORT, *names)
    assert status == 2
    assert "is not a folder" in errors
    out.unlink()
    (tmp_path / "bad.docx").write_bytes(b"PK")
    assert ziggurat("translate", trained, *SHORT, "--document", tmp_path / "bad.docx", *names).status == 2
    assert not out.exists()  # a refused call leaves no folder
    assert ziggurat("translate", trained, *SHORT, *names).status == 0  # the folder is created
    assert list(members((out / "a.docx").read_bytes())) == list(members(docx()))
    assert list(members((out / "b.odt").read_bytes())) == list(members(odt()))
    assert ziggurat("translate", trained, *SHORT, *names).status == 0
    one = ["--document", tmp_path / "a.docx", "--output"]
    assert ziggurat("translate", trained, *SHORT, *one, f"{tmp_path}/new/").status == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.docx"]
    status, _, errors = ziggurat("translate", trained, *SHORT, *one, f"{tmp_path}/none/new/")
    assert status == 2
    assert "none does not exist" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--protect", "("], "the pattern '(' cannot be read"),
        (["--leave", "id"], "`--leave` is for documents whose texts have keys"),
        (["--workers", "2"], "`--workers` is for lines of text"),
        (["--quality"], "`--quality` is for lines of text"),
        (["--output", "-"], "needs `--output`"),
        (["--document", "-"], "a document's kind is recognised by its name"),
        (["--document", "missing.docx"], "missing.docx: no such file"),
        (["--output", "out.DOCX"], "out.DOCX: is for Word, and "),
        (["--output", "out.txt"], "stays HTML; end it in .html"),
        (["--output", "out.pdf"], "stays HTML; end it in .html"),
        (["--output", "out"], "stays HTML; end it in .html"),
        (["--output", "out.html.json"], "out.html.json: is for "),
    ],
)
def test_impossible_calls_get_one_message(
    ziggurat: Ziggurat, trained: Path, page: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    usual = {"--document": page, "--output": tmp_path / "out.html"}
    given = [word for option, value in usual.items() if option not in arguments for word in (option, value)]
    status, out, errors = ziggurat("translate", trained, *given, *arguments)
    assert (status, out) == (2, "")
    assert message in errors
    assert not (tmp_path / "out.html").exists()


def test_a_damaged_document_leaves_nothing(ziggurat: Ziggurat, trained: Path, tmp_path: Path) -> None:
    for name, content in (("a.docx", b"PK nothing"), ("a.pdf", b"%PDF"), ("a.xlf", b"<a>")):
        (tmp_path / name).write_bytes(content)
        status, _, errors = ziggurat("translate", trained, "--document", tmp_path / name, "-o", tmp_path / "out")
        assert status == 2
        assert name in errors
        assert "Traceback" not in errors
        assert not (tmp_path / "out").exists()
    status, _, errors = ziggurat("translate", trained, "--document", tmp_path / "a.xlf", "-o", tmp_path / "a.xlf")
    assert "is an input" in errors


def test_without_sentencex_the_message_says_how_to_install_it(
    ziggurat: Ziggurat, trained: Path, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentencex_splitter.cache_clear()
    monkeypatch.setitem(sys.modules, "sentencex", None)
    status, _, errors = ziggurat("translate", trained, "--document", page, "-o", tmp_path / "out.html")
    assert status == 2
    assert "pip install 'ziggurat-mt[serve]'" in errors


def test_a_model_without_attention_weights_translates_by_segment(
    ziggurat: Ziggurat, trained: Path, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.translate.interface.tells_alignments", lambda translator: False)
    out = tmp_path / "out.html"
    status, _, errors = ziggurat("translate", trained, *SHORT, "--document", page, "--output", out)
    assert status == 0
    assert "no alignments from this model" in errors
    assert "translated by segments" in errors
    assert out.read_text(encoding="utf-8").count("<b>") == 1


def test_a_second_document_without_its_option_is_reported_with_the_fix(
    ziggurat: Ziggurat, trained: Path, tmp_path: Path
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("Some words.\n")
    names = ["--document", tmp_path / "a.txt", tmp_path / "b.txt", "--output", tmp_path / "out/"]
    status, _, errors = ziggurat("translate", trained, *names)
    assert status == 2
    assert f"`--document {tmp_path / 'b.txt'}`" in errors


def test_json_has_the_notices_of_each_document(ziggurat: Ziggurat, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '{"id": "Su divusim.", "b": "Su ACME ne.", "c": "{n, plural, }"}', encoding="utf-8"
    )
    (tmp_path / "b.txt").write_text("12\n")
    names = ["--document", tmp_path / "a.json", "--document", tmp_path / "b.txt", "--output", tmp_path / "out/"]
    status, said, _ = ziggurat("translate", trained, *SHORT, *names, "--json", "--leave", "id", "--protect", "ACME")
    assert status == 0
    first, second = map(json.loads, said.splitlines())
    assert (first["document"], first["output"]) == (str(tmp_path / "a.json"), str(tmp_path / "out" / "a.json"))
    assert {(each["kind"], each["place"]) for each in first["notices"]} >= {
        ("left_by_key", "key id"),
        ("not_parsed", "key c"),
    }
    assert [(each["kind"], each["count"]) for each in second["notices"]] == [("nothing_to_translate", 1)]
    assert (first["sentences"] > 0, second["sentences"]) == (True, 0)
    written = json.loads((tmp_path / "out" / "a.json").read_text(encoding="utf-8"))
    assert written["id"] == "Su divusim."
    assert "ACME" in written["b"]


def test_document_options_need_documents(ziggurat: Ziggurat, trained: Path) -> None:
    for option in ("--protect", "--leave"):
        status, _, errors = ziggurat("translate", trained, option, "x")
        assert status == 2
        assert f"`{option}` goes with `--document`" in errors
