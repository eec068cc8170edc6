"""Works on paragraphs: all their sentences are requested at once, and each paragraph is reassembled with its marks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import regex

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.glossary import with_terms
from ziggurat.serve.text.projection import (
    MAX_STEPS,
    Close,
    Mark,
    MisplacedError,
    Open,
    Piece,
    SpannedText,
    Verbatim,
    project,
    steps,
)
from ziggurat.serve.text.sentences import (
    Link,
    Options,
    Result,
    SentenceRequests,
    SentenceTranslation,
    Target,
    Unit,
    sentence,
    together,
    unchanged,
)
from ziggurat.serve.text.splitting import Item, protected, sentence_spans
from ziggurat.translate.results import UNSPACED_SCRIPTS, join_parts

Value = TypeVar("Value")

# A tab divides text like a line end: columns do not form a sentence, and the model would write a space.
_LINE_ENDS = regex.compile(r"(\r\n|[\t\n\r\x0b\x0c\x85\u2028\u2029])")

# Soft hyphens, joiners of words and byte order marks, and zero-width spaces unless they divide the words of a script
# without other spaces.
_HIDDEN = regex.compile(rf"[\u00ad\u2060\ufeff]|(?<![{UNSPACED_SCRIPTS}])\u200b(?![{UNSPACED_SCRIPTS}])")


class SentencePair(NamedTuple):
    """A sentence of a text and its translation, each as a range of characters with an exclusive end."""

    source: tuple[int, int]
    target: tuple[int, int]


@dataclass(frozen=True)
class AlignedText:
    """A translated text, with its sentences and links between characters.

    Attributes:
        text: the translation.
        sentences: in order.
        links: links between characters of the source and of `text`.
    """

    text: str
    sentences: list[SentencePair]
    links: list[Link]


def plain_text(text: str, options: Options) -> SentenceRequests[Result[str]]:
    """Yield the sentences of plain text to translate; return the translated text.

    Each line is a paragraph, as is each part of it between tabs; white space between sentences is preserved.
    """
    outcome = yield from aligned_text(text, options)
    return Result(outcome.value.text, outcome.notices)


def aligned_text(text: str, options: Options, *, lines: bool = True) -> SentenceRequests[Result[AlignedText]]:
    """Like `plain_text`, but return sentences and links as well; without `lines` the text is a single paragraph."""
    notices = TextNotices()
    parts = _LINE_ENDS.split(text) if lines else [text]
    written = [bool(part.strip()) for part in parts]  # False for line ends
    whole = [SpannedText(part) for part, has_text in zip(parts, written, strict=True) if has_text]
    _admit([line.text for line in whole], options)
    done = iter((yield from _distinct(together([_line(line, options, notices) for line in whole]))))
    said, sentences, links = list[str](), list[SentencePair](), list[Link]()
    at = target_at = 0
    for part, has_text in zip(parts, written, strict=True):
        target, pairs = next(done) if has_text else (Target(part), [])
        for (start, end), (target_start, target_end) in pairs:
            sentences.append(SentencePair((start + at, end + at), (target_start + target_at, target_end + target_at)))
        links += [_moved(link, at, target_at) for link in [*target.fixed, *target.links]]
        said.append(target.text)
        at += len(part)
        target_at += len(target.text)
    return Result(AlignedText("".join(said), sentences, links), notices)


def _admit(texts: Sequence[str], options: Options) -> None:
    if options.admit is not None:
        options.admit(texts)


def sentence_count(text: str, options: Options, *, lines: bool = True) -> int:
    """Return how many sentences `aligned_text` finds. It requests repeated ones once, and some not at all."""
    return sum(len(_units(SpannedText(line), options)[0]) for line in (_LINE_ENDS.split(text) if lines else [text]))


def _line(
    text: SpannedText, options: Options, notices: Counter[str]
) -> SentenceRequests[tuple[Target, list[SentencePair]]]:
    spans, units = _units(text, options)
    return (yield from _translated(text, spans, units, options, notices))


def paragraphs(
    texts: Sequence[SpannedText], options: Options, notices: Counter[str]
) -> SentenceRequests[list[list[Piece]]]:
    """Yield the sentences of paragraphs to translate; return the pieces of each. Notices are counted in `notices`."""
    written = [bool(text.text.strip()) for text in texts]
    whole = [text for text, has_text in zip(texts, written, strict=True) if has_text]
    _admit([text.text for text in whole], options)
    done = iter((yield from _distinct(together([_paragraph(text, options, notices) for text in whole]))))
    return [next(done) if has_text else original_pieces(text) for text, has_text in zip(texts, written, strict=True)]


def _distinct(work: SentenceRequests[Value]) -> SentenceRequests[Value]:
    """Return the same work, but repeated sentences are requested only once."""
    try:
        asked = next(work)
        while True:
            places: dict[str, int] = {}
            numbers = [places.setdefault(one, len(places)) for one in asked]
            answers: list[SentenceTranslation] = yield list(places)
            asked = work.send([answers[number] for number in numbers])
    except StopIteration as ended:
        result: Value = ended.value
        return result


def _paragraph(text: SpannedText, options: Options, notices: Counter[str]) -> SentenceRequests[list[Piece]]:
    if steps(text, text.text) <= MAX_STEPS:
        spans, units = _units(text, options)
        target, _ = yield from _translated(text, spans, units, options, notices)
        if target.text == text.text:  # every mark keeps its exact position, even inside words and placeholders
            return original_pieces(text)
        if steps(text, target.text) <= MAX_STEPS:
            try:
                return project(text, target)
            except MisplacedError:
                pass
    notices["in_segments"] += 1
    return (yield from _by_slices(text, options, notices))


def _units(text: SpannedText, options: Options) -> tuple[list[tuple[int, int]], list[Unit]]:
    """Return the sentences of a paragraph, as spans and as units."""
    copied = [m for m in text.all_marks() if isinstance(m.piece, Verbatim) and m.end > m.start]
    copied.sort(key=lambda mark: mark.start)
    elements = [Item(mark.start, mark.end) for mark in copied]
    own = set(elements)
    items = sorted({*elements, *_outside(protected(text.text, options.protect), elements)})
    starts = [item.start for item in items]
    edges = sorted({place for mark in text.all_marks() for place in (mark.start, mark.end)})
    if options.split is None:
        spans = sentence_spans(text.text, lambda whole: [whole])
    else:
        spans = sentence_spans(text.text, options.split, [(item.start, item.end) for item in items])
    units = []
    for start, end in spans:
        inside = items[bisect_left(starts, start) : bisect_left(starts, end)]
        inside = [item for item in inside if item.end <= end]  # an item that is split counts as text
        marked_here = edges[bisect_left(edges, start + 1) : bisect_left(edges, end)]
        edges_of_items = {place for item in inside if item in own for place in (item.start, item.end)}
        units.append(
            Unit(
                text.text[start:end],
                [Item(item.start - start, item.end - start, item.positional) for item in inside],
                frozenset(number for number, item in enumerate(inside) if item in own),
                [place - start for place in marked_here if place not in edges_of_items],
            )
        )
    return spans, units


def _outside(items: Sequence[Item], elements: Sequence[Item]) -> list[Item]:
    """Return the items that do not overlap an element."""
    kept, at = [], 0
    for item in items:
        while at < len(elements) and elements[at].end <= item.start:
            at += 1
        if at == len(elements) or elements[at].start >= item.end:
            kept.append(item)
    return kept


def _translated(
    text: SpannedText,
    spans: Sequence[tuple[int, int]],
    units: Sequence[Unit],
    options: Options,
    notices: Counter[str],
) -> SentenceRequests[tuple[Target, list[SentencePair]]]:
    """Yield the texts of a paragraph to translate; return them joined with the original white space."""
    if len(units) == 1:  # the usual case, without the overhead of `together`
        targets = [(yield from _sentence(units[0], options, notices))]
    else:
        targets = yield from together([_sentence(unit, options, notices) for unit in units])
    said, links, fixed, pairs = "", [], [], []
    begin = 0
    for (start, end), target in zip(spans, targets, strict=True):
        gap = text.text[begin:start]
        # Scripts without spaces need none between sentences, but a translation into another script does.
        if said and not gap and len(join_parts([said[-1:], target.text[:1]])) > 2:
            gap = " " if join_parts([text.text[begin - 1], text.text[start]]).count(" ") == 0 else ""
        said += gap
        shift = len(said)
        links += [_moved(link, start, shift) for link in target.links]
        fixed += [_moved(link, start, shift) for link in target.fixed]
        said += target.text
        pairs.append(SentencePair((start, end), (shift, len(said))))
        begin = end
    whole = [Link(*pair.source, *pair.target) for pair in pairs]
    return Target(said + text.text[begin:], links, fixed, whole), pairs


def _sentence(unit: Unit, options: Options, notices: Counter[str]) -> SentenceRequests[Target]:
    """Yield the texts of a sentence without hidden characters; return its translation, or itself if nothing changes."""
    if not _HIDDEN.search(unit.text):
        return (yield from _with_terms(unit, options, notices))
    kept = _visible(unit)
    shown = replace(
        unit,
        text="".join(unit.text[place] for place in kept),
        items=[i._replace(start=bisect_left(kept, i.start), end=bisect_left(kept, i.end)) for i in unit.items],
        inner=sorted({bisect_left(kept, place) for place in unit.inner}),
    )
    target = yield from _with_terms(shown, options, notices)
    if target.text == shown.text:
        return unchanged(unit)
    links, fixed = (
        [k._replace(source_start=kept[k.source_start], source_end=kept[k.source_end - 1] + 1) for k in each]
        for each in (target.links, target.fixed)
    )
    return replace(target, links=links, fixed=fixed)


def _visible(unit: Unit) -> list[int]:
    """Return the indices of a sentence's characters without hidden ones, which would divide words for the model."""
    protected_places = {place for item in unit.items for place in range(item.start, item.end)}
    hidden = {found.start() for found in _HIDDEN.finditer(unit.text)} - protected_places
    return [place for place in range(len(unit.text)) if place not in hidden]


def _with_terms(unit: Unit, options: Options, notices: Counter[str]) -> SentenceRequests[Target]:
    """Yield the texts of a sentence to translate; return the translation, with the glossary if there is one."""
    if options.terms is None:
        return (yield from sentence(unit, options, notices))
    found = options.terms.found(unit.text)
    hard = [each for each in found if each.term.hard]
    target = yield from with_terms(unit, hard, options, notices)
    if options.tally is not None:
        options.tally.count(found, target.text)
    return target


def _moved(link: Link, source: int, target: int) -> Link:
    return Link(
        link.source_start + source, link.source_end + source, link.target_start + target, link.target_end + target
    )


def _by_slices(text: SpannedText, options: Options, notices: Counter[str]) -> SentenceRequests[list[Piece]]:
    """Yield the text between any two marks separately; return all translated, with the marks in their order."""
    order = original_pieces(text)
    slices = [SpannedText(piece) for piece in order if isinstance(piece, str)]
    said = iter((yield from together([_paragraph(one, options, notices) for one in slices])))
    return [part for piece in order for part in (next(said) if isinstance(piece, str) else [piece])]


def original_pieces(text: SpannedText) -> list[Piece]:
    """Return a paragraph as the pieces it was made from, with adjacent texts joined."""
    order: list[Piece] = []
    begin = 0

    def up_to(place: int) -> None:
        nonlocal begin
        if place > begin:
            order.append(text.text[begin:place])
        begin = max(begin, place)

    waiting: list[Mark | Close] = list(reversed(text.marks))
    ends: list[int] = []  # ends of the open elements
    while waiting:
        mark = waiting.pop()
        if isinstance(mark, Close):
            up_to(ends.pop())
            order.append(mark)
            continue
        up_to(mark.start)
        order.append(mark.piece)
        if isinstance(mark.piece, Open):
            ends.append(mark.end)
            waiting += [mark.close or Close(None), *reversed(mark.children)]
        else:
            begin = mark.end
    up_to(len(text.text))
    return order
