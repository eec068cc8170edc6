"""Office documents: parts with other names, drawings, and requirements for all XML in an archive."""

from __future__ import annotations

import re
import time
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.text.fakes import Translate, identity, upper
from tests.serve.text.files import docx, epub, members, odt, packed, run
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Link, Options, Result, SentenceTranslation
from ziggurat.serve.text.sentences import run as run_work
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.system.errors import DataError

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")
W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
A = 'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'
TYPE = "application/vnd.openxmlformats-officedocument."
RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"


def read(name: str, parts: dict[str, str] | dict[str, bytes], translate: Translate = upper) -> Result[bytes]:
    return run_work(document(packed(parts), name, SETTINGS), translate)


def types(**parts: str) -> str:
    overrides = "".join(
        f'<Override PartName="/{name}" ContentType="{TYPE}{kind}+xml"/>' for name, kind in parts.items()
    )
    return f'<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">{overrides}</Types>'


def relations(target: str, kind: str = RELATION) -> str:
    return f'<Relationships xmlns="urn:r"><Relationship Id="a" Type="{kind}" Target="{target}"/></Relationships>'


BODY = f"<w:document {W}><w:body><w:p>{run('The dog runs home.')}</w:p></w:body></w:document>"
MAIN = "wordprocessingml.document.main"


@pytest.mark.parametrize(
    ("member", "target", "kind"),
    [
        ("word/document22.xml", "word/document22.xml", MAIN),
        ("word/document22.xml", "/word/document22.xml", ""),
        ("word/document.xml", "/word/document.xml", ""),
        ("main.xml", "main.xml", ""),
        ("word/body part.xml", "word/body%20part.xml", ""),
        ("Word/Document.xml", "word/document.xml", ""),
        ("content/text.xml", "", MAIN),
        ("content/text.xml", "./content/text.xml", ""),
        ("content/text.xml", "", "wordprocessingml.template.main"),
    ],
)
def test_the_package_names_the_main_part(member: str, target: str, kind: str) -> None:
    parts = {member: BODY}
    if kind:
        parts["[Content_Types].xml"] = types(**{member: kind})
    if target:
        parts["_rels/.rels"] = relations(target)
    assert b"tHE DOG RUNS HOME." in members(read("a.docx", parts).value)[member]
    strict = relations(target, "http://purl.oclc.org/ooxml/officeDocument/relationships/officeDocument")
    if target:
        assert b"tHE DOG" in members(read("a.docx", {**parts, "_rels/.rels": strict}).value)[member]


def test_a_package_without_a_main_part_is_refused() -> None:
    with pytest.raises(DataError, match=r"has no 'word/document\.xml'"):
        read("a.docx", {"[Content_Types].xml": types(), "_rels/.rels": relations("gone.xml"), "word/other.xml": BODY})


@pytest.mark.parametrize("kind", ["header", "footer", "footnotes", "endnotes", "comments"])
def test_parts_are_known_by_their_content_types(kind: str) -> None:
    parts = {
        "[Content_Types].xml": types(**{"word/strange.xml": f"wordprocessingml.{kind}"}),
        "word/document.xml": BODY,
        "word/strange.xml": f"<w:x {W}><w:p>{run('More text')}</w:p></w:x>",
    }
    assert b"mORE TEXT" in members(read("a.docx", parts).value)["word/strange.xml"]


DRAWN = f"<x {A}><a:p><a:r><a:t>First step</a:t></a:r></a:p></x>"


@pytest.mark.parametrize("part", ["diagrams/data1.xml", "diagrams/drawing1.xml", "charts/chart2.xml"])
@pytest.mark.parametrize(("name", "folder"), [("a.docx", "word"), ("a.pptx", "ppt")])
def test_text_in_drawings_is_translated(name: str, folder: str, part: str) -> None:
    main = {"word": "word/document.xml", "ppt": "ppt/presentation.xml"}[folder]
    parts = {main: BODY if folder == "word" else "<x/>", f"{folder}/{part}": DRAWN}
    assert b"fIRST STEP" in members(read(name, parts).value)[f"{folder}/{part}"]


def test_text_boxes_and_their_fallback_are_translated() -> None:
    box = f"<w:txbxContent><w:p>{run('In the box')}</w:p></w:txbxContent>"
    both = (
        '<mc:AlternateContent xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"><mc:Choice>'
        f"<w:drawing>{box}</w:drawing></mc:Choice><mc:Fallback><w:pict>{box}</w:pict></mc:Fallback></mc:AlternateContent>"
    )
    body = f"<w:p>{run('Left')}<w:r>{both}</w:r>{run('right')}</w:p>"
    asked: list[str] = []

    def watched(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return upper(sentences)

    said = run_work(document(docx(body), "a.docx", SETTINGS), watched).value
    assert "Left right" in asked
    assert members(said)["word/document.xml"].count(b"iN THE BOX") == 2
    assert run_work(document(docx(body), "a.docx", SETTINGS), identity).value == docx(body)


def test_embedded_documents_are_reported() -> None:
    parts = {"word/document.xml": BODY, "word/embeddings/sheet.xlsx": "x", "word/afchunk1.htm": "y"}
    outcome = read("a.docx", parts)
    assert outcome.notices == {"left_out": 2}
    assert outcome.notices.places == {"left_out": "word/embeddings/sheet.xlsx"}


@pytest.mark.parametrize(
    ("part", "kind", "content"),
    [
        ("word/chunk.html", "text/html", b"<p>Chunk text</p>"),
        ("word/chunk.HTM", "", b"<p>Chunk text</p>"),
        ("word/chunk.dat", "text/html", b"<p>Chunk text</p>"),
        ("word/chunk.xml", "application/xhtml+xml", b"<html><p>Chunk text</p></html>"),
        ("word/chunk.mht", "message/rfc822", b"From: x"),
        ("word/chunk.rtf", "application/rtf", b"{\\rtf"),
        ("word/chunk.txt", "text/plain", b"Chunk text"),
        ("word/chunk.docx", f"{TYPE}{MAIN}+xml", docx()),
        ("chunk/1.bin", "application/x", docx()),
        ("word/header9.xml", f"{TYPE}wordprocessingml.header+xml", docx()),
    ],
)
def test_documents_inserted_unchanged_are_reported(part: str, kind: str, content: bytes) -> None:
    override = f'<Types><Override PartName="/{part}" ContentType="{kind}"/></Types>'
    parts = {"[Content_Types].xml": override.encode(), "word/document.xml": BODY.encode(), part: content}
    outcome = read("a.docx", parts)
    assert outcome.notices == {"left_out": 1}
    assert outcome.notices.places == {"left_out": part}
    assert members(outcome.value)[part] == content


def test_a_document_without_text_is_reported() -> None:
    for name, content in (("a.txt", b"12\n\n34\n"), ("a.docx", packed({"word/document.xml": f"<w:document {W}/>"}))):
        assert run_work(document(content, name, SETTINGS), upper).notices == {"nothing_to_translate": 1}


@given(st.text(st.sampled_from("]>-<&'\"a \x00\x1f\ufffe\ud800\u2028"), min_size=1, max_size=12))
@settings(max_examples=80)
def test_any_translation_is_well_formed(said: str) -> None:
    def answer(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation(said, [Link(0, len(text), 0, len(said))]) for text in sentences]

    for name, content in (("a.docx", docx()), ("a.odt", odt()), ("a.epub", epub())):
        for part, text in members(run_work(document(content, name, SETTINGS), answer).value).items():
            if part.endswith((".xml", ".xhtml", ".ncx", ".opf")):
                ElementTree.fromstring(text.replace(b"&nbsp;", b" "))


def test_ruby_of_opendocument_is_read() -> None:
    ruby = "<text:ruby><text:ruby-base>sign</text:ruby-base><text:ruby-text>said</text:ruby-text></text:ruby>"
    parts = members(odt())
    parts["content.xml"] = parts["content.xml"].replace(b">Left cell<", f">Left {ruby} cell<".encode())
    content = members(read("a.odt", parts).value)["content.xml"]
    assert b"<text:ruby-base>SIGN</text:ruby-base><text:ruby-text>said</text:ruby-text>" in content


@pytest.mark.parametrize("soup", ["<language ", "<a:language ", "<" + "a" * 50, "<language>x"])
def test_the_language_of_a_book_is_found_in_linear_time(soup: str) -> None:
    parts = members(epub())
    parts["OPS/book.opf"] = parts["OPS/book.opf"].replace(
        b"<metadata", f"<x><![CDATA[{soup * 60_000}]]></x><metadata".encode()
    )
    began = time.process_time()
    said = members(read("a.epub", parts, identity).value)["OPS/book.opf"]
    assert b"<dc:language>de</dc:language>" in said
    assert time.process_time() - began < 10  # in quadratic time it took a minute


def test_labels_of_charts_are_translated() -> None:
    values = "".join(
        f'<c:{kind}><c:pt idx="0"><c:v>{text}</c:v></c:pt></c:{kind}>'
        for kind, text in (("strCache", "Series one &amp; two"), ("strLit", "Quarter"), ("numCache", "1.5"))
    )
    space = 'xmlns:c="http://schemas.openxmlformats.org/drawingml/2006/chart"'
    chart = f"<c:chartSpace {space}><c:tx><c:v>Loose</c:v></c:tx>{values}</c:chartSpace>"
    for main, body, name in (("word/document.xml", BODY, "a.docx"), ("ppt/presentation.xml", "<x/>", "a.pptx")):
        part = f"{main.split('/')[0]}/charts/chart1.xml"
        said = members(read(name, {main: body, part: chart}).value)[part].decode()
        assert [said.count(text) for text in ("sERIES ONE &amp; TWO", "qUARTER", "lOOSE", "1.5")] == [1, 1, 1, 1]
        assert members(read(name, {main: body, part: chart}, identity).value)[part].decode() == chart


TEXT = "<x><a:t xmlns:a='urn:a'>Some words</a:t></x>"


@pytest.mark.parametrize(
    ("part", "content", "reported"),
    [
        ("comments/comment1.xml", "<p:l xmlns:p='urn:p'><p:text>Look here</p:text></p:l>", 1),
        ("comments/modernComment_1.xml", TEXT, 1),
        ("charts/chartEx1.xml", TEXT, 1),
        ("glossary/document.xml", f"<w:glossaryDocument {W}><w:p>{run('Type here')}</w:p></w:glossaryDocument>", 1),
        ("numbering.xml", f'<w:numbering {W}><w:lvlText w:val="Chapter %1"/></w:numbering>', 1),
        ("numbering.xml", f'<w:numbering {W}><w:lvlText w:val="o"/><w:lvlText w:val="%1."/></w:numbering>', 0),
        ("slideMasters/slideMaster1.xml", TEXT, 0),
        ("theme/theme1.xml", TEXT, 0),
        ("charts/style1.xml", "<cs:v xmlns:cs='urn:c'>12</cs:v>", 0),
        ("settings.xml", "<w:settings/>", 0),
    ],
)
def test_parts_with_text_that_are_not_read_are_reported(part: str, content: str, reported: int) -> None:
    for main, body, name in (("word/document.xml", BODY, "a.docx"), ("ppt/presentation.xml", TEXT, "a.pptx")):
        place = f"{main.split('/')[0]}/{part}"
        outcome = read(name, {main: body, place: content})
        assert outcome.notices["left_out"] == reported
        assert not reported or outcome.notices.places["left_out"] == place
        assert members(outcome.value)[place].decode() == content


@pytest.mark.parametrize(
    ("paragraph", "reported"),
    [
        (f"<mc:AlternateContent><mc:Choice>{run('Some text')}</mc:Choice></mc:AlternateContent>", 1),
        (f"<w:r><mc:AlternateContent><mc:Choice>{run('Some text')}</mc:Choice></mc:AlternateContent></w:r>", 1),
        (f"<w:unheardOf>{run('Some text')}</w:unheardOf>", 1),
        (f"<w:unheardOf>{run('12')}</w:unheardOf>", 0),
        (f"<w:moveFrom>{run('Some text')}</w:moveFrom>", 0),
        (f"<w:ins>{run('Some text')}</w:ins>", 0),
    ],
)
def test_text_that_is_not_read_is_reported(paragraph: str, reported: int) -> None:
    space = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
    body = f"<w:document {W} {space}><w:p>{run('The dog.')}{paragraph}</w:p></w:document>"
    outcome = read("a.docx", {"word/document.xml": body})
    assert outcome.notices == ({"left_out": 1} if reported else {})


@pytest.mark.parametrize(
    ("element", "said"),
    [
        ('<wp:docPr id="1" name="Pic" descr="A red house" title="House"/>', ["A RED HOUSE".lower(), "hOUSE"]),
        ('<p:cNvPr id="2" name="Pic" descr="A &quot;dog&quot;"/>', ["a &quot;DOG&quot;"]),
        ('<v:textpath on="t" string="Draft"/>', ["dRAFT"]),
        ("<v:shape id='x' alt='Two cats'/>", ["tWO CATS"]),
        ('<wp:docPr id="1" name="Pic" descr=""/>', ['name="Pic" descr=""']),
    ],
)
def test_descriptions_of_pictures_are_translated(element: str, said: list[str]) -> None:
    drawing = f"<w:drawing xmlns:wp='urn:wp' xmlns:p='urn:p' xmlns:v='urn:v'>{element}</w:drawing>"
    for paragraph in (f"<w:p>{run('See ')}<w:r>{drawing}</w:r>{run(' now')}</w:p>", f"<w:p><w:r>{drawing}</w:r></w:p>"):
        content = docx(paragraph)
        text = members(run_work(document(content, "a.docx", SETTINGS), upper).value)["word/document.xml"].decode()
        assert all(one.casefold() in text.casefold() for one in said)
        assert "A red house" not in text
        assert "Draft" not in text
        assert run_work(document(content, "a.docx", SETTINGS), identity).value == content


@pytest.mark.parametrize("name", ["Object 1/content.xml", "Object 2/content.xml"])
def test_objects_of_opendocument_are_reported(name: str) -> None:
    text = "<x xmlns:text='urn:oasis:names:tc:opendocument:xmlns:text:1.0'><text:p>Axis</text:p></x>"
    assert read("a.odt", members(odt()) | {name: text.encode()}).notices == {"left_out": 1}
    assert read("a.odt", members(odt()) | {name: b"<math><mi>x</mi></math>"}).notices == {}


@pytest.mark.parametrize("name", ["OPS/unlisted.xhtml", "OPS/text/PAGE 1.xhtml", "more.HTML", "OPS/x.htm"])
def test_pages_that_a_book_does_not_list_are_reported(name: str) -> None:
    outcome = read("a.epub", members(epub()) | {name: b"<html><body><p>Some text</p></body></html>"})
    assert outcome.notices == {"left_out": 1}
    assert outcome.notices.places == {"left_out": name}


@pytest.mark.parametrize("kind", ["text/html", "text/plain", "application/pdf"])
def test_pages_of_a_book_that_are_not_read_are_reported(kind: str) -> None:
    parts = members(epub()) | {"OPS/more.bin": b"text"}
    item = f'<item id="m" href="more.bin" media-type="{kind}"/></manifest>'.encode()
    parts["OPS/book.opf"] = parts["OPS/book.opf"].replace(b"</manifest>", item)
    assert read("a.epub", parts).notices == {"left_out": 1}


@pytest.mark.parametrize(
    "said", ["<dc:creator>Bob Smith</dc:creator>", "<dc:date>2020-01-01T00:00:00</dc:date>",
             "<meta:date-string>May 1</meta:date-string>", "<meta:creator-initials>bs</meta:creator-initials>",
             "<loext:sender-initials>bs</loext:sender-initials>"],
)  # fmt: skip
def test_authors_and_dates_of_comments_stay(said: str) -> None:
    spaces = (
        "xmlns:dc='http://purl.org/dc/elements/1.1/' xmlns:meta='urn:oasis:names:tc:opendocument:xmlns:meta:1.0' "
        "xmlns:loext='urn:loext'"
    )
    note = f"<office:annotation {spaces}>{said}<text:p>A remark</text:p></office:annotation>"
    parts = members(odt())
    parts["content.xml"] = parts["content.xml"].replace(b">Left cell<", f">Left {note} cell<".encode())
    content = members(read("a.odt", parts).value)["content.xml"].decode()
    assert said in content
    assert "a REMARK" in content


@pytest.mark.parametrize("escape", ["_x000B_", "_x000D_", "_x000A_"])
def test_ends_of_lines_as_powerpoint_spells_them(escape: str) -> None:
    asked: list[str] = []

    def watched(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return upper(sentences)

    slide = f"<p:sld xmlns:p='urn:p' {A}><a:p><a:r><a:t>Upper{escape}Lower</a:t></a:r></a:p></p:sld>"
    parts = {"ppt/presentation.xml": "<x/>", "ppt/slides/slide1.xml": slide}
    said = members(run_work(document(packed(parts), "a.pptx", SETTINGS), watched).value)[
        "ppt/slides/slide1.xml"
    ].decode()
    assert asked == ["Upper", "Lower"]
    assert re.sub("<[^>]*>", "", said) == f"uPPER{escape}lOWER"
