"""Sentences of a text: generators request them, check them, and request them again if something was lost.

Nothing in this package calls a translator. A work yields a list of sentences, is sent their translations in the same
order, may request more, and returns its result. So one caller can translate sentence by sentence (`run`), while a
server puts the sentences of many requests into one search.

A sentence is requested in up to three forms: unchanged; without the stretches that must stay unchanged, which the
alignment puts back; or each segment between marks and such stretches separately. Every fallback is counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

import regex

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.splitting import (
    BRANCHES,
    Item,
    Protection,
    Splitter,
    adjoining,
    has_words,
    occurrences,
    protected,
)
from ziggurat.translate.results import UNSPACED_SCRIPTS
from ziggurat.translate.terms import Terms

if TYPE_CHECKING:
    from ziggurat.serve.text.glossary import Tally

Value = TypeVar("Value")


class Link(NamedTuple):
    """A stretch of the source and the corresponding stretch of its translation; ends are exclusive."""

    source_start: int
    source_end: int
    target_start: int
    target_end: int


@dataclass(frozen=True)
class SentenceTranslation:
    """The translation of a sentence, and links between characters, the surest first; None: unknown."""

    text: str
    links: Sequence[Link] | None = None


@dataclass(frozen=True)
class Result(Generic[Value]):
    """The translated text or document that a work returns, and counts of what needed special handling."""

    value: Value
    notices: TextNotices = field(default_factory=TextNotices)


SentenceRequests: TypeAlias = Generator[list[str], list[SentenceTranslation], Value]
"""A generator that yields sentences, is sent their translations, and returns its result.

Each sentence has at least one letter, and no white space at its ends.
"""


def run(work: SentenceRequests[Value], translate: Callable[[list[str]], list[SentenceTranslation]]) -> Value:
    """Return the result of `work`, with its sentences translated by `translate`, in order."""
    try:
        asked = next(work)
        while True:
            asked = work.send(translate(asked))
    except StopIteration as ended:
        result: Value = ended.value
        return result


def watched(work: SentenceRequests[Value], tell: Callable[[list[str]], object]) -> SentenceRequests[Value]:
    """Return the same work, but it passes each list of sentences to `tell` before it requests them."""
    try:
        asked = next(work)
        while True:
            tell(asked)
            asked = work.send((yield asked))
    except StopIteration as ended:
        result: Value = ended.value
        return result
    finally:
        work.close()


def together(works: Sequence[SentenceRequests[Value]]) -> SentenceRequests[list[Value]]:
    """Return several works as one, which requests the sentences of all of them at once; its result is a list."""
    results: dict[int, Value] = {}
    answers: dict[int, list[SentenceTranslation]] | None = None  # None: the works have not started
    while True:
        asked: dict[int, list[str]] = {}
        for place in range(len(works)) if answers is None else answers:
            try:
                asked[place] = next(works[place]) if answers is None else works[place].send(answers[place])
            except StopIteration as ended:
                results[place] = ended.value
        if not asked:
            return [results[place] for place in range(len(works))]
        rendered = yield [sentence for sentences in asked.values() for sentence in sentences]
        answers, begin = {}, 0
        for place, sentences in asked.items():
            answers[place] = rendered[begin : begin + len(sentences)]
            begin += len(sentences)


# A letter of a script without spaces; a word, including joiners of its parts; any other character.
_UNIT = regex.compile(
    rf"[{UNSPACED_SCRIPTS}]\p{{M}}*|(?:(?![{UNSPACED_SCRIPTS}])[\p{{L}}\p{{M}}\p{{N}}_])+"
    rf"(?:['’·\-](?:(?![{UNSPACED_SCRIPTS}])[\p{{L}}\p{{M}}\p{{N}}_])+)*|\S"
)


@dataclass(frozen=True)
class Target:
    """The translation of a text.

    Attributes:
        text: the translation.
        links: links between characters of the source and of `text`, the surest first.
        fixed: links of stretches that stayed unchanged; no tag goes inside them.
        sentences: links of whole sentences, in order; none: it is a single sentence.
    """

    text: str
    links: list[Link] = field(default_factory=list)
    fixed: list[Link] = field(default_factory=list)
    sentences: list[Link] = field(default_factory=list)


def units(text: str, fixed: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """Return the spans of a text's words and other characters; those in `fixed` (in order) are not split."""
    spans, begin = [], 0
    for start, end in fixed:
        spans += [found.span() for found in _UNIT.finditer(text, begin, start)]
        spans.append((start, end))
        begin = end
    return spans + [found.span() for found in _UNIT.finditer(text, begin)]


def cut_at(spans: Sequence[tuple[int, int]], cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the spans, each split at those of `cuts` that lie inside it."""
    parts = []
    for start, end in spans:
        inside = cuts[bisect_right(cuts, start) : bisect_left(cuts, end)]
        parts += list(pairwise([start, *inside, end]))
    return parts


def gaps(text: str) -> tuple[list[int], list[int]]:
    """Return, for each boundary of characters, the start and end of the white space around it."""
    begins, ends = list(range(len(text) + 1)), list(range(len(text) + 1))
    for place in range(1, len(text) + 1):
        if text[place - 1].isspace():
            begins[place] = begins[place - 1]
    for place in range(len(text) - 1, -1, -1):
        if text[place].isspace():
            ends[place] = ends[place + 1]
    return begins, ends


def best_boundary(centres: Sequence[float | None], at: float, allowed: Sequence[int], lowest: int, highest: int) -> int:
    """Return the boundary at which the fewest words are on a different side of a point than in the source.

    `centres` has for each word its index in the source, None if unknown; `at` is the point's index in the source.
    `allowed` are boundaries in order; boundary k is before word k. Only words from `lowest` to `highest` count.
    """
    wrong = sum(1 for c in centres[lowest:highest] if c is not None and c < at)
    best, fewest, k = allowed[0], wrong + 1, lowest
    for boundary in allowed:
        while k < boundary:
            centre = centres[k]
            if centre is not None:
                wrong += 1 if centre >= at else -1
            k += 1
        if wrong < fewest:
            best, fewest = boundary, wrong
    return best


_CLOSES = regex.compile(r"[.,;:!?…)\]}»”’。，；：！？、）」』]")
_OPENS = regex.compile(r"[(\[{«“‘（「『]")
_TOUCHES = regex.compile(r"[\p{L}\p{N}]")
SPACED = regex.compile(rf"(?![{UNSPACED_SCRIPTS}])[\p{{L}}\p{{N}}]")
"""SPACED matches a letter or digit of a script with spaces between words."""


@dataclass(frozen=True)
class Options:
    """Settings for splitting texts and reassembling them.

    Attributes:
        split: splits a paragraph into sentences (ziggurat.serve.text.splitting); None: a paragraph is one sentence.
        aligned: whether the translator gives alignments; without them, sentences with marks are translated in segments.
        again: whether a sentence is requested again if something that must stay unchanged is missing.
        terms: a glossary, whose hard terms must appear; soft terms are the caller's responsibility.
        tally: counter of what became of the terms.
        protect: patterns of text that must stay unchanged, in addition to what always must.
        admit: receives the paragraphs, possibly in several calls, before they are split; an exception ends the work.
    """

    split: Splitter | None
    aligned: bool = True
    again: bool = True
    terms: Terms | None = None
    tally: Tally | None = None
    protect: Protection | None = None
    admit: Callable[[Sequence[str]], None] | None = None


@dataclass(frozen=True)
class Unit:
    """A sentence and the facts known about it.

    Attributes:
        text: the sentence, without white space at its ends.
        items: stretches that must stay unchanged, in order.
        copied: indices of the `items` that are copied elements.
        inner: indices strictly inside the text where marks start, end or stand.
    """

    text: str
    items: list[Item] = field(default_factory=list)
    copied: frozenset[int] = frozenset()
    inner: Sequence[int] = ()


def sentence(unit: Unit, options: Options, notices: Counter[str]) -> SentenceRequests[Target]:
    """Yield the texts of a sentence to translate; return the finished translation."""
    if kept := sum(BRANCHES.match(unit.text, item.start, item.end) is not None for item in unit.items):
        notices["not_parsed"] += kept  # a message in a format that is not parsed
    if not has_words(unit.text, unit.items):
        return unchanged(unit)
    if unit.inner and not options.aligned:
        notices["unaligned"] += 1
        return (yield from _segments(unit, notices))
    (answer,) = yield [unit.text]
    answer = _answered(unit.text, answer, notices)
    text, links = answer.text, answer.links
    fixed = _located(unit, text, links, options.protect) if options.again else []
    if fixed is None:
        notices["protected_again"] += 1
        return (yield from _cut_out(unit, options, notices))
    if not links:
        if unit.inner:
            notices["unaligned"] += 1
            return (yield from _segments(unit, notices))
        links = [Link(0, len(unit.text), 0, len(text))]
    return Target(text, list(links), fixed)


def unchanged(unit: Unit) -> Target:
    """Return a sentence as its own translation."""
    fixed = [Link(item.start, item.end, item.start, item.end) for item in unit.items]
    spans = units(unit.text, [(item.start, item.end) for item in unit.items])
    return Target(unit.text, [Link(start, end, start, end) for start, end in spans], fixed)


_NOTHING = regex.compile(r"[\s\p{DI}\p{Cc}]*+")
"""_NOTHING matches text that readers cannot see: white space, zero-width characters, controls."""


def _answered(asked: str, answer: SentenceTranslation, notices: Counter[str]) -> SentenceTranslation:
    """Return a translation without white space at its ends; if nothing is left, return the source and count it.

    A document must not lose text because a model returned nothing.
    """
    if _NOTHING.fullmatch(answer.text):
        notices["empty"] += 1
        return SentenceTranslation(asked, [Link(*span, *span) for span in units(asked)])
    text = answer.text.strip()
    if text == answer.text:
        return answer
    before = len(answer.text) - len(answer.text.lstrip())
    if answer.links is None:
        return SentenceTranslation(text, None)
    links = []
    for link in answer.links:
        start, end = max(0, link.target_start - before), min(len(text), link.target_end - before)
        if start < end:
            links.append(link._replace(target_start=start, target_end=end))
    return SentenceTranslation(text, links)


# Checks that everything stayed unchanged


def _located(unit: Unit, text: str, links: Sequence[Link] | None, protect: Protection | None) -> list[Link] | None:
    """Return where each item is in the translation; None unless each occurs as often as in the source."""
    if not unit.items or text == unit.text:
        return [Link(item.start, item.end, item.start, item.end) for item in unit.items]
    # (1) Copied elements: their text as often as in the source, longer ones first since they may contain shorter ones.
    taken: list[tuple[int, int]] = []
    places: dict[tuple[str, bool], list[int]] = {}  # by text, and whether it belongs to an element
    literals = {unit.text[unit.items[i].start : unit.items[i].end] for i in unit.copied}
    for literal in sorted(literals, key=len, reverse=True):
        here = [at for at in occurrences(literal, text) if not _overlaps(taken, at, at + len(literal))]
        own = sum(unit.text[unit.items[i].start : unit.items[i].end] == literal for i in unit.copied)
        if len(here) != len(occurrences(literal, unit.text)) or len(here) < own:
            return None
        places[literal, True] = _likeliest(unit, literal, here, own, links)
        taken += [(at, at + len(literal)) for at in places[literal, True]]
    # (2) The others are found by pattern, as in the source.
    found = [item for item in protected(text, protect) if not _overlaps(taken, item.start, item.end)]
    wanted = [item for i, item in enumerate(unit.items) if i not in unit.copied]
    if Counter(text[i.start : i.end] for i in found) != Counter(unit.text[i.start : i.end] for i in wanted):
        return None
    if [text[i.start : i.end] for i in found if i.positional] != [
        unit.text[i.start : i.end] for i in wanted if i.positional
    ]:
        return None
    for item in found:
        places.setdefault((text[item.start : item.end], False), []).append(item.start)
    # (3) Equal items keep their order.
    fixed = []
    for number, item in enumerate(unit.items):
        at = places[unit.text[item.start : item.end], number in unit.copied].pop(0)
        fixed.append(Link(item.start, item.end, at, at + item.end - item.start))
    return sorted(fixed, key=lambda link: link.target_start)


def _overlaps(taken: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    return any(start < other_end and other_start < end for other_start, other_end in taken)


def _likeliest(unit: Unit, literal: str, here: list[int], own: int, links: Sequence[Link] | None) -> list[int]:
    """Return which occurrences of a literal belong to its elements, if it also occurs as text: those linked to them."""
    if own == len(here):
        return here
    spans = [unit.items[i] for i in unit.copied]
    spans = [item for item in spans if unit.text[item.start : item.end] == literal]

    def linked(at: int) -> int:
        return sum(
            link.target_start < at + len(literal) and at < link.target_end
            and any(link.source_start < item.end and item.start < link.source_end for item in spans)
            for link in links or ()
        )  # fmt: skip

    return sorted(sorted(here, key=lambda at: -linked(at))[:own])


# The second form: without the items


def _cut_out(unit: Unit, options: Options, notices: Counter[str]) -> SentenceRequests[Target]:
    text, places = _without(unit)
    if not options.aligned or not text:
        return (yield from _segments(unit, notices))
    (answer,) = yield [text]
    answer = _answered(text, answer, notices)
    if not answer.links:
        notices["unaligned"] += 1
        return (yield from _segments(unit, notices))
    links = [
        Link(*_larger(places[link.source_start : link.source_end]), link.target_start, link.target_end)
        for link in answer.links
        if 0 <= link.source_start < link.source_end <= len(places)
    ]
    return _put_back(unit, Target(answer.text, links))


def _without(unit: Unit) -> tuple[str, list[int]]:
    """Return the text without its items, and for each of its characters the index in the whole text.

    An item between two words without spaces (`one%stwo`) leaves a space.
    """
    kept, blanks, begin = list[int](), set[int](), 0
    for item in [*unit.items, Item(len(unit.text), len(unit.text))]:
        stretch = range(begin, item.start)
        if kept and stretch and _divides(unit.text, kept[-1] + 1, begin):
            blanks.add(begin - 1)
            kept.append(begin - 1)
        # One of the two spaces around an item is removed with it.
        if kept and stretch and unit.text[kept[-1]].isspace() and begin:
            if unit.text[stretch[0]].isspace():
                stretch = stretch[1:]
            elif _CLOSES.match(unit.text[stretch[0]]):
                kept.pop()
        kept += stretch
        begin = item.end
    while kept and unit.text[kept[-1]].isspace():
        kept.pop()
    while kept and unit.text[kept[0]].isspace():
        kept.pop(0)
    return "".join(" " if place in blanks else unit.text[place] for place in kept), kept


def _divides(text: str, start: int, end: int) -> bool:
    """Return whether removing the range from `start` to `end` would join two words, with no space on either side."""
    return start < end and bool(SPACED.match(text[start - 1 : start]) and SPACED.match(text[end : end + 1]))


def _larger(places: Sequence[int]) -> tuple[int, int]:
    """Return the longest contiguous span: a word may have an item inside."""
    best, begin = (places[0], places[0] + 1), 0
    for number in range(1, len(places) + 1):
        if number == len(places) or places[number] != places[number - 1] + 1:
            if number - begin > best[1] - best[0]:
                best = (places[begin], places[number - 1] + 1)
            begin = number
    return best


def _put_back(unit: Unit, target: Target) -> Target:
    """Return the translation with the items inserted where the fewest words change sides, in the source's order."""
    words = units(target.text)
    centres: list[float | None] = []
    for start, end in words:
        link = next((k for k in target.links if k.target_start < end and start < k.target_end), None)
        centres.append(None if link is None else (link.source_start + link.source_end - 1) / 2)
    text, links, fixed = "", [], []
    begin, lowest = 0, 0
    shifts: list[tuple[int, int]] = []  # how many characters were inserted before this character
    for run in adjoining(unit.items):
        start, stop = run[0].start, run[-1].end
        lowest = best_boundary(centres, start, range(lowest, len(words) + 1), 0, len(words))
        end = words[lowest - 1][1] if lowest else 0
        text += target.text[begin:end]
        begin = max(begin, end)
        # The white space around the items is as in the source; a single space of the translation is kept before them.
        if text and not text[-1].isspace() and _blank_before(unit.text, start, text[-1]):
            text += " "
            if target.text[begin : begin + 1].isspace():
                begin += 1
        shift = len(text) - start
        fixed += [Link(item.start, item.end, item.start + shift, item.end + shift) for item in run]
        text += unit.text[start:stop]
        if _divides(unit.text, start, stop) and target.text[begin : begin + 1].isspace():
            begin += 1  # the space that stood for them
        if (rest := target.text[begin:]) and not rest[0].isspace() and _blank_after(unit.text, stop, rest[0]):
            text += " "
        shifts.append((begin, len(text) - begin))
    text += target.text[begin:]
    for link in target.links:
        shift = next((s for at, s in reversed(shifts) if at <= link.target_start), 0)
        end_shift = next((s for at, s in reversed(shifts) if at < link.target_end), 0)
        links.append(link._replace(target_start=link.target_start + shift, target_end=link.target_end + end_shift))
    return Target(text, links, fixed)


def _blank_before(source: str, at: int, last: str) -> bool:
    """Return whether a space belongs between `last` and an item that is at `at` in the source."""
    beside = source[at - 1] if at else " "
    return (beside.isspace() and not _OPENS.match(last)) or bool(_TOUCHES.match(last) and not _TOUCHES.match(beside))


def _blank_after(source: str, at: int, first: str) -> bool:
    """Return whether a space belongs between an item that ends at `at` in the source and `first`."""
    beside = source[at] if at < len(source) else " "
    return (beside.isspace() and not _CLOSES.match(first)) or bool(_TOUCHES.match(first) and not _TOUCHES.match(beside))


# The third form: segments


def _segments(unit: Unit, notices: Counter[str]) -> SentenceRequests[Target]:
    """Yield each stretch between marks and items separately; return all translated, in the source's order."""
    cuts = sorted({0, len(unit.text), *unit.inner, *(i.start for i in unit.items), *(i.end for i in unit.items)})
    inside = {place for item in unit.items for place in cuts if item.start < place < item.end}
    cuts = [place for place in cuts if place not in inside]
    items = {item.start for item in unit.items if item.end > item.start}
    stretches = list(pairwise(cuts))
    cores: list[tuple[int, int]] = []
    for start, end in stretches:
        part = unit.text[start:end]
        before = len(part) - len(part.lstrip())
        cores.append((start + before, max(start + before, end - (len(part) - len(part.rstrip())))))
    asked = [
        n for n, core in enumerate(cores) if stretches[n][0] not in items and has_words(unit.text[slice(*core)], [])
    ]
    rendered = yield [unit.text[slice(*cores[n])] for n in asked]
    answers = {
        n: _answered(unit.text[slice(*cores[n])], answer, notices).text
        for n, answer in zip(asked, rendered, strict=True)
    }
    text, links, fixed = "", list[Link](), list[Link]()
    for number, ((start, end), core) in enumerate(zip(stretches, cores, strict=True)):
        text += unit.text[start : core[0]]
        said = answers.get(number, unit.text[slice(*core)])
        joined = _TOUCHES.match(unit.text[core[0] - 1 : core[0]]) and _TOUCHES.match(unit.text[core[0] :])
        if not joined and _TOUCHES.match(text[-1:]) and _TOUCHES.match(said):
            text += " "  # a character between them was lost
        link = Link(*core, len(text), len(text) + len(said))
        if said and core[0] < core[1]:
            (fixed if start in items else links).append(link)
        text += said + unit.text[core[1] : end]
    return Target(text, links, fixed)
