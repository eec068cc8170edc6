"""Splitting of paragraphs into sentences, by sentencex (Wikimedia), and the white space around them.

sentencex is in the extra `serve`. Without it there is an error, not a worse splitter: the same text would otherwise be
translated differently on two machines. Callers can give a splitter of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import regex

from ziggurat.system.errors import ConfigError

Splitter = Callable[[str], list[str]]
"""Text without line ends at its own ends -> its sentences; joined they are the text."""

MAX_SENTENCE = 2000
"""Characters; a longer "sentence" is text without full stops, such as a list, and is cut at the best place before."""

_BLOCK = 10_000
"""Characters that sentencex is given at once: quotes that open and do not close take it time by the square, in which no
other thread goes on."""

# The last of these in a sentence that is too long is where it is cut: the end of a line, clause or word.
_CUTS = [regex.compile(p) for p in (r"[\n\r\u2028\u2029]\s*", r"[.!?;:。！？；：]\s*", r"[,，、]\s*", r"\s+")]
_BLANKS = regex.compile(r"[^\S\x00-\x7f]")
_SURROGATES = regex.compile(r"[\ud800-\udfff]")


@lru_cache(maxsize=256)
def sentencex_splitter(language: str) -> Splitter:
    """Return sentencex's splitter for a language code; one that it does not know is split by its general rules.

    Raises ConfigError where sentencex is not installed.
    """
    try:
        import sentencex
    except ModuleNotFoundError:
        raise ConfigError(
            "`sentencex`, which splits text into sentences, is not installed: pip install 'ziggurat-mt[serve]'"
        ) from None
    segment: Callable[[str, str], Any] = sentencex.segment

    def block(text: str) -> list[str]:
        # Stand-ins of the same length, so that the text itself can be cut by lengths: Rust has no lone surrogates, and
        # sentencex (1.0.32) panics at white space of several bytes before a full stop, as French has it.
        stand_in = _BLANKS.sub(" ", _SURROGATES.sub("\ufffd", text))
        try:
            found = segment(language, stand_in)
        except BaseException as error:
            # A panic is no Exception, so it would end a server. It has no class that could be imported.
            if type(error).__name__ != "PanicException":
                raise
            found = [text]  # as a splitter does that finds no end of a sentence
        sentences, begin = [], 0
        for sentence in found:
            sentences.append(text[begin : begin + len(sentence)])
            begin += len(sentence)
        return sentences

    def split(text: str) -> list[str]:
        sentences, begin = list[str](), 0
        while len(text) - begin > _BLOCK:
            found = [sentence for sentence in block(text[begin : begin + _BLOCK]) if sentence]
            # The last one may go on, and the next block begins with it; if it is most of a block, it is cut anyhow.
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
    """Return where the last word of a text begins; its end if it has one word."""
    gaps = [found.end() for found in _CUTS[-1].finditer(text, len(text) // 2) if found.end() < len(text)]
    return gaps[-1] if gaps else len(text)


def sentence_spans(text: str, split: Splitter, kept: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """Return the sentences of a paragraph as spans without white space at their ends.

    Args:
        text: the paragraph.
        split: the splitter.
        kept: stretches in order that no sentence may end inside of, such as addresses; a longer sentence is cut
            between them or, at MAX_SENTENCE, through them.
    """
    ends, end = [], 0
    for sentence in split(text):
        end += len(sentence)
        ends.append(end)
    if end != len(text):  # a splitter that drops or adds characters
        ends = [len(text)]
    spans, begin, at = [], 0, 0
    for end in ends:
        while at < len(kept) and kept[at][1] <= end:
            at += 1
        if at < len(kept) and kept[at][0] < end < kept[at][1]:
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
            # In the second half, or the parts would become too short to be understood.
            found = [m.end() for m in kind.finditer(text, begin + MAX_SENTENCE // 2, cut)]
            if found:
                cut = found[-1]
                break
        spans.append((begin, cut))
        begin = cut
    return [*spans, (begin, end)] if begin < end else spans


def _stripped(text: str, begin: int, end: int) -> tuple[int, int]:
    """Return the span without white space at its ends."""
    while begin < end and text[begin].isspace():
        begin += 1
    while begin < end and text[end - 1].isspace():
        end -= 1
    return begin, end
