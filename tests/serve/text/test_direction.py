"""Documents translated into and from languages that are written from right to left."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.text.fakes import Translate, identity
from tests.serve.text.files import docx, epub, members, odt, packed, pptx, run
from ziggurat.serve.text.documents.direction import with_attribute
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Link, Options, SentenceTranslation
from ziggurat.serve.text.sentences import run as run_work
from ziggurat.serve.text.splitting import sentencex_splitter

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def always(text: str) -> Translate:
    return lambda sentences: [SentenceTranslation(text, [Link(0, len(s), 0, len(text))]) for s in sentences]


def translated(
    content: bytes, name: str, source: str = "en", target: str = "ar", translate: Translate = identity
) -> dict[str, str]:
    options = Settings(Options(sentencex_splitter("en")), source, target)
    parts = members(run_work(document(content, name, options), translate).value)
    for part, text in parts.items():
        if part.endswith((".xml", ".opf")):
            ElementTree.fromstring(text)
    return {part: text.decode("utf-8", "replace") for part, text in parts.items()}


def word(body: str, source: str = "en", target: str = "ar", translate: Translate = identity) -> str:
    text = translated(docx(body), "a.docx", source, target, translate)["word/document.xml"]
    return text.split("<w:body>")[1].split("<w:sectPr/>")[0]


ARABIC = always("مرحبا")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<w:p>", "<w:p><w:pPr><w:bidi/></w:pPr>"),
        ("<w:p><w:pPr/>", "<w:p><w:pPr><w:bidi/></w:pPr>"),
        ('<w:p><w:pPr><w:keepNext/><w:jc w:val="left"/></w:pPr>',
         '<w:p><w:pPr><w:keepNext/><w:bidi/><w:jc w:val="left"/></w:pPr>'),
        ("<w:p><w:pPr><w:keepNext/></w:pPr>", "<w:p><w:pPr><w:keepNext/><w:bidi/></w:pPr>"),
        ("<w:p><w:pPr><w:rPr><w:i/></w:rPr></w:pPr>", "<w:p><w:pPr><w:bidi/><w:rPr><w:i/><w:iCs/></w:rPr></w:pPr>"),
        ('<w:p><w:pPr><w:bidi w:val="0"/></w:pPr>', '<w:p><w:pPr><w:bidi w:val="0"/></w:pPr>'),
        ("<w:p>\n<w:pPr>\n<w:ind/></w:pPr>", "<w:p>\n<w:pPr>\n<w:bidi/><w:ind/></w:pPr>"),
    ],
)  # fmt: skip
def test_paragraphs_of_word(before: str, after: str) -> None:
    assert word(f"{before}{run('Hello')}</w:p>", translate=ARABIC).startswith(after)


@pytest.mark.parametrize(
    ("text", "properties", "after"),
    [
        ("Hello", "", "<w:rPr><w:rtl/></w:rPr>"),
        ("Hello", '<w:b/><w:lang w:val="en-US"/>', '<w:rPr><w:b/><w:bCs/><w:rtl/><w:lang w:val="en-US"/></w:rPr>'),
        ("Hello", '<w:b/><w:bCs/><w:sz w:val="9"/><w:szCs w:val="8"/><w:color w:val="x"/>',
         '<w:rPr><w:b/><w:bCs/><w:sz w:val="9"/><w:szCs w:val="8"/><w:color w:val="x"/><w:rtl/></w:rPr>'),
        ("Hello", '<w:sz w:val="28"/>', '<w:rPr><w:sz w:val="28"/><w:szCs w:val="28"/><w:rtl/></w:rPr>'),
        ("Hello", "<w:rtl w:val='0'/>", "<w:rPr><w:rtl w:val='0'/></w:rPr>"),
        ("12.", "", "<w:rPr><w:rtl/></w:rPr>"),
    ],
)  # fmt: skip
def test_runs_of_word(text: str, properties: str, after: str) -> None:
    assert f"<w:r>{after}<w:t" in word(f"<w:p>{run(text, properties)}</w:p>", translate=ARABIC)


def test_runs_in_latin_letters_stay_as_they_are() -> None:
    assert "<w:rtl/>" not in word(f"<w:p>{run('Hello')}</w:p>", translate=always("Hallo"))
    assert "<w:rtl/>" not in word("<w:p><w:r><w:br/></w:r></w:p>", translate=ARABIC)


def test_tables_and_styles_of_word() -> None:
    table = '<w:tbl><w:tblPr><w:tblStyle w:val="a"/><w:tblW w:w="0"/></w:tblPr><w:tr/></w:tbl>'
    assert '<w:tblStyle w:val="a"/><w:bidiVisual/><w:tblW w:w="0"/>' in word(table)
    parts = members(docx())
    parts["word/styles.xml"] = f'<w:styles xmlns:w="{W}"><w:style><w:rPr><w:b/></w:rPr></w:style></w:styles>'.encode()
    assert "<w:b/><w:bCs/>" in translated(packed(parts), "a.docx")["word/styles.xml"]


def test_documents_of_word_from_the_right() -> None:
    properties = '<w:pPr><w:bidi/><w:jc w:val="left"/></w:pPr>'
    body = f"<w:p>{properties}{run('سلام', '<w:b/><w:rtl/>')}</w:p><w:tbl><w:tblPr><w:bidiVisual/></w:tblPr></w:tbl>"
    back = word(body, "fa", "en", always("Hello"))
    assert back.startswith('<w:p><w:pPr><w:jc w:val="left"/></w:pPr><w:r><w:rPr><w:b/></w:rPr><w:t')
    assert "bidiVisual" not in back
    parts = members(docx(body))
    parts["word/styles.xml"] = (
        f'<w:styles xmlns:w="{W}"><w:style><w:pPr><w:bidi/></w:pPr></w:style></w:styles>'.encode()
    )
    assert "bidi" not in translated(packed(parts), "a.docx", "fa", "en")["word/styles.xml"]


@pytest.mark.parametrize(
    ("source", "target"), [("en", "de"), ("ar", "fa"), ("he", "ur"), ("", "de"), ("en", ""), ("", ""), ("ar", "")]
)
@pytest.mark.parametrize("name", ["a.docx", "a.pptx", "a.odt"])
def test_other_pairs_change_nothing(name: str, source: str, target: str) -> None:
    content = {"a.docx": docx, "a.pptx": pptx, "a.odt": odt}[name]()
    options = Settings(Options(sentencex_splitter("en")), source, target)
    assert run_work(document(content, name, options), identity).value == content


@pytest.mark.parametrize("name", ["a.docx", "a.pptx"])
def test_each_direction_is_turned_once(name: str) -> None:
    content = {"a.docx": docx, "a.pptx": pptx}[name]()
    options = Settings(Options(sentencex_splitter("en")), "", "ar")
    once = run_work(document(content, name, options), identity).value
    assert members(once) != members(content)
    assert members(run_work(document(once, name, options), identity).value) == members(once)


PARTS = st.sampled_from(
    ["<w:keepNext/>", "<w:ind/>", '<w:jc w:val="left"/>', "<w:rPr><w:b/></w:rPr>", "<w:bidi/>", "<w:shd/>"]
)


@given(st.lists(PARTS, unique=True), st.lists(st.sampled_from(["<w:b/>", "<w:i/>", "<w:color/>"]), unique=True))
@settings(max_examples=40, deadline=None)
def test_any_properties_of_word_have_the_direction_once(paragraph: list[str], letters: list[str]) -> None:
    content = word(f"<w:p><w:pPr>{''.join(paragraph)}</w:pPr>{run('Hello', ''.join(letters))}</w:p>", translate=ARABIC)
    assert content.count("<w:bidi/>") == content.count("<w:rtl/>") == 1
    turned_back = word(content, "ar", "en", always("Hello"))
    assert "<w:bidi/>" not in turned_back
    assert "<w:rtl/>" not in turned_back


# Slides

A = 'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'


def slide(part: str, inside: str, source: str = "en", target: str = "he") -> str:
    parts = {"ppt/presentation.xml": "<p:x xmlns:p='urn:p'/>", part: f"<p:sld xmlns:p='urn:p' {A}>{inside}</p:sld>"}
    return translated(packed(parts), "a.pptx", source, target)[part].partition(">")[2].removesuffix("</p:sld>")


HELLO = "<a:r><a:t>Hello</a:t></a:r></a:p>"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<a:p>", '<a:p><a:pPr rtl="1"/>'),
        ('<a:p><a:pPr lvl="1"/>', '<a:p><a:pPr lvl="1" rtl="1"/>'),
        ('<a:p><a:pPr algn="l" rtl="0"/>', '<a:p><a:pPr algn="r" rtl="1"/>'),
        ('<a:p><a:pPr algn="r"><a:buNone/></a:pPr>', '<a:p><a:pPr algn="l" rtl="1"><a:buNone/></a:pPr>'),
        ('<a:p><a:pPr algn="ctr"/>', '<a:p><a:pPr algn="ctr" rtl="1"/>'),
        ('<a:p><a:pPr algn="r" rtl="1"/>', '<a:p><a:pPr algn="r" rtl="1"/>'),
    ],
)
def test_paragraphs_of_slides(before: str, after: str) -> None:
    assert slide("ppt/slides/slide1.xml", before + HELLO) == after + HELLO
    if "rtl" in before and 'rtl="1"' not in before:
        assert slide("ppt/slides/slide1.xml", after + HELLO, "he", "en") == before + HELLO


def test_masters_and_tables_of_slides() -> None:
    style = '<p:bodyStyle><a:lvl1pPr><a:x/></a:lvl1pPr><a:lvl2pPr algn="l" rtl="0"/></p:bodyStyle>'
    turned = '<p:bodyStyle><a:lvl1pPr rtl="1" algn="r"><a:x/></a:lvl1pPr><a:lvl2pPr algn="r" rtl="1"/></p:bodyStyle>'
    assert slide("ppt/slideMasters/slideMaster1.xml", style) == turned
    assert slide("ppt/slideLayouts/slideLayout1.xml", '<a:lvl1pPr algn="ctr"/>') == '<a:lvl1pPr algn="ctr" rtl="1"/>'
    assert (
        slide("ppt/slides/slide1.xml", "<a:tblPr/><a:bodyPr rtlCol='0'/>")
        == "<a:tblPr rtl=\"1\"/><a:bodyPr rtlCol='1'/>"
    )


@pytest.mark.parametrize("part", ["slideMasters/slideMaster1.xml", "slideLayouts/slideLayout7.xml"])
def test_text_of_masters_next_to_placeholders_is_translated(part: str) -> None:
    shape = "<p:sp><p:nvSpPr><p:nvPr>{}</p:nvPr></p:nvSpPr><a:p><a:r><a:t>Hello all</a:t></a:r></a:p></p:sp>"
    inside = shape.format("<p:ph type='title'/>") + shape.format("")
    parts = {"ppt/presentation.xml": "<x/>", f"ppt/{part}": f"<p:sld xmlns:p='urn:p' {A}>{inside}</p:sld>"}
    options = Settings(Options(sentencex_splitter("en")), "en", "de")
    outcome = run_work(document(packed(parts), "a.pptx", options), always("Hallo"))
    assert re.findall("<a:t>(.*?)</a:t>", members(outcome.value)[f"ppt/{part}"].decode()) == ["Hello all", "Hallo"]
    assert outcome.notices == {}


# OpenDocument and EPUB


def open_document(inside: str, source: str = "en", target: str = "ar") -> str:
    parts = members(odt())
    space = 'xmlns:fo="urn:oasis:names:tc:opendocument:xmlns:xsl-fo-compatible:1.0"'
    styles = parts["styles.xml"].replace(b"<style:footer", f"<x {space}/>{inside}<style:footer".encode(), 1)
    parts["styles.xml"] = styles.replace(b"xmlns:xlink", f"{space} xmlns:xlink".encode(), 1)
    return (
        translated(packed(parts), "a.odt", source, target)["styles.xml"].split(f"<x {space}/>")[1].split("<style:f")[0]
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('<style:page-layout-properties style:writing-mode="lr-tb"/>',
         '<style:page-layout-properties style:writing-mode="rl-tb"/>'),
        ("<style:page-layout-properties/>", '<style:page-layout-properties style:writing-mode="rl-tb"/>'),
        ('<style:paragraph-properties fo:text-align="start"/>', '<style:paragraph-properties fo:text-align="right"/>'),
        ('<style:paragraph-properties fo:text-align="end"/>', '<style:paragraph-properties fo:text-align="left"/>'),
        ('<style:paragraph-properties fo:text-align="justify"/>',
         '<style:paragraph-properties fo:text-align="justify"/>'),
        ('<style:paragraph-properties style:writing-mode="rl-tb" fo:text-align="right"/>',
         '<style:paragraph-properties style:writing-mode="rl-tb" fo:text-align="right"/>'),
        ('<style:paragraph-properties style:writing-mode="lr-tb"/>',
         '<style:paragraph-properties style:writing-mode="rl-tb"/>'),
        ('<style:paragraph-properties style:writing-mode="tb-rl"/>',
         '<style:paragraph-properties style:writing-mode="tb-rl"/>'),
        ('<style:default-style style:family="paragraph"><style:paragraph-properties/></style:default-style>',
         '<style:default-style style:family="paragraph"><style:paragraph-properties style:writing-mode="rl-tb" '
         'fo:text-align="right"/></style:default-style>'),
    ],
)  # fmt: skip
def test_styles_of_opendocument(before: str, after: str) -> None:
    assert open_document(before) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('style:writing-mode="rl-tb" fo:text-align="end"', 'style:writing-mode="lr-tb" fo:text-align="left"'),
        ('fo:text-align="right"', 'fo:text-align="left"'),
        ('fo:text-align="left"', 'fo:text-align="right"'),
        ('fo:text-align="start"', 'fo:text-align="start"'),
        ('style:writing-mode="page"', 'style:writing-mode="page"'),
    ],
)
def test_styles_of_opendocument_from_the_right(before: str, after: str) -> None:
    tag = "<style:paragraph-properties {}/>"
    assert open_document(tag.format(before), "he", "fr") == tag.format(after)


@pytest.mark.parametrize(
    ("version", "spine", "target", "after"),
    [
        ("3.0", "<spine>", "ar", '<spine page-progression-direction="rtl">'),
        ("3.0", '<spine toc="t">', "he", '<spine toc="t" page-progression-direction="rtl">'),
        ("3.0", '<spine page-progression-direction="ltr">', "fa", '<spine page-progression-direction="rtl">'),
        ("2.0", '<spine toc="t">', "ar", '<spine toc="t">'),
        ("3.0", "<spine>", "de", "<spine>"),
    ],
)
def test_pages_of_books_follow_from_the_right(version: str, spine: str, target: str, after: str) -> None:
    assert after in translated(book(version, spine), "a.epub", "en", target)["OPS/book.opf"]


def test_pages_of_books_from_the_right() -> None:
    content = book("3.1", '<spine page-progression-direction="rtl">')
    assert 'page-progression-direction="ltr"' in translated(content, "a.epub", "ar", "en")["OPS/book.opf"]


def book(version: str, spine: str) -> bytes:
    parts = members(epub())
    text = parts["OPS/book.opf"].decode().replace("<package ", f'<package version="{version}" ')
    parts["OPS/book.opf"] = text.replace("</package>", f"{spine}</spine></package>").encode()
    return packed(parts)


@pytest.mark.parametrize(
    ("inside", "reported"),
    [
        ("<text>Page text</text>", 1),
        ('<text x="1"><tspan>Page</tspan></text>', 1),
        ("<svg:text>Page</svg:text>", 1),
        ("<text>12</text>", 0),
        ("<style>.a { color: red }</style><path d='M 1'/>", 0),
        ("<foreignObject><p>Words</p></foreignObject>", 1),
    ],
)
def test_drawings_with_text_in_books_are_reported(inside: str, reported: int) -> None:
    parts = members(book("3.0", "<spine>"))
    item = b'<item id="s" href="page.svg" media-type="image/svg+xml"/></manifest>'
    parts["OPS/book.opf"] = parts["OPS/book.opf"].replace(b"</manifest>", item)
    parts["OPS/page.svg"] = f"<svg xmlns:svg='urn:s'>{inside}</svg>".encode()
    options = Settings(Options(sentencex_splitter("en")), "en", "de")
    notices = run_work(document(packed(parts), "a.epub", options), identity).notices
    assert notices == ({"left_out": 1} if reported else {})
    assert not reported or notices.places == {"left_out": "OPS/page.svg"}


@pytest.mark.parametrize(
    ("raw", "after"),
    [
        ("<a/>", '<a x:b="1"/>'),
        ("<a >", '<a x:b="1">'),
        ("<a y:b='0' c=\"2\">", "<a y:b='1' c=\"2\">"),
        ('<a bb="0"/>', '<a bb="0" x:b="1"/>'),
        ('<a b = "0"/>', '<a b = "1"/>'),
        ('<a b=""/>', '<a b="1"/>'),
    ],
)
def test_an_attribute_of_a_tag(raw: str, after: str) -> None:
    assert with_attribute(raw, "x:b", "1") == after
