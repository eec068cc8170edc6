"""Files from strangers: refused with a reason, in bounded time and memory, before any sentence is translated."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Sequence

import pytest

from tests.serve.text.fakes import identity, permuting, steps
from tests.serve.text.files import BODY, FILES, docx, members, packed
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Limits, Settings
from ziggurat.serve.text.sentences import Options, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.serve.text.tokens import read_xml
from ziggurat.system.errors import DataError

OPTIONS = Options(sentencex_splitter("en"))


def read(name: str, content: bytes, limits: Limits | None = None) -> bytes:
    settings = Settings(OPTIONS, "en", "de", limits=limits or Limits())
    return run(document(content, name, settings), identity).value


ENTITY = b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><a>&x;</a>'
LAUGHS = b"<!DOCTYPE a [<!ENTITY a 'ha'>%s]><a>&a9;</a>" % b"".join(
    b"<!ENTITY a%d '%s'>" % (n, b"&a%d;" % (n - 1) * 10) for n in range(1, 10)
)
PARAMETER = b'<!DOCTYPE a [<!ENTITY % p SYSTEM "http://example.org/x.dtd"> %p;]><a/>'
DEEP = b"<a>" * 100_000
XML_ATTACKS = [
    ENTITY,
    LAUGHS,
    PARAMETER,
    DEEP,
    b"",
    b"\x00",
    b"<a>",
    b"<a></b>",
    b"<a b='1' b='2'/>",
    b"\xff\xfe<",
    b"<a>\x01</a>",
]


def with_part(name: str, part: str, content: bytes) -> bytes:
    return packed({**members(FILES[name]), part: content})


@pytest.mark.parametrize("attack", XML_ATTACKS, ids=range(len(XML_ATTACKS)))
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("a.xlf", ""),
        ("a.tmx", ""),
        ("a.docx", "word/document.xml"),
        ("a.docx", "word/footnotes.xml"),
        ("a.pptx", "ppt/slides/slide1.xml"),
        ("a.odt", "content.xml"),
        ("a.epub", "META-INF/container.xml"),
        ("a.epub", "OPS/book.opf"),
        ("a.epub", "OPS/text/page 1.xhtml"),
    ],
)
def test_xml_that_is_broken_or_declares_entities_is_refused(name: str, part: str, attack: bytes) -> None:
    with pytest.raises(DataError, match=f"^{name}"):
        read(name, with_part(name, part, attack) if part else attack)


def test_any_declaration_inside_a_file_is_refused() -> None:
    content = FILES["a.tmx"].replace(b'SYSTEM "tmx14.dtd"', b'[<!ATTLIST tuv x CDATA "y">]')
    with pytest.raises(DataError, match="declarations of its own in its DOCTYPE"):
        read("a.tmx", content)


def test_external_dtds_are_not_fetched() -> None:
    content = FILES["a.tmx"].replace(b"tmx14.dtd", b"file:///etc/hostname").replace(b"Hello", b"Hello &x;")
    assert b"&x;" in read("a.tmx", content)


def archive(*names: str, size: int = 10, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    return packed({**members(FILES["a.docx"]), **{name: bytes(size) for name in names}}) if method else b""


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "\\x", "a\\..\\x", "C:/x"])
def test_names_that_lead_out_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="leads out of the archive"):
        read("a.docx", archive(name))


def test_bombs_are_refused_unopened() -> None:
    bomb = archive("x", size=40 << 20)
    with pytest.raises(DataError, match="over 200 times as many"):
        read("a.docx", bomb)
    with pytest.raises(DataError, match="more than 1,000"):
        read("a.docx", bomb, Limits(unpacked=1000))
    with pytest.raises(DataError, match="more than 20 members"):
        read("a.docx", archive(*(f"n{n}" for n in range(20))), Limits(members=20))
    with pytest.raises(DataError, match="more than 100"):
        read("a.docx", FILES["a.docx"], Limits(size=100))


@pytest.mark.parametrize(
    ("name", "piece"),
    [("a.html", "<"), ("a.html", "&"), ("a.xlf", "<"), ("a.tmx", "&"), ("a.json", '"')]
    + [(f"a.{kind}", end) for kind in ("txt", "md", "srt", "vtt", "po") for end in ("\n", "\r", "\r\n")]
    + [("a.txt", end) for end in "\v\f\x85\u2028\u2029"],
)
def test_the_number_of_pieces_is_checked_before_a_file_is_read(name: str, piece: str) -> None:
    content = b"\xff" + piece.encode() * 11  # the first byte stops every reader
    with pytest.raises(DataError, match=f"^{name}: more than 10 tags, lines or strings"):
        read(name, content, Limits(pieces=10))
    with pytest.raises(DataError, match=f"^{name}: (?!more than)"):
        read(name, content, Limits(pieces=11))


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_letters_of_utf_16_are_not_ends_of_lines(codec: str) -> None:
    content = "\ufeff\u0b95\u0bcd\u0c15\u0d15\r\n\u2028".encode(codec)
    assert read("a.txt", content, Limits(pieces=2)) == content
    with pytest.raises(DataError, match="more than 1 tags, lines or strings"):
        read("a.txt", content, Limits(pieces=1))


def test_pieces_of_all_members_count_together() -> None:
    body = f"<w:p>{'<w:r/>' * 40}</w:p>"
    content = members(docx(body))
    content["word/header1.xml"] = content["word/document.xml"]
    pieces = content["word/header1.xml"].count(b"<")
    with pytest.raises(DataError, match=f"^a.docx: more than {2 * pieces - 1} tags"):
        read("a.docx", packed(content), Limits(pieces=2 * pieces - 1))
    read_too = ("word/document.xml", "word/footnotes.xml", "[Content_Types].xml", "_rels/.rels")
    both = pieces + sum(c.count(b"<") for n, c in content.items() if n in read_too)
    read("a.docx", packed(content), Limits(pieces=both))


@pytest.mark.parametrize("name", sorted(FILES))
def test_paragraphs_are_reported_before_any_is_cut(name: str) -> None:
    told, cut = list[str](), list[str]()

    def split(text: str) -> list[str]:
        assert text in told
        cut.append(text)
        return [text]

    options = Options(split, admit=told.extend)
    assert run(document(FILES[name], name, Settings(options, "en", "de")), identity).value
    assert cut
    assert all(text.strip() for text in told)

    def refuse(texts: Sequence[str]) -> None:
        raise DataError("enough")

    cut.clear()
    with pytest.raises(DataError, match="enough"):
        run(document(FILES[name], name, Settings(Options(split, admit=refuse), "en", "de")), identity)
    assert cut == []


def test_text_of_xml_in_many_lines_is_one_token() -> None:
    """expat reports each line and each entity separately; joining them one by one took quadratic time."""
    lines = "one &amp; two\n" * 5000
    (_, text, _) = read_xml(f"<a>{lines}</a>".encode(), "a.xml").tokens
    assert (text.raw, text.text) == (lines, lines.replace("&amp;", "&"))
    tokens = read_xml(b"<a>x<![CDATA[\ny]]>z<b/>\n</a>", "a.xml").tokens
    assert "".join(token.raw for token in tokens) == "<a>x<![CDATA[\ny]]>z<b/>\n</a>"
    assert [(token.kind, token.text) for token in tokens] == [
        ("open", ""), ("text", "x\nyz"), ("empty", ""), ("text", "\n"), ("close", ""),
    ]  # fmt: skip


def test_a_message_of_many_lines_is_read_in_one_pass() -> None:
    text = "".join(f'"line {n}\\n"\n' for n in range(3000))
    said = read("a.po", f'msgid ""\n{text}msgstr ""\n'.encode()).decode()
    assert said == f'#, fuzzy\nmsgid ""\n{text}msgstr ""\n{text}'


def test_a_zip_directory_with_false_sizes_does_not_unpack_more() -> None:
    """10 MiB of zeros that the directory declares as 100 bytes: the checksum cannot be right."""
    content = bytearray(with_part("a.docx", "word/document.xml", b"<a/>" + bytes(10 << 20)))
    place = content.rindex(b"PK\x01\x02", 0, content.rindex(b"word/document.xml"))
    content[place + 24 : place + 28] = struct.pack("<I", 100)
    with pytest.raises(DataError, match=r"word/document\.xml.*damaged"):
        read("a.docx", bytes(content))


def test_encrypted_duplicate_and_oddly_packed_members_are_refused() -> None:
    content = bytearray(FILES["a.docx"])
    place = content.index(b"PK\x01\x02")
    content[place + 8] |= 1
    with pytest.raises(DataError, match="is encrypted"):
        read("a.docx", bytes(content))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_LZMA) as strange:
        strange.writestr("word/document.xml", "<a/>")
    with pytest.raises(DataError, match="packed in a way"):
        read("a.docx", out.getvalue())
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as doubled:
        doubled.writestr("word/document.xml", "<a/>")
        with pytest.warns(UserWarning, match="Duplicate"):
            doubled.writestr("word/document.xml", "<b/>")
    with pytest.raises(DataError, match="same name"):
        read("a.docx", out.getvalue())


@pytest.mark.parametrize("name", ["a.docx", "a.pptx", "a.odt", "a.epub"])
def test_a_document_of_another_kind_is_named(name: str) -> None:
    with pytest.raises(DataError, match="not a zip archive"):
        read(name, b"plain text")
    with pytest.raises(DataError, match="is it a document of another kind"):
        read(name, packed({"other.xml": "<a/>"}))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"abc\xff", r"a\.txt: not valid UTF-8 \(byte 3"),
        ("a.json", b'{"a": ', "a.json"),
        ("a.json", b"[" * 100_000, "a.json"),
        ("a.po", b'msgid "a"\nnonsense\n', "a.po, line 2: not a line"),
        ("a.po", b'msgid "a"\nmsgid "b"\n', "a.po, line 2: a second msgid"),
        ("a.xlf", b"<a/>", "not XLIFF"),
        ("a.tmx", b"<tmx/>", "not TMX"),
        ("a.srt", b"\xff\xfe\x00", "not valid UTF-16-LE"),
    ],
)
def test_text_of_the_wrong_kind_is_refused(name: str, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(name, content)


def test_nested_text_boxes_take_no_exponential_time() -> None:
    box = "<w:r><w:pict><v:textbox><w:txbxContent>"
    end = "</w:txbxContent></v:textbox></w:pict></w:r>"
    text = '<w:r><w:t xml:space="preserve">word </w:t></w:r>'
    for depth in (30, 32):
        content = docx(f"<w:p>{text}{box}" * depth + f"<w:p>{text}</w:p>" + f"{end}{text}</w:p>" * depth)
        assert read("a.docx", content) == content
    note = "<text:note><text:note-body><text:p>word "
    body = FILES["a.odt"]
    nested = members(body)["content.xml"].replace(
        b"One ", (note * 50 + "</text:p></text:note-body></text:note>" * 50).encode(), 1
    )
    content = packed({**members(body), "content.xml": nested})
    assert members(read("a.odt", content)) == members(content)


@pytest.mark.parametrize("name", sorted(FILES))
def test_damaged_bytes_give_a_document_or_an_error(name: str) -> None:
    rng = random.Random(name)
    settings = Settings(OPTIONS, "en", "de")
    said = []
    for _ in range(60):
        content = bytearray(FILES[name])
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(content))
            content[at : at + rng.randint(0, 3)] = bytes(rng.randrange(256) for _ in range(rng.randint(0, 3)))
        try:
            run(document(bytes(content), name, settings), permuting(1))
        except DataError as error:
            said.append(str(error))
    assert said
    assert all(message.startswith(name) for message in said)


@pytest.mark.parametrize("name", ["a.md", "a.srt", "a.po", "a.json", "a.txt", "a.html"])
@pytest.mark.parametrize(
    "unit", ["[", "](", "*", "**a", "`", "``a", "![", "<b>", "|", "> ", "- ", "\\", '"', "{\\", "$$", "\n"]
)
@pytest.mark.slow
def test_steps_are_linear(name: str, unit: str) -> None:
    once, four_times = (filled(name, unit * count) for count in (1000, 4000))
    assert len(read(name, four_times)) >= len(four_times)
    assert steps(lambda: read(name, four_times)) < 5 * steps(lambda: read(name, once)) + 10_000


def filled(name: str, text: str) -> bytes:
    """A file with this text."""
    content = text.encode()
    if name == "a.json":
        content = json.dumps([content.decode()]).encode()
    if name == "a.po":
        content = (
            b'msgid "' + content.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"") + b'"\nmsgstr ""\n'
        )
    if name == "a.srt":
        content = b"1\n00:00:01,000 --> 00:00:02,000\n" + content
    return content


@pytest.mark.slow
def test_a_word_file_of_ten_thousand_paragraphs_is_read() -> None:
    content = docx(BODY * 300)
    assert members(read("a.docx", content)) == members(content)


@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("a.json", lambda n: json.dumps({"a": " \t" * n + "x"})),
        ("a.json", lambda n: json.dumps({"a": "<b>" * n + "x<i>" * n + "{n,plural,other{a}}"})),
        *(
            ("a.json", lambda n, unit=unit: json.dumps({"a": unit * (n // 4) + "x"}))
            for unit in ("%d", "%da", "{%", "<%", "<b =", "<b hidden ", "__a", "@a.", "{/if", "'{", "%<", "</0>")
        ),
        ("a.md", lambda n: "import " + " " * n + "x"),
        ("a.md", lambda n: "word" + " " * n + "x"),
        ("a.srt", lambda n: "1\n00:00:01,000 --> 00:00:02,000\n" + "<b>" * n + "x<b>" * n + "\n"),
        ("a.srt", lambda n: "1\n00:00:01,000 --> 00:00:02,000\na" + " " * n + "b\n"),
        ("a.srt", lambda n: "1" + "-" * n + "\n"),
    ],
)
def test_long_runs_of_one_sign_come_back_and_hang_nothing(name: str, one: Callable[[int], str]) -> None:
    """With a quadratic expression, each of these would take minutes."""
    content = one(200_000 if "{n" not in one(1) and "<b>" not in one(1) else 20_000)
    assert read(name, content.encode()).decode() == content


def test_encrypted_documents_are_reported() -> None:
    listed = b"<manifest><file-entry full-path='content.xml'><encryption-data/></file-entry></manifest>"
    for parts in ({"content.xml": b"\x80\xff"}, {}):  # LibreOffice encrypts each member, or puts all into one
        with pytest.raises(DataError, match=r"a\.odt: is protected by a password; save it without one"):
            read("a.odt", packed({**parts, "META-INF/manifest.xml": listed}))
    locked = "<encryption><EncryptedData><CipherReference URI='{}'/></EncryptedData></encryption>"
    for page in ("OPS/text/page%201.xhtml", "/OPS/toc.ncx"):
        with pytest.raises(DataError, match=r"a\.epub: OPS/.* is encrypted"):
            read("a.epub", with_part("a.epub", "META-INF/encryption.xml", locked.format(page).encode()))
    fonts = with_part("a.epub", "META-INF/encryption.xml", locked.format("OPS/a.otf").encode())
    assert members(read("a.epub", fonts))["OPS/text/page 1.xhtml"]
