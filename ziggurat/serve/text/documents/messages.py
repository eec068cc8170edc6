"""Messages of programs, whose strings may contain placeholders, tags and branches; gettext (.po).

The form of a message is detected: ICU's MessageFormat, HTML, or text in lines.
"""

from __future__ import annotations

import gettext as gettext_rules
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from html import unescape
from typing import NamedTuple, TypeAlias

import regex

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.documents.access_keys import read_label
from ziggurat.serve.text.documents.icu import FORMATTED, MessageError, icu_template, parse
from ziggurat.serve.text.documents.program_values import is_for_programs
from ziggurat.serve.text.elements import HTML, PAGES, MarkupRules
from ziggurat.serve.text.files import Charset, Settings, decoded
from ziggurat.serve.text.markup import PlainForm, Template, filled, markup_template, written
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece, Verbatim
from ziggurat.serve.text.sentences import Options, Result, SentenceRequests, together
from ziggurat.serve.text.splitting import BRANCHES, protected
from ziggurat.serve.text.tokens import BLOCKS, Token, html_tokens
from ziggurat.system.errors import DataError, printable

# "a <b and c> d" has no tag: in HTML, a tag's attributes have values or are known to have none.
_TAG = regex.compile(
    r"(?<!<)</?(?P<name>[A-Za-z][\w:.\-]*+)"
    r"(?:/|\s++(?:(?:hidden|disabled|checked|selected|required|controls|autoplay|loop|muted|/)\s*+)*+(?=/?>)"
    r"|\s(?=[^<>=]{0,500}+=)[^<>]{0,500}+)?>(?!>)"
)
_ENTITY = regex.compile(r"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
# Lines, and plural forms as Laravel and vue-i18n write them: `one apple | {n} apples`, `{0} none|[2,*] many`. A
# template's filter does not count: {{ price | currency }}, [[a|b]].
_FORMS = r"(?<![ \t])[ \t]*+\|(?![^{}\n]{0,200}\}|[^\[\]\n]{0,200}\]\])[ \t]*+(?:\[\d{1,9},(?:\d{1,9}|\*)\][ \t]*+)?"
_DIVIDED = regex.compile(rf"(\r\n|\n|\r|{_FORMS})")
_DIVIDED_FORMS = regex.compile(f"({_FORMS})")
_NUMBERED = r"</?(?P<number>\d{1,3})[ ]?/?>"  # tags of react-i18next
# Placeholders that are text elsewhere: Laravel's :name and links of vue-i18n; Drupal's @name, !name and %name;
# i18next's __name__; Qt's %1 and %L1, which no digit follows.
_NAMES = (
    r"(?<![\w:/]):[A-Za-z_]\w{0,60}(?![\w:])|(?<![\w:/])@(?:\.\w{1,20})?:(?:[\w.\-]{0,80}\w|\([\w.\-]{1,80}\))",
    r"(?<![\w@/.])@[A-Za-z_]\w{0,60}+(?:[.\-]\w{1,40}+){0,3}+|(?<![\w!/])![a-z_]\w{1,40}+|(?<![\w%])%[a-z_]\w{3,40}+(?!%)",
    r"(?<!\w)__[A-Za-z](?:\w{0,40}?[A-Za-z0-9])?__(?!\w)|(?<![\w%])%L?[1-9](?![\w%$!]|[.,]\d)",
)
_PRINTF = frozenset(("awk", "c", "gcc-internal", "javascript", "lua", "objc", "perl", "php", "python", "ruby"))
"""_PRINTF are gettext's flags (`c-format`) of messages in which `%` is written `%%`."""
_QT = r"%L?\d{1,2}(?!\d)"
_FORMATS = {
    **dict.fromkeys(("qt", "qt-plural", "kde", "kde-kuit", "ycp", "smalltalk"), _QT),
    "gcc-internal": r"%[<>']|%q?[+#]?(?:hh|h|ll|l|w|z|t)?[A-Za-z]",
    "gfc-internal": r"%[<>']|%(?:\d\$)?[A-Za-z]",
    **dict.fromkeys(("scheme", "lisp"), r"~[\d,'@:]{0,10}[A-Za-z%~&|*?()<>\[\]{};^]"),
    "object-pascal": r"%\d{1,2}:[-\d.]{0,6}[a-zA-Z]",
}
"""_FORMATS maps gettext's flags (`qt-format`) to placeholders of that format, in addition to the common ones."""
_NAME = " name"
"""_NAME is the name of an untagged element whose text is a placeholder; HTML names contain no spaces."""
_MESSAGE = replace(PAGES, copied=PAGES.copied | {_NAME})


@lru_cache(maxsize=256)
def references(*more: str) -> regex.Pattern[str]:
    """Return the pattern of a message's placeholders: the patterns `more` first, then those of any text."""
    return regex.compile("|".join((_NUMBERED, *more, *_NAMES)))


_TAG_WITH_NUMBER = regex.compile(_NUMBERED)
_ELEMENTS = HTML.inline | HTML.void | HTML.copied | HTML.nested | HTML.seen | BLOCKS
# MessageFormat 2, and MediaWiki's {{PLURAL:$1|file|files}}.
_OTHER_SYNTAX = regex.compile(r"\A\s*+\.(?:match|input|local)\s*+[{$]|\{\{(?:PLURAL|GENDER|GRAMMAR|FORMAL):")
# For files in which some messages are ICU's: '{name}' is a placeholder between quotation marks, as in FORMATTED.
_MAY_QUOTE, _NO_ICU = regex.compile(r"\{|''"), regex.compile(r"'\{[^\s{},']|\|")


class Syntax(NamedTuple):
    """Facts about the messages of a file.

    Attributes:
        names: the placeholders that they may contain.
        is_icu: whether all are in ICU's MessageFormat, or only those recognised as such; None: whether an apostrophe
            before a brace quotes it is unknown.
        is_pod: whether they are marked as in POD: `B<bold>`, `E<lt>`.
        is_printf: whether a percent sign is written twice.
    """

    names: regex.Pattern[str] = references()
    is_icu: bool | None = False
    is_pod: bool = False
    is_printf: bool = False


_UNKNOWN = Syntax()


def message(text: str, options: Options, notices: Counter[str], syntax: Syntax = _UNKNOWN) -> SentenceRequests[str]:
    """Yield the texts of a message to translate; return the translated message.

    An ICU message that cannot be parsed is left unchanged, and is counted as `not_parsed`.
    """
    branches = BRANCHES.search(text) is not None
    tags = is_html(text) and not syntax.is_pod
    if not tags and (found := read_label(text)) is not None:
        return found.translated((yield from message(found.text, options, notices, syntax)))
    apostrophe = "\u2019" if syntax.is_icu is None else "''"
    if branches or FORMATTED.search(text) or (syntax.is_icu and _MAY_QUOTE.search(text) and not _NO_ICU.search(text)):
        try:
            parts = parse(text)
        except MessageError:
            parts = []
        if parts:
            return (
                yield from written(
                    icu_template(parts, notices, apostrophe, message_tokens if tags else None), options, notices
                )
            )
    if branches or _OTHER_SYNTAX.search(text):
        notices["not_parsed"] += 1
        return text
    if tags:
        tokens = list(message_tokens(text, syntax.names))
        rules = with_own_elements(tokens, _MESSAGE)
        whole: Template = []
        for form in _parted(tokens, _DIVIDED_FORMS if rules.collapses else _DIVIDED):
            whole += [form] if isinstance(form, str) else markup_template(form, rules)
        return (yield from written(whole, options, notices))
    template: Template = []
    for number, part in enumerate(_DIVIDED.split(text)):
        template += [part] if number % 2 else filled(_named(part, syntax.names), PlainForm())
    said = yield from written(template, options, notices)
    return said.replace("'{", f"{apostrophe}{{") if syntax.is_icu is None and "'{" not in text else said


def placed(
    works: Sequence[Callable[[TextNotices], SentenceRequests[str]]], places: Sequence[str], notices: TextNotices
) -> SentenceRequests[list[str]]:
    """Return several works as one; the notices of each are counted at its place."""
    own = [TextNotices() for _ in works]
    done = yield from together([work(mine) for work, mine in zip(works, own, strict=True)])
    for place, mine in zip(places, own, strict=True):
        for kind, count in mine.items():
            notices.add(kind, place, count)
    return done


def is_html(text: str) -> bool:
    """Return whether a message is HTML: it has entities, HTML elements, or others with both of their tags.

    `<<name>>` and an address in `<...>` are not tags.
    """
    if any(unescape(entity) != entity for entity in _ENTITY.findall(text)):
        return True
    names = {found["name"] for found in _TAG.finditer(text)}
    return any(name.lower() in _ELEMENTS or (f"<{name}" in text and f"</{name}>" in text) for name in names)


def message_tokens(text: str, names: regex.Pattern[str] | None = None) -> Iterator[Token]:
    """Yield the HTML tokens of a message, including numbered tags, and the `names` in it as elements."""
    for token in html_tokens(text):
        if token.kind == "text":
            begin = 0
            for found in (names or _TAG_WITH_NUMBER).finditer(token.raw):
                yield from _text(token.raw[begin : found.start()])
                yield from _reference(found)
                begin = found.end()
            yield from _text(token.raw[begin:])
        elif token.kind == "other" and (found := _TAG_WITH_NUMBER.fullmatch(token.raw)):  # </0> is a comment in HTML
            yield from _reference(found)
        else:
            yield token


def _text(raw: str) -> list[Token]:
    return [Token("text", raw, text=unescape(raw) or raw)] if raw else []


def _reference(found: regex.Match[str]) -> list[Token]:
    """Return a numbered tag, or another name as an element without tags."""
    raw, number = found[0], found["number"]
    if number is None:
        return [Token("open", "", _NAME), Token("text", raw, text=raw), Token("close", "", _NAME)]
    return [Token("empty" if raw.endswith("/>") else "close" if raw.startswith("</") else "open", raw, number)]


def _parted(tokens: Sequence[Token], pattern: regex.Pattern[str]) -> Iterator[list[Token] | str]:
    """Yield the parts between the dividers that a pattern matches outside all elements, and the dividers."""
    form: list[Token] = []
    depth = 0
    for token in tokens:
        depth += (token.kind == "open" and token.name not in HTML.void) - (token.kind == "close")
        if token.kind != "text" or depth > 0:
            form.append(token)
            continue
        for number, part in enumerate(pattern.split(token.raw)):
            if number % 2:
                yield form
                yield part
                form = []
            elif part:
                form += html_tokens(part)
    yield form


def with_own_elements(tokens: Sequence[Token], rules: MarkupRules = HTML) -> MarkupRules:
    """Return rules that allow elements known only to a program (`<link>terms</link>`) inside sentences.

    If no element separates lines, line ends do, as in messages of chats and GTK, where they are not page layout.
    """
    names = {token.name for token in tokens}
    own = {token.name for token in tokens if token.kind == "close" or token.name.isdigit()}
    own -= rules.inline | rules.copied | rules.nested | BLOCKS | {"br"}
    collapses = rules.collapses and not names.isdisjoint(BLOCKS | rules.blank)
    return replace(rules, inline=rules.inline | own, void=rules.void - own, collapses=collapses)


def _named(text: str, names: regex.Pattern[str]) -> list[Piece]:
    """Return a line as pieces, with its names."""
    pieces: list[Piece] = []
    begin = 0
    pods: list[str] = []  # elements of POD that are open
    for found in names.finditer(text):
        sign = _sign(found[0], found["number"])
        if found[0] == ">":
            sign = Close(">", pods.pop()) if pods else ">"
        elif _POD_OPENS.fullmatch(found[0]):
            pods.append(found[0])
            sign = Open(found[0], found[0])
        pieces += [text[begin : found.start()], sign]
        begin = found.end()
    return [piece for piece in (*pieces, text[begin:]) if piece]


_POD_OPENS = regex.compile(r"\b[A-Z]{1,2}<(?=\S|\Z)")
_POD = rf"\b(?:CW?|[EFL])<[^<>]{{1,200}}>|{_POD_OPENS.pattern}|>"
"""_POD matches code, links, letters and the tags of POD, which po4a writes for the fonts of manuals."""


def _sign(raw: str, number: str | None) -> Piece:
    """Return a name, or a numbered tag."""
    if number is None:
        return Verbatim(raw, raw)
    if raw.endswith("/>"):
        return EmptyElement(raw)
    return Close(raw, number) if raw.startswith("</") else Open(raw, number)


# gettext

_STRINGS = r'(?:"(?:[^"\\]++|\\.)*+"\s*+)'
# As gettext reads them: white space is optional, adjacent strings are joined, and they may start on the next line.
_ENTRY_LINE = regex.compile(
    rf"(domain|msgctxt|msgid_plural|msgid|msgstr\s*+(?:\[\s*+\d{{1,2}}\s*+\])?)\s*+({_STRINGS}*+)"
)
_MORE_LINE = regex.compile(rf"{_STRINGS}++")
_STRING = regex.compile(r'"((?:[^"\\]++|\\.)*+)"')
# A non-ASCII letter may be written as its bytes, one escape for each.
_ESCAPE = regex.compile(r"(?:\\(?P<octal>[0-7]{1,3}))+|(?:\\x(?P<hex>[0-9A-Fa-f]{1,2}))+|\\(?P<sign>.)")
_CHARSET = regex.compile(r'"Content-Type:[^"\n]*?charset=([^\s\\";]+)', flags=regex.IGNORECASE)
_LANGUAGE = regex.compile(r"^(?P<source>X-Source-)?Language:[ \t]*+([\w@.\-]++)", flags=regex.MULTILINE)
_PLURALS = regex.compile(r"^Plural-Forms:[^\n;]*+;\s*+plural\s*+=([^\n;]++)", flags=regex.MULTILINE)
_CREDITS = frozenset(("translator-credits", "translator_credits", "Your names", "Your emails"))
"""_CREDITS are messages whose translations are the names of those who translated the file, in GNOME and KDE."""
_OFTEN, _FEW = 200, 5  # a form used by fewer than _FEW of the first numbers counts as rare
_Entry: TypeAlias = "dict[str, tuple[int, int, str]]"
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", '"': '"'
}  # fmt: skip
_QUOTED = str.maketrans({letter: f"\\{name}" for name, letter in _ESCAPES.items()})


def gettext(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the untranslated messages of a .po file; return the file with their translations, marked as fuzzy.

    Among plural forms, the form of 1 is the translation of the singular unless many numbers share it; all others are
    translations of the plural. Forms that the file does not list are not added. The file keeps its character set if
    that has all letters of the translations, and becomes UTF-8 otherwise.

    A message that is a key (`menu.title`) instead of text stays untranslated.

    Raises DataError for a line that is not valid in a .po file, bytes that are invalid in its character set, or
    languages in its header that differ from those of `settings`.
    """
    label = _CHARSET.search(content.decode("latin-1"))
    text, charset = decoded(content, name, label[1] if label else "")
    lines = regex.findall(r"[^\n]*+\n|[^\n]++", text)
    notices = TextNotices()
    numbers = _numbers_of_singular("")  # until a header says otherwise
    wanted: list[tuple[_Entry, str, str]] = []  # an entry, its keyword and its source
    for entry in _entries(lines, name):
        source = entry.get("msgid")
        if source is None or not source[2]:
            _refuse_languages(entry, settings, name)
            numbers = _numbers_of_singular("".join(said for _, _, said in entry.values()))
            continue
        left = settings.leaves(source[2], entry.get("msgctxt", source)[2])
        for key, (begin, _, said) in entry.items():
            if not key.startswith("msgstr") or said:
                continue
            if left:
                notices.add("left_by_key", f"line {begin + 1}")
            elif source[2] in _CREDITS or (is_for_programs(source[2]) and not read_label(source[2])):
                notices.add("for_programs", f"line {begin + 1}")
            else:
                plural = entry.get("msgid_plural", source)[2]
                wanted.append((entry, key, source[2] if _is_singular(key, numbers, source[2], plural) else plural))
    syntaxes = [_syntax(lines, min(begin for begin, _, _ in entry.values())) for entry, _, _ in wanted]
    works = [
        partial(message, part[2], settings.options, syntax=own) for part, own in zip(wanted, syntaxes, strict=True)
    ]
    done = yield from placed(works, [f"line {entry[key][0] + 1}" for entry, key, _ in wanted], notices)
    for (entry, key, source_text), syntax, answer in zip(wanted, syntaxes, done, strict=True):
        begin, end, _ = entry[key]
        said = _percents(source_text, answer) if syntax.is_printf else answer
        quoted = _quoted(_edges(source_text, said))
        body = [f"{key} {quoted[0]}"] if len(quoted) == 1 else [f'{key} ""', *quoted]
        # All of it on its first line, so that the numbers of the other lines stay valid.
        lines[begin:end] = ["".join(line + _line_end(lines[begin]) for line in body), *[""] * (end - begin - 1)]
    for first in {min(begin for begin, _, _ in entry.values()) for entry, _, _ in wanted}:
        _flag(lines, first)
    return Result(_encoded("".join(lines), charset), notices)


def _numbers_of_singular(header: str) -> tuple[str, Sequence[int]]:
    """Return the form of 1 by a header's rule, as `msgstr[0]`, and those of the first numbers that share it."""
    found = _PLURALS.search(header)
    try:
        form = gettext_rules.c2py(found[1]) if found else (lambda number: int(number != 1))
        own = form(1)
        return f"msgstr[{own}]", [number for number in range(_OFTEN) if form(number) == own]
    except (ValueError, ArithmeticError):  # an invalid rule
        return _numbers_of_singular("")


def _is_singular(key: str, of_one: tuple[str, Sequence[int]], singular: str, plural: str) -> bool:
    """Return whether a form is the translation of the singular.

    The form of 1 is, unless 2 also has it, as in a language with a single form. If 21 has it, "one file" would be shown
    for 21, so the singular must then contain the plural's placeholders; msgfmt also refuses such a form.
    """
    form, numbers = of_one
    if key == "msgstr":
        return True
    if key != form or 2 in numbers:
        return False
    found = [sorted(text[i.start : i.end] for i in protected(text)) for text in (singular, plural)]
    return len(numbers) < _FEW or found[0] == found[1]


def _refuse_languages(entry: _Entry, settings: Settings, name: str) -> None:
    """Raise DataError if a header names languages other than those of the settings."""
    for said in (said for key, (_, _, said) in entry.items() if key.startswith("msgstr")):
        for found in _LANGUAGE.finditer(said):
            source, target = (found[2], "") if found["source"] else ("", found[2])
            settings.refuse_languages(source, target, name)


def _line_end(line: str) -> str:
    return "\r\n" if line.endswith("\r\n") else "\n"


def _flag(lines: list[str], first: int) -> None:
    """Mark the entry whose first keyword is in line `first` as fuzzy: a translation to be reviewed."""
    if (at := _flags(lines, first)) is None:
        before = first  # start of the comments on the previous message (`#|`)
        while before and lines[before - 1].startswith("#|"):
            before -= 1
        lines[before] = f"#, fuzzy{_line_end(lines[first])}{lines[before]}"
    elif "fuzzy" not in [flag.strip() for flag in lines[at][2:].split(",")]:
        lines[at] = f"#, fuzzy,{lines[at][2:]}"


def _flags(lines: list[str], first: int) -> int | None:
    """Return the line with the flags of the entry whose first keyword is in line `first`."""
    at = first
    while at and lines[at - 1].startswith("#") and not lines[at - 1].startswith("#~"):
        at -= 1
        if lines[at].startswith("#,"):
            return at
    return None


def _syntax(lines: list[str], first: int) -> Syntax:
    """Return the facts about this entry's messages, from its flags and po4a's comments."""
    at = _flags(lines, first)
    flags = set() if at is None else {flag.strip().removesuffix("-format") for flag in lines[at][2:].split(",")}
    at = first
    while at and lines[at - 1].startswith("#") and not lines[at].startswith("#. type:"):
        at -= 1
    is_pod = lines[at].startswith("#. type:")
    patterns = [pattern for flag, pattern in _FORMATS.items() if flag in flags]
    return Syntax(references(*patterns, *([_POD] if is_pod else [])), is_pod=is_pod, is_printf=bool(flags & _PRINTF))


def _percents(source: str, said: str) -> str:
    """Return a translation for printf, in which a percent sign that the source lacks (`50 %`) is written twice."""
    bare, at = "", 0
    for item in protected(source):
        bare, at = bare + source[at : item.start], item.end
    if "%" in bare + source[at:]:  # a format that is not known
        return said
    written, at = "", 0
    for item in protected(said):
        written += said[at : item.start].replace("%", "%%") + said[item.start : item.end]
        at = item.end
    return written + said[at:].replace("%", "%%")


def _encoded(text: str, charset: Charset) -> bytes:
    """Return the file's bytes; if its character set is wrong or lacks a letter, they are UTF-8."""
    try:
        if charset.declared or text.isascii():
            return charset.encoded(text, "strict")
    except UnicodeEncodeError:
        if charset.codec.startswith("utf"):  # a model can output half a surrogate pair, which is not a letter
            return charset.encoded(text)
    declared = _CHARSET.sub(lambda found: found[0].removesuffix(found[1]) + "UTF-8", text, count=1)
    return Charset().encoded(declared)


def _entries(lines: list[str], name: str) -> list[_Entry]:
    """Return the entries: for each keyword the line range (end exclusive) and the text."""
    entries: list[_Entry] = [{}]
    keyword, texts = "", list[str]()  # the strings of its lines so far

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
            keyword, texts = "".join(found[1].split()), [_unquoted(found[2])]
            if keyword == "domain":  # it applies to the messages after it
                entries.append({})
                keyword = ""
                continue
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
    """Return the text that adjacent strings stand for."""

    def letters(found: regex.Match[str]) -> str:
        if found["sign"]:
            return _ESCAPES.get(found["sign"], found[0])
        octal, numbers = found.captures("octal"), found.captures("hex")
        codes = [int(code, 8) for code in octal] if octal else [int(code, 16) for code in numbers]
        if 0 in codes or max(codes) > 255:
            return found[0]
        try:
            return bytes(codes).decode("utf-8")
        except UnicodeDecodeError:
            return found[0]

    return _ESCAPE.sub(letters, "".join(_STRING.findall(text)))


def _quoted(text: str) -> list[str]:
    """Return the text as quoted strings, one for each of its lines."""
    return [f'"{line.translate(_QUOTED)}"' for line in regex.findall(r"[^\n]*+\n|[^\n]++", text)] or ['""']


def _edges(source: str, said: str) -> str:
    """Return the translation with line ends at its edges where the source has them, which msgfmt checks."""
    said = said.strip("\n")
    before = len(source) - len(source.lstrip("\n"))
    after = len(source) - len(source.rstrip("\n"))
    return "\n" * before + said + "\n" * after
