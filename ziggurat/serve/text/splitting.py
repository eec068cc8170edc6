"""Splitting of paragraphs into sentences, by sentencex (Wikimedia), and the white space around them.

sentencex is in the extra `serve`. Without it there is an error instead of a worse splitter, because otherwise the same
text would be translated differently on two machines. Callers can pass their own splitter.

No sentence ends inside text that a translation must preserve: placeholders, addresses, emoji. They are found by
patterns; ziggurat.serve.text.sentences carries them through a translation.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import regex

from ziggurat.system.errors import ConfigError, DataError, printable

Splitter = Callable[[str], list[str]]
"""Splitter: text without line ends at its own ends -> its sentences, which joined are the text."""

MAX_SENTENCE = 2000
"""MAX_SENTENCE is a length in characters; longer "sentences" lack full stops, like lists, and are split earlier."""

_BLOCK = 10_000
"""_BLOCK is the number of characters passed to sentencex at once: unclosed quotes cost it quadratic time, during which
no other thread runs."""

# A sentence that is too long is split at the last of these: the end of a line, clause or word.
_CUTS = [regex.compile(p) for p in (r"[\n\r\u2028\u2029]\s*", r"[.!?;:。！？；：]\s*", r"[,，、]\s*", r"\s+")]
_BLANKS = regex.compile(r"[^\S\x00-\x7f]")
_SURROGATES = regex.compile(r"[\ud800-\udfff]")


@lru_cache(maxsize=256)
def sentencex_splitter(language: str) -> Splitter:
    """Return sentencex's splitter for a language code; an unknown one is split by general rules.

    Raises ConfigError if sentencex is not installed.
    """
    try:
        import sentencex
    except ModuleNotFoundError:
        raise ConfigError(
            "`sentencex`, which splits text into sentences, is not installed: pip install 'ziggurat-mt[serve]'"
        ) from None
    segment: Callable[[str, str], Any] = sentencex.segment

    def block(text: str) -> list[str]:
        # Stand-ins of the same length, so that the text itself can be split by lengths: Rust has no lone surrogates,
        # and sentencex (1.0.32) panics at multi-byte white space before a full stop, as in French.
        stand_in = _BLANKS.sub(" ", _SURROGATES.sub("\ufffd", text))
        try:
            found = segment(language, stand_in)
        except BaseException as error:
            # A panic is not an Exception, so it would end a server. Its class cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            found = [text]  # as if no sentence end had been found
        sentences, begin = [], 0
        for sentence in found:
            sentences.append(text[begin : begin + len(sentence)])
            begin += len(sentence)
        return sentences

    def split(text: str) -> list[str]:
        sentences, begin = list[str](), 0
        while len(text) - begin > _BLOCK:
            found = [sentence for sentence in block(text[begin : begin + _BLOCK]) if sentence]
            # The last sentence may continue, so the next block starts with it, unless it fills most of a block.
            if len(found) > 1 and len(found[-1]) <= MAX_SENTENCE:
                found.pop()
            else:
                last = found.pop() if found else text[begin : begin + _BLOCK]
                found.append(last[: _last_gap(last)])
            sentences += found
            begin += sum(map(len, found))
        return [*sentences, *block(text[begin:])]

    return split


def _last_gap(text: str) -> int:
    """Return where the last word of a text starts; its end if it has a single word."""
    gaps = [found.end() for found in _CUTS[-1].finditer(text, len(text) // 2) if found.end() < len(text)]
    return gaps[-1] if gaps else len(text)


def sentence_spans(text: str, split: Splitter, whole: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """Return the sentences of a paragraph as spans without white space at their ends.

    Args:
        text: the paragraph.
        split: the splitter.
        whole: stretches, in order, that no sentence may end inside, such as addresses; a longer sentence is split
            between them or, at MAX_SENTENCE, inside them.
    """
    ends, end = [], 0
    for sentence in split(text):
        end += len(sentence)
        ends.append(end)
    if end != len(text):  # a splitter that drops or adds characters
        ends = [len(text)]
    spans, begin, at = [], 0, 0
    for end in ends:
        while at < len(whole) and whole[at][1] <= end:
            at += 1
        if at < len(whole) and whole[at][0] < end < whole[at][1]:
            continue
        spans += _within_limit(text, begin, end)
        begin = end
    spans += _within_limit(text, begin, len(text))
    return [span for span in (_stripped(text, *span) for span in spans) if span[0] < span[1]]


def _within_limit(text: str, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the span in parts of at most MAX_SENTENCE characters."""
    spans = []
    while end - begin > MAX_SENTENCE:
        cut = begin + MAX_SENTENCE
        for kind in _CUTS:
            # In the second half, since otherwise the parts would be too short to be understood.
            found = [m.end() for m in kind.finditer(text, begin + MAX_SENTENCE // 2, cut)]
            if found:
                cut = found[-1]
                break
        spans.append((begin, cut))
        begin = cut
    return [*spans, (begin, end)] if begin < end else spans


def _stripped(text: str, begin: int, end: int) -> tuple[int, int]:
    while begin < end and _is_gap(text[begin]):
        begin += 1
    while begin < end and _is_gap(text[end - 1]):
        end -= 1
    return begin, end


def _is_gap(character: str) -> bool:
    """Return whether a character is white space, including zero-width ones (pasted byte order marks)."""
    return character.isspace() or character in "\u200b\ufeff"


# Text that must stay unchanged


class Item(NamedTuple):
    """A stretch of a text that must stay unchanged, as a range of characters with an exclusive `end`."""

    start: int
    end: int
    positional: bool = False
    """Whether its meaning depends on its position among similar items, as for `%s`: they must keep their order."""


# Quantifiers are possessive or bounded, so that every text takes linear time.
_IN_URL = r"""[^\s<>"'“”‘’«»`\\^{}|]++"""
_URL = rf"(?:https?|ftp|file)://{_IN_URL} | \b(?:mailto|tel):{_IN_URL} | \bwww\.[\w-]++\.{_IN_URL}"
_EMAIL = r"(?<![\w.+-])[\w.+-]{1,64}+@[\w-]{1,63}+(?:\.[\w-]{1,63}+)++"
_PLACEHOLDERS = r"""
    \{\{\{?[^{}\n]{1,80}\}\}\}?  # {{name}}
  | \$\{[^{}\n]{1,80}\} | \#\{[^{}\n]{1,80}\} | %\{[^{}\n]{1,80}\}  # ${name}, Ruby's #{name} and %{name}
  | \{\x20{0,4}[$@]?[\w.\-\[\]]{0,80}\x20{0,4}(?:[!:][\w.\-\[\]!:,+<>=^%\x20]{0,80})?\}  # {0}, {name}, {0:.2f}, {$name}
  | \{\x20{0,4}[$@]?[\w.\-]{1,80}\x20{0,4},\x20{0,4}(?:-?\d|(?:number|date|time|duration|ordinal|spellout|list)\b)
      [^{}\n]{0,80}\}  # {price, number, ::currency/EUR}, {0,-10:C}
  | \{@\w{1,30}(?:\x20[^{}\n]{0,200})?\} | \$t\([^()\n]{1,200}\)  # {@link Name}, i18next's $t(key)
  | %\([\w.\- ]{1,80}\)[\#0\- +]?\d{0,4}(?:\.\d{1,4})?[a-zA-Z]  # %(name)s
  | %\d{1,3}\$[\#0\- +]?\d{0,4}(?:\.\d{1,4})?(?:hh|h|ll|l|L|z|j|t|q)?[a-zA-Z@]  # %1$s
  | %%[A-Za-z0-9_.]{1,40}%%  # %%NAME%%
  | (?<![\w%])%(?!(?:hh?|ll?|[Lzjtq])[a-zA-Z]%)[A-Za-z_][A-Za-z0-9_]{1,40}%(?!\w)  # %NAME%, but not %lu%%
  | %\d{1,2}%(?!\w) | %<[\w.]{1,80}>(?:[\#0\-+]?\d{0,4}(?:\.\d{1,4})?[a-zA-Z](?!\w))?  # %1%, %<name>s, %<PRIu64>
  | %%(?:[a-zA-Z](?!\w))?  # a percent sign
  | %\[\d{1,2}\][\#+\-]?[\d.]{0,6}[a-zA-Z]  # Go's %[1]d
  | (?<!\d)(?<!\d\s)%[\-\#+EO]?[bBDhHIjklmMNPqQrRtTUvVwWyYzZ](?![A-Za-z0-9_])  # strftime's %Y, Go's %v, Lua's %q
  | </?\d{1,3}\x20?/?> | \{\w{1,10}> | <\w{1,10}\}  # react-i18next's <0>, {b> and <b} of Phrase
  | \{\$[A-Za-z_][^{}\n]{0,80}\}  # {$x|escape}
  | \{[/\#:](?:if|else|each|for|foreach|section|block|with|await|then|catch|key)\b[^{}\n]{0,80}\}  # {#if x}, {/if}
  | \{%[^{}\n]{1,200}%\} | \{\#[^{}\n]{1,200}\#\} | <%[^<>\n]{1,200}%>  # {% if x %}, {# remark #}, <%= name %>
  | <<[\w.\-\x20]{1,80}>>  # <<name>>
  | \$[A-Za-z_][\w@]{0,80}\$ | \$[A-Za-z_]\w{0,80}  # $NAME$, $NAME; $5 is money
  | \[\[[^\[\]\n]{1,80}\]\] | \[%[^\[\]\n]{1,200}%\] | \[X\d{1,6}X\]  # Weblate sends [X0X] for what it keeps
"""
# "100 % sure" and Hungarian's "20%-a" contain no placeholder: a space is not a flag here, nor is a hyphen after a
# number. The letter is the last ASCII letter of its word, or is followed by a few that start no word of text, so that
# all of `%dh%02dm` is kept.
_SIZE = "(?:hh|h|ll|l|L|z|j|t|q)?"
_GLUED = rf"%(?:0?\d{{0,2}}\.\d{{1,2}}[fFgGs]|(?:0\d{{1,2}})?{_SIZE}[diusS@])"
_POSITIONAL = rf"""
    %(?:[\#0+']|(?<!\d%)-|-(?=[\d*]))?(?:\d{{1,4}}|\*)?(?:\.(?:\d{{1,4}}|\*))?{_SIZE}[diouxXeEfFgGcsSpaAn@](?![A-Za-z0-9_])
      (?:%%(?!\w))?
  | (?<![\w%])(?<!\d\s){_GLUED}[A-Za-z]{{1,3}}+(?:{_GLUED}[A-Za-z]{{0,3}}+)*+(?!\w)
"""
# A sequence of emoji: with modifiers, joined by ZWJ, flags, keycaps. Digits alone also have the property Emoji.
_PICTURE = r"(?:\p{Emoji_Presentation}|\p{Extended_Pictographic}\ufe0f?)"
_EMOJI = (
    rf"(?:\p{{Regional_Indicator}}{{2}} | [0-9\#*]\ufe0f?\u20e3 |"
    rf" {_PICTURE}[\U0001F3FB-\U0001F3FF]?+[\U000E0020-\U000E007F]*+(?:\u200d{_PICTURE}[\U0001F3FB-\U0001F3FF]?+)*+)++"
)
_ITEMS = regex.compile(
    rf"(?P<url>{_URL}) | (?P<email>{_EMAIL}) | (?P<named>{_PLACEHOLDERS}) | (?P<positional>{_POSITIONAL})"
    rf" | (?P<emoji>{_EMOJI})",
    flags=regex.VERBOSE,
)
_AFTER_URL = ".,;:!?…。，；：！？、)]"
_PAIRS = (("(", ")"), ("[", "]"))
_LETTER = regex.compile(r"\p{L}")
_WORD_INSIDE = regex.compile(r"\w")
# © ® ™ and the arrows are pictographs in Unicode, but ordinary text to those who write them.
_TEXT_PICTURES = frozenset("©®™‼⁉ℹ↔↕↖↗↘↙↩↪▪▫▶◀◻◼〰〽㊗㊙")


BRANCHES = regex.compile(r"\{\s*+[^\s{},']++\s*+,\s*+(?i:plural|select|selectordinal|choice)\s*+,")
"""BRANCHES matches the start of a message argument that contains texts, in ICU's MessageFormat."""


class Protection:
    """User-defined patterns; the text they match must also stay unchanged.

    The library `regex` searches for them with a time limit: all searches in one text or document may take SECONDS of
    computing time in total. Patterns that take a long time to compile are refused.

    Raises ConfigError, naming the pattern, if it does not compile, has more than MAX_PATTERN characters, repeats more
    than MAX_REPEATED groups, has more than MAX_WRITTEN characters once its counted repeats are expanded, or calls
    itself.
    """

    SECONDS = 5.0
    MAX_PATTERN = 300
    MAX_REPEATED = 6
    MAX_WRITTEN = 10_000

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [self._compiled(pattern) for pattern in patterns]
        self._left = self.SECONDS

    def _compiled(self, pattern: str) -> regex.Pattern[str]:
        shown = f"the pattern {printable(pattern, 100)!r}"
        # The library expands a repeated group, and the groups inside it again for each copy.
        if len(pattern) > self.MAX_PATTERN or len(_REPEATED.findall(pattern)) > self.MAX_REPEATED:
            raise ConfigError(
                f"{shown} has more than {self.MAX_PATTERN} characters or {self.MAX_REPEATED} repeated groups; give "
                "several patterns"
            )
        if _written_out(pattern) > self.MAX_WRITTEN:  # a few hundred bytes of memory each
            raise ConfigError(
                f"{shown} repeats more than {self.MAX_WRITTEN:,} characters or groups; give smaller counts"
            )
        if _CALL.search(pattern):
            raise ConfigError(f"{shown} calls itself or one of its groups, which is not supported")
        try:
            return regex.compile(pattern)
        except regex.error as error:
            raise ConfigError(f"{shown} cannot be read: {error}") from None

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the ranges that the patterns match in a text, without white space at their ends.

        Raises DataError if they have taken more than SECONDS.
        """
        spans: list[tuple[int, int]] = []
        for pattern in self._patterns:
            began = time.thread_time()
            try:
                for found in pattern.finditer(text, timeout=max(self._left, 0.001)):
                    span = _stripped(text, *found.span())
                    spans += [span] if span[0] < span[1] else []
                self._left -= time.thread_time() - began
            except TimeoutError:
                raise DataError(
                    f"patterns to protect took more than {self.SECONDS:g} seconds in total; time ran out at "
                    f"{printable(pattern.pattern, 100)!r}: simplify it"
                ) from None
        return spans


_REPEATED = regex.compile(r"\)[*+?{]")
_TOKENS = regex.compile(r"(?s)\\.|\[(?:\\.|[^\]\\])*+\]|\{(?P<least>\d*+)(?:,(?P<most>\d*+))?\}|.")
_CALL = regex.compile(r"\(\?(?:R|[+-]?\d|&|P>)")


def _written_out(pattern: str) -> int:
    """Return how many characters, classes and escapes a pattern has with its counted repeats expanded."""
    last, groups = 0, [0]
    for found in _TOKENS.finditer(pattern):
        if found[0] == "(":
            groups.append(0)
        elif found[0] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif counts := [int(count) for count in found.group("least", "most") if count]:
            times = max(1, *counts)
            groups[-1] += last * (times - 1)
            last *= times
        else:
            last = 1
            groups[-1] += 1
    return sum(groups)


def protected(text: str, own: Protection | None = None) -> list[Item]:
    """Return the stretches of `text` that must stay unchanged, in order; they do not overlap.

    `own` are the user's patterns. A match that overlaps another stretch is merged with it.
    """
    items = _protected_anywhere(text)
    if own is None or not (spans := own.spans(text)):
        return items
    joined: list[Item] = []
    for item in sorted([*items, *(Item(*span) for span in spans)]):
        if joined and item.start < joined[-1].end:
            last = joined.pop()
            item = Item(last.start, max(last.end, item.end), last.positional or item.positional)
        joined.append(item)
    return joined


def _protected_anywhere(text: str) -> list[Item]:
    """Return placeholders, addresses and emoji."""
    items = _branching(text)
    starts = [item.start for item in items]
    for found in _ITEMS.finditer(text):
        start, end = found.span()
        whole = bisect_right(starts, end - 1) - 1
        if whole >= 0 and start < items[whole].end:
            continue
        if found.lastgroup == "url":
            end = _end_of_address(text, start, end)
        elif found.lastgroup == "emoji" and set(found[0]) <= _TEXT_PICTURES:
            continue
        items.append(Item(start, end, found.lastgroup == "positional"))
    return sorted(items) if starts else items


def _branching(text: str) -> list[Item]:
    """Return the outermost arguments with branches, `{count, plural, one {# file} other {# files}}`."""
    begins = [found.start() for found in BRANCHES.finditer(text)]
    if not begins:
        return []
    ends: dict[int, int] = {}
    opened: list[int] = []
    for found in regex.finditer("[{}]", text):
        if found[0] == "{":
            opened.append(found.start())
        elif opened:
            ends[opened.pop()] = found.end()
    items: list[Item] = []
    for begin in begins:
        if begin in ends and (not items or begin >= items[-1].end):
            items.append(Item(begin, ends[begin]))
    return items


def _end_of_address(text: str, start: int, end: int) -> int:
    """Return where an address ends: before the punctuation of its sentence, unless it opens a bracket itself."""
    unclosed = {
        closing: text.count(closing, start, end) - text.count(opening, start, end) for opening, closing in _PAIRS
    }
    while end > start and text[end - 1] in _AFTER_URL:
        last = text[end - 1]
        if last in unclosed:
            if unclosed[last] <= 0:
                break
            unclosed[last] -= 1
        end -= 1
    return end


def has_words(text: str, items: list[Item]) -> bool:
    """Return whether `text` has a letter outside `items`; otherwise there is nothing to translate."""
    begin = 0
    for item in items:
        if _LETTER.search(text, begin, item.start):
            return True
        begin = item.end
    return _LETTER.search(text, begin) is not None


def adjoining(items: Sequence[Item]) -> list[list[Item]]:
    """Return groups of items without text inside: the parts of `%d%%` and of `{scheme}{host}` belong together."""
    groups: list[list[Item]] = []
    for item in items:
        if groups and groups[-1][-1].end == item.start:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def occurrences(literal: str, text: str) -> list[int]:
    """Return where `literal` starts in `text`, not inside a word and without overlaps."""
    places, at = [], text.find(literal)
    while at >= 0:
        end = at + len(literal)
        cuts_word = (at > 0 and _WORD_INSIDE.match(literal[0]) and _WORD_INSIDE.match(text[at - 1])) or (
            end < len(text) and _WORD_INSIDE.match(literal[-1]) and _WORD_INSIDE.match(text[end])
        )
        if not cuts_word:
            places.append(at)
        at = text.find(literal, end if not cuts_word else at + 1)
    return places
