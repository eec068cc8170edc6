"""JSON: strings that are values, and of files of messages whose shape is known those that people read.

Known by their shape: messages.json of WebExtensions, ARB, extracted messages of FormatJS, structured files of
Transifex, manifests of web applications. Of all others (i18next's among them) every value is a message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias

import regex

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.charsets import decoded
from ziggurat.serve.text.documents.messages import message, placed
from ziggurat.serve.text.sentences import Result, SentenceRequests
from ziggurat.serve.text.settings import Settings
from ziggurat.system.errors import printable
from ziggurat.system.small_files import parse_json

_TOKEN = regex.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\]]')
_COLON = regex.compile(r"\s*:")
_Path: TypeAlias = "tuple[str, ...]"


class _Value(NamedTuple):
    """A string that is a value: its characters in the file, and the keys that lead to it (lists have none)."""

    begin: int
    end: int
    path: _Path


def json_values(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Return the work of translating JSON: strings that are values. Numbers, order and layout stay as they are.

    Raises DataError: not JSON, nested more than 64 deep, larger than ziggurat.system.small_files.MAX_BYTES, or of
    another language than those of `settings`.
    """
    text, charset = decoded(content, name)
    shape = _shape(parse_json(text.encode(), name), name)  # refuses what is not JSON, or nested too deeply
    places = _values(text)
    values = [json.loads(text[value.begin : value.end]) for value in places]
    notices = TextNotices()
    wanted = list[int]()
    for number, value in enumerate(places):
        if shape.translates(value.path):
            if settings.leaves(*value.path):
                notices.add("left_by_key", _place(value))
            else:
                wanted.append(number)
    works = [partial(message, values[number], settings.options) for number in wanted]
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
    path: list[str] = []  # the key in each object that is open; empty in lists
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

# The key of an entry whose value people read -> the keys beside it that are for translators and programs.
_ENTRIES = {
    "message": frozenset(("description", "placeholders", "hash")),
    "defaultMessage": frozenset(("id", "description", "file", "start", "end", "line", "col")),
    "string": frozenset(("context", "developer_comment", "character_limit", "key")),
}
_MANIFEST = frozenset(("name", "short_name", "description", "label"))


class _Shape(NamedTuple):
    """The parts of a file that are translated.

    Attributes:
        last: keys of strings that are, if not all are.
        depth: how many keys lead to those strings; 0: any number.
        metadata: whether what is below a key that begins with `@` is not.
        language: the keys that lead to the file's language.
    """

    last: frozenset[str] = frozenset()
    depth: int = 0
    metadata: bool = False
    language: _Path | None = None

    def translates(self, path: _Path) -> bool:
        """Return whether a string at the end of these keys is translated."""
        if path == self.language or (path and path[0] == "$schema"):
            return False
        if self.metadata and path and path[0].startswith("@"):
            return False
        return (not self.last or (bool(path) and path[-1] in self.last)) and self.depth in (0, len(path))


def _shape(content: Any, name: str) -> _Shape:
    ending = PurePath(name).suffix.lower()
    if ending == ".webmanifest":
        return _Shape(last=_MANIFEST)
    if not isinstance(content, Mapping | list):
        return _Shape()
    if isinstance(content, Mapping):
        if ending == ".arb" or "@@locale" in content or _described(content):
            return _Shape(metadata=True, language=("@@locale",))
        if isinstance(content.get("translations"), Mapping) and set(content) == {"locale", "translations"}:
            return _Shape(language=("locale",))  # Angular's
    items = [v for k, v in content.items() if k[:1] not in "$@"] if isinstance(content, Mapping) else content
    for key, beside in _ENTRIES.items():
        if items and all(_is_entry(item, key, beside) for item in items):
            return _Shape(last=frozenset((key,)), depth=2 if isinstance(content, Mapping) else 1)
    return _Shape()


def _described(content: Mapping[str, Any]) -> bool:
    """Return whether messages have metadata beside them, as `@key`."""
    return any(key[:1] == "@" and isinstance(content.get(key[1:]), str) for key in content if len(key) > 1)


def _is_entry(item: Any, key: str, beside: frozenset[str]) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get(key), str) and set(item) <= beside | {key}
