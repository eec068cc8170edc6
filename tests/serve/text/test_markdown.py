"""Markdown: text is translated wherever a CommonMark reader sees text, and nowhere else."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tests.serve.text.fakes import Translate, identity, permuting, swapped, upper
from ziggurat.serve.text.documents import markdown
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Link, Options, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.system.errors import ConfigError

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")


def translated(text: str, translate: Translate, settings: Settings = SETTINGS, name: str = "a.md") -> str:
    return run(document(text.encode(), name, settings), translate).value.decode()


@pytest.mark.parametrize(
    "text",
    [
        "1. TEXT\n\n   ```sh\n   echo words\n   ```\n\n   TEXT\n",
        "* TEXT\n    ~~~\n    some words\n    ~~~\n* TEXT\n",
        "TEXT\n\n<pre>\nsome words\n\nmore words\n</pre>\n\nTEXT\n",
        "<pre class=x>\n\n# some words\n",
        "TEXT\n\n<!-- some words\n\nmore words\n\n* and more -->\n\nTEXT\n",
        "TEXT <!-- some\nwords --> TEXT\n",
        "<script>\nlet words\n\nlet more\n</script>\n",
        "<div>\nTEXT <code>some words</code>\n<p translate=no>keep words\n</div>\n\nTEXT\n",
        "TEXT <kbd>Ctrl</kbd> TEXT <span class='notranslate'>Brand words</span> TEXT\n",
        "$$\nsome words\n\nmore\n$$\n",
        "---\nlayout: some\n---\n\nTEXT\n",
        "    some words\n\nTEXT\n\n\tsome words\n",
        "> TEXT\n>\n>     some words\n",
        "> TEXT\n>\n> <div>\n> some words\n> </div>\n",
        "<div some\nwords\n\nTEXT\n",
        "\\\nTEXT\n\nTEXT\\\n\\\nTEXT  \n\\\nTEXT\n",
        "[some label]: http://x.y 'TEXT'\n\n[^some-note]: TEXT\n",
        "TEXT `some words\nmore words` TEXT\n",
        "> [!NOTE]\n> TEXT\n",
        "- [x] TEXT\n",
        "# TEXT ## {#some-id}\n",
        "TEXT\n===\n\nTEXT\n---\n\n* * *\n",
        "<https://some.words> TEXT ![](some.png) TEXT\n",
    ],
)
def test_everything_except_text_stays(text: str) -> None:
    given = text.replace("TEXT", "text")
    assert translated(given, upper) == text
    assert translated(given.replace("\n", "\r\n"), upper) == text.replace("\n", "\r\n")


@pytest.mark.parametrize(
    "text",
    [
        "* item\n\n    paragraph of the item\n\n    * inner item\n\n        and its paragraph\n",
        "1. item\n\n   paragraph\n\n   > quoted\n   > words\n",
        "[^1]: note text\n\n    its second paragraph\n\n    * with an item\n",
        "![alt text](a.png) ![alt text][pic] [![alt text](<a b.png> 'kept')](http://x.y)\n",
        "| head | cell |\n|--|--|\n| a \\| b | ![alt](x.png) |\n\n> | a | b |\n> |---|---|\n> | c | d |\n",
        "line\nlazy [in brackets] and (more) * words\n",
        "<p>\nhtml text\n</p>\n<details><summary>more text</summary>\n\n**bold** text\n\n</details>\n",
        "setext heading\nin two lines\n===\n",
        "x | y without a table\n",
        '<div>\n  <a class="x"\n    href="y">\n    far indented words\n  </a>\n</div>\n',
        "{{ 1 }}\n    indented words\n{{ 2 }}\n    - an item\n{{ 3 }}\n     > a quotation\n",
        "| a poem\n|      its line\n",
        "[@name](https://x.y/name), [-@name](x) and [@name][pic]\n",
    ],
)
def test_text_is_translated(text: str) -> None:
    kept = re.compile(r"\]\([^()]*\)|\[pic\]|\bx\.png|<[^<>]*>")
    said = translated(text, upper)
    assert not re.search("[a-z]", kept.sub("", said))
    assert said.casefold() == text.casefold()


# Syntax that site generators read. TEXT is translated, everything else stays.
MARKS_OF_SITES = [
    ":::note\n\nTEXT\n\n:::\n",
    ":::caution TEXT TEXT\nTEXT\n:::\n",
    "::: tip TEXT\nTEXT\n\n* TEXT\n:::\n",
    ":::note[TEXT]{#some-id}\nTEXT\n:::\n",
    "::: {.callout-note title='TEXT'}\nTEXT\n:::\n",
    ":::{warning} TEXT\nTEXT\n:::\n",
    ":::{figure} some/path.png\nTEXT\n:::\n",
    "::::tabs\n:::tab\nTEXT\n:::\n::::\n",
    "::youtube[TEXT]{#id}\n",
    '!!! note "TEXT"\n\n    TEXT\n\n    * TEXT\n\nTEXT\n',
    "!!! warning\n    TEXT\n\n    ```sh\n    echo words\n    ```\n\n    TEXT\n",
    '??? note "TEXT"\n    TEXT\n\n        code words\n\n    TEXT\n',
    '???+ tip inline end "TEXT"\n\n    !!! bug\n\n        TEXT\n\n    TEXT\n',
    '=== "TEXT"\n\n    TEXT\n\n=== "TEXT"\n\n    TEXT\n',
    ".. note:: TEXT\n\n   TEXT\n",
    ".. include:: some/words.txt\n\nTEXT\n",
    "```{note} TEXT\nTEXT\n```\n\nTEXT\n",
    "```{python}\nsome words\n```\n",
    "import Tabs from '@theme/Tabs';\nimport {\n  One,\n  Two\n} from 'words';\n\nTEXT\n",
    "export const words = {\n\n  some: 'more words',\n};\n\nTEXT\n",
    "export const Words = () => (\n  <b>some words</b>\n);\n\nTEXT\n",
    '{% include "some words.html" %}\n\nTEXT {% tag words %} TEXT\n',
    "{{< figure src='some words' >}}\n\nTEXT\n",
    "{/* some words */}\n\nTEXT {/* more\nwords */} TEXT\n",
    "TEXT :smile: TEXT {{ some.words }} TEXT {@link Words}\n",
    "TEXT [TEXT](some-words){target=_blank} TEXT\n{: .some-class}\n",
    "[[toc]]\n\n[TOC]\n\n--8<-- 'some/words.md'\n\nTEXT\n",
    "*[HTML]: TEXT\n",
    "> [!tip] TEXT\n> TEXT\n",
    "+++\nlayout = 'words'\n+++\n\nTEXT\n",
    "TEXT [@smith2010, p. 3] TEXT\n",
    "TEXT\n:::note TEXT\nTEXT\n:::\nTEXT\n",
    "- TEXT\n\n  :::note\n\n  TEXT\n\n  :::\n",
    "```{note}\n:class: some words\n:name: x\nTEXT\nTEXT\n```\n",
    "```{warning} TEXT\n---\nclass: words\n---\nTEXT\n```\n",
    ":::{figure} a.png\n:alt: TEXT TEXT\n:width: 200px\n\nTEXT\n:::\n",
    ".. note::\n   :class: words\n\n   TEXT\n",
    "- TEXT\n  ```{tip}\n  :class: words\n  TEXT\n  ```\n",
    "> ```{tip}\n> :class: words\n> TEXT\n> ```\n",
    "(some-label)=\n## TEXT\n\nTEXT (TEXT) = TEXT\n",
    "```md\n:::note some words\n!!! note 'words'\n```\n\nTEXT\n",
]
FORMULAS = [
    "TEXT $E = mc^2$ TEXT $\\alpha_i$ TEXT\n",
    "TEXT \\(a_1 + b\\) TEXT \\\\(x_1\\\\) TEXT\n",
    "TEXT $$\n\\sum_i words\n$$ TEXT\n",
    "TEXT \\[x = \\frac{words}{b}\\] TEXT\n",
    "TEXT $n$ TEXT, $x$-TEXT ($k$)\n",
    "TEXT $`words_1`$ TEXT\n",
    "\\begin{align}\nwords &= b \\\\\n\\end{align}\n\nTEXT\n",
    "| TEXT | $x_i$ |\n|---|---|\n| $y$ | TEXT |\n",
]
TARGETS = [
    "TEXT [TEXT](http://some.org/a_(b_(c))) TEXT\n",
    'TEXT [TEXT](/url "TEXT \\"TEXT\\" TEXT") TEXT\n',
    "TEXT [TEXT](/url (some title)) TEXT\n",
    "TEXT [TEXT](<some words (x> 'TEXT') TEXT\n",
    "TEXT [TEXT](some\\)words) TEXT\n",
    "[![TEXT](a_(b).png)](http://some.words) TEXT\n",
]


@pytest.mark.parametrize("text", [*MARKS_OF_SITES, *FORMULAS, *TARGETS])
def test_marks_of_sites_formulas_and_targets_stay(text: str) -> None:
    given = text.replace("TEXT", "text")
    assert translated(given, identity) == given
    assert translated(given, upper) == text
    assert translated(given.replace("\n", "\r\n"), upper) == text.replace("\n", "\r\n")


@pytest.mark.parametrize("text", ["it costs $5 and $6 now", "from US$5 to $10 or $ more", "\\(see the words here\\)"])
def test_dollars_and_brackets_around_words_are_not_a_formula(text: str) -> None:
    assert translated(text, upper) == swapped(text)


@pytest.mark.parametrize(
    ("text", "shown", "said"),
    [
        ("set my\\_own\\_name now", "set my_own_name now", "SET MY\\_OWN\\_NAME NOW"),
        ("two \\* three\\*", "two * three*", "TWO \\* THREE\\*"),
        ("so \\[see\\] it", "so [see] it", "SO \\[SEE\\] IT"),
        ("a&amp;b &lt; c&#42;", "a&b < c*", "A&amp;B &lt; C&#42;"),
        ("tom&nbsp;and &mdash; jerry", "tom\xa0and — jerry", "TOM&nbsp;AND &mdash; JERRY"),
        ("a&thinsp;b", "a\u2009b", "A&thinsp;B"),
        ("soft&shy;ly", "softly", "SOFTLY"),
        ("no &entity; here", "no &entity; here", "NO &ENTITY; HERE"),
        ("back\\\\slash", "back\\slash", "BACK\\\\SLASH"),
        ("| a\\_b |\n|---|\n", "a_b", "| A\\_B |\n|---|\n"),
    ],
)
def test_escapes_and_entities_are_characters(text: str, shown: str, said: str) -> None:
    asked: list[str] = []

    def watch(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return upper(sentences)

    assert translated(text, watch) == said
    assert asked == [shown]
    assert translated(text, identity) == text


@pytest.mark.parametrize(
    "text",
    [
        "[foo*]: /url\n\nSee *[foo*] here.\n",
        "See [the text][my label][other] here.\n\n[other]: /x\n",
        "[the text][my label][other]\n\n[other]: /x\n[the text]: /y\n",
        "*a [b* c](x) d*\n",
        "[a *b](x) c*\n",
        "[a [b](c) d](e)\n",
        "**[foo**][] and *x\n\n[foo**]: /url\n",
        "a * b and _c\n",
    ],
)
def test_links_bind_more_tightly_than_emphasis(text: str) -> None:
    assert translated(text, identity) == text
    said = translated(text, upper)
    assert [len(links(page)) for page in (text, said)] == [len(links(text))] * 2
    assert [target for _, target in links(said)] == [target for _, target in links(text)]


def links(page: str) -> list[tuple[str, str]]:
    return re.findall('<a href="([^"]*)"()', MarkdownIt().render(page))


def test_a_quotation_is_one_text_without_its_marks() -> None:
    asked: list[str] = []

    def watch(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return upper(sentences)

    text = "> One *sentence\n> over* two lines.\n  >lazy\n"
    assert translated(text, identity) == text
    assert translated(text, watch) == "> oNE *SENTENCE\n> OVER* TWO LINES.\n> LAZY\n"
    assert asked == ["One sentence\nover two lines.", "lazy"]


def test_a_link_whose_text_is_its_label_gets_the_label() -> None:
    text = "See [the guide], [The Guide][] and [no link].\n\n[the guide]: http://x.y\n"
    assert translated(text, identity) == text
    nested = "[see [the guide] here](page)\n\n[the guide]: http://x.y\n"  # links are not nested
    assert translated(nested, upper).startswith("[SEE [THE GUIDE][the guide] HERE](PAGE)")
    quoted = "> See [the\n> *guide*] and [the\n>guide].\n\n[the guide]: x\n\n[the *guide*]: y\n"
    assert translated(quoted, identity) == quoted
    said = translated(text, upper)
    assert said.startswith("sEE [THE GUIDE][the guide], [tHE gUIDE][The Guide] AND [NO LINK].")


def saying(text: str) -> Translate:
    return lambda sentences: [SentenceTranslation(text) for _ in sentences]


def tags_inside(block: str) -> list[str]:
    """Return the tags inside the paragraphs of a page."""
    return re.findall("<(?!/?p>)[^<>]*>", MarkdownIt().render(block))


def test_underscores_inside_a_word_are_letters() -> None:
    for text in ("call __foo__bar now\n", "the my__long__name and __init__s\n", "a __bold word__, b\n"):
        assert translated(text, upper) == text.swapcase()


def test_a_translation_that_looks_like_markup_stays_text() -> None:
    for said in ("1. Mai", "- so", "# eins", "> mehr", "+ x", "---", "=== ", "```so``", "~~~ so ~~"):
        block = translated("Some words\n", saying(said))
        (opened, *_) = MarkdownIt().parse(block)
        assert opened.type == "paragraph_open", block
        assert not tags_inside(block), block
    row = translated("| a | b |\n|---|---|\n", saying("x | y"))
    assert row == "| x \\| y | x \\| y |\n|---|---|\n"
    alt = translated("![words](a.png)\n", saying("a] b"))
    assert alt == "![a\\] b](a.png)\n"


WORDS = ["one", "two", "three", "1.", "-", "#", "+", "*bold words*", "`code`", "[link](x)", "![alt](y)", "1986."]
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(lambda words: " ".join(["Begin", *words]))
BLOCKS = st.recursive(
    st.one_of(
        st.lists(TEXT, min_size=1, max_size=3).map(lambda lines: lines),
        TEXT.map(lambda text: [f"## {text}"]),
        TEXT.map(lambda text: ["```", text, "", "```"]),
        TEXT.map(lambda text: ["<pre>", text, "", "</pre>"]),
        TEXT.map(lambda text: ["| a | b |", "|---|---|", f"| {text} | c |"]),
        TEXT.map(lambda text: [f"[^1]: {text}"]),
        st.just(["***"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: [line for part in parts for line in [*part, ""]][:-1]
        ),
        inner.map(lambda lines: [f"> {line}" for line in lines]),
        inner.map(lambda lines: ["- " + lines[0], *("  " + line for line in lines[1:])]),
        inner.map(lambda lines: ["1. " + lines[0], *("   " + line for line in lines[1:])]),
    ),
    max_leaves=6,
)


@pytest.mark.slow
@given(BLOCKS, st.sampled_from(["\n", "\r\n"]), st.integers(0, 9))
@settings(max_examples=150)
def test_a_translation_has_the_same_blocks(lines: list[str], end: str, seed: int) -> None:
    text = end.join(lines)
    assert translated(text, identity) == text
    said = translated(text, permuting(seed, change=swapped))
    parser = MarkdownIt().enable("table")
    before, after = (
        [(token.type, token.content if token.type in ("fence", "html_block") else "") for token in parser.parse(page)]
        for page in (text.replace("\r\n", "\n"), said.replace("\r\n", "\n"))
    )
    assert after == before


PARTS = (
    *("a word", "# ", "- ", "1. ", "> ", "    ", "\t", "\n", "\n\n", "---", "===", "```", "`", "[a]", "[a](b)"),
    *("[a][]", "\n\n[a]: http://x\n", "![alt](i.png)", "[^1]", "\n[^1]: ", "<pre>", "<!--", "-->", "<div>", "</div>"),
    *("<b>", "</b>", ":::note A title\n", ":::", '!!! note "Title"\n', "import x from 'y'\n", "export const a = {\n"),
    *("$x$", "\\(", "\\)", "\\_", "&amp;", "{% x %}", "+++\n", "```{note}\n", ":class: a\n", "(a)=\n"),
    *("*[", "](", "][b]", ")", '=== "T"\n'),
    *("| a | b |\n|---|---|\n", "|", "\\", "  \n", "$$", "**", "_", "[ ] ", "[!NOTE]", "\r\n", "\r", "\0", "é", "\xa0"),
)  # fmt: skip


@pytest.mark.slow
@given(st.lists(st.sampled_from(PARTS), max_size=20).map("".join), st.integers(0, 9))
@settings(max_examples=200)
def test_anything_comes_back_byte_for_byte(text: str, seed: int) -> None:
    assert translated(text, identity) == text
    translated(text, permuting(seed))  # no error


def test_without_the_parser_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    markdown._parser.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "mdit_py_plugins.footnote", None)
    with pytest.raises(ConfigError, match=r"`mdit_py_plugins.footnote`, .* pip install 'ziggurat-mt\[serve\]'"):
        translated("text\n", identity)


@pytest.mark.parametrize(
    ("text", "asked", "said"),
    [
        ("| a<br>b | x |\n|---|---|\n| y | z |\n", "a\nb", "| A<br>B | X |\n|---|---|\n| Y | Z |\n"),
        ("one<br/>two\n", "one\ntwo", "ONE<br/>TWO\n"),
        ("[Home](a.md)[News](b.md)\n", "Home News", "[HOME](a.md)[NEWS](b.md)\n"),
        ('- !!! note "Heed"\n      body\n', "Heed", '- !!! note "HEED"\n      BODY\n'),
        ("1. ::: tip\n   Text\n   :::\n", "Text", "1. ::: tip\n   TEXT\n   :::\n"),
        ("Hello <Foo bar={x > 1} /> world\n", "Hello  world", "HELLO <Foo bar={x > 1} /> WORLD\n"),
    ],
)  # fmt: skip
def test_breaks_links_and_marks_in_items(text: str, asked: str, said: str) -> None:
    seen: list[str] = []

    def noted(sentences: list[str]) -> list[SentenceTranslation]:
        seen.extend(sentences)
        return upper(sentences)

    assert translated(text, noted).upper() == said.upper()
    assert " ".join(seen[0].split()) == " ".join(asked.split())


TEMPLATES = [
    "{{ site.title }} TEXT {{ page.x }}\n\nTEXT\n",
    "{% if a %}TEXT TEXT{% endif %}\n",
    "{: .x} TEXT {: .y}\n",
    "{{ a }} {{ b }}\n",
    "{% if a %}{{ b }}{% endif %}\n",
    "{/* words */} TEXT {/* more words */}\n",
    "> {% note %} TEXT {% endnote %}\n",
    "[TEXT TEXT]({{ site.baseurl }}/about/) TEXT\n",
    "[TEXT]({% link a.md %})\n",
    "![TEXT]({{ '/a b.png' | relative_url }} \"TEXT\")\n",
    "[TEXT](/a/{{ page.some id }}/b) TEXT\n",
]
TAGS = [
    '<a title="1 > 2" href=x>TEXT TEXT</a> TEXT\n',
    'TEXT <span v-if="a > b && c < d">TEXT</span>\n',
    "TEXT <b x='>words>'>TEXT</b>\n",
    "TEXT <Foo f={() => words} /> TEXT\n",
    'TEXT <i a="words\nwords">TEXT</i>\n',
    '<Foo\n  a="words"\n>\n  TEXT\n</Foo>\n',
    'TEXT\n\n<Foo\n  a="words"\n  b\n/>\n\nTEXT\n',
    '<some-tag a="words"\n  b="words">\n\nTEXT\n\n</some-tag>\n',
]
RAW = [
    "\\newpage\n\nTEXT\n",
    "TEXT \\cite{foo} TEXT \\ref{fig:a}.\n",
    "TEXT \\citep[p.~3]{foo,bar} TEXT\n",
    "TEXT \\LaTeX{} TEXT\n",
    "TEXT [\\words\\folder] TEXT\n",
    "TEXT \\vspace*{1cm}\n",
]
BLOCKS = [
    "TEXT TEXT\n: TEXT TEXT\n: TEXT\n\nTEXT\n:   TEXT\n",
    "TEXT\n\n:   TEXT\n\n    TEXT TEXT\n",
    "| TEXT TEXT\n| TEXT\n|   TEXT\n\nTEXT\n",
    "/// note | TEXT TEXT\nTEXT\n///\n\nTEXT\n",
    "/// details\nTEXT\n\n//// tip | TEXT\nTEXT\n////\n///\n",
    "| TEXT | TEXT |\n|---|:-:|\n| TEXT | TEXT |\n| TEXT | `words` TEXT |\n| TEXT | TEXT |\n",
    "TEXT\n\n+---+-----+\n| some | words |\n+===+=====+\n| more | words |\n+---+-----+\n\nTEXT\n",
]
TITLES = [
    '[TEXT](/url "TEXT TEXT") TEXT\n',
    "![TEXT](a.png 'TEXT') TEXT\n",
    '[TEXT](/url "TEXT & TEXT")\n',
    '[![TEXT](a.png "TEXT")](/url "TEXT TEXT")\n',
    '> [TEXT](/url "TEXT")\n',
    '[TEXT](</a b> "TEXT")\n',
]


@pytest.mark.parametrize("text", [*TEMPLATES, *TAGS, *RAW, *BLOCKS, *TITLES])
def test_text_next_to_marks_is_translated_and_they_stay(text: str) -> None:
    given = text.replace("TEXT", "text")
    for name in ("a.md", "a.mdx"):
        assert translated(given, identity, name=name) == given
        assert translated(given, upper, name=name) == text
        assert translated(given, fluent, name=name).split("\n") == text.split("\n")


def fluent(sentences: list[str]) -> list[SentenceTranslation]:
    return permuting(None, change=swapped)(sentences)


@pytest.mark.parametrize(
    "text",
    [
        "TEXT {a + b} TEXT {cond ? <b>Yes</b> : 'No'}\n",
        "{items.map(i => <li>{i.name}</li>)}\n",
        "{items.map(i => (\n  <li>{i.name} words</li>\n))}\n\nTEXT\n",
        "TEXT {`some ${a} words`} TEXT\n",
        "TEXT {f({a: {b: 1}})} TEXT\n",
        "TEXT <Foo a={b > c ? words : d}>TEXT</Foo>\n",
        "# TEXT {props.title}\n",
        "- TEXT {a.b}\n",
        "<Grid\n" + 60 * "  {...words}\n" + "  items={[\n\n    <b>words</b>,\n  ]}\n>\n  TEXT\n</Grid>\n",
        "<Tabs>\n    <Tab>\n        TEXT\n\n        - TEXT\n    </Tab>\n</Tabs>\n",
    ],
)
def test_expressions_of_mdx_stay(text: str) -> None:
    given = text.replace("TEXT", "text")
    assert translated(given, identity, name="a.mdx") == given
    assert translated(given, upper, name="a.mdx") == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("{cond && <b>words</b>}\n", 1),
        ("a {cond ? <b>words</b> : <i>more</i>} b\n", 1),
        ("{cond && (\n  <b>\n    words\n  </b>\n)}\n", 1),
        ("{/* <b>words</b> */}\n\n{/*\n<b>words</b>\n*/}\n", 0),
        ("{items.map((x) => <b>{x.name}</b>)} {a > b} {f('x', `y`)}\n", 0),
        ("a {cond ? 'Some words' : ''} b\n", 1),
        ("<Grid\n  items={[\n    {\n\n      title: 'Some words',\n    },\n  ]}\n/>\n", 1),
        ("<Grid\n  items={[1, 2]}\n  title='Some words'\n/>\n", 0),
    ],
)
def test_text_in_expressions_of_mdx_is_counted(text: str, count: int) -> None:
    assert run(document(text.encode(), "a.mdx", SETTINGS), identity).notices["not_read"] == count


def test_tables_drawn_with_signs_are_reported() -> None:
    grid = "text\n\n::: some\n+---+\n| a |\n+===+\n| b |\n+---+\n\ntext\n\n+---+\n| c |\n+---+\n"
    outcome = run(document(grid.encode(), "a.md", SETTINGS), upper)
    assert outcome.notices == {"left_out": 2}
    assert outcome.notices.places == {"left_out": "line 4"}


@pytest.mark.parametrize(
    ("text", "asked", "said"),
    [
        ("***bold italic*** x", "bold italic x", "***BOLD ITALIC*** X"),
        ("a ***b c*** d ***e***", "a b c d e", "A ***B C*** D ***E***"),
        ("*a **b***", "a b", "*A **B***"),
        ("***a** b*", "a b", "***A** B*"),
        ("text[link](u)", "text link", "TEXT[LINK](u)"),
        ("see [link](u)s here", "see links here", None),
        ("请看[链接](u)", "请看链接", None),
    ],
)
def test_emphasis_and_links_next_to_words(text: str, asked: str, said: str | None) -> None:
    found: list[str] = []

    def watched(sentences: list[str]) -> list[SentenceTranslation]:
        found.extend(sentences)
        return fluent(sentences)

    page = translated(text, watched)
    assert "[](" not in page
    if text not in ("***a** b*", "*a **b***"):
        assert found == [asked]
        assert said is None or page == said


@pytest.mark.parametrize(
    "text",
    [
        *('a*"b"*', 'a_"b"_', 'a**"b"**', 'a__"b"__', "*(*a)", "**(**a)", "_(_a_)_", "*(*a*)*", "__a, __b__, c__"),
        *("_a _b_ c_", "__a_ b_", "____a__ b__", "a *\\**", "a _\\__", "*$*a", "a ** b ** c", "a * b*", "**a:**b"),
    ],
)
def test_marks_are_emphasis_where_parsers_see_it(text: str) -> None:
    parser = MarkdownIt("commonmark")
    outcome = translated(f"{text}\n", letter_by_letter)
    assert outcome != f"{text}\n"
    tags = [re.findall("<[^<>]+>", parser.render(each)) for each in (text, outcome)]
    assert tags[0] == tags[1]


def letter_by_letter(sentences: list[str]) -> list[SentenceTranslation]:
    links = [[Link(n, n + 1, n, n + 1) for n in range(len(text))] for text in sentences]
    return [SentenceTranslation(text.upper(), own) for text, own in zip(sentences, links, strict=True)]


def test_chinese_leaves_no_blank_after_emphasis_that_ends_with_a_sign() -> None:
    assert translated("**注意：**请看\n", saying("Note: please see")).count("**") == 2
    found: list[str] = []
    translated("**注意：**请看\n", lambda sentences: found.extend(sentences) or identity(sentences))
    assert found == ["注意：请看"]


@pytest.mark.parametrize("sign", ["]", "[", "a]b", "<b", "`", "a`b`", "](x)"])
def test_signs_in_a_new_text_begin_and_end_nothing(sign: str) -> None:
    page = translated("see [this](u) and `code`\n", saying(sign))
    assert [target for target, _ in links(page)] == ["u"]
    assert "<code>code</code>" in MarkdownIt().render(page)


UNITS = ["{% ", "{{ ", "{", "{a", "***", "***a", '<a b="', "<a b='x' ", "\\ab{", "\\ab[", "/// ", "| a\n", ": a\n"]
UNITS += ["+---+", "+---+\n", "<a\n", '[a](b "', "{/*", "{: "]


@pytest.mark.parametrize("unit", UNITS)
def test_marks_are_found_in_linear_time(unit: str) -> None:
    few, many = (timed(unit * count) for count in (500, 4_000))
    assert many < 30 * few + 0.5  # quadratic time would be sixty-four times as long


def timed(text: str) -> float:
    began = time.process_time()
    for name in ("a.md", "a.mdx"):
        translated(text, identity, name=name)
    return time.process_time() - began


def test_rows_of_a_table_are_not_lines_that_stay_lines() -> None:
    table = "| a | b |\n|---|---|\n| c `d|e` | f |\n| g | h |\n"
    asked: list[str] = []

    def watched(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return upper(sentences)

    texts = [table, table.replace("|---|---|", "| --- | --- |"), table.replace("\n|", "\n  |")]
    texts += [table.replace("| a | b |", "a | b"), table.replace("| a | b |\n|---|---|", "a | b\n--- | ---")]
    for text in texts:
        asked.clear()
        translated(text, watched)
        assert asked == ["a", "b", "c `d", "e`", "f", "g", "h"]


def shape(page: str) -> list[str]:
    """Return the blocks, links and images of a page."""
    tokens = MarkdownIt().parse(page)
    inside = [child for token in tokens for child in token.children or [] if child.type in ("link_open", "image")]
    return [token.type for token in tokens] + [token.type for token in inside]


@pytest.mark.parametrize("said", ["W\\", "W [x](y)", "W ![x](y)", "W!", "W <!--", "[x]: y", "a\\\\[b", "W ]: ]["])
@pytest.mark.parametrize(
    "text",
    ["[This](u)\n", "a\n[This](u)[that](v)\n", '![This](u "That") or -->\n', "* This\n* That\n", "This `code`.\n"],
)
def test_a_translation_neither_begins_nor_ends_a_link(text: str, said: str) -> None:
    assert shape(translated(text, saying(said))) == shape(text)


def test_an_exclamation_mark_before_a_link_does_not_turn_it_into_an_image() -> None:
    asked = "Go [here](u)"

    def exclaimed(sentences: list[str]) -> list[SentenceTranslation]:
        assert sentences == ["Go here"]
        return [SentenceTranslation("Los!hier", [Link(0, 2, 0, 4), Link(3, 7, 4, 8)])]

    assert shape(translated(asked, exclaimed)) == shape(asked)
    assert translated("![a \\[b\\] c](u)\n", identity) == "![a \\[b\\] c](u)\n"
    assert translated("![a \\[b\\] c](u)\n", upper) == "![A \\[B\\] C](u)\n"


@pytest.mark.parametrize(
    "text", ["> one two  \n> three four\n", "- one\\\n  two three\\\n  four\n", "a  \nb  \nc  \nd\n"]
)
def test_line_breaks_leave_no_line_empty(text: str) -> None:
    for seed in range(20):
        assert shape(translated(text, permuting(seed))) == shape(text)
    assert shape(translated(text, saying("X"))) == shape(text)


def blocks(text: str) -> list[str]:
    return [token.type for token in MarkdownIt("commonmark").parse(text)]


MARKERS = ["*", "**", "***", "__", "-", "- x", "* x", "+", "1. x", "# h", "> x", "===", "```", "~~~", "[x]: y", "(x)"]


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize(
    "text",
    [
        "* word",
        "- word",
        "1. word",
        "> * word",
        "* *word*",
        "- __word__",
        "a  \nword",
        "a\\\nword",
        "> a  \n> word",
        "- a  \n  word",
        "a  \n*word*",
        "a *x*  \nword",
        "a **x**\nword",
        "**a** word",
        "word **a**",
        "a [^1]word",
    ],
)
def test_a_translation_that_looks_like_a_marker_begins_no_block(text: str, marker: str) -> None:
    """Nor does it together with marks before it, those of an item or of emphasis at the beginning of a line."""

    def only(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation(sentence.replace("word", marker), []) for sentence in sentences]

    def linked(sentences: list[str]) -> list[SentenceTranslation]:
        found = []
        for sentence in sentences:
            said = sentence.replace("word", marker)
            words = [[match.span() for match in re.finditer(r"\S+", one)] for one in (sentence, said)]
            found.append(SentenceTranslation(said, [Link(*a, *b) for a, b in zip(*words, strict=False)]))
        return found

    def alone(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation(marker, []) for _ in sentences]

    for translate in (only, linked, alone):
        assert blocks(translated(text, translate)) == blocks(text)


CHINESE = {"see": "看", "the": "", "menu": "菜单", "now": "现在", " ": "", ".": "。", "!": "！", "(": "（", ")": "）"}


def in_chinese(sentences: list[str]) -> list[SentenceTranslation]:
    """A translator into a script without blanks, word by word."""
    answers = []
    for text in sentences:
        said, links = "", []
        for found in re.finditer(r"\w+|\W", text):
            word = CHINESE.get(found[0], found[0])
            links += [Link(*found.span(), len(said), len(said) + len(word))] if word else []
            said += word
        answers.append(SentenceTranslation(said, links))
    return answers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("see **menu** now", "看**菜单**现在"),
        ('see **"menu"** now', '看 **"菜单"** 现在'),
        ("see *(menu)* now", "看 *（菜单）* 现在"),
        ("see _menu_ now", "看 _菜单_ 现在"),
        ("see __menu__", "看 __菜单__"),
        ("**menu:** see", "**菜单:** 看"),
        ("see ~~menu!~~ now", "看~~菜单！~~ 现在"),
        ("see **[menu](x)** now", "看 **[菜单](x)** 现在"),
        ("see **_menu_** now", "看 **_菜单_** 现在"),
    ],
)
def test_emphasis_is_emphasis_next_to_words_of_scripts_without_blanks(text: str, said: str) -> None:
    outcome = run(document(text.encode(), "a.md", SETTINGS), in_chinese).value.decode()
    assert outcome == said
    parser = MarkdownIt("commonmark").enable("strikethrough")
    tags = [re.findall("<[^<>]+>", parser.render(each)) for each in (text, outcome)]
    assert tags[0] == tags[1]
