"""Pairs whose words are recognisable by their letters, and a check of their alignment that knows nothing about edits.

Each word is one repeated letter that no other word has: wherever a modifier moves it, its letters identify it.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

from ziggurat.data.modifiers import EditablePair, Span

Letters = tuple[str, str]

MARKS: Letters = ("".join(map(chr, range(0x10428, 0x1043C))), "".join(map(chr, range(0x1043C, 0x10450))))
"""MARKS are the letters of source and target words: small ones of the Deseret alphabet, which noise never has."""

KEYS: Letters = ("qetuxn", "äöüßøå")
"""KEYS are letters for typing errors: no two of them are neighbours on a keyboard or look alike."""

ENDS = ("", ".", "?", "!", "...")


def marked_pair(rng: Random, letters: Letters = MARKS, most: int = 6, shortest: int = 1) -> EditablePair:
    """Return a pair of up to `most` words per side with random links: none, one to one or many to many.

    Marked letters count as a script without blanks, too; keys do not.
    """
    texts, spans = [], []
    separators = (" ", " ", ", ", "") if letters is not KEYS else (" ", " ", ", ")
    end = rng.choice(ENDS)
    for side in letters:
        text, words = "", []
        for letter in rng.sample(side, rng.randint(1, min(most, len(side)))):
            begin = len(text)
            text += letter * rng.randint(shortest, 4)
            text += f"þ{letter}" if letters is KEYS and rng.random() < 0.3 else ""  # something to swap with
            words.append((begin, len(text)))
            text += rng.choice(separators)
        texts.append(text.rstrip(" ,") + end)
        spans.append(words)
    links = {(rng.choice(spans[0]), rng.choice(spans[1])) for _ in range(rng.randint(0, 6))}
    return EditablePair(texts[0], texts[1], sorted(links))


def _known(text: str, letters: str) -> list[str]:
    """Return the letter of each character of a text, in either case; "" for others."""
    folded = {letter.casefold()[0]: letter for letter in letters}
    return [folded.get(character.casefold()[0], "") for character in text]


def check(before: EditablePair, after: EditablePair, letters: Letters = MARKS) -> None:
    """Assert that `after` has exactly the links of `before` whose words have something left on both sides.

    Further links in `after` must join text that is the same on both sides (copies and hints), or belong to a word whose
    translation is replaced by a hint.
    """
    old = [_known(text, side) for text, side in zip(before.texts, letters, strict=True)]
    new = [_known(text, side) for text, side in zip(after.texts, letters, strict=True)]
    wanted = Counter((old[0][source[0]], old[1][target[0]]) for source, target in before.links)
    found: Counter[tuple[str, str]] = Counter()
    for link in after.links:
        texts = [text[slice(*span)] for text, span in zip(after.texts, link, strict=True)]
        assert all(text and text == text.strip() for text in texts), (after.texts, link)
        if texts[0] == texts[1]:
            continue
        words = [_word(known, span) for known, span in zip(new, link, strict=True)]
        if not words[1]:
            assert texts[1] in after.texts[0], "text that is neither a translation nor a hint"
        found[words[0], words[1]] += 1
    replaced: Counter[tuple[str, str]] = Counter()
    for (source, target), count in wanted.items():
        if source not in new[0] or target not in new[1]:
            replaced[source, ""] += count if source in new[0] else 0
            continue
        assert found.pop((source, target), 0) == count, (before.texts, before.links, after.texts, after.links)
    assert found == +replaced, (before.texts, before.links, after.texts, after.links)


def check_apart(pair: EditablePair) -> None:
    """Assert that the linked words of each side are parts of its text, and share no character."""
    for side, text in enumerate(pair.texts):
        words = sorted({link[side] for link in pair.links})
        assert all(0 <= first < end <= len(text) for first, end in words), (text, words)
        assert all(word[1] <= after[0] for word, after in pairwise(words)), (text, words)


def _word(known: list[str], span: Span) -> str:
    """Return the word that a span covers exactly, or "" if it covers none."""
    inside = {letter for letter in known[slice(*span)] if letter}
    assert len(inside) < 2, "a linked word has letters of another one"
    word = next(iter(inside), "")
    assert not word or known[slice(*span)].count(word) == known.count(word), "a part of a word has lost its link"
    return word
