"""Small documents as programs write them, with tables, footnotes, split runs, fields, pictures and notes."""
# ruff: noqa: E501  (documents have long lines)

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

PICTURE = bytes(range(256)) * 4
_W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
_XML = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\r\n'


def packed(parts: Mapping[str, str | bytes], stored: tuple[str, ...] = ()) -> bytes:
    """Return a zip with members in order, those in `stored` uncompressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            info = zipfile.ZipInfo(name, (2024, 2, 3, 4, 5, 6))
            info.compress_type = zipfile.ZIP_STORED if name in stored else zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, content)
        archive.comment = b"a remark"
    return out.getvalue()


def members(content: bytes) -> dict[str, bytes]:
    """Return the content of a zip's members, in order."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def run(text: str, properties: str = "", attributes: str = "") -> str:
    inside = f"<w:rPr>{properties}</w:rPr>" if properties else ""
    return f'<w:r{attributes}>{inside}<w:t xml:space="preserve">{text}</w:t></w:r>'


BODY = (
    '<w:p w:rsidR="00A1"><w:pPr><w:pStyle w:val="Heading1"/></w:pPr>' + run("The first heading") + "</w:p>"
    # A word in three runs that only the editing history divides, a bold word, a footnote, a link, a deleted word.
    "<w:p>"
    + run("One lit", attributes=' w:rsidR="01"')
    + run("tle ho", attributes=' w:rsidR="02"')
    + '<w:proofErr w:type="spellStart"/>'
    + run("use and ")
    + run("bold", "<w:b/>")
    + run(" words")
    + '<w:r><w:rPr><w:rStyle w:val="FootnoteReference"/></w:rPr><w:footnoteReference w:id="2"/></w:r>'
    + run(". Then ")
    + '<w:hyperlink r:id="rId4" w:history="1">'
    + run("a link", '<w:rStyle w:val="Hyperlink"/>')
    + "</w:hyperlink>"
    + '<w:del w:id="1" w:author="A"><w:r><w:delText>gone</w:delText></w:r></w:del>'
    + run(" &amp; the end.")
    + "</w:p>"
    "<w:tbl><w:tr><w:tc><w:p>"
    + run("Left cell")
    + "</w:p></w:tc><w:tc><w:p>"
    + run("Right cell", "<w:i/>")
    + "</w:p></w:tc></w:tr></w:tbl>"
    # A field, a tab, a picture with a text box in the middle of a sentence.
    "<w:p>"
    + run("Page ")
    + '<w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:instrText> REF x </w:instrText></w:r>'
    '<w:r><w:fldChar w:fldCharType="separate"/></w:r>'
    + run("see there")
    + '<w:r><w:fldChar w:fldCharType="end"/></w:r>'
    + run(" with ")
    + "<w:r><w:pict><v:textbox><w:txbxContent><w:p>"
    + run("In the box")
    + "</w:p></w:txbxContent></v:textbox></w:pict></w:r>"
    + run("a box.")
    + "<w:r><w:tab/><w:t>Short</w:t><w:br/><w:t>lines here</w:t></w:r></w:p><w:p/><w:p><w:pPr/></w:p>"
)


def docx(body: str = BODY) -> bytes:
    spaces = f'{_W} xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships" xmlns:v="urn:v"'
    footnote = f'<w:footnote w:id="2"><w:p><w:r><w:footnoteRef/></w:r>{run(" The note itself.")}</w:p></w:footnote>'
    return packed(
        {
            "[Content_Types].xml": "<Types/>",
            "_rels/.rels": "<Relationships/>",
            "word/document.xml": f"{_XML}<w:document {spaces}><w:body>{body}<w:sectPr/></w:body></w:document>",
            "word/styles.xml": f"{_XML}<w:styles {_W}><w:style w:styleId='Heading1'/></w:styles>",
            "word/footnotes.xml": f"{_XML}<w:footnotes {_W}>{footnote}</w:footnotes>",
            "word/header1.xml": f"{_XML}<w:hdr {_W}><w:p>{run('The header')}</w:p></w:hdr>",
            "word/media/image1.png": PICTURE,
        }
    )


def pptx() -> bytes:
    def slide(*paragraphs: str) -> str:
        text = "".join(f"<a:p>{p}<a:endParaRPr lang='en'/></a:p>" for p in paragraphs)
        spaces = 'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" xmlns:p="urn:p"'
        return f"{_XML}<p:sld {spaces}><p:sp><p:txBody><a:bodyPr/>{text}</p:txBody></p:sp></p:sld>"

    runs = '<a:pPr lvl="1"/><a:r><a:rPr lang="en" b="1"/><a:t>Big</a:t></a:r><a:r><a:rPr lang="en"/><a:t> plans</a:t></a:r>'
    table = "<a:r><a:t>one cell</a:t></a:r><a:br/><a:r><a:t>of it</a:t></a:r>"
    return packed(
        {
            "[Content_Types].xml": "<Types/>",
            "ppt/presentation.xml": "<p:presentation xmlns:p='urn:p'/>",
            "ppt/slides/slide1.xml": slide(runs, table, '<a:fld type="slidenum"><a:t>1</a:t></a:fld>'),
            "ppt/notesSlides/notesSlide1.xml": slide("<a:r><a:t>Say this</a:t></a:r>"),
            "ppt/media/image1.png": PICTURE,
        }
    )


def odt() -> bytes:
    spaces = " ".join(
        f'xmlns:{prefix}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
        for prefix, name in [
            ("office", "office"),
            ("text", "text"),
            ("table", "table"),
            ("draw", "drawing"),
            ("style", "style"),
        ]
    )
    note = (
        '<text:note text:note-class="footnote"><text:note-citation>1</text:note-citation><text:note-body>'
        "<text:p>The note itself.</text:p></text:note-body></text:note>"
    )
    body = (
        '<text:h text:outline-level="1">The first heading</text:h>'
        f'<text:p>One <text:span text:style-name="T1">bold</text:span> word{note} here<text:s text:c="2"/>and '
        '<text:a xlink:href="http://x">a link</text:a>.<text:line-break/>it goes on &amp; on.</text:p>'
        "<table:table><table:table-row><table:table-cell><text:p>Left cell</text:p></table:table-cell>"
        "<table:table-cell><text:p>Right cell</text:p></table:table-cell></table:table-row></table:table>"
        '<text:p>Page <text:page-number>one</text:page-number><draw:frame draw:name="f"><draw:text-box>'
        "<text:p>In the box</text:p></draw:text-box></draw:frame></text:p>"
    )
    whole = f'{spaces} xmlns:xlink="http://www.w3.org/1999/xlink"'
    style = '<style:style style:name="T1"><style:text-properties fo:x="bold" xmlns:fo="urn:fo"/></style:style>'
    return packed(
        {
            "mimetype": "application/vnd.oasis.opendocument.text",
            "content.xml": f"<?xml version='1.0' encoding='UTF-8'?>\n<office:document-content {whole}>"
            f"<office:automatic-styles>{style}</office:automatic-styles><office:body><office:text>{body}</office:text>"
            "</office:body></office:document-content>",
            "styles.xml": f"<office:document-styles {whole}><style:footer><text:p>The footer</text:p></style:footer>"
            "</office:document-styles>",
            "Pictures/a.png": PICTURE,
        },
        stored=("mimetype",),
    )


def epub() -> bytes:
    page = (
        '<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" '
        '"http://www.w3.org/TR/xhtml11/DTD/xhtml11.dtd">\n<html xmlns="http://www.w3.org/1999/xhtml"><head><title>The title'
        "</title><style>p { color: red }</style></head><body><h1>Chapter&nbsp;one</h1><p>It <i>was</i> a <b>dark</b> night"
        '<img src="a.png" alt="a lamp"/>.</p><pre>code  here</pre></body></html>'
    )
    book = (
        '<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
        "<dc:language>en</dc:language></metadata><manifest>"
        '<item id="a" href="text/page%201.xhtml" media-type="application/xhtml+xml"/>'
        '<item id="n" href="toc.ncx" media-type="application/x-dtbncx+xml"/>'
        '<item id="p" href="a.png" media-type="image/png"/></manifest></package>'
    )
    contents = (
        '<ncx xmlns="http://www.daisy.org/z3986/2005/ncx/"><head><meta name="x" content="y"/></head><navMap>'
        "<navPoint><navLabel><text>Chapter one</text></navLabel></navPoint></navMap></ncx>"
    )
    return packed(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": '<container><rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>',
            "OPS/book.opf": book,
            "OPS/text/page 1.xhtml": page,
            "OPS/toc.ncx": contents,
            "OPS/a.png": PICTURE,
        },
        stored=("mimetype",),
    )


TEXTS: dict[str, str] = {
    "a.txt": "First line.  Second one.\r\n\r\n\tIndented 😀\n",
    "a.md": '---\ntitle: x\n---\n# The **big** heading\n\nSome text with `code()` and [a link](http://x.y "t"),\nwrapped _here_.  \n'
    "Hard break.\n\n* item one\n* [ ] item two\n\n> quoted words\n\n```python\nx = 'text'\n```\n\n    indented code\n\n"
    "| Head | Cell |\n|---|:--|\n| one | `two` |\n\n[ref]: http://x.y\n![picture](a.png) and <b>html</b> end[^1].\n",
    "a.html": "<!doctype html>\n<html><head><title>Title</title></head><body><p>One <b>two</b>.</p></body></html>\n",
    "a.srt": "1\r\n00:00:01,000 --> 00:00:02,500\r\n<i>Hello there,</i>\r\nmy friend.\r\n\r\n2\r\n00:00:03,000 --> 00:00:04,000\r\n"
    "{\\an8}- Who?\r\n- Nobody.\r\n",
    "a.vtt": "WEBVTT - note\n\nSTYLE\n::cue { color: red }\n\nNOTE do not touch\n\nid1\n00:01.000 --> 00:02.000 align:start\n"
    "<v Mary>Hello <c.loud>you</c> &amp; me <00:01.500>now\n",
    "a.xlf": '<?xml version="1.0"?>\n<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2"><file source-language="en">'
    '<body>\n  <trans-unit id="1">\n    <source>Press <g id="1">the button</g><x id="2"/> now</source>\n  </trans-unit>\n'
    '  <trans-unit id="2"><source>Done words</source><target>Fertig</target></trans-unit>\n'
    '  <trans-unit id="3" translate="no"><source>Keep words</source></trans-unit>\n'
    '  <trans-unit id="4"><source>New <mrk mtype="protected">Brand</mrk> words</source><target state="new">old</target></trans-unit>\n'
    "</body></file></xliff>\n",
    "b.xlf": '<xliff version="2.0" xmlns="urn:oasis:names:tc:xliff:document:2.0" srcLang="en"><file id="f"><unit id="1"><segment>'
    '<source>Press <pc id="1">the button</pc><ph id="2"/> now</source></segment></unit></file></xliff>',
    "a.tmx": '<?xml version="1.0"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx version="1.4"><header srclang="en"/><body>\n<tu>\n'
    '  <tuv xml:lang="en-GB"><seg>Hello <bpt i="1">&lt;b></bpt>you<ept i="1">&lt;/b></ept></seg></tuv>\n</tu>\n'
    '<tu><tuv xml:lang="en"><seg>Done</seg></tuv><tuv xml:lang="de"><seg>Fertig</seg></tuv></tu></body></tmx>',
    "a.po": 'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n\n#: a.c:1\n#, c-format\nmsgid "Open %s file\\n"\n'
    'msgstr ""\n\nmsgid "Done"\nmsgstr "Fertig"\n\nmsgctxt "x"\nmsgid "one \\"file\\""\nmsgid_plural ""\n"%d files"\nmsgstr[0] ""\n'
    'msgstr[1] ""\n',
    "a.xml": '<?xml version="1.0" encoding="utf-8"?>\n<resources>\n  <string name="a">Hello <b>bold</b> %1$s</string>\n</resources>\n',
    "a.json": '{"title": "Hello {name}", "n": 1.50, "list": ["two words", null, {"key words": "a <b>bold</b> \\u00fc \\" thing"}],\n'
    ' "url": "http://x.y"}\n',
}

FILES: dict[str, bytes] = {
    **{name: text.encode() for name, text in TEXTS.items()},
    "a.docx": docx(),
    "a.pptx": pptx(),
    "a.odt": odt(),
    "a.epub": epub(),
}
"""FILES has one file of each kind."""
