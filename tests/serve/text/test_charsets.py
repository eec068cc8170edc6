"""Character sets: the output bytes agree with the file's mark or declaration."""

from __future__ import annotations

import codecs
import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.text.fakes import Translate, identity
from tests.serve.text.files import FILES, TEXTS
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Options, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.system.errors import DataError

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")
MARKS = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}


def translated(name: str, content: bytes, translate: Translate = identity) -> bytes:
    return run(document(content, name, SETTINGS), translate).value


def saying(text: str) -> Translate:
    return lambda sentences: [SentenceTranslation(text) for _ in sentences]


@pytest.mark.parametrize("encoding", sorted(MARKS))
@pytest.mark.parametrize("name", [name for name in TEXTS if not name.endswith((".xlf", ".tmx", ".po", ".xml"))])
def test_a_mark_stays_and_is_not_shown_to_the_model(name: str, encoding: str) -> None:
    asked: list[str] = []

    def watch(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return identity(sentences)

    content = MARKS[encoding] + TEXTS[name].encode(encoding)
    assert translated(name, content, watch) == content
    assert asked
    assert not any("\ufeff" in text for text in asked)
    said = translated(name, content, saying("Größe 漢"))
    assert said.startswith(MARKS[encoding])
    text = said[len(MARKS[encoding]) :].decode(encoding)
    assert "Größe 漢" in (json.dumps(json.loads(text), ensure_ascii=False) if name == "a.json" else text)


def test_messages_keep_their_mark() -> None:
    content = codecs.BOM_UTF8 + FILES["a.po"]
    assert translated("a.po", content, saying("Größe")) == codecs.BOM_UTF8 + translated(
        "a.po", FILES["a.po"], saying("Größe")
    )


PAGE = '<html><head>%s<meta name="a" content="b"></head><body title="x"><p>Some words %s</p></body></html>'
DECLARATIONS = [
    '<meta charset="{}">',
    "<META CHARSET={}>",
    '<meta http-equiv="Content-Type" content="text/html; charset={}">',
    "<!-- <meta charset=\"utf-8\"> --><meta charset='{}'/>",
]


def declared(page: bytes) -> str:
    """Return the character set that a page declares, found with a pattern other than the package's."""
    bare = re.sub(r"<!--.*?-->", "", page.decode("latin-1"))
    return re.search(r"""(?i:charset|encoding)=["']?([\w-]+)""", bare)[1]  # type: ignore[index]


@pytest.mark.parametrize("declaration", DECLARATIONS)
@pytest.mark.parametrize(
    ("label", "codec", "own", "kept"),
    [
        ("iso-8859-1", "latin-1", "é", "ü"),
        ("ISO-8859-1", "cp1252", "“é”", "ü"),  # as browsers read it
        ("windows-1251", "cp1251", "слово", "ж"),
        ("koi8-r", "koi8-r", "слово", "ж"),
        ("Shift_JIS", "cp932", "漢字", "か"),
        ("gb2312", "gbk", "漢字", "中"),
        ("us-ascii", "ascii", "", "a"),
        ("iso-8859-2", "iso-8859-2", "łó", "ř"),
        ("utf-8", "utf-8", "é漢", "ü"),
    ],
)
def test_a_page_is_readable_by_its_declaration(declaration: str, label: str, codec: str, own: str, kept: str) -> None:
    content = (PAGE % (declaration.format(label), own)).encode(codec)
    assert translated("a.html", content) == content
    said = translated("a.html", content, saying(f"Neu {kept} Ω漢&"))
    assert declared(said) == label
    assert f"Neu {kept} Ω漢&" in html.unescape(said.decode(codec))
    assert kept.encode(codec) in said
    plain = translated("a.html", (PAGE % (declaration.format(label), "")).encode(codec), saying("Ω漢"))
    assert "Ω漢" in html.unescape(plain.decode(declared(plain)))


@pytest.mark.parametrize("label", ["iso-8859-1", "windows-1251", "x-user-defined", "utf-16", "Big5"])
def test_a_page_that_is_utf8_gets_the_declaration_of_utf8(label: str) -> None:
    page = PAGE % (f'<meta charset="{label}">', "größer “漢字”")
    assert translated("a.html", page.encode()) == page.replace(label, "utf-8").encode()


def test_xhtml_declares_its_encoding_first() -> None:
    text = '<?xml version="1.0" encoding="iso-8859-1"?>\n<html xmlns="x"><head/><body><p>Some é</p></body></html>'
    assert translated("a.xhtml", text.encode("latin-1")) == text.encode("latin-1")
    said = translated("a.xhtml", text.encode("latin-1"), saying("ü 漢"))
    assert "<p>ü &#28450;</p>" in said.decode("latin-1")
    both = text.replace("<head/>", "<head><meta charset='iso-8859-1'/></head>")
    assert translated("a.xhtml", both.encode()) == both.replace("iso-8859-1", "utf-8").encode()


def test_bytes_that_are_not_of_the_character_set_are_refused() -> None:
    page = (PAGE % ("<meta charset=shift_jis>", "")).encode() + b"\x81"
    with pytest.raises(DataError, match=r"a\.html: not valid SHIFT_JIS \(byte \d+, from 0\); convert it to UTF-8"):
        translated("a.html", page)
    with pytest.raises(DataError, match=r"a\.html: not valid UTF-8"):
        translated("a.html", b"<p>caf\xe9")
    for codec in ("punycode", "unicode_escape", "rot13", "utf-7", "idna"):  # codecs of Python, not character sets
        with pytest.raises(DataError, match="is unknown; convert it to UTF-8"):
            translated("a.xlf", f'<?xml version="1.0" encoding="{codec}"?><xliff/>'.encode())
        page = (PAGE % (f"<meta charset={codec}>", "")).encode()
        assert translated("a.html", page, saying("ü")).decode().count("ü") == 2


CATALOGUE = (
    'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=%s\\n"\n"X-Other: charset=x\\n"\n\n'
    'msgid "Some words"\nmsgstr ""\n\nmsgid "Done"\nmsgstr "Fertig%s"\n'
)


@pytest.mark.parametrize(
    ("label", "codec", "own", "said", "after"),
    [
        ("ISO-8859-1", "latin-1", "é", "Größe", "ISO-8859-1"),
        ("ISO-8859-1", "latin-1", "é", "Größe 漢", "UTF-8"),
        ("ISO-8859-1", "latin-1", "", "“so”", "UTF-8"),  # not part of it, although browsers accept it
        ("ASCII", "ascii", "", "Größe", "UTF-8"),
        ("ASCII", "ascii", "", "Haus", "ASCII"),
        ("CHARSET", "utf-8", "", "Größe", "UTF-8"),
        ("CHARSET", "utf-8", "", "Haus", "CHARSET"),
        ("KOI8-R", "koi8-r", "слово", "слово", "KOI8-R"),
        ("EUC-JP", "euc-jp", "漢字", "Größe ж €", "UTF-8"),
        ("UTF-8", "utf-8", "é", "Größe 漢", "UTF-8"),
        ("ISO-8859-1", "utf-8", "é漢", "Haus", "UTF-8"),  # declared wrongly
    ],
)
def test_messages_are_readable_by_their_declaration(
    label: str, codec: str, own: str, said: str, after: str, tmp_path: Path
) -> None:
    content = (CATALOGUE % (label, own)).encode(codec)
    out = translated("a.po", content, saying(said))
    encoding = "utf-8" if after in ("UTF-8", "CHARSET") else codec
    expected = (CATALOGUE % (after, own)).replace(
        'msgid "Some words"\nmsgstr ""', f'#, fuzzy\nmsgid "Some words"\nmsgstr "{said}"'
    )
    assert out.decode(encoding) == expected
    if shutil.which("msgfmt") and after != "CHARSET":
        (tmp_path / "a.po").write_bytes(out)
        subprocess.run(["msgfmt", "--check-format", "--use-fuzzy", "-o", "/dev/null", tmp_path / "a.po"], check=True)


LETTERS = st.text(st.characters(codec="latin-1", exclude_characters="<>&\r\n\x00"), max_size=20)


@pytest.mark.slow
@given(LETTERS, LETTERS, st.sampled_from(["iso-8859-1", "windows-1252"]))
@settings(max_examples=80)
def test_any_bytes_of_a_declared_charset_come_back(one: str, other: str, label: str) -> None:
    content = (PAGE % (f'<meta charset="{label}">', f"{one} <i>{other}</i>")).encode("latin-1")
    try:
        said = translated("a.html", content)
    except DataError:  # bytes without a meaning in windows-1252
        assert label == "windows-1252"
        return
    if not content.isascii() and declared(said) == "utf-8":  # valid UTF-8 by chance
        content.decode()
        return
    assert said == content
