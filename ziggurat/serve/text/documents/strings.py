"""Files of strings with keys: JSON in known shapes, and Android's strings.xml."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import unescape
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias

import regex

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.documents.bilingual import CDATA, are_html, html_in_xml, with_html
from ziggurat.serve.text.documents.messages import (
    Syntax,
    message,
    message_tokens,
    placed,
    references,
    with_own_elements,
)
from ziggurat.serve.text.documents.program_values import is_for_programs
from ziggurat.serve.text.elements import HTML, MarkupRules
from ziggurat.serve.text.files import Settings, decoded
from ziggurat.serve.text.markup import Template, TemplateGroup, markup_template, written
from ziggurat.serve.text.sentences import Result, SentenceRequests
from ziggurat.serve.text.splitting import BRANCHES, has_words
from ziggurat.serve.text.tokens import Token, read_xml, xml_ends
from ziggurat.system.errors import DataError, printable
from ziggurat.system.small_files import parse_json

_TOKEN = regex.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\]]')
_COLON = regex.compile(r"\s*:")
_Path: TypeAlias = "tuple[str, ...]"


class _Value(NamedTuple):
    """A string value: its range in the file, and the keys that lead to it (lists have none)."""

    begin: int
    end: int
    path: _Path


def json_values(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the strings in JSON to translate; return the file. Numbers, order and layout are preserved.

    Raises DataError if it is not JSON, nested more than 64 deep, larger than ziggurat.system.small_files.MAX_BYTES, in
    a language other than those of `settings`, or of an unsupported shape.
    """
    text, charset = decoded(content, name)
    shape = _shape(parse_json(text.encode(), name), name)  # refuses invalid or too deeply nested JSON
    places = _values(text)
    values = [json.loads(text[value.begin : value.end]) for value in places]
    notices = TextNotices()
    wanted = list[int]()
    for number, value in enumerate(places):
        if shape.translates(value.path):
            if settings.leaves(*value.path):
                notices.add("left_by_key", _place(value))
            elif shape == _Shape() and is_for_programs(values[number]):
                notices.add("for_programs", _place(value))
            else:
                wanted.append(number)
        elif shape.entry and not shape.entry & set(value.path) and has_words(values[number], []):
            notices.add("not_read", _place(value))
    syntax = shape.syntax([values[number] for number in wanted])
    works = [partial(message, values[number], settings.options, syntax=syntax) for number in wanted]
    done = yield from placed(works, [_place(places[number]) for number in wanted], notices)
    said = dict(zip(wanted, done, strict=True))
    for number, value in enumerate(places):
        if value.path == shape.language and settings.becomes_target(values[number], name):
            said[number] = settings.target
    ascii_only = text.isascii() and "\\u" in text
    out, at = [], 0
    for number, after in sorted(said.items()):
        begin, end, _ = places[number]
        same = after == values[number]
        out += [text[at:begin], text[begin:end] if same else json.dumps(after, ensure_ascii=ascii_only)]
        at = end
    return Result(charset.encoded("".join([*out, text[at:]])), notices)


def _place(value: _Value) -> str:
    return f"key {printable('.'.join(value.path), 100)}" if value.path else f"character {value.begin}"


def _values(text: str) -> list[_Value]:
    values: list[_Value] = []
    path: list[str] = []  # the key in each open object; empty in lists
    for found in _TOKEN.finditer(text):
        sign = found[0]
        if sign in ("{", "["):
            path.append("")
        elif sign in ("}", "]"):
            path.pop()
        elif path and _COLON.match(text, found.end()):
            path[-1] = json.loads(sign)
        else:
            values.append(_Value(found.start(), found.end(), tuple(key for key in path if key)))
    return values


# Shapes

# The key of an entry whose value is for readers -> the neighbouring keys for translators and programs.
_ENTRIES = {
    "message": frozenset(("description", "placeholders", "hash")),
    "defaultMessage": frozenset(("id", "description", "file", "start", "end", "line", "col")),
    "string": frozenset(("context", "developer_comment", "character_limit", "key")),
    "translation": frozenset(("id",)),
}
_FORMS = frozenset(("zero", "one", "two", "few", "many", "other"))
_BESIDE_FORMS = frozenset(("id", "description", "hash", "leftDelim", "rightDelim"))  # in go-i18n
_MANIFEST = frozenset(("name", "short_name", "description", "label"))


class _Shape(NamedTuple):
    """The parts of a file that are translated.

    Attributes:
        last: last keys of translated strings, if not all strings are translated.
        depth: number of keys that lead to those strings; 0: any number.
        entry: keys of untranslated strings in entries that should have no other such keys.
        left: last keys of untranslated strings.
        metadata: whether everything below a key that starts with `@` is untranslated.
        language: keys that lead to the file's language.
        names: patterns of placeholders in its messages, in addition to the common ones.
        icu: whether the messages are in ICU's MessageFormat; None: if one has branches.
    """

    last: frozenset[str] = frozenset()
    depth: int = 0
    entry: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    metadata: bool = False
    language: _Path | None = None
    names: tuple[str, ...] = ()
    icu: bool | None = None

    def translates(self, path: _Path) -> bool:
        """Return whether the string at the end of these keys is translated."""
        if path == self.language or (path and path[0] == "$schema"):
            return False
        if (self.metadata and path and path[0].startswith("@")) or (self.left and path and path[-1] in self.left):
            return False
        return (not self.last or (bool(path) and path[-1] in self.last)) and self.depth in (0, len(path))

    def syntax(self, texts: Sequence[str]) -> Syntax:
        """Return the facts about the messages that are translated."""
        names = references(*self.names)
        if self.language == _ARB_LANGUAGE:  # Flutter's messages use quoting only if enabled
            return Syntax(names, any("''" in text for text in texts) or None)
        return Syntax(names, any(map(BRANCHES.search, texts)) if self.icu is None else self.icu)


_ARB_LANGUAGE = ("@@locale",)
_BY_NUMBER = (r"\$\d", r"\$\$")


def _shape(content: Any, name: str) -> _Shape:
    ending = PurePath(name).suffix.lower()
    if ending == ".webmanifest":
        return _Shape(last=_MANIFEST)
    if not isinstance(content, Mapping | list):
        return _Shape()
    if isinstance(content, Mapping):
        _refuse_other(content, name)
        if ending == ".arb" or "@@locale" in content or _described(content):
            return _Shape(metadata=True, language=_ARB_LANGUAGE)
        if isinstance(content.get("@metadata"), Mapping):  # MediaWiki's
            return _Shape(metadata=True, names=_BY_NUMBER)
        if isinstance(content.get("translations"), Mapping) and set(content) == {"locale", "translations"}:
            return _Shape(language=("locale",))  # Angular's
    items = [v for k, v in content.items() if k[:1] not in "$@"] if isinstance(content, Mapping) else content
    for key, beside in _ENTRIES.items():
        if _are_entries(items, key, beside):
            icu, names = key == "defaultMessage" or None, _BY_NUMBER if key == "message" else ()
            depth = 2 if isinstance(content, Mapping) else 1
            return _Shape(frozenset((key,)), depth, beside | {key}, names=names, icu=icu)
    forms = [item for item in items if isinstance(item, Mapping) and isinstance(item.get("other"), str)]
    if any(_BESIDE_FORMS & set(item) and set(item) <= _FORMS | _BESIDE_FORMS for item in forms):
        return _Shape(left=_BESIDE_FORMS)
    return _Shape()


def _refuse_other(content: Mapping[str, Any], name: str) -> None:
    """Raise DataError for files of other programs whose values are not all text, or which hold two languages."""
    messages = content.get("messages")
    of_gotext = messages if isinstance(messages, list) else []
    compiled = [value for value in content.values() if isinstance(value, list) and value]
    kind = ""
    if {"sourceLanguage", "strings"} <= set(content):
        kind = "a catalogue of Xcode, which holds several languages; export XLIFF from it"
    elif "locale_data" in content:
        kind = "made for Jed; translate the .po file that it was made from"
    elif any(isinstance(item, Mapping) and {"id", "translation"} <= set(item) for item in of_gotext):
        kind = "of gotext, which holds two languages"
    elif any(all(isinstance(p, Mapping) and isinstance(p.get("type"), int) for p in value) for value in compiled):
        kind = "of compiled messages; translate what they were compiled from"
    if kind:
        raise DataError(f"{name}: is {kind}")


def _described(content: Mapping[str, Any]) -> bool:
    """Return whether messages have metadata under a neighbouring `@key`."""
    return any(key[:1] == "@" and isinstance(content.get(key[1:]), str) for key in content if len(key) > 1)


def _are_entries(items: Sequence[Any], key: str, beside: frozenset[str]) -> bool:
    """Return whether these are entries: all have `key` and only known keys, or half have it and some have known keys.

    In the latter case someone has added keys to the other entries, or left keys out.
    """
    known = [
        item
        for item in items
        if isinstance(item, Mapping) and isinstance(item.get(key), str) and set(item) <= beside | {key}
    ]
    return bool(known) and (
        len(known) == len(items) or (2 * len(known) >= len(items) and any(beside & set(item) for item in known))
    )


_SPACES = {"urn:oasis:names:tc:xliff:document:1.2": "xliff", "http://schemas.android.com/tools": "tools"}
_REFERENCE = regex.compile(r"\s*+(?:[@?](?:[+*]?+[\w.]++:)?(?:\+?[\w.]++/)?[\w.]++|#[0-9A-Fa-f]{3,8})\s*+")
_ESCAPE = regex.compile(
    r"(?P<space>(?:\\u0020|\\ )+)|(?P<br>\\n|\\u000[aA])|(?P<quote>\")"
    r"|(?:\\u(?!00(?:20|0[aA]))(?P<code>[0-9A-Fa-f]{4}))+|\\.",
    flags=regex.DOTALL,
)
_NAMED_TEXT = regex.compile(r"<[^<>]{0,500}\s(?:alt|title|placeholder|aria-label)\s*+=")
_LAYOUT = regex.compile(r"[ \t\r\n]+")
_WRITTEN = str.maketrans({"\\": "\\\\", "'": "\\'", '"': '\\"', "\n": "\\n", "\t": "\\t"})
_LOCALE = regex.compile(r"""(\btools:locale\s*+=\s*+["'])[^"']*+""")


def android(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the strings of an Android application, recognised by its element `resources`; return the translated file.

    Elements with `translatable="false"` and references (`@string/other`) are preserved, as are resources of other
    types, which are counted if they have text. A `tools:locale` that names the source becomes the target's.

    Raises DataError for XML of another kind, or in a language other than those of `settings`.
    """
    xml = read_xml(content, name, _SPACES)
    tokens, ends = xml.tokens, xml_ends(xml.tokens)
    root = next((place for place, token in enumerate(tokens) if token.kind in ("open", "empty")), 0)
    if tokens[root].name != "resources":
        raise DataError(
            f"{name}: XML is read only as Android's strings (`resources`) or with a known file name suffix; its "
            f"element is {printable(tokens[root].name, 60)!r}"
        )
    out = [token.raw for token in tokens]
    locale = tokens[root].attributes.get("tools:locale", "")
    if settings.becomes_target(locale, name):
        out[root] = _LOCALE.sub(rf"\g<1>{settings.target}", out[root])
    notices, wanted = TextNotices(), list[tuple[int, str]]()
    for place, key, called in _strings(tokens, ends, root, notices):
        if settings.leaves(key):
            notices.add("left_by_key", called)
        else:
            wanted.append((place, called))
    for place, called in wanted:
        if any(_NAMED_TEXT.search(token.text) for token in tokens[place + 1 : ends[place]]):
            notices.add("not_read", called)
    templates = [_template(tokens[place + 1 : ends[place]]) for place, _ in wanted]
    works = [partial(written, template, settings.options) for template in templates]
    done = yield from placed(works, [called for _, called in wanted], notices)
    for (place, _), said in zip(wanted, done, strict=True):
        out[place + 1 : ends[place]] = [said, *[""] * (ends[place] - place - 2)]
    return Result(xml.encoded("".join(out)), notices)


def _strings(
    tokens: Sequence[Token], ends: dict[int, int], root: int, notices: TextNotices
) -> Iterator[tuple[int, str, str]]:
    """Yield the index of each string, the name of its resource, and its name in notices."""
    for place in _children(tokens, ends, root):
        token = tokens[place]
        key = token.attributes.get("name", "")
        called = f"{token.name} {printable(key, 60)}"
        if "false" in (token.attributes.get("translatable"), tokens[root].attributes.get("translatable")):
            continue
        if token.name == "string" or token.attributes.get("type") == "string":
            yield place, key, called
        elif token.name in ("string-array", "plurals"):
            for number, item in enumerate(_children(tokens, ends, place), start=1):
                yield item, key, f"{called}, item {number}"
        elif token.name == "array":  # its values may have any type
            items = ("".join(t.text for t in tokens[item : ends[item]]) for item in _children(tokens, ends, place))
            if any(has_words(text, []) and not _REFERENCE.fullmatch(text) for text in items):
                notices.add("not_read", called)


def _children(tokens: Sequence[Token], ends: dict[int, int], parent: int) -> Iterator[int]:
    """Yield the indices of an element's direct children that are not empty."""
    place = parent + 1
    while place < ends.get(parent, parent):
        if tokens[place].kind == "open" and ends[place] > place + 1:
            yield place
        place = ends.get(place, place) + 1


def _template(inside: Sequence[Token]) -> Template:
    texts = [token.kind == "text" for token in inside]
    if len(inside) == 1 and inside[0].kind == "text":
        if _REFERENCE.fullmatch(inside[0].text):
            return [inside[0].raw]
        if inside[0].raw.startswith(CDATA) or are_html(inside):
            return html_in_xml(inside[0], lambda text: _markup(list(message_tokens(text)), _RULES))
    if not are_html([token for token in inside if token.kind == "text"]):
        return _markup(inside, replace(_RULES, xml=True))
    parts, escape = with_html(inside, texts)
    rules = replace(_RULES, xml=True, escape=lambda text: escape(_escaped(text)))
    template = _markup(parts, rules, lambda raw: unescape(unescape(raw)))
    return [TemplateGroup(template, source=["".join(token.raw for token in inside)])]


def _markup(tokens: Sequence[Token], rules: MarkupRules, read: Callable[[str], str] = unescape) -> Template:
    return markup_template(list(_divided(tokens, read)), with_own_elements(tokens, rules))


def _divided(tokens: Sequence[Token], read: Callable[[str], str]) -> Iterator[Token]:
    """Yield text with its escapes decoded and, between texts, line ends, preserved spaces and quotation marks.

    Between quotation marks all white space is preserved; elsewhere Android reduces it to one space, and strips the
    ends.
    """
    quoted = False
    for token in tokens:
        if token.kind != "text":
            yield token
            continue
        if token.raw.startswith(CDATA):  # next to elements
            yield token._replace(text=_unescaped(token.text))
            continue
        begin = 0
        for found in _ESCAPE.finditer(token.raw):
            if (name := found.lastgroup) in ("space", "br", "quote"):
                yield from _text(token.raw[begin : found.start()], read, quoted=quoted)
                yield Token("empty", found[0], name)
                begin = found.end()
                quoted ^= name == "quote"
        yield from _text(token.raw[begin:], read, quoted=quoted)


def _text(raw: str, read: Callable[[str], str], *, quoted: bool) -> Iterator[Token]:
    if not quoted:
        yield Token("text", raw, text=_unescaped(_LAYOUT.sub(" ", read(raw))))
        return
    for number, part in enumerate(regex.split(r"(\r?\n)", raw)):
        yield Token("empty", part, "br") if number % 2 else Token("text", part, text=_unescaped(read(part)))


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_letters, text)


def _letters(found: regex.Match[str]) -> str:
    """Return the decoded escapes; two of `\\u` may be one character."""
    if codes := found.captures("code"):
        return bytes.fromhex("".join(codes)).decode("utf-16-be", "replace")
    kind = {"br": "\n", "space": " "}.get(found.lastgroup or "")
    return kind or {"\\t": "\t"}.get(found[0], found[0][-1])


def _escaped(text: str) -> str:
    """Return text with Android's escapes; `@` and `?` have a meaning at the start of a string."""
    escaped = text.translate(_WRITTEN)
    return f"\\{escaped}" if escaped.startswith(("@", "?")) else escaped


_RULES = replace(
    HTML,
    inline=HTML.inline | {"pair"},
    copied=HTML.copied | {"xliff:g"},
    points=frozenset(("quote", "x")),
    collapses=False,
    spaces=frozenset(("space",)),
    escape=_escaped,
)
