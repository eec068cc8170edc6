"""Everything that separates two words, in every kind of document: it returns to its place, and words are not glued."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.text.fakes import Translate, identity, permuting, swapped, upper
from tests.serve.text.files import docx, members, packed, pptx
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Link, Options, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")


def asked_and_said(name: str, content: bytes, translate: Translate = upper) -> tuple[list[str], bytes]:
    """Return the sentences to be translated in a document, and the document's translation."""
    asked: list[str] = []

    def watched(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return translate(sentences)

    return asked, run(document(content, name, SETTINGS), watched).value


def word(paragraph: str, translate: Translate = upper) -> tuple[list[str], str]:
    """Return the same for a Word paragraph, whose translation is given with one letter per mark."""
    asked, said = asked_and_said("a.docx", docx(f"<w:p>{paragraph}</w:p>"), translate)
    body = members(said)["word/document.xml"].decode().partition("<w:body>")[2].partition("<w:sectPr/>")[0]
    asked = [sentence for sentence in asked if sentence not in ("The note itself.", "The header")]
    for mark, letter in (
        ("tab", "\t"),
        ("ptab", "\t"),
        ("br", "\n"),
        ("noBreakHyphen", "‑"),
        ("drawing", "#"),
        ("cr", "\n"),
        ("footnoteReference", "*"),
    ):
        body = re.sub(rf"<w:{mark}\b[^>]*/>", letter, body)
    return asked, re.sub(r"<[^>]*>", "", body)


def one_run(*parts: str) -> str:
    return "<w:r>" + "".join(part if part.startswith("<") else f"<w:t>{part}</w:t>" for part in parts) + "</w:r>"


@pytest.mark.parametrize(
    ("parts", "asked", "said"),
    [
        (("Name", "<w:tab/>", "Address", "<w:tab/>", "City"), ["Name", "Address", "City"], "nAME\taDDRESS\tcITY"),
        (("2.1", "<w:tab/>", "The dog", "<w:tab/>", "6"), ["The dog"], "2.1\ttHE DOG\t6"),
        (("<w:tab/>", "Indented"), ["Indented"], "\tiNDENTED"),
        (("Left", '<w:ptab w:alignment="right"/>', "Right"), ["Left", "Right"], "lEFT\trIGHT"),
        (("Page one", '<w:br w:type="page"/>', "next page"), ["Page one", "next page"], "pAGE ONE\nNEXT PAGE"),
        (("One", '<w:br w:type="column"/>', "two"), ["One", "two"], "oNE\nTWO"),
        (("Mary Smith", "<w:br/>", "Main Street"), ["Mary Smith", "Main Street"], "mARY sMITH\nmAIN sTREET"),
        (("Hello,", "<w:cr/>", "Mary"), ["Hello,\nMary"], "hELLO,\nmARY"),
        (("Word", '<w:footnoteReference w:id="2"/>', "more"), ["Word more"], "wORD*MORE"),
        (("seventy", "<w:noBreakHyphen/>", "five"), ["seventy-five"], "SEVENTY‑FIVE"),
        (("a well-known", "<w:noBreakHyphen/>", "b"), ["a well-known-b"], "A WELL‑KNOWN-B"),
        (("Left", "<w:drawing/>", "right"), ["Left right"], "lEFT#RIGHT"),
        (("Left ", "<w:drawing/>", "right"), ["Left right"], "lEFT #RIGHT"),
        (("soft", "<w:softHyphen/>", "ware"), ["software"], "SOFTWARE"),
    ],
)
def test_marks_of_word(parts: tuple[str, ...], asked: list[str], said: str) -> None:
    assert word(one_run(*parts)) == (asked, said)
    assert word("".join(one_run(part) for part in parts)) == (asked, said)


def test_tabs_in_links_and_fields_of_word() -> None:
    link = f'<w:hyperlink w:anchor="a">{one_run("Contents", "<w:tab/>", "12")}</w:hyperlink>'
    assert word(link) == (["Contents"], "cONTENTS\t12")
    begins = '<w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:fldChar w:fldCharType="separate"/></w:r>'
    assert word(f"{begins}{one_run('Contents', '<w:tab/>', '1')}") == (["Contents"], "cONTENTS\t1")


def test_an_unchanged_paragraph_of_several_texts_keeps_its_source() -> None:
    begins = '<w:r w:rsidR="01"><w:fldChar w:fldCharType="begin"/></w:r>'
    runs = '<w:r w:rsidR="1"><w:t>One </w:t></w:r><w:r w:rsidR="2"><w:t>two</w:t><w:tab/><w:t>3</w:t></w:r><w:r/>'
    for paragraph in (begins + runs, runs, runs + begins, f"<w:hyperlink>{runs}</w:hyperlink>{begins}"):
        content = docx(f"<w:p>{paragraph}</w:p>")
        assert asked_and_said("a.docx", content, identity)[1] == content


def test_ruby_of_word_keeps_its_signs_and_its_text_is_read() -> None:
    ruby = (
        "<w:r><w:ruby><w:rubyPr/><w:rt><w:r><w:t>signs</w:t></w:r></w:rt><w:rubyBase><w:r><w:t>text</w:t></w:r>"
        "</w:rubyBase></w:ruby></w:r>"
    )
    asked, said = word(f"{one_run('Some ')}{ruby}{one_run(' here')}")
    assert asked == ["Some text here"]
    assert said == "sOME signsTEXT HERE" or said == "SOME signsTEXT HERE"


def test_a_superscript_in_a_word_keeps_its_letters() -> None:
    raised = '<w:r><w:rPr><w:vertAlign w:val="superscript"/></w:rPr><w:t>2</w:t></w:r>'
    content = docx(f"<w:p>{one_run('About 5 m')}{raised}{one_run(' of land')}</w:p>")

    def by_words(sentences: list[str]) -> list[SentenceTranslation]:
        links = [Link(m.start(), m.end(), m.start(), m.end()) for m in re.finditer(r"\S+", sentences[0])]
        return [
            SentenceTranslation(s.replace("About", "Circa").replace("land", "Land"), links)
            if s.startswith("About")
            else identity([s])[0]
            for s in sentences
        ]

    asked, said = asked_and_said("a.docx", content, by_words)
    assert "About 5 m2 of land" in asked
    assert '<w:vertAlign w:val="superscript"/></w:rPr><w:t xml:space="preserve">2</w:t>' in (
        members(said)["word/document.xml"].decode()
    )


def test_tabs_of_slides_and_of_plain_text_divide() -> None:
    content = members(pptx())
    slide = content["ppt/slides/slide1.xml"].replace(b"Big</a:t>", b"Big\tSmall</a:t>")
    asked, said = asked_and_said("a.pptx", packed({**content, "ppt/slides/slide1.xml": slide}))
    assert asked[:2] == ["Big", "Small plans"]
    assert b"bIG" in members(said)["ppt/slides/slide1.xml"]
    assert asked_and_said("a.txt", b"Name\tAddress\t\tCity\n") == (
        ["Name", "Address", "City"],
        b"nAME\taDDRESS\t\tcITY\n",
    )


@pytest.mark.parametrize(
    ("page", "asked"),
    [
        ("<a>Home</a><a>About us</a><span>Menu</span>", ["Home", "About us", "Menu"]),
        ("<span>Total</span><strong>Price</strong>", ["Total", "Price"]),
        ('<span class="tag">red</span><span class="tag">green</span>', ["red", "green"]),
        ("<b><a>Home</a></b><a>here</a>", ["Home", "here"]),
        ("<b>Total:</b><span>five</span>", ["Total:", "five"]),
        ("<p>hello<img src='x.png'>world</p>", ["hello world"]),
        ("<p>hello <img src='x.png'> world</p>", ["hello  world"]),
        ("<p>hello<input>world</p>", ["hello", "world"]),
        ("<p>hello<svg><path/></svg>world</p>", ["hello world"]),
        ("un<u>der</u>line", ["underline"]),
        ("H<sub>two</sub><sup>plus</sup>", ["Htwoplus"]),
        ("<b>under</b><i>line</i>", ["underline"]),
        ('<span lang="en">Hel</span><span lang="en">lo</span>', ["Hello"]),
        ("a<wbr>b", ["ab"]),
    ],
)
def test_neighbours_in_html(page: str, asked: list[str]) -> None:
    found, said = asked_and_said("a.html", page.encode())
    assert found == asked
    assert re.findall("<[^>]*>", said.decode()) == re.findall("<[^>]*>", page.replace('"en"', '"de"'))
    assert asked_and_said("a.html", page.encode(), identity)[1].decode() == page.replace('"en"', '"de"')


@pytest.mark.parametrize(
    "code",
    [
        '<x id="1" ctype="lb"/>',
        '<x id="1" equiv-text="&lt;br/&gt;"/>',
        '<ph id="1">&lt;br/&gt;</ph>',
        '<ph id="1">\\n</ph>',
        '<ph id="1" equiv-text="[br]"/>',
    ],
)
def test_line_breaks_of_xliff(code: str) -> None:
    unit = f'<trans-unit id="1"><source>one{code}two</source></trans-unit>'
    asked, said = asked_and_said("a.xlf", f'<xliff version="1.2"><file><body>{unit}</body></file></xliff>'.encode())
    assert asked == ["one\ntwo"]
    assert f">ONE{code}TWO</target>" in said.decode()


PARTS = st.lists(
    st.sampled_from(("<w:tab/>", "Some words", "another", "<w:noBreakHyphen/>", "12", "<w:br/>")), max_size=8
)


@given(PARTS, st.integers(0, 3))
@settings(max_examples=60)
def test_any_runs_and_tabs_keep_their_order(parts: list[str], seed: int) -> None:
    asked, said = word(one_run("Begin", *parts), permuting(seed, change=swapped))
    assert not any("\t" in sentence for sentence in asked)
    assert said.count("\t") == parts.count("<w:tab/>")
    shown = {"<w:tab/>": "\t", "<w:br/>": "\n", "<w:noBreakHyphen/>": "-"}
    columns = "".join(["Begin", *(shown.get(part, part) for part in parts)]).split("\t")
    for column, translated in zip(columns, said.split("\t"), strict=True):
        assert sorted(re.sub(r"\W", "", column.lower())) == sorted(re.sub(r"\W", "", translated.lower()))


def fluent(sentences: list[str]) -> list[SentenceTranslation]:
    return permuting(None, change=swapped)(sentences)


POINTS = ("<img src=x>", "<!-- c -->", "<a id=x></a>", "<a href=x><img src=x></a>", "<code>f\ng</code>")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("see # here", "SEE # HERE"),
        ("see # # here", "SEE # # HERE"),
        ("<b>see #</b> here", "<b>SEE #</b> HERE"),
        ("<b>see # </b>here", "<b>SEE # </b>HERE"),
        ("see #<b> here</b>", "SEE # <b>HERE</b>"),
        ("One. # Two.", "oNE. # tWO."),
        ("see\n#\nhere", "SEE # HERE"),
        ("see# here", "SEE# HERE"),
        ("see #here", "SEE #HERE"),
        ("# see #", "# SEE #"),
    ],
)
def test_a_point_between_two_blanks_keeps_both(point: str, page: str, said: str) -> None:
    found = asked_and_said("a.html", page.replace("#", point).encode(), fluent)[1]
    if "#here" not in page and "see#" not in page:  # in those an image stands for a blank
        assert found.decode().split() == said.replace("#", point).split()
    assert asked_and_said("a.html", page.replace("#", point).encode(), identity)[1].decode() == page.replace("#", point)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.md", "Some ![p](a) here", "sOME ![P](a) HERE"),
        ("a.md", "See <http://x> for more", "sEE <http://x> FOR MORE"),
        ("a.md", "Some words [^1] here\n\n[^1]: A note", "sOME WORDS [^1] HERE\n\n[^1]: a NOTE"),
        ("a.md", "Text `c\no` end", "tEXT `c\no` END"),
        ("a.json", '{"k": "<1>x</1> {{y}} <0/> z"}', '{"k": "<1>X</1> {{y}} <0/> Z"}'),
    ],
)
def test_points_of_other_formats_keep_their_blanks(name: str, content: str, said: str) -> None:
    assert asked_and_said(name, content.encode(), fluent)[1].decode() == said


@pytest.mark.parametrize(
    "code", ['<x id="1"/>', '<ph id="1">{0}</ph>', '<g id="1"/>', '<bx id="1"/>', '<it id="1">a</it>']
)
def test_codes_of_xliff_keep_their_blanks(code: str) -> None:
    unit = f'<trans-unit id="1"><source>You have {code} files</source></trans-unit>'
    content = f'<xliff version="1.2"><file><body>{unit}</body></file></xliff>'.encode()
    assert f">yOU HAVE {code} FILES</target>" in asked_and_said("a.xlf", content, fluent)[1].decode()


@pytest.mark.parametrize("point", ["<w:drawing/>", '<w:footnoteReference w:id="2"/>'])
def test_points_of_word_keep_their_blanks(point: str) -> None:
    shown = "#" if "drawing" in point else "*"
    assert word(one_run("see ", point, " here"), fluent)[1] == f"SEE {shown} HERE"
    assert word(one_run("see ") + one_run(point) + one_run(" here"), fluent)[1] == f"SEE {shown} HERE"


SCRAPS = st.lists(
    st.sampled_from(("one", "two", "three", "end.", *POINTS[:3], "<b>bold", "</b>")), min_size=1, max_size=9
)


@given(SCRAPS, st.sampled_from((None, 1, 2, 3)))
@settings(max_examples=150)
def test_no_point_touches_a_word_that_was_apart_from_it(scraps: list[str], seed: int | None) -> None:
    page = " ".join(scraps)
    said = asked_and_said("a.html", page.encode(), permuting(seed, change=swapped))[1].decode()
    assert not re.search(r"\w<(?:img|a|!)|(?:-->|</a>|src=x>)\w", said)
