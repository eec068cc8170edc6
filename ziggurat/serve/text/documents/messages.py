"""Messages of programs: gettext (.po) and JSON, whose strings may hold placeholders and tags."""

from __future__ import annotations

import json
from collections import Counter
from typing import TypeAlias

import regex

from ziggurat.serve.text.charsets import Charset, decoded
from ziggurat.serve.text.documents.archive import Settings
from ziggurat.serve.text.markup import HTML, PlainForm, filled, markup_template, written
from ziggurat.serve.text.sentences import Options, Result, SentenceRequests, together
from ziggurat.serve.text.tokens import html_tokens
from ziggurat.system.errors import DataError, printable
from ziggurat.system.small_files import parse_json

_TAG = regex.compile(r"</?[A-Za-z][^<>]{0,500}>")


def _message(text: str, options: Options, notices: Counter[str]) -> SentenceRequests[str]:
    """Return the work of translating a message: text, or HTML if it has tags; every line is a paragraph."""
    if _TAG.search(text):
        return (yield from written(markup_template(list(html_tokens(text)), HTML), options, notices))
    lines = [part for part in regex.split(r"(\r\n|\n|\r)", text) if part]
    return (yield from written([slot for line in lines for slot in filled([line], PlainForm())], options, notices))


# JSON

_TOKEN = regex.compile(r'"(?:[^"\\]++|\\.)*+"')
_COLON = regex.compile(r"\s*:")


def json_values(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Return the work of translating JSON: all strings but keys. Numbers, order and layout stay as they are.

    Raises DataError: not JSON, nested more than 64 deep, or larger than ziggurat.system.small_files.MAX_BYTES allows.
    """
    text, charset = decoded(content, name)
    parse_json(text.encode(), name)  # refuses what is not JSON, or nested too deeply
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
    return Result(charset.encoded("".join([*out, text[at:]])), notices)


# gettext

_ENTRY_LINE = regex.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[(\d{1,2})\])?)\s+("(?:[^"\\]|\\.)*")\s*')
_MORE_LINE = regex.compile(r'"(?:[^"\\]|\\.)*"\s*')
_CHARSET = regex.compile(r'"Content-Type:[^"\n]*?charset=([^\s\\";]+)', flags=regex.IGNORECASE)
_Entry: TypeAlias = "dict[str, tuple[int, int, str]]"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"'}


def gettext(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Return the work of translating a .po file: messages without a translation get one, marked as fuzzy; others stay.

    Of plurals, form 0 is the translation of the singular and all others that of the plural; forms that the file does
    not list are not added. The file keeps its character set if that has the letters of the translations, and is UTF-8
    otherwise. Raises DataError: a line that is none of a .po file, or bytes that are not of its character set.
    """
    label = _CHARSET.search(content.decode("latin-1"))
    text, charset = decoded(content, name, label[1] if label else "")
    lines = regex.findall(r"[^\n]*+\n|[^\n]++", text)
    notices: Counter[str] = Counter()
    wanted: list[tuple[_Entry, str, str]] = []  # an entry, a keyword of it and its source
    for entry in _entries(lines, name):
        source = entry.get("msgid")
        if source is None or not source[2]:
            continue
        for key, (_, _, said) in entry.items():
            if key.startswith("msgstr") and not said:
                plural = key not in ("msgstr", "msgstr[0]")
                wanted.append((entry, key, entry.get("msgid_plural", source)[2] if plural else source[2]))
    done = yield from together([_message(source, settings.options, notices) for _, _, source in wanted])
    for (entry, key, source_text), answer in zip(wanted, done, strict=True):
        begin, end, _ = entry[key]
        quoted = _quoted(_edges(source_text, answer))
        body = [f"{key} {quoted[0]}"] if len(quoted) == 1 else [f'{key} ""', *quoted]
        # All of it in its first line, so that the numbers of the others hold.
        lines[begin:end] = ["".join(line + _line_end(lines[begin]) for line in body), *[""] * (end - begin - 1)]
    for first in {min(begin for begin, _, _ in entry.values()) for entry, _, _ in wanted}:
        _flag(lines, first)
    return Result(_encoded("".join(lines), charset), notices)


def _line_end(line: str) -> str:
    return "\r\n" if line.endswith("\r\n") else "\n"


def _flag(lines: list[str], first: int) -> None:
    """Mark the entry whose first keyword is in line `first` as fuzzy: a translation to be reviewed."""
    before = first  # of the remarks on the message before this one (`#|`)
    while before and lines[before - 1].startswith("#|"):
        before -= 1
    at = before
    while at and lines[at - 1].startswith("#") and not lines[at - 1].startswith("#~"):
        at -= 1
        if lines[at].startswith("#,"):
            flags = [flag.strip() for flag in lines[at][2:].split(",")]
            if "fuzzy" not in flags:
                lines[at] = f"#, fuzzy,{lines[at][2:]}"
            return
    lines[before] = f"#, fuzzy{_line_end(lines[first])}{lines[before]}"


def _encoded(text: str, charset: Charset) -> bytes:
    """Return the file's bytes; where its character set lacks a letter, or is not what it declares, it becomes UTF-8."""
    try:
        if charset.declared or text.isascii():
            return charset.encoded(text, "strict")
    except UnicodeEncodeError:
        if charset.codec.startswith("utf"):  # a model can give what is no letter: half a surrogate pair
            return charset.encoded(text)
    declared = _CHARSET.sub(lambda found: found[0].removesuffix(found[1]) + "UTF-8", text, count=1)
    return Charset().encoded(declared)


def _entries(lines: list[str], name: str) -> list[_Entry]:
    """Return the entries: for each keyword the lines from and to (exclusive), and the text."""
    entries: list[_Entry] = [{}]
    keyword, texts = "", list[str]()  # of its lines so far

    def end() -> None:
        nonlocal keyword
        if keyword:
            begin, last, _ = entries[-1][keyword]
            entries[-1][keyword] = (begin, last + len(texts) - 1, "".join(texts))
        keyword = ""

    for number, line in enumerate(lines):
        bare = line.strip()
        if not bare or bare.startswith("#"):
            end()
            continue
        if found := _ENTRY_LINE.fullmatch(bare):
            end()
            keyword, texts = found[1], [_unquoted(found[3])]
            if keyword in ("msgctxt", "msgid") and any(key.startswith("msgstr") for key in entries[-1]):
                entries.append({})
            if keyword in entries[-1]:
                raise DataError(f"{name}, line {number + 1}: a second {keyword} in one entry")
            entries[-1][keyword] = (number, number + 1, "")
        elif _MORE_LINE.fullmatch(bare) and keyword:
            texts.append(_unquoted(bare))
        else:
            raise DataError(f"{name}, line {number + 1}: not a line of a .po file: {printable(bare)!r}")
    end()
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
