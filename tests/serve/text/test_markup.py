"""Inline markup: the same tags, well formed, around a text that is the plain translation."""

from __future__ import annotations

import html as entities
import random
from collections import Counter
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inspect.browser import opened
from tests.serve.text.fakes import Translate, identity, permuting, steps, swapped, upper
from ziggurat.serve.text.elements import HTML, PAGES, MarkupRules
from ziggurat.serve.text.markup import html, xml
from ziggurat.serve.text.sentences import Link, Options, Result, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.serve.text.tokens import html_tokens
from ziggurat.system.errors import DataError

OPTIONS = Options(sentencex_splitter("en"))
ONE_SENTENCE = Options(None)


def translated(text: str, translate: Translate, options: Options = OPTIONS) -> Result[str]:
    return run(html(text, options), translate)


class Reader(HTMLParser):
    """The standard library's reader as an independent check: tags, text, and whether tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.text = ""
        self.open: list[str] = []
        self.nested = True
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[f"<{tag} {sorted(attrs)}>"] += 1
        if tag not in HTML.void | HTML.blank:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.tags[f"</{tag}>"] += 1
        if not self.open or self.open.pop() != tag:
            self.nested = False

    def handle_data(self, data: str) -> None:
        self.text += data


WORDS = st.lists(st.sampled_from(["one", "Two", "three,", "four.", "fünf", "&amp;", "語"]), min_size=1, max_size=4).map(
    " ".join
)


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> str:
    """Inline content, with blanks inside and outside its tags."""
    parts = []
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["text", "text", "element", "void", "empty"]))
        if kind == "element" and depth:
            name = draw(st.sampled_from(["b", "i", "a", "span"]))
            parts.append(f'<{name} id="{depth}{number}">{draw(trees(depth - 1))}</{name}>')
        elif kind == "void":
            parts.append(draw(st.sampled_from(['<img src="x">', "<wbr>", "<!-- note -->"])))
        elif kind == "empty":
            parts.append("<i></i>")
        else:
            parts.append(draw(WORDS))
        parts.append(draw(st.sampled_from([" ", " ", "", "\n  "])))
    return "".join(parts)


@pytest.mark.slow
@given(trees(), st.integers(0, 99))
@settings(max_examples=150)
def test_tags_are_the_same_and_nest_and_the_text_is_the_plain_translation(tree: str, seed: int) -> None:
    source = Reader(tree)
    translate = permuting(seed, change=swapped)
    outcome = translated(tree, translate, ONE_SENTENCE)
    said = Reader(outcome.value)
    assert said.nested
    assert said.tags == source.tags
    if any(c.isalpha() for c in source.text):
        (plain,) = translate([source.text.strip()])
        assert said.text.split() == plain.text.split()
    else:
        assert outcome.value == tree
    assert outcome.value.count("<!-- note -->") == tree.count("<!-- note -->")
    assert list_of(outcome.value, "voids") == list_of(tree, "voids")


def list_of(text: str, what: str) -> Counter[tuple[str, ...]]:
    """Return the images and comments directly in each element, by its tag, in order."""
    assert what == "voids"
    found: Counter[tuple[str, ...]] = Counter()
    stack: list[list[str]] = [["root"]]
    for token in html_tokens(text):
        if token.kind == "open" and token.name not in HTML.void:
            stack.append([token.raw])
        elif token.kind == "close":
            found[tuple(stack.pop())] += 1
        elif token.kind != "text":
            stack[-1].append(token.raw)
    found[tuple(stack.pop())] += 1
    return found


@given(trees())
@settings(max_examples=100)
def test_a_document_of_which_nothing_changes_comes_back_byte_for_byte(tree: str) -> None:
    page = f"<!DOCTYPE html>\n<div class=x>{tree}<p>{tree}</div> <pre>{tree}</pre>"
    assert translated(page, identity).value == page


@given(trees())
@settings(max_examples=100)
def test_words_stay_in_their_elements_if_order_stays(tree: str) -> None:
    changed = translated(tree, upper, ONE_SENTENCE).value
    assert entities.unescape(changed) == entities.unescape("".join(swapped_text(tree)))


def swapped_text(tree: str) -> list[str]:
    return [swapped(entities.unescape(t.raw)) if t.kind == "text" else t.raw for t in html_tokens(tree)]


BROKEN = [
    *("<b>", "</b>", "<i>", "</i>", "<p>", "</p>", "<a href='x", "<", "&", "&#x;", "<!--", "-->", "</", "x", " y "),
    *("<br>", "</br>", "<code>", "</code>", "<script>", "</script>", "<b", ">", '"', "<table>", "<td>", "\0", "]]>"),
    "<![CDATA[",
]


@given(st.lists(st.sampled_from(BROKEN), max_size=25).map("".join), st.integers(0, 9))
@settings(max_examples=200)
def test_broken_markup_comes_back_equally_broken(text: str, seed: int) -> None:
    assert "".join(token.raw for token in html_tokens(text)) == text
    assert translated(text, identity).value == text
    said = translated(text, permuting(seed)).value
    source_tags = [t.raw for t in html_tokens(text) if t.kind in ("open", "close")]
    assert Counter(t.raw for t in html_tokens(said) if t.kind in ("open", "close")) == Counter(source_tags)
    assert faults(said) <= faults(text)


def faults(text: str) -> int:
    """Return closing tags of inline elements that close nothing or the wrong element."""
    count, stack = 0, []
    for token in html_tokens(text):
        if token.kind == "open" and token.name in HTML.inline:
            stack.append(token.name)
        elif token.kind == "close" and token.name in HTML.inline:
            if stack and stack[-1] == token.name:
                stack.pop()
            else:
                count += 1
    return count + len(stack)


@given(trees())
@settings(max_examples=100)
def test_tags_equal_those_of_the_standard_library(tree: str) -> None:
    ours = [(t.kind, t.name) for t in html_tokens(tree) if t.kind in ("open", "close")]
    theirs = []
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, attrs: theirs.append(("open", tag))  # type: ignore[method-assign]
    reader.handle_endtag = lambda tag: theirs.append(("close", tag))  # type: ignore[method-assign]
    reader.feed(tree)
    assert ours == theirs


def noisy(seed: int) -> Translate:
    """Return random words, some from the source, with random links, or none."""

    def one(text: str) -> SentenceTranslation:
        rng = random.Random(f"{seed} {text}")
        words = text.split()
        said = " ".join(rng.choice([*words, "new", "{0}", "."]) for _ in range(rng.randint(0, 2 * len(words))))

        def span(length: int) -> tuple[int, int]:
            begin = rng.randrange(length)
            return begin, rng.randint(begin + 1, min(length, begin + 8))

        links = [Link(*span(len(text)), *span(len(said))) for _ in range(rng.randint(0, 12))] if said else []
        return SentenceTranslation(said, links if rng.random() < 0.9 else None)

    return lambda sentences: [one(s) for s in sentences]


RICH = st.lists(
    st.one_of(
        trees(2), st.sampled_from(["{0}", "<code>x</code>", "<br>", ". ", " %s ", "😀", "<b>{0}</b>", "a.b@c.de", "\n"])
    ),
    max_size=6,
).map(" ".join)


@given(RICH, st.integers(0, 99), st.booleans())
@settings(max_examples=200)
def test_nothing_gets_lost_whatever_the_translation(tree: str, seed: int, aligned: bool) -> None:
    source = Reader(tree)
    said = Reader(translated(tree, noisy(seed), Options(OPTIONS.split, aligned)).value)
    assert said.nested
    assert said.tags == source.tags
    for item in ("%s", "😀", "a.b@c.de"):
        assert said.text.count(item) == source.text.count(item)
    assert said.text.count("{0}") >= source.text.count("{0}")


def fixed(said: str, *links: tuple[int, int, int, int]) -> Translate:
    return lambda sentences: [SentenceTranslation(said, [Link(*link) for link in links]) for _ in sentences]


def test_tags_follow_their_words() -> None:
    # the black cat -> le chat noir
    translate = fixed("le chat noir", (0, 3, 0, 2), (4, 9, 8, 12), (10, 13, 3, 7))
    assert translated("the <b>black</b> <i>cat</i>", translate).value == "le <i>chat</i> <b>noir</b>"
    assert translated("the <b>black cat</b>", translate).value == "le <b>chat noir</b>"
    assert translated("<p><b>the black cat</b></p>", fixed("xyz")).value == "<p><b>xyz</b></p>"


def test_an_element_covers_only_the_best_stretch() -> None:
    # Words 1, 3 and 4 of the target are linked to the element, word 2 to other text, word 5 to nothing.
    translate = fixed("v w x y z", (0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 4, 5), (0, 1, 6, 7))
    assert translated("<b>a</b> c", translate).value == "v w <b>x y</b> z"
    sibling = translated("<b>a</b> <i>c</i>", translate).value
    assert sibling == "v <i>w</i> <b>x y</b> z"


def test_an_element_without_words_takes_one_that_is_linked_less_surely() -> None:
    translate = fixed("eins zwei", (0, 3, 0, 4), (4, 7, 5, 9), (8, 13, 5, 9))
    assert translated("one two <b>three</b>", translate).value == "eins <b>zwei</b>"


def test_without_alignment_each_node_is_translated() -> None:
    seen: list[str] = []

    def watch(sentences: list[str]) -> list[SentenceTranslation]:
        seen.extend(sentences)
        return [SentenceTranslation(s.upper()) for s in sentences]

    outcome = translated("one <b>two</b> three. <i>Whole one.</i>", watch)
    assert outcome.value == "ONE <b>TWO</b> THREE. <i>WHOLE ONE.</i>"
    assert outcome.notices == {"unaligned": 1}
    assert seen[:2] == ["one two three.", "Whole one."]
    seen.clear()
    translated("one <b>two</b> three.", watch, Options(OPTIONS.split, aligned=False))
    assert seen == ["one", "two", "three."]


@pytest.mark.parametrize(
    "copied",
    [
        "<code>x &lt; <i>y</i></code>",
        '<span translate="no">Foo Bar</span>',
        "<b class='a notranslate'>Foo</b>",
        "<kbd>Q</kbd>",
        "<math><mi>x</mi></math>",
        "<script>var word = 'x'</script>",
        "<style>b { color: red }</style>",
        "<pre>some\n text</pre>",
    ],
)
def test_copied_elements_survive(copied: str) -> None:
    for translate in (upper, permuting(3, change=swapped), permuting(3, aligned=False, change=swapped)):
        said = translated(f"<p>First {copied} second words.</p>", translate).value
        assert said.count(copied) == 1
        assert "fIRST" in said


NO = "translate=no"


UNTRANSLATED = [
    f"<p {NO}>keep words<p>TEXT",
    f"<p {NO}>keep <b>words</b><div>TEXT</div></p>TEXT",
    f"<ul><li {NO}>keep<ul><li>keep</ul>keep<li>TEXT</ul>TEXT",
    f"<table><tr><td {NO}>keep<td>TEXT<tr><th {NO}>keep</table>TEXT",
    f"<table><tr {NO}><td>keep<td>keep<tr><td>TEXT</table>",
    f"<table><tbody {NO}><tr><td>keep<tbody><tr><td>TEXT</table>",
    f"<table><tr><td {NO}><table><tr><td>keep</table>keep<td>TEXT</table>",
    f"<dl><dt {NO}>keep<dd>TEXT<dt>TEXT<dd class='a notranslate'>keep</dl>TEXT",
    f"<select><option {NO}>keep<option>TEXT<optgroup label=x {NO}><option>keep<optgroup><option>TEXT</select>",
    f"<div><p {NO}>keep</div>TEXT",
    f"<div><span {NO}>keep</div>TEXT",
    f"<body {NO}><p>keep",
    f"<ul><li {NO}>keep<section><li>keep</section>keep<div><li>TEXT</ul>",
    f"<ul><li {NO}>keep<ul></li>keep</ul>keep<li>TEXT</ul>",
    f"<button {NO}>keep<button>TEXT</button>TEXT",
    f"<p {NO}>keep <button><p>keep</button> keep</p>TEXT",
    f"<i {NO}>keep <b>keep</i>TEXT</b> TEXT",
    "<p>TEXT <code>keep</p><p>TEXT</p>",
    "<ruby>TEXT<rp>(<rt>keep<rp>)</ruby>TEXT",
    f"<table><tr><td>TEXT</div><td {NO}>keep</table>",
    f"<P {NO}>keep</P>TEXT<LI {NO}>keep",
]


@pytest.mark.parametrize("page", UNTRANSLATED)
def test_an_element_without_an_end_tag_ends_where_browsers_end_it(page: str) -> None:
    assert translated(page.replace("TEXT", "text"), upper).value == page


UPPER_IN_BROWSER = """() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let text = "";
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    const kept = !parent.translate || parent.closest(".notranslate, code, rt, rp");
    text += kept ? walker.currentNode.data : walker.currentNode.data.toUpperCase();
  }
  return text;
}"""


@pytest.mark.slow
def test_chromium_ends_elements_in_the_same_places() -> None:
    rng = random.Random(1)
    tags = [f"<{sign}{name}>" for name in ("p", "ul", "li", "div", "dl", "h1", "section") for sign in ("", "/")]
    tags += ["<ol>", "<dd>"]
    tags += [f"<{name} {NO}>" for name in ("p", "li", "dt", "dd", "div")]
    pages = [page for page in UNTRANSLATED if "<code>" not in page]  # browsers reopen <code> in the next paragraph
    pages += ["".join(f"{rng.choice(tags)}w{n} " for n in range(rng.randint(2, 8))) for _ in range(100)]
    with opened() as browser:
        shown = browser.new_page()
        for page in pages:
            shown.set_content(f"<body>{page}" if "<body" not in page else page)
            said = translated(page, upper_all).value
            assert Reader(said).text.split() == shown.evaluate(UPPER_IN_BROWSER).split(), page


def upper_all(sentences: list[str]) -> list[SentenceTranslation]:
    return [SentenceTranslation(s.upper(), [Link(n, n + 1, n, n + 1) for n in range(len(s))]) for s in sentences]


def test_in_xml_only_end_tags_end_elements() -> None:
    text = f'<x><p {NO[:-3]}="no">keep<p>keep</p>keep</p><p>TEXT</p></x>'
    rules = MarkupRules(inline=frozenset(), xml=True)
    assert run(xml(text.replace("TEXT", "text"), OPTIONS, rules), upper).value == text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "UTF-16LE", "iso-8859-1", "ascii", "x-unknown"])
def test_an_encoding_that_the_text_of_xml_declares_means_nothing(encoding: str) -> None:
    text = f'<?xml version="1.0" encoding="{encoding}"?>\n<x>grün “漢字”</x>'
    assert run(xml(text, OPTIONS, MarkupRules(inline=frozenset(), xml=True)), upper).value == text.replace(
        "grün", "GRüN"
    )


@pytest.mark.parametrize("text", ["<x>\ud800</x>", "\udfff", "a <b>\udc00"])
def test_half_a_character_in_xml_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="half a character"):
        run(xml(text, OPTIONS, MarkupRules(inline=frozenset(), xml=True)), upper)


def test_text_that_copied_elements_also_contain_is_distinguished() -> None:
    for text in (
        "<code>{0}</code> opens {0}",
        "x <code>a</code>a<code>a</code> a",
        "<code>a</code>a",
        "a<code>b</code>c",
    ):
        for translate in (identity, upper, permuting(1), permuting(2, aligned=False)):
            said = translated(text, translate).value
            assert said.count("<code>") == text.count("<code>")
            assert Reader(said).nested
        assert translated(text, identity).value == text


def test_a_copied_element_outside_of_its_link_sends_the_paragraph_to_its_slices() -> None:
    # The code goes to the beginning, the rest of its link to the end, and a bold word between them.
    said = {
        "y x mid": SentenceTranslation(
            "x mid y y", [Link(2, 3, 0, 1), Link(4, 7, 2, 5), Link(0, 1, 6, 7), Link(0, 1, 8, 9)]
        )
    }
    outcome = translated(
        "<a>y <code>x</code></a> <b>mid</b>",
        lambda sentences: [said.get(s, SentenceTranslation(s.upper())) for s in sentences],
    )
    assert outcome.value == "<a>Y <code>x</code></a> <b>MID</b>"
    assert outcome.notices == {"in_segments": 1}


def test_entities_stay_valid_and_as_they_were_spelt() -> None:
    said = translated("<p>Fish &amp; chips &lt; 5&nbsp;&euro; <b>caf&eacute;</b></p>", permuting(5)).value
    assert Counter(said.replace("<", " <").split()) >= Counter({"&amp;": 1, "&lt;": 1})
    assert "5&nbsp;&euro;" in translated("<p>word 5&nbsp;&euro;</p>", upper).value
    assert "<b>caf&eacute;</b>" in said
    assert translated("AT&T <i>word</i>", upper).value == "at&t <i>WORD</i>"
    unlike = "<p>x <b>&amp;</b> <i>&</i> <b>&#38;</b></p>"
    assert translated(unlike, identity).value == unlike
    assert translated("a", fixed("<b>&amp;\x01")).value == "&lt;b>&amp;amp;"


def test_breaks() -> None:
    seen: list[str] = []

    def watch(sentences: list[str]) -> list[SentenceTranslation]:
        seen.extend(" ".join(s.split()) for s in sentences)
        return identity(sentences)

    text = "<p>goes on<br>here</p><p>Milk<br>Eggs</p><p>one,<br/>Two</p><p>a<br><br>b</p><td>x</td><td>y</td>"
    assert translated(text, watch).value == text
    assert seen == ["goes on here", "Milk", "Eggs", "one, Two", "a", "b", "x", "y"]
    assert translated("<p>Su gokun<br/>midul</p>", upper).value == "<p>sU GOKUN<br/>MIDUL</p>"


def test_line_ends_of_a_page_end_no_sentence() -> None:
    seen: list[str] = []

    def watch(sentences: list[str]) -> list[SentenceTranslation]:
        seen.extend(" ".join(s.split()) for s in sentences)
        return upper(sentences)

    for text in (
        "<p>The old\n<a href='x'>\nhouse</a> stands. It\n\n  is red.</p>",
        "<p>The old\r\n\r\nhouse stands. <b>It\n</b>\n<i>\nis</i> red.</p>",
        "<p>\n\n<!-- one -->\n\nThe old<!-- two -->\n\n<!-- three -->\nhouse stands. It is red.</p>",
        "<p>The old<br>\nhouse stands. It<br>\n\nis red.</p>",
    ):
        seen.clear()
        assert translated(text, identity).value == text
        said = translated(text, watch).value
        assert seen == ["The old house stands.", "It is red."]
        assert "".join(said.split()).lower() == "".join(text.split()).lower()


def test_attributes_are_translated_on_request() -> None:
    rules = PAGES
    text = "<p>See <img src=a alt=\"one 'two'\" title='say \"x\"'> <a title=bare>here</a>"
    text += ' <input placeholder="Na&amp;me"></p>'
    said = run(html(text, OPTIONS, rules), upper).value
    assert "alt=\"ONE 'TWO'\"" in said
    assert "title='SAY \"X\"'" in said
    assert 'placeholder="nA&amp;ME"' in said
    assert translated(text, upper).value.count("one 'two'") == 1
    quoting = run(html('<img alt="a">', OPTIONS, rules), fixed('"<'))
    assert quoting.value == '<img alt="&quot;&lt;">'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # For browsers the following attribute is the value of `value` and `width`.
        (
            '<input title="Suche" value= placeholder="Name">',
            '<input title="sUCHE" value= placeholder="Name">',
        ),
        ('<img alt="Ein Hund" width= title="Bild">', '<img alt="eIN hUND" width= title="Bild">'),
        ('<img alt="" title="a"alt="b">', '<img alt="" title="A"alt="B">'),
        ('<img title = "a" data-x=\' alt="b"\'>', '<img title = "A" data-x=\' alt="b"\'>'),
        ("<img title='a' alt=\"b>", "<img title='A' alt=\"b>"),
    ],
)
def test_attributes_are_found_where_browsers_find_them(text: str, said: str) -> None:
    assert run(html(text, OPTIONS, PAGES), upper).value == said


@pytest.mark.parametrize(
    "unit",
    [
        *("<b>", "</b>", "<b>x", "<b></b>", "<i>x</i> ", "<!--", "<a b='", "<p>x", "<script>", "<code>", "<b>x</i>"),
        *("<br>x", "&amp;", "<p>", "<li>x", "<td><table>", "<b><hr>", "<p><table><b><hr>"),
    ],
)
def test_steps_and_depth_are_bounded(unit: str) -> None:
    once, four_times = unit * 1_000, unit * 4_000
    assert len(translated(four_times, identity, ONE_SENTENCE).value) >= len(four_times) - 1
    few, many = (steps(lambda text=text: translated(text, upper, ONE_SENTENCE)) for text in (once, four_times))  # type: ignore[misc]
    assert many < 8 * few + 10_000  # quadratic time would take sixteen times as many


def test_too_deep_or_too_many_tags_divide_a_paragraph() -> None:
    deep = "<b>" * 3000 + "one two" + "</b>" * 3000
    assert translated(deep, permuting(1)).value in (deep, deep.replace("one two", "two one"))
    many = "<i>x</i> " * 3000
    outcome = translated(many, identity, ONE_SENTENCE)
    assert outcome.value == many
    assert outcome.notices == {"in_segments": 1}
    assert translated("<i>x</i> " * 30, identity, ONE_SENTENCE).notices == {}


def test_a_random_page_of_every_kind_of_tag() -> None:
    rng = random.Random(7)
    names = sorted(HTML.inline | HTML.copied | HTML.void | {"div", "td", "h1"})
    page = "".join(f"<{rng.choice(names)}>word{n} </{rng.choice(names)}>" for n in range(400))
    assert translated(page, identity).value == page


@pytest.mark.parametrize(
    "tag",
    [
        '<input type="submit" value="TEXT">',
        "<INPUT TYPE=Button value='TEXT'>",
        '<input type="text" value="stays">',
        '<option value="stays" label="TEXT">TEXT</option>',
        '<optgroup label="TEXT"></optgroup>',
        '<meta name="description" content="TEXT">',
        '<meta property="og:title" content="TEXT">',
        '<meta name="viewport" content="width=device-width">',
        '<input type=submit value="stays" translate="no">',
        '<track label="TEXT">',
    ],
)
def test_attributes_that_people_read_are_translated(tag: str) -> None:
    given = tag.replace("TEXT", "text")
    assert run(html(given, OPTIONS, PAGES), upper).value == tag
    assert run(html(given, OPTIONS), upper).value == given.replace(">text<", ">TEXT<")
