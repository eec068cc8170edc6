"""Page elements: what is translated in their attributes and content, languages, directions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.text.fakes import identity, permuting, steps, swapped, upper
from tests.serve.text.files import FILES, members
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.elements import PAGES
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.markup import html
from ziggurat.serve.text.sentences import Options, Result, run
from ziggurat.serve.text.splitting import sentencex_splitter

OPTIONS = Options(sentencex_splitter("en"))


def translated(page: str, source: str = "en", target: str = "de", name: str = "a.html") -> Result[bytes]:
    given = Settings(OPTIONS, source, target)
    return run(document(page.encode(), name, given), upper)


def translated_page(page: str, source: str = "en", target: str = "de", name: str = "a.html") -> str:
    return translated(page, source, target, name).value.decode()


# Direction


@pytest.mark.parametrize(
    ("source", "target", "before", "after"),
    [
        ("en", "ar", '<html lang="en" dir="ltr">', '<html lang="ar" dir="rtl">'),
        ("en", "ar", '<html lang="en">', '<html dir="rtl" lang="ar">'),
        ("en", "he", "<HTML LANG=en-GB DIR=LTR>", "<HTML LANG=he DIR=rtl>"),
        ("en", "fa", "<html>", '<html dir="rtl">'),
        ("en", "ur", "<html dir>", '<html dir="rtl" dir>'),
        ("en", "ar", "<html dir='auto'>", "<html dir='auto'>"),
        ("ar", "en", '<html lang="ar" dir="rtl">', '<html lang="en" dir="ltr">'),
        ("he", "ar", '<html lang="he" dir="rtl">', '<html lang="ar" dir="rtl">'),
        ("en", "de", '<html lang="en" dir="ltr">', '<html lang="de" dir="ltr">'),
        ("az", "az_Arab", "<html>", '<html dir="rtl">'),
        ("en", "ar", "<html><body dir=ltr><p dir='ltr'>", "<html dir=\"rtl\"><body dir=rtl><p dir='rtl'>"),
        ("en", "ar", "<html dir=rtl><td dir=ltr>", "<html dir=rtl><td dir=rtl>"),
        # In elements inside sentences, typed text and protected text, it is the direction of their content.
        ("en", "ar", "<html dir=rtl><span dir=ltr>", "<html dir=rtl><span dir=ltr>"),
        ("en", "ar", "<html dir=rtl><bdo dir=ltr>", "<html dir=rtl><bdo dir=ltr>"),
        ("en", "ar", "<html dir=rtl><input dir=ltr>", "<html dir=rtl><input dir=ltr>"),
        ("en", "ar", "<html dir=rtl><pre dir=ltr>", "<html dir=rtl><pre dir=ltr>"),
        ("en", "ar", "<html dir=rtl><p dir=ltr translate=no>", "<html dir=rtl><p dir=ltr translate=no>"),
        ("en", "ar", "<html dir=rtl><p dir=ltr lang=fr>", "<html dir=rtl><p dir=ltr lang=fr>"),
    ],
)
def test_a_page_declares_the_direction_of_the_translation(source: str, target: str, before: str, after: str) -> None:
    outcome = translated(before, source, target)
    assert outcome.value.decode() == after
    assert "direction" not in outcome.notices


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("http-equiv=Content-Language content=en", "http-equiv=Content-Language content=pt-BR"),
        ("property='og:locale' content='en_US'", "property='og:locale' content='pt_BR'"),
        ("name=dc.language content=en-GB", "name=dc.language content=pt-BR"),
        ("property='og:locale' content='fr_FR'", "property='og:locale' content='fr_FR'"),
        ("property='og:locale:alternate' content='en_US'", "property='og:locale:alternate' content='en_US'"),
        ("name=author content=En", "name=author content=En"),
        ("http-equiv=Content-Language", "http-equiv=Content-Language"),
    ],
)
def test_the_head_of_a_page_declares_the_language_of_the_translation(before: str, after: str) -> None:
    assert translated_page(f"<meta {before}>", target="pt-BR") == f"<meta {after}>"


def test_xhtml_and_books_declare_it_too() -> None:
    assert translated_page("<html xml:lang='en'><body>1</body></html>", target="ar", name="a.xhtml").startswith(
        "<html dir=\"rtl\" xml:lang='ar'>"
    )
    book = run(document(FILES["a.epub"], "a.epub", Settings(OPTIONS, "en", "ar")), upper)
    pages = [text.decode() for name, text in members(book.value).items() if name.endswith("html")]
    assert pages
    assert all(re.search(r'<html [^>]*dir="rtl"', page) for page in pages)


def test_a_page_without_a_place_for_its_direction_is_reported() -> None:
    assert translated("<p>One</p>", target="ar").notices == {"direction": 1}
    assert translated("<p>One</p>").notices == {}
    assert run(html("<p>One</p>", OPTIONS), upper).notices == {}


def test_html_in_markdown_gets_the_direction() -> None:
    assert (
        translated_page("<div dir='ltr'>\n<p>One</p>\n</div>\n", target="ar", name="a.md")
        == "<div dir='rtl'>\n<p>oNE</p>\n</div>\n"
    )


# Attributes


@pytest.mark.parametrize(
    ("page", "after"),
    [
        ("<img src=a.png alt=Cat>", '<img src=a.png alt="cAT">'),
        ("<img alt=a&amp;b src=c/d>", '<img alt="A&amp;B" src=c/d>'),
        ("<input placeholder=name required>", '<input placeholder="NAME" required>'),
        ("<input placeholder=it's>", '<input placeholder="IT\'S">'),
        ("<p title=One class=x>two</p>", '<p title="oNE" class=x>TWO</p>'),
        ("<img alt=x/>", '<img alt="X/">'),
        ("<img alt=1234 title='a b'>", "<img alt=1234 title='A B'>"),
        ("<img alt= Cat>", '<img alt= "cAT">'),
        ("<img alt title=Dog>", '<img alt title="dOG">'),
    ],
)
def test_values_without_quotes_are_translated_and_get_quotes(page: str, after: str) -> None:
    assert translated_page(page) == after
    assert run(html(page, OPTIONS), identity).value == page, "quotes come with a change alone"


# Languages, and `translate` attributes


@pytest.mark.parametrize(
    ("page", "after", "reported"),
    [
        ("<p lang=fr>Bonjour</p><p>One</p>", "<p lang=fr>Bonjour</p><p>oNE</p>", 1),
        ("<p lang=fr><b>Bon</b> <i>jour</i></p>", "<p lang=fr><b>Bon</b> <i>jour</i></p>", 1),
        ("<p>See <i lang='la'>carpe diem</i> here</p>", "<p>sEE <i lang='la'>carpe diem</i> HERE</p>", 1),
        ("<div xml:lang=fr>Bon<p lang=en>One</p>jour</div>", "<div xml:lang=fr>Bon<p lang=de>oNE</p>jour</div>", 1),
        ("<p lang=de>Schon</p>", "<p lang=de>Schon</p>", 1),
        ("<p lang=en-US>One</p>", "<p lang=de>oNE</p>", 0),
        ("<p lang=''>One</p><p lang=und>Two</p>", "<p lang=''>oNE</p><p lang=und>tWO</p>", 0),
        ("<p lang=fr>1234</p>", "<p lang=fr>1234</p>", 0),
        ("<html lang=fr><p>One</p></html>", "<html lang=fr><p>oNE</p></html>", 0),
        ("<img lang=fr alt=Chat>", "<img lang=fr alt=Chat>", 1),
        ("<ul><li lang=fr>Un<li>Two</ul>", "<ul><li lang=fr>Un<li>tWO</ul>", 1),
        ("<p translate=no lang=fr>A <b lang=en>b</b></p>", "<p translate=no lang=fr>A <b lang=en>b</b></p>", 1),
    ],
)
def test_text_in_another_language_stays_and_is_counted(page: str, after: str, reported: int) -> None:
    outcome = translated(page)
    assert outcome.value.decode() == after
    assert outcome.notices["other_languages"] == reported
    assert run(html(page, OPTIONS, PAGES), upper).notices["other_languages"] == 0  # the language is not known


@pytest.mark.parametrize(
    ("page", "after"),
    [
        ("<div translate=no>a<p translate=yes>b</p>c</div>d", "<div translate=no>a<p translate=yes>B</p>c</div>D"),
        ("<div translate=no>a<p translate>b</p></div>", "<div translate=no>a<p translate>B</p></div>"),
        ("<p class=notranslate>a <b translate=yes>b</b> c", "<p class=notranslate>a <b translate=yes>B</b> c"),
        (
            "<p>x <b translate=no>a <i translate=yes>b</i></b> y</p>",
            "<p>X <b translate=no>a <i translate=yes>B</i></b> Y</p>",
        ),
        (
            "<div translate=no><div translate=yes>a<p translate=no>b</p></div><img alt=c></div>",
            "<div translate=no><div translate=yes>A<p translate=no>b</p></div><img alt=c></div>",
        ),
        (
            "<div translate=no>a<img translate=yes alt=b><img alt=d></div>c",
            '<div translate=no>a<img translate=yes alt="B"><img alt=d></div>C',
        ),
        ("<p>a <b translate=no><i lang=en>b</i></b> c", "<p>A <b translate=no><i lang=en>b</i></b> C"),
    ],
)
def test_the_innermost_attribute_counts(page: str, after: str) -> None:
    assert translated_page(page) == after


WISHES = st.sampled_from(
    ["", " translate='no'", " translate='yes'", " lang='fr'", " lang='en'", " class='notranslate'"]
)
TREES = st.recursive(
    st.just("word"),
    lambda inside: st.lists(st.tuples(st.sampled_from(["div", "b"]), WISHES, inside), min_size=1, max_size=3),
    max_leaves=12,
)


def page_of(tree: object, is_own: bool = True, is_wanted: bool = True) -> str:
    """Return the page for a tree in which each word says whether it is to be translated."""
    if isinstance(tree, str):
        return " word " if is_own and is_wanted else " stay "
    assert isinstance(tree, list)
    out = ""
    for name, wish, inside in tree:
        own = {" lang='fr'": False, " lang='en'": True}.get(wish, is_own)
        wanted = {" translate='no'": False, " class='notranslate'": False, " translate='yes'": True}.get(
            wish, is_wanted
        )
        out += f"<{name}{wish}>{page_of(inside, own, wanted)}</{name}>"
    return out


@given(TREES)
@settings(max_examples=150)
def test_any_nesting_of_attributes_is_obeyed(tree: object) -> None:
    page = page_of(tree)
    text = re.sub("<[^>]*>", " ", translated_page(page))
    assert text.split() == re.sub("<[^>]*>", " ", page).replace("word", "WORD").split()
    assert run(html(page, OPTIONS, PAGES), identity).value == page


# Text in elements and attributes


@pytest.mark.parametrize(
    "page",
    [
        "<template><p>TEXT</p></template>",
        "<video src=a><track label='TEXT'><p>TEXT <a href=b>TEXT</a></p></video>",
        "<audio controls>TEXT</audio>",
        "<canvas id=c>TEXT</canvas>",
        "<object data=a><param name=text><p>TEXT</p></object>",
        "<picture><source srcset=text><img alt='TEXT'></picture>",
        "<map name=text><area href=b alt='TEXT'></map>",
        "<svg viewBox='0'><title>TEXT</title><desc>TEXT</desc><g><text x=1>TEXT <tspan>TEXT</tspan></text></g></svg>",
        "<svg aria-label='TEXT'><path d='text'/></svg>",
        "<svg><style>text</style><metadata>text</metadata><text>TEXT</text></svg>",
        "<svg><foreignObject><p>TEXT</p></foreignObject></svg>",
        "<object><object><object>TEXT</object></object></object>",
        "<textarea placeholder='TEXT' aria-label='TEXT'></textarea>",
        "<iframe title='TEXT' src=text></iframe>",
        "<code title='TEXT'>text</code>",
        "<p aria-description='TEXT' aria-roledescription='TEXT' aria-labelledby='text'>TEXT</p>",
        "<meta name=keywords content='TEXT'>",
        "<meta property='og:image:alt' content='TEXT'>",
        "<meta itemprop=description content='TEXT'>",
        "<meta itemprop=image content='text'>",
        "<table><tr><th abbr='TEXT'>TEXT</th></tr></table>",
        "<video src=a>TEXT",
    ],
)
def test_text_is_found_wherever_people_read_it(page: str) -> None:
    given = page.replace("TEXT", "saying").replace("text", "Text")
    given = given.replace("<Text", "<text").replace("</Text", "</text")
    outcome = run(html(f"<p>One {given} two</p>", OPTIONS, PAGES), upper)
    assert outcome.value == f"<p>oNE {given.replace('saying', 'SAYING')} TWO</p>"
    assert run(html(given, OPTIONS, PAGES), identity).value == given
    shuffled = run(html(f"<p>One {given} two three</p>", OPTIONS, PAGES), permuting(3, change=swapped)).value
    assert shuffled.count("SAYING") == page.count("TEXT")


@pytest.mark.parametrize(
    "page",
    [
        "<textarea>Write here</textarea>",
        "<iframe srcdoc='&lt;p>Words'></iframe>",
        "<p>One <textarea rows=2>Write &amp; read</textarea></p>",
    ],
)
def test_text_that_stays_is_reported(page: str) -> None:
    outcome = translated(page)
    assert outcome.notices["not_read"] == 1
    assert outcome.notices.places["not_read"].startswith("element <")


@pytest.mark.parametrize("page", ["<textarea></textarea>", "<textarea>12</textarea>", "<iframe srcdoc=''></iframe>"])
def test_everything_that_stays_is_reported(page: str) -> None:
    assert "not_read" not in translated(page).notices


@pytest.mark.parametrize(
    "unit",
    [
        *("<div translate=no><div translate=yes>x", "<div lang=fr><p lang=en>x", "<p lang=fr>x", "<b translate=no>x"),
        *(
            "<object>x",
            "<svg><text>x",
            "<template><p>",
            "<video><track label=x>x",
            "<p dir=ltr lang=en x=y>",
            "<th abbr=x>",
        ),
        *("<div translate=no><b>x</b>", "<object><template><svg>x", "</object><object>x", "<textarea>x</textarea>"),
    ],
)
def test_steps_are_bounded(unit: str) -> None:
    few, many = (steps(lambda text=text: translated_page(text, target="ar")) for text in (unit * 500, unit * 2_000))  # type: ignore[misc]
    assert many < 8 * few + 10_000  # quadratic time would take sixteen times as many
