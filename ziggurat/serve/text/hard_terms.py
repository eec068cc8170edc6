"""Hard terms of a glossary: they come out of a translation letter by letter.

The sentence is translated as it is; where that does not give the terms, it is translated again with each term replaced
by what it shall become, which must then come through unchanged like an address (ziggurat.serve.text.sentences), and is
put back by the alignment where it does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ziggurat.serve.text.glossary import Found
from ziggurat.serve.text.protection import Item, occurrences
from ziggurat.serve.text.sentences import Link, Options, Target, Unit, Work, sentence


def with_terms(unit: Unit, found: Sequence[Found], options: Options, notices: Counter[str]) -> Work[Target]:
    """Return the work of translating a sentence with these hard terms; `found` is in order.

    Terms that overlap an item of the unit (an address, a copied element) are left as they are.
    """
    free = [f for f in found if not any(f.start < item.end and item.start < f.end for item in unit.items)]
    if not free:
        return (yield from sentence(unit, options, notices))
    if options.aligned or not unit.inner:
        target = yield from sentence(unit, options, notices)
        wanted = Counter(each.term.target for each in free)
        if all(len(occurrences(literal, target.text)) == times for literal, times in wanted.items()):
            return target
    notices["terms_again"] += 1
    replaced = _Replaced(unit, free)
    target = yield from sentence(replaced.unit, options, notices)
    return Target(target.text, list(map(replaced.back, target.links)), list(map(replaced.back, target.fixed)))


class _Replaced:
    """A sentence with its terms replaced by what they shall become, and the way back to its own characters."""

    def __init__(self, unit: Unit, found: Sequence[Found]) -> None:
        text, begin = "", 0
        self._stretches: list[tuple[int, int, int, int]] = []  # of the new text, and what each was
        terms: list[Item] = []
        for start, end, term in found:
            self._add(len(text), begin, start)
            text += unit.text[begin:start]
            self._stretches.append((len(text), len(text) + len(term.target), start, end))
            terms.append(Item(len(text), len(text) + len(term.target)))
            text += term.target
            begin = end
        self._add(len(text), begin, len(unit.text))
        text += unit.text[begin:]
        copied = {Item(*self._forth(item), item.positional) for i, item in enumerate(unit.items) if i in unit.copied}
        others = {Item(*self._forth(item), item.positional) for i, item in enumerate(unit.items)}
        items = sorted({*others, *terms})
        literal = copied | set(terms)
        inside = [place for place in unit.inner if not any(f.start < place < f.end for f in found)]
        self.unit = Unit(
            text,
            items,
            frozenset(number for number, item in enumerate(items) if item in literal),
            [self._place(place) for place in inside],
        )

    def _add(self, at: int, start: int, end: int) -> None:
        if start < end:
            self._stretches.append((at, at + end - start, start, end))

    def _forth(self, item: Item) -> tuple[int, int]:
        first = self._place(item.start)
        return first, first + item.end - item.start

    def _place(self, place: int) -> int:
        """Return where a character outside of the terms is in the new text."""
        for new, _, start, end in self._stretches:
            if start <= place < end:
                return new + place - start
        return self._stretches[-1][1]

    def back(self, link: Link) -> Link:
        """Return a link of the new text as one of the sentence; what points into a term points to all of it."""
        starts, ends = [], []
        for new, new_end, start, end in self._stretches:
            if new < link.source_end and link.source_start < new_end:
                whole = new_end - new != end - start
                starts.append(start if whole else start + max(0, link.source_start - new))
                ends.append(end if whole else end - max(0, new_end - link.source_end))
        if not starts:
            return link._replace(source_start=0, source_end=0)
        return link._replace(source_start=min(starts), source_end=max(ends))
