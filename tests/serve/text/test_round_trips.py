"""Unchanged documents: every text format returns the bytes that it received."""
# ruff: noqa: E501  (parts of documents stand in rows)

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.text.fakes import identity, permuting, swapped
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.documents.program_values import is_for_programs
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Options, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.system.errors import DataError

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")


def translated(name: str, content: bytes) -> bytes:
    return run(document(content, name, SETTINGS), identity).value


SOUP: dict[str, Sequence[str]] = {
    "a.txt": ("Words here. ", "\t", "\n", "\r\n", "\r", "\u2028", "\x0b", "\x1f", "%s {0} ", "漢字。", "a@b.de ", "😀", "\0", "  "),
    "a.html": (
        *("Words here. ", "<p>", "</p>", "<b>", "</b>", "<i class='x'>", "</i>", "<br>", "<br/>", "<li translate=no>", "</ul>"),
        *("<code>", "</code>", "&amp;", "&nbsp;", "& ", "< ", "<!-- c -->", "<img alt='two words'>", "<a title=\"a &lt; 'b'\">"),
        *("</a>", "<td>", "<table>", "</table>", "<pre>", "</pre>", "\n", "\x1f", "{0} ", "<script>x<b>", "</script>", "<rt>", "<b>&</b>", "<b>&amp;</b>", "&#1;"),
    ),
    "a.srt": (
        *("1\n", "00:00:01,000 --> 00:00:02,000\n", "Words here.\n", "- Who?\n", "\n", "<i>", "</i>", "{\\an8}", "\r\n", "a < b\n"),
        *("00:01:00,5 --> 00:01:02,0 X1:1\r\n", "& &amp; ", "<font color=red>", "</font>", "-->", "♪ ", "\r"),
    ),
    "a.vtt": (
        *("WEBVTT\n\n", "00:01.000 --> 00:02.000 align:start\n", "<v Mary>", "</v>", "<c.loud>", "</c>", "<00:01.500>", "\n"),
        *("NOTE some words\n", "STYLE\n", "Words here.\n", "&amp; ", "&lt;b> ", "-Who?\n", "\r\n", "id\n", "a < b\n", "&lt;00:01.5&gt;", "<b>&</b>", "<b>&amp;</b>", "&#1;"),
    ),
}  # fmt: skip
MARKS = {"utf-8": codecs.BOM_UTF8, "utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE, "": b""}
PLAIN = st.text(st.characters(codec="utf-8"), max_size=30)


@pytest.mark.parametrize("name", sorted(SOUP))
@given(data=st.data(), encoding=st.sampled_from(sorted(MARKS)))
@settings(max_examples=80)
def test_any_text_comes_back(name: str, data: st.DataObject, encoding: str) -> None:
    text = data.draw(st.lists(st.sampled_from(SOUP[name]) | PLAIN, max_size=20).map("".join))
    content = MARKS[encoding] + text.encode(encoding or "utf-8")
    if not encoding and content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return
    assert translated(name, content) == content
    run(document(content, name, SETTINGS), permuting(1, change=swapped))  # no error


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.booleans(), st.sampled_from(sorted(MARKS)))
@settings(max_examples=100)
def test_any_json_comes_back(value: object, ascii_only: bool, encoding: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1)
    try:
        content = MARKS[encoding] + text.encode(encoding or "utf-8")
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return
    assert translated("a.json", content) == content


# Bilingual formats: complete files come back unchanged; in others each new translation is in place, and nothing else
# changes.

LINE = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], include_characters="\t"), max_size=20)
XML_LINE = LINE.filter(lambda text: not re.search("[\ufffe\uffff]", text))
WORDS = st.sampled_from(["Open %s file", "two words", "漢字 {0}", "a < b & c", "<b>bold</b> words", 'say "so"', "é"])
COMMENTS = ["", "# Somebody\n", "#: a.c:1\n", "#. remark\n#: a.c:1\n", '#~ msgid "x"\n#~ msgstr "y"\n\n']
FLAGS = ["", "#, c-format\n", "#, fuzzy, c-format\n"]
ENTRIES = st.lists(
    st.tuples(st.sampled_from(COMMENTS), st.sampled_from(FLAGS), WORDS | LINE, st.none() | WORDS), max_size=5
)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t") + '"'


@given(ENTRIES, st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=100)
def test_any_messages_come_back(entries: list[tuple[str, str, str, str | None]], end: str) -> None:
    header = 'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n\n'
    before = after = header
    for number, (comment, flags, source, target) in enumerate(entries):
        key = f'msgctxt "{number}"\nmsgid {quoted(source)}\n'
        before += f"{comment}{flags}{key}msgstr {quoted(target or '')}\n\n"
        if target is None and source and not is_for_programs(source):  # such a source is a key, so it stays
            flags = flags if "fuzzy" in flags else flags.replace("#, ", "#, fuzzy, ") or "#, fuzzy\n"
            target = source
        after += f"{comment}{flags}{key}msgstr {quoted(target or '')}\n\n"
    before, after = before.replace("\n", end), after.replace("\n", end)
    assert translated("a.po", before.encode()).decode() == after
    assert translated("a.po", after.encode()).decode() == after


INLINE = (
    "{}",
    "<x id='1'/>{}",
    "<g id='1'>{}</g> x",
    "<mrk mtype='protected'>Q</mrk> {}<bpt id='2'>&lt;b></bpt>y<ept id='2'/>",
)
UNITS = st.lists(st.tuples(XML_LINE | WORDS, st.sampled_from(INLINE), st.booleans()), max_size=5)
REVIEW = ' state="needs-review-translation" state-qualifier="leveraged-mt"'


def xliff(source: str, target: str | None, *, new: bool) -> str:
    added = "" if target is None else f"\n<target{REVIEW if new else ''}>{target}</target>"
    return f"<trans-unit>\n<source>{source}</source>{added}</trans-unit>\n"


def xliff_2(source: str, target: str | None, *, new: bool) -> str:
    added = "" if target is None else f"\n<target>{target}</target>"
    return f"<unit><segment>\n<source>{source}</source>{added}</segment></unit>\n"


def tmx(source: str, target: str | None, *, new: bool) -> str:
    added = "" if target is None else f'\n<tuv xml:lang="de"><seg>{target}</seg></tuv>'
    return f'<tu>\n<tuv xml:lang="en"><seg>{source}</seg></tuv>{added}</tu>\n'


PAIRS = [
    ("a.xlf", xliff, '<xliff version="1.2"><file target-language="de"><body>{}</body></file></xliff>'),
    ("b.xlf", xliff_2, '<?xml version="1.0"?>\n<xliff version="2.1" trgLang="de"><file>{}</file></xliff>\n'),
    ("a.tmx", tmx, '<!DOCTYPE tmx SYSTEM "x.dtd">\n<tmx version="1.4"><header srclang="en"/><body>{}</body></tmx>'),
]


@pytest.mark.parametrize(("name", "unit", "frame"), PAIRS, ids=["xliff-1", "xliff-2", "tmx"])
@given(units=UNITS, encoding=st.sampled_from(sorted(MARKS)))
@settings(max_examples=60)
def test_any_pairs_come_back(
    name: str, unit: Callable[..., str], frame: str, units: list[tuple[str, str, bool]], encoding: str
) -> None:
    before = after = ""
    for text, markup, done in units:
        source = markup.format(escape(text))
        target = "Fertig &#x41;" if done else None
        before += unit(source, target, new=False)
        after += unit(source, target or source, new=not done)
    contents = [MARKS[encoding] + frame.format(body).encode(encoding or "utf-8") for body in (before, after)]
    assert translated(name, contents[0]) == contents[1]
    assert translated(name, contents[1]) == contents[1]


def wrapped(name: str, text: str) -> bytes:
    """Return a document that contains a text, with a translation if the format has one."""
    if name == "a.json":
        return json.dumps({"a": [text], "b": text.splitlines()}, ensure_ascii=False).encode()
    if name == "a.po":
        line = quoted(text.replace("\n", " ").replace("\r", " "))
        return (
            f'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n\nmsgid "x"\nmsgstr {line}\n'.encode()
        )
    (unit, frame) = next((unit, frame) for known, unit, frame in PAIRS if known == name)
    return frame.format(unit(escape(text), escape(text), new=True)).encode()


@pytest.mark.slow
def test_hostile_files_come_back_or_are_refused(shared_data: Path) -> None:
    paths = sorted(path for path in (shared_data / "hostile").iterdir() if path.suffix in (".de", ".en", ".tsv"))
    assert len(paths) > 40
    came_back, refused = 0, set()
    for path in paths:
        content = path.read_bytes()[:1000]
        text = "x" + content.decode("utf-8", "ignore")
        contents = dict.fromkeys(("a.txt", "a.md", "a.html", "a.srt", "a.vtt"), content)
        contents |= {name: wrapped(name, text) for name in ("a.po", "a.json", *(known for known, _, _ in PAIRS))}
        for name, whole in contents.items():
            try:
                said = translated(name, whole)
            except DataError as error:
                refused.add(str(error).partition(" (")[0].removeprefix(f"{name}: ").partition(":")[0])
                continue
            assert said == whole, (path.name, name)
            came_back += 1
    assert came_back > 400
    assert refused <= {"not valid UTF-8", "not valid UTF-16-LE", "not well-formed XML"}  # no control characters in XML
