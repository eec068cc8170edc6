"""Runs many documents through translators whose answers are known, and checks what happens to their text.

    python -m tools.documents FOLDER ... [--commonmark spec.json] [--json]

Each document in the folders whose kind can be told from its name goes through three translators. `identity` returns
every sentence as it is; `letters` replaces each of a to z by another letter, so that the source can be read back from
its output; `capitals` writes capitals. The command counts the documents that `identity` changed, the words that were
lost or doubled, the words that people read but that never reached the translator without a notice about it (skipped
words, including those in attributes and front matter, as lxml, markdown-it and PyYAML see them), and the outputs that
do not open. It lists refused documents. With CommonMark's examples (spec.json of a version of the specification), it
counts those that `identity` changed and those whose HTML has other tags under `letters`, but for emphasis inside words.

The status is 1 if anything was counted.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import json
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import regex
import yaml

from ziggurat.serve.text.documents.kinds import KINDS, DocumentKind, document, document_kind
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Link, Options, Result, SentenceTranslation, run
from ziggurat.serve.text.splitting import protected, sentencex_splitter
from ziggurat.system.errors import DataError

Translate = Callable[[list[str]], list[SentenceTranslation]]

FAULTS = ("changed", "lost", "doubled", "skipped", "not opening")
"""FAULTS are the names of the counts: the first and the last count documents, the others words."""
STAYS = {
    *("not_parsed", "endings_kept", "nothing_to_translate", "no_cues", "data_cues"),
    *("not_shown", "left_out", "not_read", "for_programs", "empty", "other_languages"),
}
"""STAYS are the notices that say that text was left as it is."""
BILINGUAL = {"XLIFF", "TMX", "gettext"}
"""BILINGUAL are kinds of files that hold both sources and translations."""
_SMALL, _CAPITAL = 0x1D5EE, 0x1D5D4  # mathematical letters, which no document here has
_FORTH = {ord("a") + n: _SMALL + n for n in range(26)} | {ord("A") + n: _CAPITAL + n for n in range(26)}
_BACK = {other: letter for letter, other in _FORTH.items()}
_TOKENS = regex.compile(r"\w+|[^\w\s]")
_MARKUP = (".xml", ".xhtml", ".html", ".htm", ".ncx", ".opf", ".rels", ".xht")


def answering(change: Callable[[str], str]) -> Translate:
    """Return a translator that applies `change` to each sentence; `change` keeps its length."""

    def translate(sentences: list[str]) -> list[SentenceTranslation]:
        links = [[Link(*found.span(), *found.span()) for found in _TOKENS.finditer(text)] for text in sentences]
        return [SentenceTranslation(change(text), own) for text, own in zip(sentences, links, strict=True)]

    return translate


def letters(text: str) -> str:
    """Return `text` with each of a to z replaced by another letter."""
    return text.translate(_FORTH)


def capitals(text: str) -> str:
    """Return `text` in capitals, except letters whose capital is several characters or another letter's, too (ı)."""
    return "".join(c.upper() if len(c.upper()) == 1 and c.upper().casefold() == c.casefold() else c for c in text)


def translated(content: bytes, name: str, change: Callable[[str], str]) -> Result[bytes]:
    """Return the translation of a document. Raises DataError for one that is refused."""
    target = "de" if document_kind(name).name == "TMX" else ""
    settings = Settings(Options(sentencex_splitter("en")), target=target)
    return run(document(content, name, settings), answering(change))


def parts(content: bytes) -> dict[str, bytes]:
    """Return the members of an archive by name; any other file is one part, with the name ""."""
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return {"": content}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def opens(content: bytes, name: str) -> bool:
    """Return whether Ziggurat can read a document, and other parsers can read its XML or JSON."""
    try:
        translated(content, name, str)
        for part, inside in parts(content).items():
            if not inside:  # some programs write empty parts
                continue
            if (part or name).endswith((".xml", ".rels", ".xlf", ".xliff", ".tmx", ".ncx", ".opf")):
                ElementTree.fromstring(inside)
            elif name.endswith((".json", ".arb")):
                json.loads(inside.decode("utf-8-sig"))
    except (DataError, ElementTree.ParseError, ValueError):
        return False
    return True


# Words

_DIVIDES = regex.compile(
    r"</?(?:w:p|w:tab|w:br|w:cr|w:ptab|a:p|a:br|text:(?:p|h|s|tab|line-break)|p|div|br|li|t[dhr]|h[1-6]|source|target|"
    r"item|string|title|text|seg)\b[^<>]*+>"
)
_TAG = regex.compile(r"""(?s)<!--.*?-->|<[A-Za-z/!?](?:=\s*"[^"]*"|=\s*'[^']*'|[^<>])*+>""")
_ENTITY = regex.compile(r"&#?\w{1,32};")
_SOFT_HYPHEN = regex.compile(r"\xad|&(?:shy|#173|#xad);", flags=regex.IGNORECASE)
_ESCAPE = regex.compile(r"(?:\\u[0-9A-Fa-f]{4})++|\\[nrt\\]")
_WORD = regex.compile(r"[A-Za-z]{2,}+")


def words(text: str, kind: DocumentKind, back: Callable[[str], str]) -> Counter[str]:
    """Return the words of a file, between its tags and inside them, after `back` undid their translation."""
    text = _ESCAPE.sub(lambda found: json.loads(f'"{found[0]}"'), text) if kind.name in ESCAPED else text
    text, counts = _SOFT_HYPHEN.sub("", text), Counter[str]()
    if kind.name == "Markdown":
        text = regex.sub(r"[*_~\\]", "", text)
    if kind.name in OFFICE:  # layout between tags divides no words
        text = regex.sub(r">\s*\n\s*<", "><", text)
    if kind.name not in ("text", "gettext"):
        for tag in _TAG.findall(text) if kind.name not in OFFICE else ():
            counts.update(_WORD.findall(back(unescaped(tag))))
        text = _TAG.sub("", _DIVIDES.sub(" ", text))
    counts.update(_WORD.findall(back(text if kind.name == "text" else unescaped(text))))
    return counts


def unescaped(text: str) -> str:
    """Return a text with characters in place of its complete entities."""
    return _ENTITY.sub(lambda found: html.unescape(found[0]), text)


def decoded(content: bytes) -> str:
    """Return the text of a part, decoded by its byte order mark or declaration."""
    label = regex.search(rb"""(?:encoding|charset)\s*=\s*["']?([\w-]+)""", content[:500])
    for encoding in (
        "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8",
        (label or [b"", b""])[1].decode(),
    ):
        try:
            return content.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
    return content.decode("latin-1")


def compared(before: bytes, after: bytes, name: str, back: Callable[[str], str]) -> Counter[str]:
    """Return how many words a translation lost and doubled, once `back` undid it."""
    kind, counts = document_kind(name), Counter[str]()
    old, new = parts(before), parts(after)
    for part, content in old.items():
        if part and not part.endswith(_MARKUP):
            counts["lost"] += content != new.get(part)
            continue
        source = _REPLACED.sub("", decoded(content)) if kind.name == "XLIFF" else decoded(content)
        wanted, found = (words(each, kind, back) for each in (source, decoded(new.get(part, b""))))
        counts["lost"] += (wanted - found).total()
        more = found - wanted
        if kind.name in BILINGUAL:  # a translation has the words of its source
            more = Counter({word: count for word, count in more.items() if word not in _ADDED | wanted.keys()})
        elif kind.name == "Markdown":  # a link whose text is its label gets the label, and a linked heading its name
            added = "".join([*_LABEL.findall(decoded(new[part])), *_NAME.findall(decoded(new[part]))])
            more -= words(added, kind, back)
        counts["doubled"] += more.total()
    return counts


_ADDED = frozenset(
    _WORD.findall("target state needs-review-translation qualifier leveraged-mt translated fuzzy tuv xml:lang seg de")
)
"""_ADDED are words in the tags that are added to bilingual formats, and gettext's flag."""
_REPLACED = regex.compile(r"""(?s)<target\b[^<>]*\bstate="(?:new|needs-translation)".*?</target>|\bstate="initial" """)
_NAME = regex.compile(r'<a id="[^"]*"></a>|\{:?\s?#[^{}]*\}')
_LABEL = regex.compile(r"\]\[[^\[\]\n]*+\]")
ESCAPED = {"JSON", "gettext", "Android"}
"""ESCAPED are kinds that write characters with a backslash."""
OFFICE = {"Word", "PowerPoint"}
"""OFFICE are kinds that repeat the tags of a run for each piece of its text."""


# Text that never reaches a translator, as docs/documents.md says

_KEPT = {
    "HTML": r"""(?imsx) <!--.*?-->
        | <(?P<copied>script|style|code|kbd|samp|var|pre|textarea|svg|math|template|noscript|audio|video|canvas|iframe
            |map|object|picture|rp|rt|rtc|xmp|noembed|noframes|plaintext)\b.*?</(?P=copied)\s*>
        | <(?P<own>\w+)\b[^<>]*(?:translate=["']?no|notranslate)[^<>]*>.*?</(?P=own)\s*>
        | <[A-Za-z/!?](?:=\s*"[^"]*"|=\s*'[^']*'|[^<>])*+>""",
    "Markdown": r"""(?imsx)  # in a paragraph, a heading or a cell
        (?<![`\\])(`+)(?!`).+?(?<!`)\1(?!`)
        | \$\$.*?\$\$ | \$[^$\n]+\$ | \$(?=\S)[^$]+(?<=\S)\$(?!\d)
        | \\\(.*?\\\) | \\\[(?!\\\]).*?\\\] | \\begin\{(\w+)\}.*?\\end\{\2\}
        | \]\([^()\s]*(?:\([^()]*\)[^()\s]*)*[^()]*\) | \](?:\[[^\]]*\])+ | \[\^[^\]]*\]
        | \{[{%].*?[%}]\} | \{:.*?\} | \{\ ?(?:[\#.]|[\w-]+=)[^{}]*\} | \{/\*.*?\*/\} | \[!\w+\]
        | \[-?@[^\]]*\](?!\() | ^:{3,}\{figure(?:-md)?\}.*?$ | ^(?:import|export)\b.*?$
        | ^\s*(?:::::*|!!!|\?\?\?|===)\+?[\ \t]*(?:[\w-]+(?:\ [\w-]+(?=\ "))?|\{[^{}]*\})?
        | \{[\w:-]+\}(?=`) | ^\([\w .:-]+\)=$ | ^\ {0,3}%.*?$ | ^\+\+\+.*?$
        | ^:(?!(?:alt|caption|title):)[\w-]+:.*?$  # names and options of MyST
        | ^\[[^\]\n]+\]:\ *<.*?>$ | ^\*\[[^\]]*\]: | ^\s*--8<--.*?$ | ^\s*\.\.\ \w+:: | :[a-z][\w+-]*:
        | \\[A-Za-z]{2,30}\*?(?:\[[^\[\]\n]*\])?(?:\{[^{}\s]*\})*(?![\w{])""",
    "SubRip": r"(?m)^\s*\d.*?(?:-->|→|[–—]>).*$|<[^<>]*>|\{\\[^{}]*\}",
    "WebVTT": r"""(?msx) \A.*?(?=\n\s*\n|\Z) | ^[^\n]*-->.*?$ | ^[^\n]*\n(?=[^\n]*-->) | <[^<>]*>
        | ^(?:NOTE|STYLE|REGION)\b.*?(?=\n\s*\n|\Z)""",
    "Android": r"""(?sx) <(string|string-array|plurals)\b[^<>]*translatable="false".*?</\1> | <xliff:g\b.*?</xliff:g>
        | (?<=>)\s*[@?][\w:./]+\s*(?=<) | <(color|bool|dimen|integer|style)\b.*?</\2> | <!\[CDATA\[ | <[^<>]*>""",
}
_KEPT["Markdown"] += f" | {_KEPT['HTML'].removeprefix('(?imsx)')}"
"""_KEPT maps a kind to a pattern for text that its files keep unchanged, as docs/documents.md says."""
_SHOWN = {  # formats whose text is inside elements
    "Word": (("word/",), r"(?s)<w:t(?:\s[^<>]*)?>(.*?)</w:t>|<a:t(?:\s[^<>]*)?>(.*?)</a:t>|<c:v>(.*?)</c:v>"),
    "PowerPoint": (
        ("ppt/slides/", "ppt/notesSlides/", "ppt/diagrams/", "ppt/charts/"),
        r"(?s)<a:t(?:\s[^<>]*)?>(.*?)</a:t>|<c:v>(.*?)</c:v>",
    ),
    "OpenDocument text": (("content.xml",), r"(?s)<text:(?:p|h|span|a)\b[^<>]*(?<!/)>([^<]*)"),
    "OpenDocument presentation": (("content.xml",), r"(?s)<text:(?:p|h|span|a)\b[^<>]*(?<!/)>([^<]*)"),
    "XLIFF": (("",), r"(?s)<target\b[^<>]*(?<!/)>(.*?)</target>"),
}


# Text that is not between tags: attributes, front matter and directives, as other parsers see them

_SHOWN_ATTRIBUTES = frozenset(("alt", "title", "placeholder", "aria-label", "aria-description"))
_OF_SOME = {"option": "label", "optgroup": "label", "track": "label", "th": "abbr"}
_SHOWN_META = regex.compile(r"(?:(?:og|twitter):(?:image:)?)?(?:description|title|alt|keywords)")
_SHOWN_KEYS = frozenset(("title", "subtitle", "description", "summary", "excerpt", "caption", "alt"))
_FRONT = regex.compile(r"\A(---|\+\+\+)[ \t]*\n(.*?)^\1[ \t]*$", flags=regex.DOTALL | regex.MULTILINE)
_OF_PROGRAMS = frozenset(
    ("code", "code-block", "code-cell", "contents", "image", "include", "literalinclude", "math", "mermaid", "raw")
)
_NO_TEXT = regex.compile(r"(?s)\{.*|\S+\.\w+")  # an expression, a file
_OPTION_LINE = regex.compile(r"(?m)^:([\w-]+):[ \t]*(.*)$")
_FENCED = regex.compile(r"(?ms)^[ \t>]*(`{3,}|~{3,}).*?^[ \t>]*\1`*[ \t]*$")
_BRACES = regex.compile(r"(?P<braces>\{(?:[^{}]++|(?&braces))*+\})")
_COMPONENT = regex.compile(
    rf"""<[A-Za-z][\w.]*+(?:\s++(?:[\w:.-]++(?:=(?:"[^"]*+"|'[^']*+'|{_BRACES.pattern}))?|(?&braces)))*+\s*+/?>"""
)
_IN_TEMPLATE = regex.compile(r"""\{[^{}]*?\b(?:alt|caption|title)="([^"{}]*)\"""")


def attributes(text: str) -> Iterator[str]:
    """Yield the attributes of a page that people see, as lxml reads them."""
    from lxml import etree
    from lxml import html as pages

    try:
        root = pages.document_fromstring(text.encode(), parser=pages.HTMLParser(encoding="utf-8"))
    except etree.ParserError:  # nothing but comments
        return
    waiting = [root]
    while waiting:
        element = waiting.pop()
        said = element.attrib
        if said.get("translate") == "no" or "notranslate" in said.get("class", "").split():
            continue
        waiting += element.iterchildren(tag=etree.Element)
        names = _SHOWN_ATTRIBUTES | {_OF_SOME.get(element.tag, "title")}
        if element.tag == "meta" and _SHOWN_META.fullmatch(said.get("name") or said.get("property") or ""):
            names |= {"content"}
        if element.tag == "input" and said.get("type") in ("button", "submit", "reset"):
            names |= {"value"}
        yield from (_TAG.sub(" ", said[name]) for name in names & {*said} if not _NO_TEXT.fullmatch(said[name]))


def seen(text: str) -> Iterator[str]:
    """Yield what people see of Markdown: paragraphs, front matter, attributes, titles, and directives in fences."""
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin
    from mdit_py_plugins.footnote import footnote_plugin

    if front := _FRONT.match(text):
        load = yaml.safe_load if front[1] == "---" else tomllib.loads
        with contextlib.suppress(yaml.YAMLError, ValueError):
            yield from _shown_values(load(front[2]))
        text = text[front.end() :]
    yield from map(html.unescape, _IN_TEMPLATE.findall(_FENCED.sub(" ", text)))
    text = _COMPONENT.sub(lambda tag: _BRACES.sub('""', tag[0]).replace("\n", " "), text)
    parser = MarkdownIt("commonmark").enable("table").use(footnote_plugin)
    parser.use(dollarmath_plugin, label_renderer=str)
    yield from attributes(parser.render(text) or " ")
    for token in parser.parse(text):
        if token.type in ("inline", "html_block"):
            yield regex.sub(r"\\([^\w\s])", r"\1", regex.sub(_KEPT["Markdown"], " ", token.content))
        elif token.type == "fence" and (directive := regex.match(r"\{([\w:-]+)\}", token.info)):
            yield from _in_directive(directive[1], token.content)


def _in_directive(name: str, content: str) -> Iterator[str]:
    yield from (value for option, value in _OPTION_LINE.findall(content) if option in _SHOWN_KEYS)
    if name == "toctree":
        yield from regex.findall(r"(?m)^(.+)<", content)
    elif name not in _OF_PROGRAMS:
        yield from seen(regex.sub(r"\S*[/.]\w\S*", " ", _OPTION_LINE.sub("", content)))  # a path is for programs


def _shown_values(value: object, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _shown_values(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _shown_values(inner, key)
    elif isinstance(value, str) and key in _SHOWN_KEYS:
        yield regex.sub(_KEPT["Markdown"], " ", html.unescape(value))


def _read_words(text: str) -> int:
    """Return how many words of the letters a to z occur in a text outside its protected parts."""
    for item in reversed(protected(text)):
        text = text[: item.start] + " " + text[item.end :]
    return len(_WORD.findall(text))


def skipped(outcome: Result[bytes], name: str) -> int:
    """Return how many words of a to z people see in a translation by `letters`, unless a notice explains them."""
    kind = document_kind(name)
    if STAYS & outcome.notices.keys() or kind.name in ("JSON", "TMX", "gettext"):
        return 0
    count = 0
    for part, content in parts(outcome.value).items():
        text = decoded(content)
        if kind.name in _SHOWN:
            begins, shown = _SHOWN[kind.name]
            if not part.startswith(begins) or not part.endswith(".xml"):
                continue
            text = " ".join("".join(found.groups("")) for found in regex.finditer(shown, text))
        elif kind.name == "EPUB" and not part.endswith((".xhtml", ".html", ".htm")):
            continue
        elif kind.name == "Markdown":
            count += sum(_read_words(html.unescape(each)) for each in seen(text))
            continue
        elif pattern := _KEPT.get("HTML" if kind.name == "EPUB" else kind.name):
            text = regex.sub(pattern, " ", text)
        count += _read_words(html.unescape(text))
        if kind.name in ("HTML", "EPUB"):
            count += sum(map(_read_words, attributes(decoded(content))))
    return count


def examined(content: bytes, name: str) -> Counter[str]:
    """Return the faults of a document's translations. Raises DataError for a document that is refused."""
    counts = Counter[str]()
    same = translated(content, name, str)
    if document_kind(name).name in BILINGUAL:  # formerly missing translations are there now
        counts["changed"] += parts(translated(same.value, name, str).value) != parts(same.value)
    else:
        counts["changed"] += parts(same.value) != parts(content)
    other = translated(content, name, letters)
    counts += compared(content, other.value, name, lambda text: text.translate(_BACK))
    counts["skipped"] += skipped(other, name)
    large = translated(content, name, capitals)
    counts += compared(content, large.value, name, str.casefold)
    counts["not opening"] += sum(not opens(each.value, name) for each in (same, other, large))
    return counts


def found(folders: list[Path]) -> Iterator[Path]:
    """Yield the documents under the folders, in order; a path to a file yields that file."""
    endings = tuple(ending for kind in KINDS for ending in kind.endings)
    for folder in folders:
        paths = folder.rglob("*") if folder.is_dir() else [folder]
        yield from sorted(path for path in paths if path.is_file() and path.name.lower().endswith(endings))


def examine(folders: list[Path]) -> tuple[dict[str, Counter[str]], list[str], list[str]]:
    """Return the counts by kind, a line for each document with faults, and one for each refused document."""
    table: dict[str, Counter[str]] = {}
    faults, refused = list[str](), list[str]()
    for path in found(folders):
        counts = table.setdefault(document_kind(path.name).name, Counter())
        counts["documents"] += 1
        try:
            own = examined(path.read_bytes(), path.name)
        except DataError as error:
            counts["refused"] += 1
            refused.append(f"{path}: {str(error).removeprefix(f'{path.name}: ')}")
            continue
        counts.update(own)
        if said := ", ".join(f"{own[fault]} {fault}" for fault in FAULTS if own[fault]):
            faults.append(f"{path}: {said}")
    return table, faults, refused


_IN_WORD = regex.compile(r"\w(?:</?(?:em|strong)>)+\w")
"""_IN_WORD matches the end of emphasis inside a word; a translation loses such emphasis."""


def commonmark(path: Path) -> tuple[Counter[str], list[str]]:
    """Return the counts over CommonMark's examples, and a line for each with faults."""
    from markdown_it import MarkdownIt

    parser, counts, faults = MarkdownIt("commonmark"), Counter[str](), list[str]()
    for example in json.loads(path.read_text(encoding="utf-8")):
        source = example["markdown"]
        pages = [parser.render(text) for text in (source, translated_text(source).translate(_BACK))]
        is_other = _TAG.findall(pages[0]) != _TAG.findall(pages[1]) and not _IN_WORD.search(pages[0])
        own = Counter(documents=1, changed=translated_text(source, str) != source, structure=is_other)
        counts.update(own)
        if own["changed"] or own["structure"]:
            faults.append(f"CommonMark's example {example.get('example', '?')}")
    return counts, faults


def translated_text(source: str, change: Callable[[str], str] = letters) -> str:
    """Return the translation of a Markdown text."""
    return translated(source.encode(), "a.md", change).value.decode()


def main(words: list[str] | None = None) -> int:
    """Run the command; return its status."""
    parser = argparse.ArgumentParser(prog="python -m tools.documents", description=__doc__.split("\n\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--commonmark", type=Path, metavar="FILE", help="spec.json of CommonMark")
    parser.add_argument("--json", action="store_true", help="the counts as JSON")
    given = parser.parse_args(words)
    table, faults, refused = examine(given.folders)
    if given.commonmark:
        table["CommonMark"], more = commonmark(given.commonmark)
        faults += more
    if given.json:
        print(json.dumps({"kinds": table, "faults": faults, "refused": refused}, indent=1))
        return bool(faults)
    columns = ("documents", "refused", *FAULTS, "structure")
    print(f"{'kind':26}" + "".join(f"{column:>12}" for column in columns))
    for kind, counts in sorted(table.items()):
        print(f"{kind:26}" + "".join(f"{counts[column]:12,}" for column in columns))
    for title, lines in (("Refused:", refused), ("Faults:", faults)):
        print("\n".join(["", title, *lines]) if lines else "", end="\n" if lines else "")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
