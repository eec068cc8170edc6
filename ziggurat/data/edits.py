"""Changes of a sentence pair that keep its word alignment right: every modifier says what it replaces, nothing else.

First of the modules on modifiers, in order of use: edits, typos, modifiers, growth, modified. Links follow from
replacements alone, in one place, so that no modifier can get them wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

SOURCE, TARGET = 0, 1
Span = tuple[int, int]
"""First character and end of a part of a text."""


class Edit(NamedTuple):
    """A replacement of a part of a text; one of nothing is an insertion."""

    first: int
    end: int
    text: str


class Pair:
    """A sentence pair with its word alignment.

    Attributes:
        texts: source and target.
        links: linked words, a span of the source and one of the target each, with a character at least.
    """

    def __init__(self, source: str, target: str, links: Sequence[tuple[Span, Span]] = ()) -> None:
        self.texts = [source, target]
        # Normalisation may leave nothing of a word, such as a no-break space between blanks.
        self.links = [link for link in links if all(first < end for first, end in link)]

    def copy(self) -> Pair:
        """Return a pair that can be changed without changing this one."""
        return Pair(self.texts[SOURCE], self.texts[TARGET], self.links)

    def edit(self, side: int, edits: Sequence[Edit]) -> list[Span]:
        """Apply `edits`, in ascending order and without overlap, to one side; return where their texts are now.

        A linked word keeps what is left of it and gets the text that replaces parts of it or stands inside of it; text
        that is inserted before or after it is no part of it. What replaces parts of several words is of the first one.
        A word that nothing is left of loses its links.
        """
        text, parts, spans, at, size = self.texts[side], [], [], 0, 0
        for first, end, new in edits:
            if not at <= first <= end:
                raise ValueError(f"edits overlap or are not in ascending order: {list(edits)}")
            parts += [text[at:first], new]
            size += first - at
            spans.append((size, size + len(new)))
            size, at = size + len(new), end
        self.texts[side] = "".join([*parts, text[at:]])
        words = _moved_words({link[side] for link in self.links}, edits)
        if side == SOURCE:
            links = [(words[source], target) for source, target in self.links]
        else:
            links = [(source, words[target]) for source, target in self.links]
        self.links = [link for link in links if link[side][0] < link[side][1]]
        return spans

    def one_to_one(self) -> list[tuple[Span, Span]]:
        """Return the links between words that have no other link, by their place in the source."""
        sources: dict[Span, int] = {}
        targets: dict[Span, int] = {}
        for source, target in self.links:
            sources[source] = sources.get(source, 0) + 1
            targets[target] = targets.get(target, 0) + 1
        return sorted(link for link in self.links if sources[link[0]] == targets[link[1]] == 1)


def _moved_words(words: set[Span], edits: Sequence[Edit]) -> dict[Span, Span]:
    """Return where each word is after `edits`: words that had no character in common have none afterwards."""
    found: dict[Span, Span] = {}
    last = taken = 0  # ends of the words so far, before and after
    for word in sorted(words):
        first, end = moved(word, edits)
        if word[0] >= last:  # one edit may replace the end of a word and the beginning of the next
            first = max(first, taken)
        found[word] = first, end
        last, taken = max(last, word[1]), max(taken, end)
    return found


def moved(span: Span, edits: Sequence[Edit]) -> Span:
    """Return where a part of a text is after `edits`."""
    (first, end), (begin, shift) = span, (0, 0)
    found: int | None = None
    for edit in edits:
        grown = len(edit.text) - (edit.end - edit.first)
        if edit.end <= first:
            begin += grown
        elif edit.first >= end:
            break
        elif edit.first < first:
            found = edit.first + begin  # the word's beginning is replaced together with what is before it
        if edit.end > end:  # likewise its end
            return (first + begin if found is None else found), edit.first + shift + len(edit.text)
        shift += grown
    return (first + begin if found is None else found), end + shift


def one_to_one_count(links: list[list[int]]) -> int:
    """Return the number of a store's links between words that have no other link, as Pair.one_to_one has them."""
    sources = Counter((link[0], link[1]) for link in links)
    targets = Counter((link[2], link[3]) for link in links)
    return sum(sources[link[0], link[1]] == targets[link[2], link[3]] == 1 for link in links)
