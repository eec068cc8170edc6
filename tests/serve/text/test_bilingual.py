"""XLIFF of CAT tools: segments, HTML inside, limits and languages."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.text.fakes import Translate, identity, upper
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Link, Options, Result, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.system.errors import DataError

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")
REVIEW = ' state="needs-review-translation" state-qualifier="leveraged-mt"'


def read(unit: str, translate: Translate = upper, attributes: str = "") -> tuple[list[str], Result[bytes]]:
    asked: list[str] = []

    def watched(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return translate(sentences)

    whole = (
        f'<xliff version="1.2"><file source-language="en" target-language="de"><body><trans-unit id="u"{attributes}>'
        f"{unit}</trans-unit></body></file></xliff>"
    )
    outcome = run(document(whole.encode(), "a.xlf", SETTINGS), watched)
    ElementTree.fromstring(outcome.value)
    return asked, outcome


def target(outcome: Result[bytes]) -> str:
    return outcome.value.decode().partition("<target")[2].partition(">")[2].rpartition("</target>")[0]


def mark(mid: int, text: str) -> str:
    return f'<mrk mtype="seg" mid="{mid}">{text}</mrk>'


def test_segments_get_a_target_after_their_source() -> None:
    first, second = mark(1, "One here."), mark(2, 'Two <g id="2">bold</g> here.')
    asked, outcome = read(
        f'<source>One here. Two <g id="2">bold</g> here.</source><seg-source>{first} {second}</seg-source>'
    )
    assert asked == ["One here.", "Two bold here."]
    said = f"{mark(1, 'oNE HERE.')} {mark(2, 'tWO <g id=' + chr(34) + '2' + chr(34) + '>BOLD</g> HERE.')}"
    assert outcome.value.decode().endswith(
        f"</seg-source><target{REVIEW}>{said}</target></trans-unit></body></file></xliff>"
    )


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [
        (f"<target>{mark(1, '')}{mark(2, '')}</target>", ["One.", "Two."], mark(1, "oNE.") + mark(2, "tWO.")),
        ("<target/>", ["One.", "Two."], mark(1, "oNE.") + mark(2, "tWO.")),
        (f"<target>{mark(1, 'Eins.')}</target>", ["Two."], mark(1, "Eins.") + mark(2, "tWO.")),
        (f"<target>{mark(1, 'Eins.')}{mark(2, '')}</target>", ["Two."], mark(1, "Eins.") + mark(2, "tWO.")),
        (f"<target>{mark(1, 'Eins.')}{mark(2, 'Zwei.')}</target>", [], mark(1, "Eins.") + mark(2, "Zwei.")),
        (
            f'<target state="new">{mark(1, "One.")}{mark(2, "Two.")}</target>',
            ["One.", "Two."],
            mark(1, "oNE.") + mark(2, "tWO."),
        ),
        ("<target>Fertig.</target>", [], "Fertig."),
    ],
)
def test_segments_that_have_a_target_keep_it(before: str, asked: list[str], after: str) -> None:
    cut = f"<seg-source>{mark(1, 'One.')}{mark(2, 'Two.')}</seg-source>"
    found, outcome = read(f"<source>One.Two.</source>{cut}{before}")
    assert (found, target(outcome)) == (asked, after)


@pytest.mark.parametrize(
    ("source", "asked", "said"),
    [
        (
            "&lt;p&gt;A &lt;b&gt;big&lt;/b&gt; one.&lt;/p&gt;",
            ["A big one."],
            "&lt;p&gt;a &lt;b&gt;BIG&lt;/b&gt; ONE.&lt;/p&gt;",
        ),
        ("<![CDATA[<p>A <b>big</b> & one.</p>]]>", ["A big & one."], "<![CDATA[<p>a <b>BIG</b> & ONE.</p>]]>"),
        ("&lt;li>one&lt;/li>&lt;li>two&lt;/li>", ["one", "two"], "&lt;li>ONE&lt;/li>&lt;li>TWO&lt;/li>"),
        ("&lt;code>1 2&lt;/code> stays", ["1 2 stays"], "&lt;code>1 2&lt;/code> STAYS"),
        ('one&lt;br/&gt;Two <g id="1">there</g>', ["one", "Two there"], 'ONE&lt;br/&gt;tWO <g id="1">THERE</g>'),
        (
            'a &lt;b&gt;big&lt;/b&gt; <g id="1">one</g>',
            ["a big one"],
            'A &lt;b&gt;BIG&lt;/b&gt; <g id="1">ONE</g>',
        ),
        ("word&amp;nbsp;word", ["word\xa0word"], "WORD&amp;nbsp;WORD"),
        ("Tom &amp;amp; Jerry", ["Tom & Jerry"], "tOM &amp;amp; jERRY"),
        ('<g id="1">Tom</g> &amp;amp; &lt;b>me&lt;/b>', ["Tom & me"], '<g id="1">tOM</g> &amp;amp; &lt;b>ME&lt;/b>'),
        ("Is it R&amp;D; so?", ["Is it R&D; so?"], "iS IT r&amp;d; SO?"),
        ("Use &lt;your company> here", ["Use <your company> here"], "uSE &lt;YOUR COMPANY> HERE"),
        ("&lt;Enter your name&gt;", ["<Enter your name>"], "&lt;eNTER YOUR NAME&gt;"),
        ("if a &lt;b and c&gt; d", ["if a <b and c> d"], "IF A &lt;B AND C&gt; D"),
        ("A List&lt;String&gt; is", ["A List<String> is"], "a lIST&lt;sTRING&gt; IS"),
        ("&lt;link>the terms&lt;/link> now", ["the terms now"], "&lt;link>THE TERMS&lt;/link> NOW"),
        ("&lt;0>the terms&lt;/0>&lt;br/>now", ["the terms\nnow"], "&lt;0>THE TERMS&lt;/0>&lt;br/>NOW"),
        ("&lt;input disabled&gt; here", ["here"], "&lt;input disabled&gt; HERE"),
        ('&lt;img alt="A cat"&gt; here', ["here", "A cat"], '&lt;img alt="a CAT"&gt; HERE'),
        ('<![CDATA[<a title="A & b">see</a>]]>', ["see", "A & b"], '<![CDATA[<a title="a & B">SEE</a>]]>'),
        ("1 &lt; 2 &amp; more", ["1 < 2 & more"], "1 &lt; 2 &amp; MORE"),
        ('go <ph id="1">&lt;img/&gt;</ph> on', ["go  on"], 'GO <ph id="1">&lt;img/&gt;</ph> ON'),
    ],
)
def test_html_inside(source: str, asked: list[str], said: str) -> None:
    found, outcome = read(f"<source>{source}</source>")
    assert (found, target(outcome)) == (asked, said)
    assert target(read(f"<source>{source}</source>", identity)[1]) == source


HTML = st.lists(
    st.sampled_from(("<p>", "</p>", "<b>", "</b>", "<br>", "words ", "A & B", "&amp;lt;", "]]>", "<i class='x'>"))
)


@given(HTML, st.booleans())
@settings(max_examples=80)
def test_any_html_comes_back(parts: list[str], cdata: bool) -> None:
    text = "".join(parts)
    raw = (
        f"<![CDATA[{text.replace(']]>', ']]]]><![CDATA[>')}]]>"
        if cdata
        else text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    )
    outcome = read(f"<source>{raw}</source>", identity)[1]
    if text.strip():
        assert target(outcome) == raw
    read(f"<source>{raw}</source>")


@pytest.mark.parametrize(
    ("attributes", "is_long"),
    [
        (' maxwidth="5" size-unit="char"', True),
        (' maxwidth="9" size-unit="char"', False),
        (' maxwidth="5"', False),
        (' maxwidth="5" size-unit="pixel"', False),
        (' maxwidth="many" size-unit="char"', False),
    ],
)
def test_a_target_beyond_its_limit_is_reported(attributes: str, is_long: bool) -> None:
    outcome = read('<source>a &amp; <g id="1">bold</g></source>', upper, attributes)[1]
    assert outcome.notices == ({"too_long": 1} if is_long else {})
    assert outcome.notices.places == ({"too_long": "unit u"} if is_long else {})


def test_limits_of_xliff_2() -> None:
    unit = '<unit id="u" slr:sizeRestriction="0,3"><segment><source>four</source></segment></unit>'
    text = (
        '<xliff xmlns="urn:oasis:names:tc:xliff:document:2.0" xmlns:slr="urn:oasis:names:tc:xliff:sizerestriction:2.0" '
        f'version="2.0" srcLang="en"><file id="f">{unit}</file></xliff>'
    )
    assert run(document(text.encode(), "a.xlf", SETTINGS), upper).notices == {"too_long": 1}


@pytest.mark.parametrize(
    ("source", "target", "is_refused"),
    [
        ("en", "de", False),
        ("en-GB", "de_AT", False),
        ("EN", "", False),
        ("eng", "deu", False),
        ("und", "de", False),
        ("fr", "it", True),
        ("en", "it", True),
        ("fr", "", True),
        ("de", "en", True),
    ],
)
def test_other_languages_are_refused(source: str, target: str, is_refused: bool) -> None:
    for text in (
        f'<xliff version="1.2"><file source-language="{source}" target-language="{target}"><body><trans-unit id="1">'
        "<source>words</source></trans-unit></body></file></xliff>",
        f'<xliff version="2.0" srcLang="{source}" trgLang="{target}"><file id="f"><unit id="1"><segment>'
        "<source>words</source></segment></unit></file></xliff>",
    ):
        if is_refused:
            with pytest.raises(DataError, match=r"a\.xlf: is from"):
                run(document(text.encode(), "a.xlf", SETTINGS), upper)
        else:
            assert b"WORDS" in run(document(text.encode(), "a.xlf", SETTINGS), upper).value


@pytest.mark.parametrize(
    ("model", "of_file", "are_same"),
    [
        ("zh-Hans", "zh-Hant", False),
        ("zh-CN", "zh-TW", False),
        ("zh-CN", "zh_HK", False),
        ("zh-Hans", "zh-Hans-HK", True),
        ("zh", "zh-Hant", True),
        ("zh-CN", "zh", True),
        ("zh-CN", "zho-SG", True),
        ("sr-Cyrl", "sr-Latn", False),
        ("sr-Cyrl", "sr@latin", False),
        ("sr-Latn", "sr-Latn-RS", True),
        ("uz", "uz-Cyrl", True),
        ("pt-PT", "pt-BR", True),
        ("de", "de@formal", True),
        ("de", "de_DE.UTF-8", True),
    ],
)
def test_scripts_of_a_language_are_distinguished(model: str, of_file: str, are_same: bool) -> None:
    settings = Settings(SETTINGS.options, "en", model)
    unit = "<body><trans-unit id='1'><source>words</source></trans-unit></body>"
    text = f'<xliff version="1.2"><file source-language="en" target-language="{of_file}">{unit}</file></xliff>'
    variants = f'<tu><tuv xml:lang="en"><seg>words</seg></tuv><tuv xml:lang="{of_file}"><seg>said</seg></tuv></tu>'
    memory = f'<tmx version="1.4"><header srclang="en"/><body>{variants}</body></tmx>'.encode()
    if are_same:
        assert b"WORDS" in run(document(text.encode(), "a.xlf", settings), upper).value
    else:
        with pytest.raises(DataError, match=r"a\.xlf: is from"):
            run(document(text.encode(), "a.xlf", settings), upper)
    assert (b"WORDS" in run(document(memory, "a.tmx", settings), upper).value) is not are_same


@pytest.mark.parametrize("said", ["a ]]> b", "]]>", "a\x00b\x1f", "<b> & </b>", "]]", "> end"])
def test_any_translation_is_well_formed(said: str) -> None:
    def answer(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation(said, [Link(0, len(text), 0, len(said))]) for text in sentences]

    for source in ("words", 'the ]]<g id="1">bold</g> words', "<![CDATA[<p>words</p>]]>", "&lt;p>words&lt;/p>"):
        read(f"<source>{source}</source>", answer)


def test_text_that_trados_marks_as_deleted_is_left_out() -> None:
    deleted = 'Some <mrk mtype="x-sdl-deleted">gone <g id="1">words</g></mrk>new <mrk mtype="x-sdl-added">text</mrk>'
    found, outcome = read(f"<source>{deleted}</source>")
    assert (found, target(outcome)) == (["Some new text"], 'sOME NEW <mrk mtype="x-sdl-added">TEXT</mrk>')
    first = mark(1, 'One <mrk mtype="x-sdl-deleted">gone</mrk>')
    segments = f"<seg-source>{first} {mark(2, 'two')}</seg-source>"
    assert read(f"<source>One gone two</source>{segments}")[0] == ["One", "two"]


@pytest.mark.parametrize("inside", ["Alt text", '<g id="2">Alt</g>', ""])
def test_text_inside_native_codes_is_reported(inside: str) -> None:
    code = f'<ph id="1">&lt;img alt="<sub>{inside}</sub>"></ph>'
    found, outcome = read(f"<source>A {code} word</source>")
    assert (len(found), target(outcome)) == (1, f"a {code} WORD")
    assert outcome.notices == ({"not_read": 1} if inside else {})
    assert outcome.notices.places == ({"not_read": "unit u"} if inside else {})


def test_tags_of_phrase_survive() -> None:
    def letters(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation(re.sub(r"[^A-Z ]", "", text.upper()), None) for text in sentences]

    outcome = read("<source>Hi {1}there{2} you {b&gt;bold&lt;b} {i>more&lt;i}</source>", letters)[1]
    assert target(outcome) == "HI {1}THERE{2} YOU {b>BOLD&lt;b} {i>MORE&lt;i}"


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ('<tuv xml:lang="de"><seg/></tuv>', '<tuv xml:lang="de"><seg>WORDS</seg></tuv>'),
        ('<tuv xml:lang="de-AT"><seg> </seg></tuv>', '<tuv xml:lang="de-AT"><seg>WORDS</seg></tuv>'),
        ('<tuv lang="DE"><note>x</note><seg></seg></tuv>', '<tuv lang="DE"><note>x</note><seg>WORDS</seg></tuv>'),
        ('<tuv xml:lang="de"><seg><ph>1</ph></seg></tuv>', None),
        ('<tuv xml:lang="de"><seg>Wort</seg></tuv>', None),
        ("", '<tuv xml:lang="de"><seg>WORDS</seg></tuv>'),
    ],
)
def test_an_empty_variant_is_filled(variant: str, said: str | None) -> None:
    unit = f'<tu><tuv xml:lang="en"><seg>words</seg></tuv>{variant}</tu>'
    text = f'<tmx version="1.4"><header srclang="en"/><body>{unit}</body></tmx>'
    found = run(document(text.encode(), "a.tmx", SETTINGS), upper).value.decode()
    assert found == (text.replace(f"{variant}</tu>", f"{said}</tu>") if said is not None else text)


def test_units_of_other_languages_are_reported() -> None:
    units = '<tu><tuv xml:lang="fr"><seg>mots</seg></tuv></tu><tu><tuv xml:lang="en"><seg>words</seg></tuv></tu>'
    text = f'<tmx version="1.4"><header srclang="fr"/><body>{units}</body></tmx>'
    assert run(document(text.encode(), "a.tmx", SETTINGS), upper).notices == {"other_languages": 1}


@pytest.mark.parametrize(
    ("attributes", "inside", "said"),
    [
        (' approved="yes"', "<source>App</source><target/>", ' approved="no"'),
        (" approved='yes'", "<source>App</source>", " approved='no'"),
        (' approved = "yes" resname="approved"', "<source>App</source>", ' approved = "no" resname="approved"'),
        (' approved="no"', "<source>App</source>", ' approved="no"'),
        (' approved="yes"', '<source>App</source><target state="new">App</target>', ' approved="no"'),
        (' approved="yes"', '<source>App</source><target state="final">Da</target>', ' approved="yes"'),
        (' approved="yes" translate="no"', "<source>App</source>", ' approved="yes" translate="no"'),
        (
            ' approved="yes"',
            f"<source>A b</source><seg-source>{mark(1, 'A one')}{mark(2, 'B two')}</seg-source>"
            f"<target>{mark(1, 'Da')}{mark(2, '')}</target>",
            ' approved="no"',
        ),
        (
            ' xmlns:m="urn:m" m:confirmed="1"',
            "<source>App</source><target></target>",
            ' xmlns:m="urn:m" m:confirmed="0"',
        ),
    ],
)
def test_machine_translations_are_not_marked_as_approved(attributes: str, inside: str, said: str) -> None:
    _, outcome = read(inside, attributes=attributes)
    assert f'<trans-unit id="u"{said}>' in outcome.value.decode()
    assert outcome.value.count(b"<source>") == inside.count("<source>")


@pytest.mark.parametrize("state", ["initial", "translated", "reviewed", "final"])
def test_an_empty_segment_of_xliff_2_is_translated_and_no_more(state: str) -> None:
    unit = f'<unit id="u"><segment state="{state}" subState="x:approved"><source>App</source><target/></segment></unit>'
    whole = f'<xliff version="2.0" srcLang="en" trgLang="de"><file id="f">{unit}</file></xliff>'
    outcome = run(document(whole.encode(), "a.xlf", SETTINGS), upper)
    assert b'<segment state="translated"><source>App</source><target>aPP</target></segment>' in outcome.value


@pytest.mark.parametrize("key", ["menu.title", "some_key", "someKey", "ERROR_NOT_FOUND", "$key.title", " menu.title\n"])
@pytest.mark.parametrize("behind", ["", "<target/>", '<target state="new">some_key</target>'])
def test_a_source_that_is_a_key_gets_no_target(key: str, behind: str) -> None:
    asked, outcome = read(f"<source>{key}</source>{behind}")
    assert asked == []
    assert outcome.notices == {"for_programs": 1, "nothing_to_translate": 1}
    assert outcome.notices.places["for_programs"] == "unit u"
    assert f"<source>{key}</source>{behind}</trans-unit>" in outcome.value.decode()


@pytest.mark.parametrize("text", ["Title", "left", "menu title", "<g id='1'>menu</g>.title", "Well. Done"])
def test_a_source_that_is_text_gets_a_target(text: str) -> None:
    asked, outcome = read(f"<source>{text}</source>")
    assert asked
    assert "for_programs" not in outcome.notices


@pytest.mark.parametrize(
    ("source", "attributes", "asked"),
    [
        ("Line one\nLine two\n\nThree", ' xml:space="preserve"', ["Line one", "Line two", "Three"]),
        ("Line one\r\nLine two", ' xml:space="preserve"', ["Line one", "Line two"]),
        ("Line one&#10;Line two", "", ["Line one", "Line two"]),
        ("Line one&#xA;&#xA;Line two", "", ["Line one", "Line two"]),
        ("Line one\n   Line two", "", ["Line one\n   Line two"]),
        ("Line one\n   Line two", ' xml:space="default"', ["Line one\n   Line two"]),
        ("Hello &lt;b&gt;you&lt;/b&gt;\nLine two", ' xml:space="preserve"', ["Hello you", "Line two"]),
    ],
)
def test_line_ends_that_are_not_layout_divide_texts(source: str, attributes: str, asked: list[str]) -> None:
    found, outcome = read(f"<source>{source}</source>", attributes=attributes)
    assert found == asked
    assert read(f"<source>{source}</source>", identity, attributes)[1].value.decode().count(source) == 2
    ends = re.findall(r"\r?\n|&#10;|&#xA;", source)
    assert re.findall(r"\r?\n|&#10;|&#xA;", target(outcome)) == ends


def test_white_space_is_kept_in_all_elements_inside() -> None:
    found, _ = read('<source xml:space="preserve">A one\nB two</source>', attributes=' xml:space="default"')
    assert found == ["A one", "B two"]
