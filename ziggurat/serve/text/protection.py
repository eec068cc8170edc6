"""Stretches of text that a translation must hold as they are: placeholders, addresses, emoji.

They are found by pattern. How they come through a translation is decided in ziggurat.serve.text.sentences.
"""

from __future__ import annotations

from typing import NamedTuple

import regex


class Item(NamedTuple):
    """A stretch of a text that must come through unchanged; `start` and the exclusive `end` are characters of it."""

    start: int
    end: int
    positional: bool = False
    """Its meaning depends on its place among its like, as of `%s`: they must come out in the same order."""


# Quantifiers are possessive or bounded, so that no text takes more than linear time.
_IN_URL = r"""[^\s<>"'“”‘’«»`\\^{}|]++"""
_URL = rf"(?:https?|ftp|file)://{_IN_URL} | \b(?:mailto|tel):{_IN_URL} | \bwww\.[\w-]++\.{_IN_URL}"
_EMAIL = r"(?<![\w.+-])[\w.+-]{1,64}+@[\w-]{1,63}+(?:\.[\w-]{1,63}+)++"
_PLACEHOLDERS = r"""
    \{\{\{?[^{}\n]{1,80}\}\}\}?  # {{name}}
  | \$\{[^{}\n]{1,80}\} | \#\{[^{}\n]{1,80}\} | %\{[^{}\n]{1,80}\}  # ${name}, Ruby's #{name} and %{name}
  | \{[\w.\-\[\]!:,+<>=^%\x20]{0,80}\}  # {0}, {name}, {0:.2f}
  | %\([\w.\- ]{1,80}\)[\#0\- +]?\d{0,4}(?:\.\d{1,4})?[a-zA-Z]  # %(name)s
  | %\d{1,3}\$[\#0\- +]?\d{0,4}(?:\.\d{1,4})?(?:hh|h|ll|l|L|z|j|t|q)?[a-zA-Z@]  # %1$s
  | %%[\w.]{1,40}%% | (?<![\w%])%[A-Za-z_]\w{1,40}%(?!\w)  # %%NAME%%, %NAME%
  | \$[A-Za-z_]\w{0,80}  # $NAME; $5 is money
  | \[\[[^\[\]\n]{1,80}\]\]
"""
# "100 % sure" has no placeholder: a blank is no flag here, and the letter is the end of a word.
_POSITIONAL = r"%[\#0\-+']?(?:\d{1,4}|\*)?(?:\.(?:\d{1,4}|\*))?(?:hh|h|ll|l|L|z|j|t|q)?[diouxXeEfFgGcsSpaAn@](?![\w%])"
# A sequence of pictures: with modifiers, joined by ZWJ, flags, keycaps. Digits alone have the property Emoji, too.
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
# © ® ™ and the arrows are pictographs to Unicode, and text to everybody who writes them.
_TEXT_PICTURES = frozenset("©®™‼⁉ℹ↔↕↖↗↘↙↩↪▪▫▶◀◻◼〰〽㊗㊙")


def protected(text: str) -> list[Item]:
    """Return the stretches of `text` that must come through unchanged, in order; they do not overlap."""
    items = []
    for found in _ITEMS.finditer(text):
        start, end = found.span()
        if found.lastgroup == "url":
            end = _end_of_address(text, start, end)
        elif found.lastgroup == "emoji" and set(found[0]) <= _TEXT_PICTURES:
            continue
        items.append(Item(start, end, found.lastgroup == "positional"))
    return items


def _end_of_address(text: str, start: int, end: int) -> int:
    """Return where an address ends: not in the punctuation of its sentence, unless it opens a bracket itself."""
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
    """Return whether `text` has a letter outside of `items`: otherwise there is nothing to translate."""
    begin = 0
    for item in items:
        if _LETTER.search(text, begin, item.start):
            return True
        begin = item.end
    return _LETTER.search(text, begin) is not None


def occurrences(literal: str, text: str) -> list[int]:
    """Return where `literal` begins in `text`, not inside of a word and without overlaps."""
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
