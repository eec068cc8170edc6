"""Android's strings.xml: what is read, what stays, and how it is written back."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.text.fakes import Translate, identity, permuting, swapped
from tests.serve.text.test_messages import faithful
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Options, Result, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.system.errors import DataError

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")
HEAD = (
    '<?xml version="1.0" encoding="utf-8"?>\n<resources xmlns:tools="http://schemas.android.com/tools" '
    'xmlns:xliff="urn:oasis:names:tc:xliff:document:1.2">\n'
)


def outcome(body: str, translate: Translate, settings: Settings = SETTINGS) -> Result[bytes]:
    return run(document(f"{HEAD}{body}</resources>\n".encode(), "strings.xml", settings), translate)


def translated(body: str, translate: Translate = faithful, settings: Settings = SETTINGS) -> str:
    return outcome(body, translate, settings).value.decode().removeprefix(HEAD).removesuffix("</resources>\n")


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (r"It\'s %1$s and \"so\"", r"iT\'S %1$s AND \"SO\""),
        (r"First line.\nSecond\ttab\u2026", "fIRST LINE.\\nsECOND\\tTAB…"),
        (r"A back\\now and \\\'it\\\'", r"a BACK\\NOW AND \\\'IT\\\'"),
        (r"\@home and \?what", r"\@HOME AND ?WHAT"),
        (r'"  Keep \'these\' blanks "', r'"  kEEP \'THESE\' BLANKS "'),
        (r"Face \uD83D\uDE00 here", "fACE 😀 HERE"),
        (r"\u0041 word", "a WORD"),
        ("Some <b>bold <i>words</i></b> &amp; <u>more</u>", "sOME <b>BOLD <i>WORDS</i></b> &amp; <u>MORE</u>"),
        ('<a href="http://x.y">A link</a>', '<a href="http://x.y">a LINK</a>'),
        ('Hi <xliff:g id="n" example="Bob">%2$s</xliff:g>!', 'hI <xliff:g id="n" example="Bob">%2$s</xliff:g>!'),
        ('With <annotation font="x">this</annotation> in', 'wITH <annotation font="x">THIS</annotation> IN'),
        (r"<![CDATA[It\'s <b>bold</b> & so\nnext]]>", r"<![CDATA[iT\'S <b>BOLD</b> & SO\nNEXT]]>"),
        (r"<![CDATA[<a href=\"x\">Here</a> now]]>", r"<![CDATA[<a href=\"x\">hERE</a> NOW]]>"),
        ("<![CDATA[Plain words]]>", "<![CDATA[pLAIN WORDS]]>"),
        (r"Press &lt;b>here&lt;/b>, it\'s", r"pRESS &lt;b>HERE&lt;/b>, IT\'S"),
        (
            "Press &lt;b>here&lt;/b> <xliff:g>%s</xliff:g> now",
            "pRESS &lt;b>HERE&lt;/b> <xliff:g>%s</xliff:g> NOW",
        ),
        ("100%% of %d", "100%% OF %d"),
        ("\n    One two.\n    Three\n    four.\n  ", " oNE TWO. tHREE FOUR. "),
        ("<![CDATA[\n  One\n  <b>two</b>\n]]>", "<![CDATA[ oNE <b>TWO</b>\n]]>"),
        ("One\n  <b>two\n  three</b>", "oNE <b>TWO THREE</b>"),
        ('"One\n  two"', '"oNE\n  TWO"'),  # everything between quotation marks is shown
        (r"Hello\u0020", r"hELLO\u0020"),
        (r"\u0020A word\u0020\u0020", r"\u0020a WORD\u0020\u0020"),
        (r"\ A word\ ", r"\ a WORD\ "),
        (r"Hello\u0020<b>there</b>", r"hELLO\u0020<b>THERE</b>"),
        (r"First.\u000aSecond", r"fIRST.\u000asECOND"),
        ("word&amp;nbsp;word", "WORD&amp;nbsp;WORD"),
        ("Tom &amp;amp; Jerry", "tOM &amp;amp; jERRY"),
        ("<b>Both</b> Tom &amp;amp; Jerry\\'s", "<b>bOTH</b> tOM &amp;amp; jERRY\\'S"),
        ("&lt;Enter your name here>", "&lt;eNTER YOUR NAME HERE>"),
        ("A List&lt;String> is", "a lIST&lt;sTRING> IS"),
        ("@string/other", "@string/other"),
        ("?attr/text", "?attr/text"),
        ("@android:string/ok", "@android:string/ok"),
        ("", ""),
    ],
)
def test_a_string_is_written_as_it_was(inside: str, said: str) -> None:
    assert translated(f'  <string name="a">{inside}</string>\n') == f'  <string name="a">{said}</string>\n'
    assert translated(f'<string name="a">{inside}</string>', identity) == f'<string name="a">{inside}</string>'


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<string name="a" translatable="false">Stays</string>', None),
        ('<string name="a" tools:ignore="Typos">A word</string>',
         '<string name="a" tools:ignore="Typos">a WORD</string>'),
        ('<string-array name="a"><item>One</item><item/><item>@string/x</item></string-array>',
         '<string-array name="a"><item>oNE</item><item/><item>@string/x</item></string-array>'),
        ('<string-array name="a" translatable="false"><item>One</item></string-array>', None),
        ('<plurals name="a"><item quantity="one">%d file</item><item quantity="other">%d files</item></plurals>',
         '<plurals name="a"><item quantity="one">%d FILE</item><item quantity="other">%d FILES</item></plurals>'),
        ('<item type="string" name="a">A word</item>', '<item type="string" name="a">a WORD</item>'),
        ('<color name="a">#FFaabb</color><bool name="b">true</bool><dimen name="c">1dp</dimen><eat-comment/>', None),
        ('<style name="a"><item name="android:textStyle">bold</item></style>', None),
        ("<!-- words --><skip/>", None),
    ],
)  # fmt: skip
def test_the_text_in_a_file(body: str, said: str | None) -> None:
    assert translated(body) == (body if said is None else said)


def test_unread_text_is_counted_with_its_place() -> None:
    body = (
        '<array name="colours"><item>#fff</item><item>@color/a</item></array>'
        '<array name="mixed"><item>Some text</item></array>'
        '<plurals name="p"><item>One</item><item>{n, plural, other {# files}}</item></plurals>'
    )
    notices = outcome(body, faithful).notices
    assert notices == {"not_read": 1, "not_parsed": 1}
    assert notices.places == {"not_read": "array mixed", "not_parsed": "plurals p, item 2"}
    body = r'<string name="a">See &lt;img alt=\"A cat\"></string><string name="b">title = &lt;b>x&lt;/b></string>'
    assert outcome(body, faithful).notices.places == {"not_read": "string a"}


def test_keys_are_left() -> None:
    body = '<string name="app_name">A name</string><string name="b">A word</string>'
    settings = Settings(Options(sentencex_splitter("en")), "en", "de", leave=("app_*",))
    assert translated(body, settings=settings) == body.replace("A word", "a WORD")
    assert outcome(body, faithful, settings).notices.places == {"left_by_key": "string app_name"}


@pytest.mark.parametrize(("locale", "becomes"), [("en", "de"), ("en-GB", "de"), ("de", "de"), ("it", None)])
def test_its_language(locale: str, becomes: str | None) -> None:
    content = f'<resources xmlns:tools="http://schemas.android.com/tools" tools:locale="{locale}">%s</resources>'
    work = document((content % '<string name="a">x</string>').encode(), "values.xml", SETTINGS)
    if becomes is None:
        with pytest.raises(DataError, match="'it'"):
            run(work, identity)
    else:
        assert f'tools:locale="{becomes}"' in run(work, identity).value.decode()


@pytest.mark.parametrize("content", ["<project/>", "<?xml version='1.0'?><rss><a>x</a></rss>", "", "<resources>"])
def test_other_xml_is_refused(content: str) -> None:
    with pytest.raises(DataError):
        run(document(content.encode(), "a.xml", SETTINGS), identity)


def shown(raw: str) -> str:
    """Return what Android shows of a string without tags: aapt's rules, character by character."""
    place, said, is_quoted, is_blank = 0, "", False, True
    while place < len(raw):
        sign = raw[place]
        if sign == "\\" and raw[place + 1] == "u":
            said += chr(int(raw[place + 2 : place + 6], 16))
            place += 6
        elif sign == "\\":
            said += {"n": "\n", "t": "\t"}.get(raw[place + 1], raw[place + 1])
            place += 2
        else:
            is_layout = sign in " \t\n" and not is_quoted
            said += "" if sign == '"' or (is_layout and is_blank) else " " if is_layout else sign
            is_quoted ^= sign == '"'
            is_blank = is_layout
            place += 1
            continue
        is_blank = False
    return said.removesuffix(" ") if is_blank else said


def test_line_ends_do_not_split_a_quoted_word() -> None:
    for text in (r"Open \n it\'s it\'s \"so\"", r"One \n (two) \n three, four"):
        for seed in range(20):
            body = f'<string name="a">{text}</string>'
            said = ElementTree.fromstring(outcome(body, permuting(seed, change=swapped)).value)[0].text or ""
            words = shown(text).split()
            assert sorted(swapped(shown(said)).split()) == sorted(words), said


WORDS = st.sampled_from(
    [
        "Open",
        r"it\'s",
        r"\"so\"",
        "files",
        r"\n",
        r"\\",
        r"\u00e9t\u00E9",
        "&amp;",
        "&lt;",
        "%d",
        '"',
        "é",
        "\n   ",
        r"\u0020",
        r"\ ",
    ]
)


@given(st.lists(st.lists(WORDS, max_size=6).map(" ".join), max_size=4), st.integers(0, 9))
def test_any_strings_show_the_same_characters(strings: list[str], seed: int) -> None:
    body = "".join(f'<string name="a{number}">{text}</string>' for number, text in enumerate(strings))
    assert translated(body, identity) == body
    written = ElementTree.fromstring(outcome(body, permuting(seed, change=swapped)).value)
    before = ElementTree.fromstring(f"{HEAD}{body}</resources>".encode())
    for one, other in zip(before, written, strict=True):
        source, said = shown(one.text or ""), shown(other.text or "")
        words = (swapped(said).replace("%D", "%d"), source)
        assert sorted("".join(words[0].split())) == sorted("".join(words[1].split()))
        assert said.count("\n") == source.count("\n")
        assert len(said) - len(said.lstrip(" ")) >= len(source) - len(source.lstrip(" "))
        unquoted = (one.text or "").replace('\\"', "")
        if unquoted.count('"') % 2 == 0:  # an open quote keeps the blanks after it, and may move to the end
            assert len(said) - len(said.rstrip(" ")) >= len(source) - len(source.rstrip(" "))
