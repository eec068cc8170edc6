"""Documents: everything except text keeps its bytes, text is translated completely, and files are well formed."""

from __future__ import annotations

import json
import re
from collections import Counter
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.text.fakes import Translate, identity, permuting, swapped
from tests.serve.text.files import FILES, PICTURE, TEXTS, docx, members, packed
from tests.serve.text.files import run as word_run
from ziggurat.serve.text.documents.kinds import KINDS, document, document_kind
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Options, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.system.errors import DataError

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")
W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"


def translated(name: str, translate: Translate, content: bytes | None = None, settings: Settings = SETTINGS) -> bytes:
    return run(document(FILES[name] if content is None else content, name, settings), translate).value


def test_every_kind_has_a_file_here() -> None:
    assert {document_kind(name).name for name in FILES} == {k.name for k in KINDS} - {"OpenDocument presentation"}
    assert document_kind("A.B.DOCX").name == "Word"
    with pytest.raises(DataError, match=r"a\.pdf: not a kind .* \.txt \.md"):
        document_kind("a.pdf")


ADDS = (".xlf", ".tmx", ".po", ".epub")  # a target or language is filled in


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(ADDS)])
def test_a_document_of_which_nothing_changes_keeps_its_bytes(name: str) -> None:
    assert translated(name, identity) == FILES[name]


@pytest.mark.parametrize("answer", ["", " ", "\u200b", "\xad\ufeff", "\x00\n"])
@pytest.mark.parametrize("name", FILES)
def test_an_empty_translation_leaves_the_source_and_is_counted(name: str, answer: str) -> None:
    def translate(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation(answer, None if answer else []) for _ in sentences]

    asked = list[str]()
    said = run(document(FILES[name], name, SETTINGS), translate)
    same = run(document(FILES[name], name, SETTINGS), lambda sentences: asked.extend(sentences) or identity(sentences))
    assert said.value == same.value
    assert said.notices["empty"] >= len(asked) > 0


@pytest.mark.parametrize("aligned", [True, False])
def test_only_texts_with_an_empty_translation_stay(aligned: bool) -> None:
    def translate(sentences: list[str]) -> list[SentenceTranslation]:
        answers = permuting(None, change=swapped)(sentences)
        return [SentenceTranslation("", []) if "two" in s else a for s, a in zip(sentences, answers, strict=True)]

    options = Settings(Options(sentencex_splitter("en"), aligned=aligned))
    page = b"<p>One here. And two here.</p><p>Say {0} <b>two</b> and three</p><p>Four %s two</p>"
    outcome = run(document(page, "a.html", options), translate)
    assert b"oNE HERE. And two here." in outcome.value
    assert b"two" in outcome.value.split(b"<p>")[2]
    assert b"Four %s two" in outcome.value.replace(b"fOUR", b"Four")
    assert outcome.notices["empty"] == 3


def test_an_archive_keeps_order_dates_and_methods() -> None:
    import io
    import zipfile

    for name in ("a.docx", "a.odt", "a.epub"):
        said = translated(name, permuting(1))
        before, after = (zipfile.ZipFile(io.BytesIO(content)).infolist() for content in (FILES[name], said))
        for one, other in zip(before, after, strict=True):
            assert (one.filename, one.date_time, one.compress_type) == (
                other.filename,
                other.date_time,
                other.compress_type,
            )
            assert one.external_attr == other.external_attr
        untouched = [
            n for n in members(said) if n.endswith((".png", "mimetype", ".rels", "container.xml", "word/styles.xml"))
        ]
        assert len(untouched) >= 2
        assert all(members(said)[n] == members(FILES[name])[n] for n in untouched)
    assert members(said)["OPS/a.png"] == PICTURE


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith((".docx", ".pptx", ".odt", ".epub"))])
@pytest.mark.parametrize("seed", range(4))
def test_parts_stay_well_formed_with_the_same_elements(name: str, seed: int) -> None:
    said = members(translated(name, permuting(seed, change=swapped), settings=Settings(SETTINGS.options)))
    for part, content in members(FILES[name]).items():
        if not part.endswith((".xml", ".xhtml", ".ncx", ".opf")):
            continue
        text, before = said[part].replace(b"&nbsp;", b" "), content.replace(b"&nbsp;", b" ")
        elements, earlier = (Counter(e.tag for e in ElementTree.fromstring(t).iter()) for t in (text, before))
        for runs in ("r", "t", "rPr"):  # runs, of which there are fewer or more
            for space in (W, "{http://schemas.openxmlformats.org/drawingml/2006/main}"):
                elements.pop(space + runs, None)
                earlier.pop(space + runs, None)
        elements.pop(f"{W}b", None), earlier.pop(f"{W}b", None)
        assert elements == earlier, part
        said_text, text_before = ("".join(ElementTree.fromstring(t).itertext()) for t in (text, before))
        assert letters(said_text) == letters(text_before), part


def letters(text: str) -> Counter[str]:
    return Counter("".join(text.split()).casefold())


def word_text(content: bytes, part: str = "word/document.xml") -> list[list[tuple[str, str]]]:
    """Return each paragraph's runs: the text, and the names of its properties."""
    root = ElementTree.fromstring(members(content)[part])
    return [
        [
            (
                "".join(t.text or "" for t in r.iter(f"{W}t")),
                " ".join(p.tag.removeprefix(W) for p in r.findall(f"{W}rPr/*")),
            )
            for r in p.iter(f"{W}r")
            if list(r.iter(f"{W}t"))
        ]
        for p in root.iter(f"{W}p")
    ]


def test_a_word_that_runs_divide_is_one_word_and_properties_follow_their_words() -> None:
    asked: list[str] = []

    def watch(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return permuting(2, change=swapped)(sentences)

    said = word_text(translated("a.docx", watch))
    assert "One little house and bold words." in asked
    assert "Then a link & the end." in asked
    assert ("BOLD", "b") in said[1]
    assert sum(properties == "rStyle" for _, properties in said[1]) == 1
    assert said[2] == [(swapped("Left cell"), "")] or said[2] == [(swapped("cell Left"), "")]
    assert {properties for _, properties in said[3]} == {"i"}
    # The reference stays after the word that it followed.
    body = members(translated("a.docx", permuting(2)))["word/document.xml"].decode()
    assert body.count("footnoteReference w:id") == 1
    assert body.count("<w:delText>gone</w:delText>") == 1
    assert word_text(translated("a.docx", identity), "word/footnotes.xml") == [[(" The note itself.", "")]]


def test_a_field_keeps_its_result_between_its_marks() -> None:
    for seed in range(8):
        body = members(translated("a.docx", permuting(seed)))["word/document.xml"].decode()
        order = [body.index(mark) for mark in ('"begin"', "instrText", '"separate"', '"end"')]
        assert order == sorted(order)
        assert re.search(r'"separate"/></w:r>(?:(?!fldChar).)*(?:see|there)', body)


PARTS = st.tuples(st.sampled_from(["one ", "two", " three", "."]), st.sampled_from(["", "<w:b/>", "<w:i/>"]))


@given(st.lists(PARTS, max_size=6), st.integers(0, 9))
@settings(max_examples=60)
def test_runs_of_any_kind_come_back_whole(parts: list[tuple[str, str]], seed: int) -> None:
    content = docx("<w:p>" + "".join(word_run(text, properties) for text, properties in parts) + "</w:p>")
    assert translated("a.docx", identity, content) == content
    (runs,) = word_text(translated("a.docx", permuting(seed), content))
    assert letters("".join(text for text, _ in runs)) == letters("".join(text for text, _ in parts))


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ('<html lang="en">', '<html lang="de">'),
        ("<HTML class=x lang=en-GB>", "<HTML class=x lang=de>"),
        ("<html xmlns='x' xml:lang='en-US' lang='EN'>", "<html xmlns='x' xml:lang='de' lang='de'>"),
        ('<html lang="fr" data-lang="en">', '<html lang="fr" data-lang="en">'),
        ("<html>", "<html>"),
        ('<p lang="en">', '<p lang="de">'),
        ('<p title="lang" lang = "en-GB" hreflang="en">', '<p title="LANG" lang = "de" hreflang="en">'),
    ],
)
def test_the_language_of_a_page_changes_from_source_to_target(tag: str, said: str) -> None:
    page = f"<!-- {tag} -->{tag}<body>One</body>"
    found = run(document(page.encode(), "a.html", Settings(Options(None), "en", "de")), upper).value
    assert found.decode() == f"<!-- {tag} -->{said}<body>ONE</body>"
    unknown = run(document(page.encode(), "a.html", Settings(Options(None))), identity).value
    assert unknown.decode() == page


def test_the_language_of_a_book_becomes_the_targets() -> None:
    book = members(translated("a.epub", identity))
    assert b"<dc:language>de</dc:language>" in book["OPS/book.opf"]
    unnamed = Settings(SETTINGS.options)
    assert translated("a.epub", identity, settings=unnamed) == FILES["a.epub"]


def upper(sentences: list[str]) -> list[SentenceTranslation]:
    """A translator into capitals, except for protected text, with each word linked to itself."""
    from tests.serve.text.fakes import PART
    from ziggurat.serve.text.sentences import Link

    def one(text: str) -> str:
        return re.sub(r"(%\w|\{\w*\})|(\w)", lambda m: m[1] or m[2].upper(), text)

    return [SentenceTranslation(one(s), [Link(*m.span(), *m.span()) for m in PART.finditer(s)]) for s in sentences]


def test_markdown() -> None:
    assert translated("a.md", upper).decode() == (
        "---\ntitle: X\n---\n# THE **BIG** HEADING\n\n"
        'SOME TEXT WITH `code()` AND [A LINK](http://x.y "T"),\n'
        "WRAPPED _HERE_.  \nHARD BREAK.\n\n* ITEM ONE\n* [ ] ITEM TWO\n\n> QUOTED WORDS\n\n"
        "```python\nx = 'text'\n```\n\n"
        "    indented code\n\n| HEAD | CELL |\n|---|:--|\n| ONE | `two` |\n\n[ref]: http://x.y\n"
        "![PICTURE](a.png) AND <b>HTML</b> END[^1].\n"
    )


def test_subtitles() -> None:
    said = translated("a.srt", upper).decode()
    assert said == TEXTS["a.srt"].replace("Hello there", "HELLO THERE").replace("my friend", "MY FRIEND").replace(
        "Who", "WHO"
    ).replace("Nobody", "NOBODY")
    asked: list[str] = []

    def watch(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return identity(sentences)

    translated("a.srt", watch)
    assert asked == ["Hello there,\nmy friend.", "Who?", "Nobody."]
    cue = b"1\n00:00:01,000 --> 00:00:02,000\nFish &amp; <b>chips</b> & co < x\n"
    assert translated("a.srt", upper, cue) == cue.upper().replace(b"B>", b"b>")
    web = translated("a.vtt", upper).decode()
    assert web == TEXTS["a.vtt"].replace("Hello", "HELLO").replace("you", "YOU").replace("me <", "ME <").replace(
        "now", "NOW"
    )


def test_xliff_fills_in_missing_targets() -> None:
    said = translated("a.xlf", upper).decode()
    marked = ' state="needs-review-translation" state-qualifier="leveraged-mt"'
    assert f'\n    <target{marked}>PRESS <g id="1">THE BUTTON</g><x id="2"/> NOW</target>\n' in said
    assert "<target>Fertig</target>" in said
    assert said.count("Keep words") == 1
    assert f'<target{marked}>NEW <mrk mtype="protected">Brand</mrk> WORDS</target>' in said
    assert 'target-language="de"' in said
    second = translated("b.xlf", upper).decode()
    assert '<target>PRESS <pc id="1">THE BUTTON</pc><ph id="2"/> NOW</target>' in second
    assert 'trgLang="de"' in second


XLIFF_1 = (
    '<xliff version="1.2"><file target-language="de"><body><trans-unit id="1"><source xml:space="preserve">Some words'
    "</source>%s</trans-unit></body></file></xliff>"
)
XLIFF_2 = (
    '<x:xliff xmlns:x="urn:oasis:names:tc:xliff:document:2.0" version="2.1" trgLang="de"><x:file><x:unit><x:segment%s>'
    "<x:source>Some words</x:source>%s</x:segment></x:unit></x:file></x:xliff>"
)


@pytest.mark.parametrize("state", ["new", "needs-translation"])
def test_a_target_marked_as_untranslated_is_replaced(state: str) -> None:
    content = (
        XLIFF_1 % f'<target xml:lang="de" state="{state}" state-qualifier="id-match" phase-name="x">Some words</target>'
    )
    said = translated("a.xlf", upper, content.encode()).decode()
    assert said == XLIFF_1 % (
        '<target xml:lang="de" phase-name="x" xml:space="preserve" state="needs-review-translation" '
        'state-qualifier="leveraged-mt">SOME WORDS</target>'
    )


@pytest.mark.parametrize(
    "state",
    ["needs-review-translation", "needs-adaptation", "needs-l10n", "translated", "signed-off", "final", "x-own", None],
)
def test_a_target_that_was_edited_stays(state: str | None) -> None:
    said = f' state="{state}"' if state else ""
    content = XLIFF_1 % f"<target{said}>Fertiger Text</target>"
    assert translated("a.xlf", upper, content.encode()).decode() == content


@pytest.mark.parametrize(
    ("group", "unit", "is_translated"),
    [("no", "yes", True), ("no", "", False), ("yes", "no", False), ("", "no", False), ("no", "other", False)],
)
@pytest.mark.parametrize("version", ["1.2", "2.1"])
def test_the_nearest_xliff_element_decides_whether_text_is_translated(
    version: str, group: str, unit: str, is_translated: bool
) -> None:
    def said(value: str) -> str:
        return f' translate="{value}"' if value else ""

    second = version != "1.2"
    outer, inner = ("<unit%s><segment>", "</segment></unit>") if second else ("<trans-unit%s>", "</trans-unit>")
    units = (f"{outer % said(value)}<source>Some words</source>{inner}" for value in (unit, ""))
    # The second group specifies nothing, because the settings of the first one end with it.
    content = f'<xliff version="{version}"><file><group{said(group)}>{next(units)}</group><group>{next(units)}</group>'
    found = translated("a.xlf", upper, f"{content}</file></xliff>".encode()).decode()
    first, second_group = found.split("</group><group>")
    assert ("SOME WORDS" in first) == is_translated
    assert "SOME WORDS" in second_group


def test_segments_of_xliff_2() -> None:
    def said(attributes: str, target: str) -> str:
        return translated("a.xlf", upper, (XLIFF_2 % (attributes, target)).encode()).decode()

    done = '<x:target order="1">SOME WORDS</x:target>'
    initial = said(' id="s" state="initial" subState="my:copy"', '<x:target order="1">Some words</x:target>')
    assert initial == XLIFF_2 % (' id="s" state="translated"', done)
    assert said("", '<x:target order="1"/>') == XLIFF_2 % ("", done)
    assert said(' state="initial"', "") == XLIFF_2 % (' state="translated"', "<x:target>SOME WORDS</x:target>")
    for attributes in ("", ' state="translated"', ' state="reviewed"', ' state="final"'):
        kept = XLIFF_2 % (attributes, "<x:target>Fertiger Text</x:target>")
        assert translated("a.xlf", upper, kept.encode()).decode() == kept


def test_tmx_adds_a_variant() -> None:
    said = translated("a.tmx", upper).decode()
    assert '<tuv xml:lang="de"><seg>HELLO <bpt i="1">&lt;b></bpt>YOU<ept i="1">&lt;/b></ept></seg></tuv>' in said
    assert said.count("<tuv") == 4
    moved = translated("a.tmx", permuting(2)).decode()
    assert '<bpt i="1">&lt;b></bpt>you<ept i="1">&lt;/b></ept> Hello' in moved
    with pytest.raises(DataError, match="language of the translation is unknown"):
        translated("a.tmx", identity, settings=Settings(SETTINGS.options))


def test_gettext_fills_in_missing_translations() -> None:
    assert translated("a.po", upper).decode() == TEXTS["a.po"].replace(
        '#, c-format\nmsgid "Open %s file\\n"\nmsgstr ""',
        '#, fuzzy, c-format\nmsgid "Open %s file\\n"\nmsgstr "OPEN %s FILE\\n"',
    ).replace('msgctxt "x"', '#, fuzzy\nmsgctxt "x"').replace('msgstr[0] ""', 'msgstr[0] "ONE \\"FILE\\""').replace(
        'msgstr[1] ""', 'msgstr[1] "%d FILES"'
    )
    crlf = TEXTS["a.po"].replace("\n", "\r\n").encode()
    assert translated("a.po", upper, crlf) == translated("a.po", upper).replace(b"\n", b"\r\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "#, fuzzy\n"),
        ("# Somebody\n#. A remark\n#: a.c:1\n", "# Somebody\n#. A remark\n#: a.c:1\n#, fuzzy\n"),
        ("#: a.c:1\n#, c-format, no-wrap\n", "#: a.c:1\n#, fuzzy, c-format, no-wrap\n"),
        ("#, c-format, fuzzy\n", "#, c-format, fuzzy\n"),
        ('#: a.c:1\n#| msgid "Old"\n', '#: a.c:1\n#, fuzzy\n#| msgid "Old"\n'),
        ('#~ msgid "Gone"\n#~ msgstr "Weg"\n', '#~ msgid "Gone"\n#~ msgstr "Weg"\n#, fuzzy\n'),
    ],
)
def test_a_new_translation_is_marked_fuzzy_like_gettexts(before: str, after: str) -> None:
    rest = 'msgctxt "x"\nmsgid "Some words"\nmsgstr "%s"\n\n#, c-format\nmsgid "Done"\nmsgstr "Fertig"\n'
    said = translated("a.po", upper, f"{before}{rest % ''}".encode()).decode()
    assert said == f"{after}{rest % 'SOME WORDS'}"
    assert translated("a.po", upper, said.encode()).decode() == said


def test_only_json_values() -> None:
    said = json.loads(translated("a.json", upper))
    listed = ["TWO WORDS", None, {"key words": 'A <b>BOLD</b> Ü " THING'}]
    assert said == {"title": "HELLO {name}", "n": 1.5, "list": listed, "url": "http://x.y"}
    assert '"n": 1.50' in translated("a.json", upper).decode()


XHTML = '<html xmlns="http://www.w3.org/1999/xhtml"><head>{}</head><body>{}</body></html>'


@pytest.mark.parametrize(
    "whole", ['<script src="a.js"/>', "<title/>", "<style/>", "<textarea/>", "<iframe/>", "<xmp/>"]
)
@pytest.mark.parametrize("ending", ["xhtml", "XHT"])
def test_an_element_of_xhtml_without_content_ends_at_once(whole: str, ending: str) -> None:
    page = XHTML.format(whole, f"<p>one {whole} two</p><div/><p>three<script>var four;</script></p>")
    said = translated(f"a.{ending}", permuting(None, change=swapped), page.encode()).decode()
    assert said == page.replace("one", "ONE").replace("two", "TWO").replace("three", "THREE")


@pytest.mark.parametrize("body", ["<p>one", "<br>", "a & b", "&nbsp;", "<p a=b>one</p>"])
def test_xhtml_that_is_not_well_formed_is_refused_with_a_way_out(body: str) -> None:
    page = XHTML.format("", body).encode()
    with pytest.raises(DataError, match=r"a\.xhtml: not well-formed XML: .*; if it is HTML, .* \.html"):
        translated("a.xhtml", identity, page)
    assert translated("a.html", identity, page) == page


SIGNED = [
    ("a.docx", "_xmlsignatures/sig1.xml"),
    ("a.pptx", "_xmlsignatures/sig2.xml"),
    ("a.odt", "META-INF/documentsignatures.xml"),
    ("a.odt", "META-INF/macrosignatures.xml"),
    ("a.epub", "META-INF/signatures.xml"),
]


@pytest.mark.parametrize(("name", "part"), SIGNED)
def test_a_signature_that_the_translation_breaks_is_reported(name: str, part: str) -> None:
    content = packed({**members(FILES[name]), part: b"<signature/>", "_xmlsignatures/origin.sigs": b""})
    settings = Settings(SETTINGS.options)
    outcome = run(document(content, name, settings), permuting(None, change=swapped))
    assert (outcome.notices["signed"], outcome.notices.places["signed"]) == (1, part)
    assert members(outcome.value)[part] == b"<signature/>"
    assert "signed" not in run(document(content, name, settings), identity).notices
