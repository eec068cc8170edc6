"""Messages of programs: gettext (.po) and JSON, whose strings may hold placeholders and tags."""

from __future__ import annotations

import json
from collections import Counter

import regex

from ziggurat.documents import parse_json
from ziggurat.errors import DataError, printable
from ziggurat.text.documents.settings import Settings, decoded
from ziggurat.text.markup import HTML, markup_template
from ziggurat.text.sentences import Options
from ziggurat.text.template import PlainForm, filled, written
from ziggurat.text.tokens import html_tokens
from ziggurat.text.work import Outcome, Work, together

__all__ = ["gettext", "json_values"]

_TAG = regex.compile(r"</?[A-Za-z][^<>]{0,500}>")


def _message(text: str, options: Options, notices: Counter[str]) -> Work[str]:
    """Return the work of translating a message: text, or HTML if it has tags; every line is a paragraph."""
    if _TAG.search(text):
        return (yield from written(markup_template(list(html_tokens(text)), HTML), options, notices))
    lines = [part for part in regex.split(r"(\r\n|\n|\r)", text) if part]
    return (yield from written([slot for line in lines for slot in filled([line], PlainForm())], options, notices))


# JSON

_TOKEN = regex.compile(r'"(?:[^"\\]++|\\.)*+"')
_COLON = regex.compile(r"\s*:")


def json_values(content: bytes, name: str, settings: Settings) -> Work[Outcome[bytes]]:
    """Return the work of translating JSON: all strings but keys. Numbers, order and layout stay as they are.

    Raises DataError: not JSON, nested more than 64 deep, or larger than ziggurat.documents.MAX_BYTES allows.
    """
    parse_json(content, name)  # refuses what is not JSON, or nested too deeply
    text, encoding = decoded(content, name)
    places = [found.span() for found in _TOKEN.finditer(text) if not _COLON.match(text, found.end())]
    values = [json.loads(text[begin:end]) for begin, end in places]
    notices: Counter[str] = Counter()
    said = yield from together([_message(value, settings.options, notices) for value in values])
    ascii_only = text.isascii() and "\\u" in text
    out, at = [], 0
    for (begin, end), before, after in zip(places, values, said, strict=True):
        same = after == before
        out += [text[at:begin], text[begin:end] if same else json.dumps(after, ensure_ascii=ascii_only)]
        at = end
    return Outcome("".join([*out, text[at:]]).encode(encoding, "replace"), notices)


# gettext

_ENTRY_LINE = regex.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[(\d{1,2})\])?)\s+("(?:[^"\\]|\\.)*")\s*')
_MORE_LINE = regex.compile(r'"(?:[^"\\]|\\.)*"\s*')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"'}


def gettext(content: bytes, name: str, settings: Settings) -> Work[Outcome[bytes]]:
    """Return the work of translating a .po file: messages without a translation get one; all others stay.

    Of plurals, form 0 is the translation of the singular and all others that of the plural; forms that the file does
    not list are not added. Raises DataError: a line that is none of a .po file, or an encoding that is not UTF-8.
    """
    text, encoding = decoded(content, name)
    lines = regex.findall(r"[^\n]*+\n|[^\n]++", text)
    entries = _entries(lines, name)
    notices: Counter[str] = Counter()
    wanted: list[tuple[int, str]] = []  # line where a msgstr begins, and its source
    ends: dict[int, int] = {}
    for entry in entries:
        source = entry.get("msgid")
        if source is None or not source[2]:
            continue
        for key, (begin, end, text_of_it) in entry.items():
            if key.startswith("msgstr") and not text_of_it:
                plural = key not in ("msgstr", "msgstr[0]")
                wanted.append((begin, entry.get("msgid_plural", source)[2] if plural else source[2]))
                ends[begin] = end
    done = yield from together([_message(source, settings.options, notices) for _, source in wanted])
    for (begin, original), answer in zip(reversed(wanted), reversed(done), strict=True):
        said = _edges(original, answer)
        end_of_line = "\r\n" if lines[begin].endswith("\r\n") else "\n"
        keyword = lines[begin].split('"')[0].rstrip()
        quoted = _quoted(said)
        body = [f"{keyword} {quoted[0]}"] if len(quoted) == 1 else [f'{keyword} ""', *quoted]
        lines[begin : ends[begin]] = [line + end_of_line for line in body]
    return Outcome("".join(lines).encode(encoding, "replace"), notices)


def _entries(lines: list[str], name: str) -> list[dict[str, tuple[int, int, str]]]:
    """Return the entries: for each keyword the lines from and to (exclusive), and the text."""
    entries: list[dict[str, tuple[int, int, str]]] = [{}]
    keyword = ""
    for number, line in enumerate(lines):
        bare = line.strip().lstrip("\ufeff")
        if not bare or bare.startswith("#"):
            keyword = ""
            continue
        if found := _ENTRY_LINE.fullmatch(bare):
            keyword = found[1]
            if keyword in ("msgctxt", "msgid") and any(key.startswith("msgstr") for key in entries[-1]):
                entries.append({})
            if keyword in entries[-1]:
                raise DataError(f"{name}, line {number + 1}: a second {keyword} in one entry")
            entries[-1][keyword] = (number, number + 1, _unquoted(found[3]))
        elif _MORE_LINE.fullmatch(bare) and keyword:
            begin, _, text = entries[-1][keyword]
            entries[-1][keyword] = (begin, number + 1, text + _unquoted(bare))
        else:
            raise DataError(f"{name}, line {number + 1}: not a line of a .po file: {printable(bare)!r}")
    return entries


def _unquoted(text: str) -> str:
    return regex.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), text.strip()[1:-1])


def _quoted(text: str) -> list[str]:
    """Return the text in quotes, a string for each of its lines."""
    escaped = [
        "".join({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(c, c) for c in line)
        for line in regex.findall(r"[^\n]*+\n|[^\n]++", text)
    ]
    return [f'"{line}"' for line in escaped] or ['""']


def _edges(source: str, said: str) -> str:
    """Return the translation with a line's end at its ends where the source has one: msgfmt checks it."""
    said = said.strip("\n")
    before = len(source) - len(source.lstrip("\n"))
    after = len(source) - len(source.rstrip("\n"))
    return "\n" * before + said + "\n" * after
