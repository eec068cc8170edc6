"""Markdown of site generators: front matter, directives of MyST, attributes, roles and links of wikis."""

from __future__ import annotations

import tomllib

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.text.fakes import identity, upper
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Options, Result, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter

SETTINGS = Settings(Options(sentencex_splitter("en")), source="en", target="de")

# TEXT is what is translated; everything else stays.
FRONT = [
    "---\ntitle: TEXT\ndescription: 'TEXT'\nsummary: \"TEXT\"\n---\n\nTEXT\n",
    "---\nsubtitle: >-\n  TEXT\nexcerpt: |\n  TEXT\n  TEXT\n\n  TEXT\nlayout: post\n---\n",
    "---\nsidebar_label: TEXT # remark\nlinkTitle: TEXT\ntags: [one, two]\ndate: 2020-01-01\n---\nTEXT\n",
    "---\nimage: {alt: TEXT, src: a.png}\nhero:\n  actions:\n    - text: TEXT\n      link: /guide\n---\n",
    "---\nhead:\n  - [meta, {name: description, content: TEXT}]\n  - [meta, {name: robots, content: none}]\n---\n",
    "---\ntitle: index.md\nhide_title: true\ncaption: 3\n---\n",
    '+++\ntitle = "TEXT"\ndescription = \'TEXT\' # remark\nweight = 3\n[params]\nsummary = "TEXT"\n+++\n\nTEXT\n',
    '{\n  "title": "TEXT",\n  "weight": 3\n}\n\nTEXT\n',
    '---\ntitle: |\n  TEXT\n  <span\n    class="some words"\n  >\n    TEXT\n  </span>\n---\n',
    "---\n\nTEXT\n\n---\n\nTEXT\n",
    "% TEXT\n% someone\n\nTEXT\n",
]
DIRECTIVES = [
    "```{figure} a.png\n:alt: TEXT\n:name: fig\n\nTEXT\n```\n",
    "```{list-table} TEXT\n:header-rows: 1\n\n* - TEXT\n  - TEXT\n```\n",
    "````{tab-set}\n```{tab-item} TEXT\nTEXT\n```\n````\n\nTEXT\n",
    "```{toctree}\n:caption: TEXT\n\nTEXT <page>\nusage\n```\n",
    "```{code-block} python\n---\ncaption: TEXT\n---\nx = some words\n```\n",
    ":::{code-block} python\n:caption: TEXT\nx = some words\n:::\n\nTEXT\n",
    ":::{toctree}\nTEXT <page>\n:::\n\n:::{dropdown} TEXT\nTEXT\n:::\n",
    "```{margin} TEXT\nTEXT\n```\n",
    '{#x}\n\n(target)=\n% some remark\nTEXT\n% another one\n\n+++ {"a": "b c"}\n\nTEXT\n',
    "# TEXT\n\n% some remark\n\nTEXT\n",
]
ATTRIBUTES = [
    'TEXT <Card title="TEXT" label=\'TEXT\' icon="home">TEXT</Card> TEXT\n',
    '<Card title="TEXT" href="/x">\n  TEXT\n</Card>\n',
    '<Hero\n  title="TEXT"\n  image="a.png"\n/>\n\nTEXT\n',
    'TEXT <abbr title="TEXT">TEXT</abbr> TEXT\n\nTEXT <img alt="TEXT" src="x.png"> TEXT\n',
    'TEXT <img alt="some words" translate="no"> TEXT\n',
    '{{< figure src="a.png" caption="TEXT" >}}\n\n{% tab title="TEXT" %}\n\nTEXT\n\n{% endtab %}\n',
    'TEXT {{< button label="TEXT" link="a/b" >}} TEXT\n',
    '```js title="src/a.js"\nsome words\n```\n\n```js title="TEXT"\nsome words\n```\n',
    """![](a.png){fig-alt="TEXT <- 'TEXT' > 1"} ![](b){fig-alt='TEXT' x="y"}\n""",
    '::: {.tip title="TEXT" icon="x"}\nTEXT\n:::\n',
    '![](a.png){fig-alt="TEXT" width="3"} TEXT\n\n{attribution="TEXT"}\n> TEXT\n',
    '[a]: /x "TEXT"\n[b]: <c d> (TEXT)\n\nTEXT\n',
]
NAMES = [
    "TEXT {ref}`TEXT <label>` TEXT {doc}`guide` TEXT\n",
    "TEXT [[page|TEXT]] TEXT\n\n![[a.png|TEXT]]\n\n![[a.png|300]]\n",
    "| TEXT |\n|---|\n| [[page\\|TEXT]] |\n",
]


def outcome(text: str, translate: object = identity, name: str = "a.md") -> Result[bytes]:
    return run(document(text.encode(), name, SETTINGS), translate)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [*FRONT, *DIRECTIVES, *ATTRIBUTES, *NAMES])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_text_that_readers_see_is_translated(text: str, end: str) -> None:
    given = text.replace("TEXT", "a text").replace("\n", end)
    for name in ("a.md", "a.mdx"):
        assert outcome(given, name=name).value.decode() == given
        said = outcome(given, upper, name=name)
        assert said.value.decode() == text.replace("TEXT", "A TEXT").replace("\n", end)
        assert "not_read" not in said.notices


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("---\nintro: This is prose for readers.\n---\n\nx\n", 1),
        ("---\ntitle: &name A shared title\nother: *name\n---\n\nx\n", 1),
        ("---\ntitle: [unclosed\n---\n\nx\n", 1),
        ('+++\ntitle = """\nSome\nwords"""\n+++\n\nx\n', 1),
        ("+++\ntitle = broken words\n+++\n\nx\n", 1),
        ("```{eval-rst}\n.. note:: Some words\n```\n\nx\n", 1),
        ("```{glossary}\nTerm\n  Its definition here.\n```\n\nx\n", 2),
        ("```{unknown}\n**bold** text\n\n3\n```\n\nx\n", 1),
        ('<Tab title={"Some words"} label={t("x")}>x</Tab>\n', 1),
        ("<Hero\n  title={`Some words`}\n/>\n\nx\n", 1),
        ("See [[Some Page|Some-Other-Page]] here.\n", 1),
        ("> <div>\n> some words\n> </div>\n\nx\n", 1),
        ('![some words](a.png\n"a title") x\n', 1),
        ("```python\nsome words here\n```\n\n```{code-block}\nsome words here\n```\n\nx\n", 0),
    ],
)
def test_visible_text_that_stays_is_counted(text: str, count: int) -> None:
    said = outcome(text, upper, name="a.mdx")
    assert said.notices["not_read"] == count
    assert bool(said.notices.places.get("not_read")) == bool(count)


VALUES = st.text(alphabet="ab :#'\"\\{}[],&*-?|>%@`\n", max_size=12).map(lambda text: f"x{text}".strip())


@given(VALUES, st.sampled_from(["title: words\n", "title: 'words'\n", 'title: "words"\n', "title: |\n  words\n"]))
@settings(max_examples=60, deadline=None)
def test_a_translated_value_reads_back_unchanged(said: str, line: str) -> None:
    """Whatever the translation, the front matter stays YAML with that text as its title."""
    line_of_text = " ".join(said.split())

    def translate(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation(line_of_text) for _ in sentences]

    block = outcome(f"---\n{line}layout: post\n---\n", translate).value.decode().removeprefix("---\n")
    read = yaml.safe_load(block.removesuffix("---\n"))
    assert read["layout"] == "post"
    assert unescaped(read["title"].strip()) == unescaped(line_of_text)


def unescaped(text: str) -> str:
    """Return text without the backslashes that Markdown puts before its signs."""
    return text.replace("\\", "")


def test_a_translated_toml_value_reads_back_unchanged() -> None:
    def translate(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation('it\'s "so"') for _ in sentences]

    block = outcome("+++\ntitle = 'words'\nsummary = \"words\"\n+++\n", translate).value.decode().strip("+\n")
    assert set(tomllib.loads(block).values()) == {'it\'s "so"'}


def test_deep_and_long_front_matter_is_counted_and_ends() -> None:
    for inside in (f"title: {'[' * 5000}", f"title: {'some words ' * 20_000}"):
        said = outcome(f"---\n{inside}\n---\n\nx\n")
        assert said.notices["not_read"] == 1


def test_a_role_and_a_link_of_a_wiki_have_no_escapes() -> None:
    def translate(sentences: list[str]) -> list[SentenceTranslation]:
        return [SentenceTranslation(text.replace("words", "a`b|c]d<")) for text in sentences]

    assert outcome("{ref}`words <l>`\n", translate).value.decode().count("`") == 2
    assert outcome("[[p|words]]\n", translate).value.decode().count("|") == 1
