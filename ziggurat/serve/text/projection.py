"""Projection of marks (tags, runs, breaks) from a text onto its translation, by links between their characters.

Bergamot's method, made strict: each word of the translation belongs to the elements of the source word that it is
linked to. Bergamot opens an element again for every run of its words. Here each element gets a single run, the one that
fits best and contains no word of a neighbour, so that the translation has the source's tags and nesting. Elements
without words are empty in the translation, and stand where the fewest words change sides. So do points (images,
breaks), which also keep their order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

from ziggurat.serve.text.sentences import SPACED, Link, Target, best_boundary, cut_at, gaps, units


@dataclass(frozen=True)
class Open:
    """Start of an element.

    Attributes:
        raw: data with which the reader's format writes it.
        name: the name of the Close that ends it.
    """

    raw: Any
    name: str = ""


@dataclass(frozen=True)
class Close:
    """End of the innermost open element, which must have this name."""

    raw: Any
    name: str = ""


@dataclass(frozen=True)
class EmptyElement:
    """A mark without text: an image, a break, a footnote's number.

    Attributes:
        raw: data with which the reader's format writes it.
        blank: the text that it stands for: a space if it divides words, as a line end does; otherwise empty.
        is_seen: whether readers see something there, such as an image. The text on its two sides is two words, and it
            stands for a space if there is none.
    """

    raw: Any
    blank: str = ""
    is_seen: bool = False


@dataclass(frozen=True)
class Verbatim:
    """An element that must stay unchanged, such as code; `text` is the part of it that readers see."""

    raw: Any
    text: str


Piece: TypeAlias = str | Open | Close | EmptyElement | Verbatim


@dataclass(eq=False)
class Mark:
    """An element, point or copied element in a text.

    Attributes:
        piece: its Open, EmptyElement or Verbatim.
        start, end: its range of characters, `end` exclusive; equal for an element without text and for most points.
        close: the Close of an element; None for other marks.
        children: the marks inside an element, in order.
    """

    piece: Open | EmptyElement | Verbatim
    start: int
    end: int
    close: Close | None = None
    children: list[Mark] = field(default_factory=list)


@dataclass
class SpannedText:
    """A paragraph: its text, and its marks in order."""

    text: str
    marks: list[Mark] = field(default_factory=list)

    def all_marks(self) -> Iterable[Mark]:
        """Yield every mark, parents before their children."""
        waiting = list(reversed(self.marks))
        while waiting:
            mark = waiting.pop()
            yield mark
            waiting += reversed(mark.children)


MAX_STEPS = 4_000_000
"""MAX_STEPS limits points times words: a few seconds. Beyond it a paragraph is translated in segments."""


def steps(source: SpannedText, target: str) -> int:
    """Return an upper bound of a projection's work, for MAX_STEPS."""
    return sum(1 for _ in source.all_marks()) * max(1, len(target) // 4)


def project(source: SpannedText, target: Target) -> list[Piece]:
    """Return the translation with the marks of `source`: every mark once, with the same nesting.

    The text of the pieces is the target's, except that a point that stands for a space replaces a space.

    Raises MisplacedError.
    """
    if not source.marks:
        return [target.text] if target.text else []
    return _Projection(source, target).pieces()


class MisplacedError(Exception):
    """A copied element is in the translation, but outside the run of the element that contains it."""


class _Projection:
    """The state of one projection."""

    def __init__(self, source: SpannedText, target: Target) -> None:
        self.source = source
        links, fixed = (self._split(source, target.text, each) for each in (target.links, target.fixed))
        self.target = target = replace(target, links=links, fixed=fixed)
        whole = units(target.text, [(link.target_start, link.target_end) for link in target.fixed])
        self.units = cut_at(whole, self._cuts())
        # Spans that stayed unchanged are not cut.
        self.fixed = {(f.target_start, f.target_end): (f.source_start, f.source_end) for f in target.fixed}
        self.of_unit = self._primary_links()
        self.centres = [None if s is None else (s[0] + s[1] - 1) / 2 for s in self.of_unit]
        self.by_source = sorted(target.links, key=lambda link: link.source_start)
        self.gaps = gaps(source.text)
        self.unit_starts = [start for start, _ in self.units]
        self.out: list[Piece] = []
        self.cursor = 0
        self.in_point = self.is_blank_owed = False
        self.breaks: set[int] = set()  # boundaries with a line end, since two would make an empty line

    @staticmethod
    def _split(source: SpannedText, target: str, whole: Sequence[Link]) -> list[Link]:
        """Return links; the link of a word with an inner mark is cut if the parts stay unchanged: `m<sup>2</sup>`."""
        inside = sorted({place for mark in source.all_marks() for place in (mark.start, mark.end)})
        links: list[Link] = []
        for link in whole:
            begin, end, at, last = link
            for cut in inside[bisect_right(inside, begin) : bisect_left(inside, end)]:
                head, tail = source.text[begin:cut], source.text[cut:end]
                said = target[at:last]
                if len(head) < len(said) and said.startswith(head):
                    middle = at + len(head)
                elif len(tail) < len(said) and said.endswith(tail):
                    middle = last - len(tail)
                else:
                    continue
                links.append(Link(begin, cut, at, middle))
                begin, at = cut, middle
            links.append(Link(begin, end, at, last))
        return [link for link in links if source.text[link.source_start : link.source_end].strip()]

    def _bounds(self, mark: Mark) -> tuple[int, int]:
        """Return the first and last boundary allowed for a point: in its sentence, or between the same two sentences.

        A line end between words stays between words.
        """
        low, high = 0, len(self.units)
        if sentences := self.target.sentences:
            number = bisect_right(sentences, mark.start, key=lambda link: link.source_start) - 1
            own = sentences[max(number, 0)]
            first, last = (bisect_left(self.unit_starts, place) for place in own[2:])
            low = last if mark.start >= own.source_end else first
            high = first if mark.start <= own.source_start else last
        is_between = self.source.text[: mark.start].strip() and self.source.text[mark.end :].strip()
        if _is_break(mark) and is_between:
            low, high = max(low, 1), min(high, len(self.units) - 1)
        return low, high

    def _cuts(self) -> list[int]:
        """Return where words of the translation are cut: at a mark inside a word, if a link ends exactly there."""
        text = self.source.text
        inside = {
            place
            for mark in self.source.all_marks()
            for place in (mark.start, mark.end)
            if 0 < place < len(text) and not text[place - 1].isspace() and not text[place].isspace()
        }
        cuts = {link.target_start for link in self.target.links if link.source_start in inside}
        return sorted(cuts | {link.target_end for link in self.target.links if link.source_end in inside})

    def _primary_links(self) -> list[tuple[int, int] | None]:
        """Return, for each unit, the source characters that most of its characters are linked to."""
        first: list[int] = [-1] * len(self.target.text)
        links = [*self.target.fixed, *self.target.links]
        for number in range(len(links) - 1, -1, -1):  # backwards: an earlier link wins
            link = links[number]
            first[link.target_start : link.target_end] = [number] * (link.target_end - link.target_start)
        primary: list[tuple[int, int] | None] = []
        for start, end in self.units:
            counts = Counter(number for number in first[start:end] if number >= 0)
            best = max(counts, key=lambda number: (counts[number], -number)) if counts else -1
            primary.append((links[best].source_start, links[best].source_end) if counts else None)
        return primary

    def pieces(self) -> list[Piece]:
        """Return the translation with the marks."""
        self._write(self.source.marks, 0, len(self.units), len(self.source.text) + 1)
        self._copy_to(len(self.target.text))
        return self.out

    def _is_gap(self, boundary: int) -> bool:
        """Return whether white space, or an end of the text, is at a boundary of units."""
        if not 0 < boundary < len(self.units):
            return True
        return self.units[boundary - 1][1] < self.units[boundary][0]

    # Assignment of words to elements

    def _write(self, marks: Sequence[Mark], low: int, high: int, until: int) -> None:
        """Write the marks of one element (or of the paragraph) whose words are units `low` to `high`.

        `until`: where the element ends in the source.
        """
        if not marks:
            return
        stretches = self._stretches(marks, low, high)
        placed = [(*stretch, 1, number) for number, stretch in stretches.items()]
        allowed = self._outside(stretches.values(), low, high)
        at_least = 0  # index in `allowed`: points keep their order
        for number, mark in enumerate(marks):
            if number in stretches:
                continue
            if isinstance(mark.piece, Verbatim) and mark.end > mark.start:
                raise MisplacedError
            first, last = self._bounds(mark)
            taken = self.breaks if _is_break(mark) else set()
            open_to_it = [place for place in allowed[at_least:] if first <= place <= last and place not in taken]
            if _is_break(mark):  # not inside `"word"`, whose quotation marks are separate units
                open_to_it = list(filter(self._is_gap, open_to_it)) or open_to_it
            boundary = best_boundary(self.centres, mark.start - 0.25, open_to_it or allowed[at_least:], low, high)
            if _is_break(mark):
                self.breaks.add(boundary)
            at_least = allowed.index(boundary, at_least)
            placed.append((boundary, boundary, 0, number))
        for begin, end, _, number in sorted(placed, key=lambda p: (p[0], p[2], p[3])):
            mark = marks[number]
            if not self.in_point and self._is_between_blanks(mark):
                self._write_point(mark, begin)
            else:
                self._write_mark(mark, begin, end)
            if self.is_blank_owed and mark.end < until:
                self._add(" ")
                self.is_blank_owed = False

    def _stretches(self, marks: Sequence[Mark], low: int, high: int) -> dict[int, tuple[int, int]]:
        """Return the range of units of each mark that has any, by its number; the ranges do not overlap."""
        starts = [mark.start for mark in marks]
        wanted: dict[int, list[int]] = {}
        owner: list[int | None] = []  # for each unit, number of its mark; -1: none of them; None: unknown
        for place in range(low, high):
            number = self._owner(marks, starts, place)
            owner.append(number)
            if number is not None and number >= 0:
                wanted.setdefault(number, []).append(place)
        # Prefix sums, to judge a gap at once: units of other marks in it forbid it, units without a mark weigh against
        # it.
        owned, free = [0], [0]
        for whose in owner:
            owned.append(owned[-1] + (whose is not None and whose >= 0))
            free.append(free[-1] + (whose == -1))
        found: dict[int, tuple[int, int]] = {}
        for number, places in wanted.items():
            best, score, begin = (places[0], places[0] + 1), 1, places[0]
            top = score
            for before, place in pairwise(places):
                between = (before + 1 - low, place - low)
                penalty = free[between[1]] - free[between[0]]
                if owned[between[1]] > owned[between[0]] or penalty >= score:
                    score, begin = 1, place
                else:
                    score += 1 - penalty
                if score > top:
                    top, best = score, (begin, place + 1)
            found[number] = best
        for number, mark in enumerate(marks):
            if len(found) <= 1 and self._is_alone(mark, low, high):
                return {number: (low, high)}
            if number not in found and mark.end > mark.start and not isinstance(mark.piece, EmptyElement | Verbatim):
                weakly = self._linked_unit(mark, low, high, owner, found)
                if weakly is not None:
                    found[number] = (weakly, weakly + 1)
        return found

    def _owner(self, marks: Sequence[Mark], starts: Sequence[int], place: int) -> int | None:
        """Return the number of the mark that a unit belongs to: the mark with at least half of its source word."""
        span, centre = self.of_unit[place], self.centres[place]
        if span is None or centre is None:
            return None
        # Of several marks that start at the same index, all but the last are empty.
        number = bisect_right(starts, centre) - 1
        if number < 0:
            return -1
        mark = marks[number]
        if isinstance(mark.piece, Verbatim):  # only its own text, since other words linked to it are ordinary text
            return number if self.fixed.get(self.units[place]) == (mark.start, mark.end) else -1
        shared = min(span[1], mark.end) - max(span[0], mark.start)
        if isinstance(mark.piece, EmptyElement) or 2 * shared < span[1] - span[0] or shared <= 0:
            return -1
        return number

    def _is_alone(self, mark: Mark, low: int, high: int) -> bool:
        """Return whether a mark contains all words of the paragraph, and so the whole translation, linked or not."""
        text = self.source.text
        return (
            low < high == len(self.units)
            and not low
            and not isinstance(mark.piece, EmptyElement | Verbatim)
            and not text[: mark.start].strip()
            and not text[mark.end :].strip()
            and bool(text[mark.start : mark.end].strip())
        )

    def _linked_unit(
        self, mark: Mark, low: int, high: int, owner: Sequence[int | None], found: dict[int, tuple[int, int]]
    ) -> int | None:
        """Return a unit for a mark that has none: a less surely linked one that belongs to no other mark."""
        first = bisect_right(self.by_source, mark.start - 1, key=lambda link: link.source_start)
        for link in self.by_source[first : first + 50]:
            if link.source_start >= mark.end:
                break
            place = bisect_right(self.unit_starts, link.target_start) - 1
            if place < 0 or self.units[place][1] <= link.target_start:
                continue
            taken = any(begin <= place < end for begin, end in found.values())
            if low <= place < high and owner[place - low] in (None, -1) and not taken:
                return place
        return None

    @staticmethod
    def _outside(stretches: Iterable[tuple[int, int]], low: int, high: int) -> list[int]:
        """Return the boundaries from `low` to `high` that are not inside a fixed span."""
        allowed, at = [], low
        for begin, end in sorted(stretches):
            allowed += [*range(at, begin), begin]
            at = end
        return [*allowed, *range(at, high + 1)]

    # Writing

    def _write_mark(self, mark: Mark, begin: int, end: int) -> None:
        """Write a mark around units `begin` to `end`, with its content."""
        if isinstance(mark.piece, Verbatim):
            if begin < end:
                self._copy_to(self.units[begin][0])
                self.out.append(mark.piece)
                self.cursor = self.units[end - 1][1]
            else:
                self._copy_to(self._place(mark.start, begin, opens=not mark.start))
                self.out.append(mark.piece)
            return
        self._copy_to(self._place(mark.start, begin, opens=begin < end or not mark.start))
        self.out.append(mark.piece)
        if isinstance(mark.piece, EmptyElement):
            gap_end = self.units[begin][0] if begin < len(self.units) else len(self.target.text)
            self.cursor = min(self.cursor + mark.end - mark.start, max(gap_end, self.cursor))
            return
        self._write(mark.children, begin, end, mark.end)
        self._copy_to(self._place(mark.end, end))
        if mark.close is not None:
            self.out.append(mark.close)

    def _is_between_blanks(self, mark: Mark) -> bool:
        text = self.source.text
        beside = (text[max(mark.start - 1, 0) : mark.start], text[mark.end : mark.end + 1])
        return mark.start == mark.end and beside[0].isspace() and beside[1].isspace()

    def _write_point(self, mark: Mark, boundary: int) -> None:
        """Write a mark without text between two spaces; the translation may have one, or none next to punctuation."""
        text = self.target.text
        self._copy_to(self._place(mark.start, boundary))
        before, after = text[max(self.cursor - 1, 0) : self.cursor], text[self.cursor : self.cursor + 1]
        if SPACED.match(before) and not SPACED.match(after):
            self._add(" ")
        self.in_point = True  # its content has no spaces
        self._write_mark(mark, boundary, boundary)
        self.in_point = False
        self.is_blank_owed = not after.isspace() and bool(before.isspace() or (not before and SPACED.match(after)))

    def _place(self, at: int, boundary: int, *, opens: bool = False) -> int:
        """Return the character index for a mark at `at` in the source, within the white space at a boundary of units.

        `opens`: whether it should precede a word rather than follow one.
        """
        start = self.units[boundary - 1][1] if boundary else 0
        end = self.units[boundary][0] if boundary < len(self.units) else len(self.target.text)
        before, after = self.gaps[0][at], self.gaps[1][at]
        if end - start == after - before:
            return start + at - before
        if before == after and opens:  # no white space in the source, so the mark touches its words
            return end
        if at == before:
            return start
        return end if at == after else min(start + at - before, end)

    def _copy_to(self, end: int) -> None:
        if end > self.cursor:
            self._add(self.target.text[self.cursor : end])
            self.cursor = end

    def _add(self, text: str) -> None:
        last = self.out[-1] if self.out else None
        if isinstance(last, str):
            self.out[-1] = last + text
        else:
            self.out.append(text)


def _is_break(mark: Mark) -> bool:
    return isinstance(mark.piece, EmptyElement) and mark.piece.blank == "\n"
