"""Links to Markdown headings: a link leads to the same heading in the translation."""

from __future__ import annotations

import re
import time
from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tests.serve.text.fakes import Translate, identity, permuting, swapped, upper
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Options, Result, run
from ziggurat.serve.text.splitting import sentencex_splitter

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")
other = permuting(None, change=lambda word: re.sub("[A-Za-z]+", lambda part: f"x{part[0].lower()}", word))


def translated(text: str, translate: Translate = other, name: str = "a.md") -> Result[bytes]:
    return run(document(text.encode(), name, SETTINGS), translate)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# Getting started\n\n[a](#getting-started)\n", '# <a id="getting-started"></a>xgetting xstarted\n'),
        ("Use it\n===\n\n[a][b]\n\n[b]: #use-it\n", '<a id="use-it"></a>xuse xit\n===\n'),
        ("## Use it ##\n\n<a href='#use-it'>a</a>\n", '## <a id="use-it"></a>xuse xit ##\n'),
        ("# Use\n# Use\n[a](#use-1)\n", '# xuse\n# <a id="use-1"></a>xuse\n'),
        ("# Use\n# Use\n[a](#use_1)\n", '# xuse\n# <a id="use_1"></a>xuse\n'),
        ("# Das Überall\n[a](#das-%C3%BCberall)\n", '# <a id="das-überall"></a>'),
        ("# Das Überall\n[a](#das-uberall)\n", '# <a id="das-uberall"></a>'),
        ("# T's & `co`, *so* _it_ [b](c)\r\n\r\n[a](#ts--co-so-it-b)\r\n", '# <a id="ts--co-so-it-b"></a>'),
        ("> # In it\n\n[a](#in-it)\n", '> # <a id="in-it"></a>xin xit\n'),
        ("- # In it\n\n[a](<#in-it>)\n", '- # <a id="in-it"></a>xin xit\n'),
        # Names that the file defines stay valid.
        ("# Use {#one}\n[a](#one)\n", "# xuse {#one}\n"),
        ('# <a id="one"></a>Use\n[a](#one)\n', '# <a id="one"></a>xuse\n'),
        ('<a name="use"></a>\n\n# Use\n[a](#use)\n', '<a name="use"></a>\n\n# xuse\n'),
        ("# Use {#one}\n# Say\n# Do {.c}\n# Go {: .c}\n[a](#say)[a](#do)[a](#go)\n",
         "# xuse {#one}\n# xsay {#say}\n# xdo {#do .c}\n# xgo {: #go .c}\n"),
        ("# Use {#one}\nSay\n---\n[a](#say)\n", "# xuse {#one}\nxsay {#say}\n---\n"),
        # No link leads to these.
        ("# Use\n[a](#other) [b](c#use) `#use` #use\n", "# xuse\n"),
        ("# Use\n", "# xuse\n"),
    ],
)  # fmt: skip
def test_a_heading_keeps_the_name_that_a_link_uses(before: str, after: str) -> None:
    said = translated(before).value.decode()
    assert said.startswith(after)
    assert re.findall(r"#[^\s)>'\"}]+(?=[)>'\"])", said) == re.findall(r"#[^\s)>'\"}]+(?=[)>'\"])", before)
    assert translated(before, identity).value.decode() == before
    assert "<a id" not in translated(before, upper).value.decode() or "<a id" in before  # differing only in case


TITLES = st.lists(
    st.sampled_from(["Use", "it", "`code`", "*so*", "a&b", "Größe", "2.0", "_x_", "[b](c)", "C++"]), min_size=1
)


def name_of(title: str) -> str:
    """Return GitHub's name for a heading, from its HTML."""
    shown = re.sub("<[^>]*>", "", title).replace("&amp;", "&").strip().lower()
    return re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")


def names(page: str) -> list[str]:
    """Return everything that a page's links can lead to."""
    shown = MarkdownIt().render(page)
    found, times = re.findall(r'id="([^"]*)"', shown), dict[str, int]()
    for title in re.findall(r"<h\d>(.*?)</h\d>", shown):
        name = name_of(title)
        found.append(f"{name}-{times[name]}" if name in times else name)
        times[name] = times.get(name, 0) + 1
    return found


@given(st.lists(TITLES.map(" ".join), min_size=1, max_size=5), st.sampled_from([other, permuting(1, change=swapped)]))
@settings(max_examples=100, deadline=None)
def test_every_link_leads_somewhere_as_before(titles: list[str], translate: Translate) -> None:
    page = "".join(f"## {title}\n\ntext\n\n" for title in titles)
    page += " ".join(f"[see](#{name})" for name in names(page) if name)
    said = translated(page, translate).value.decode()
    wanted = [unquote(name) for name in re.findall(r"\]\(#([^)]*)\)", said)]
    assert len(wanted) == sum(map(bool, names(page)))
    assert set(wanted) <= set(names(said))


def test_links_to_headings_of_other_files_are_reported() -> None:
    text = "[a](b.md#use) [c](../d#e 'title') [f](https://a.b/c#d) [g](#h) ![i](j.png)\n\n[k]: l/m.mdx#n\n"
    outcome = translated(text)
    assert outcome.notices["headings_elsewhere"] == 3
    assert outcome.notices.places["headings_elsewhere"] == "b.md#use"


UNITS = [
    "](",
    "](#",
    "](#a",
    "href=",
    "href=#",
    "# a\n",
    "# a\n[b](#a-1)\n",
    "# _",
    "# a_",
    "# {#",
    "# ![",
    "# [a](",
    "id=",
    "#a ",
]


@pytest.mark.parametrize("unit", UNITS)
def test_names_are_found_in_linear_time(unit: str) -> None:
    def seconds(text: str) -> float:
        began = time.process_time()
        translated(text)
        return time.process_time() - began

    few, many = (seconds(unit * count) + seconds("# " + unit.strip("# ") * count) for count in (500, 4_000))
    assert many < 30 * few + 0.5  # quadratic time would be sixty-four times as long
