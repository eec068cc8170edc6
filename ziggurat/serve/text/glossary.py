"""Application of a glossary's terms (ziggurat.translate.terms) to a translation.

Hard terms are reproduced letter by letter. The sentence is first translated unchanged. If the translation lacks a term,
it is translated again with each term replaced by its target, which must then stay unchanged like an address
(ziggurat.serve.text.sentences); if it does not, the alignment puts it back.

Soft terms are searched for under constraints, and dropped if they harm the translation too much. A sentence is first
translated freely, and often has its terms then; otherwise the search must produce them. Their cost is the loss of
log-probability per token of the terms. A term that the model merely would not have chosen costs a few nats; a term that
does not belong costs far more, since the search puts it in a bad place, or at the end.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import regex

from ziggurat.serve.text.alignment import piece_spans
from ziggurat.serve.text.sentences import Link, Options, SentenceRequests, Target, Unit, sentence
from ziggurat.serve.text.splitting import Item, occurrences
from ziggurat.translate.results import Translation
from ziggurat.translate.terms import LETTER, Found, Term, Terms

_WORDS = regex.compile(r"\w+|[^\w\s]+")
_APOSTROPHES = dict.fromkeys(map(ord, "\u2019\u02bc\u2032\uff07"), "'")
_SHORT = 2  # words of up to 2 letters are not inflected: `an` is not `and`
# Endings that may follow a whole word. A bare -e is only for capitalised words: German nouns take it, but English words
# become different words with it (plan, plane; them, theme).
_NOUN = "e|n|s|es|en|er|ens|ern"
_SMALL = "s|en|er|em|(?<=s|x|z|ch|sh|o)es"
_HANGUL = (
    "은|는|이|가|을|를|의|에|에서|에게|께|께서|와|과|랑|이랑|로|으로|도|만|까지|부터|보다|처럼|이나|나|라는|이라는"
)
_CYRILLIC = "а|я|у|ю|е|ы|и|о|ом|ем|ой|ей|ов|ев|ам|ям|ах|ях|ами|ями"
# Endings that replace each other in lower-case words: German and Spanish adjectives, Italian nouns.
_EXCHANGED = ("em|en|er|es|e", "as|os|a|o", "o|i", _CYRILLIC)


def times(term: Term, translation: str) -> int:
    """Return how often a translation contains a term's target.

    A hard term must match exactly. Each word of a soft term matches with its lower-case letters in either case and its
    capitals as capitals, and it may have a different ending: one from a list added to the word, or one replacing its
    own. Words of one or two letters must match exactly. The forms of Unicode and of apostrophes do not matter.
    """
    if term.hard:
        return len(occurrences(term.target, translation))
    return sum(1 for _ in _inflected(_plain(term.target)).finditer(_plain(translation)))


def _plain(text: str) -> str:
    return unicodedata.normalize("NFC", text).translate(_APOSTROPHES)


@lru_cache(maxsize=4096)
def _inflected(target: str) -> regex.Pattern[str]:
    parts = []
    for found in _WORDS.finditer(target):
        word = found[0]
        if LETTER.match(word[0]) and LETTER.match(word[-1]):
            parts.append(rf"(?<!\w)(?:{'|'.join(_forms(word))})(?!\w)")
        else:
            parts.append(_cased(word))
    last = r"(?!\+\+|#)" if LETTER.match(target[-1:]) else ""  # not the C of C++ and C#
    return regex.compile(r"\s*".join(parts) + last)


def _forms(word: str) -> list[str]:
    """Return patterns of a word with its own ending and with other endings."""
    if regex.fullmatch(r"\p{Hangul}+", word):
        return [f"{word}(?:{_HANGUL})?"]
    if len(word) <= _SHORT or not word.isalpha():
        return [_cased(word)]
    small = word == word.lower()
    if regex.match(r"\p{Cyrillic}", word):
        added = _CYRILLIC
    else:
        added = _SMALL if small else _NOUN
    forms = [rf"{_cased(word)}(?i:{added})?"]
    for endings in _EXCHANGED if small or added == _CYRILLIC else ():
        own = regex.search(rf"(?:{endings})$", word)
        if own is not None and own.start() > _SHORT:
            forms.append(rf"{_cased(word[: own.start()])}(?i:{endings})")
    if small and regex.search(r"[^aeiou]y$", word):
        forms.append(rf"{_cased(word[:-1])}(?i:ies)")
    return forms


def _cased(text: str) -> str:
    """Return a pattern in which lower-case letters also match capitals."""
    letters = (regex.escape(c) if c.isupper() else f"(?i:{'ß|ss' if c == 'ß' else regex.escape(c)})" for c in text)
    return "".join(letters)


@dataclass
class Tally:
    """Counts of a text's terms: how often each was found, and how often its target is in the translation."""

    found: Counter[Term] = field(default_factory=Counter)
    applied: Counter[Term] = field(default_factory=Counter)

    def count(self, found: Sequence[Found], translation: str) -> None:
        """Count the terms of a sentence, given its translation."""
        left: dict[str, int] = {}  # by target: two terms may have the same one
        for term, number in Counter(each.term for each in found).items():
            there = left.setdefault(term.target, times(term, translation))
            self.found[term] += number
            self.applied[term] += min(number, there)
            left[term.target] = max(0, there - number)

    def records(self, terms: Terms) -> list[dict[str, Any]]:
        """Return the counts of these terms in the form of a server's responses."""
        return [
            {
                "source": term.source,
                "target": term.target,
                "mode": term.mode,
                "found": self.found[term],
                "applied": self.applied[term],
            }
            for term in terms.terms
        ]


# Hard terms


def with_terms(unit: Unit, found: Sequence[Found], options: Options, notices: Counter[str]) -> SentenceRequests[Target]:
    """Yield the texts of a sentence to translate; return the translation with these hard terms. `found` is in order.

    Terms that overlap an item of the unit (an address, a copied element) are left unchanged.
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
    """A sentence with its terms replaced by their targets, and the mapping back to its own characters."""

    def __init__(self, unit: Unit, found: Sequence[Found]) -> None:
        text, begin = "", 0
        self._stretches: list[tuple[int, int, int, int]] = []  # ranges in the new text and in the old one
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
        """Return the index in the new text of a character outside the terms."""
        for new, _, start, end in self._stretches:
            if start <= place < end:
                return new + place - start
        return self._stretches[-1][1]

    def back(self, link: Link) -> Link:
        """Return a link of the new text as a link of the sentence; a link into a term covers the whole term."""
        starts, ends = [], []
        for new, new_end, start, end in self._stretches:
            if new < link.source_end and link.source_start < new_end:
                whole = new_end - new != end - start
                starts.append(start if whole else start + max(0, link.source_start - new))
                ends.append(end if whole else end - max(0, new_end - link.source_end))
        if not starts:
            return link._replace(source_start=0, source_end=0)
        return link._replace(source_start=min(starts), source_end=max(ends))


# Soft terms

MOST_LOSS = 10.0
"""MOST_LOSS is how many nats (of log-probability) a translation may lose for each token of its terms.

Measured with a model for Multi30k (en-de) on 100 sentences with a noun of their reference that the free translation
lacked, and 100 with a noun of another sentence. Of 175 intact translations 148 are kept, and of 25 broken ones (the
term after the full stop, doubled words, no end) 8. At 8 nats these are 121 and 2, at 15 nats 164 and 17.
"""

MOST_TERMS = 8
"""MOST_TERMS is how many terms are searched for per sentence, to bound memory; further ones are dropped."""

Search = Callable[[Sequence[int], Sequence[Sequence[str]]], Awaitable[list[Translation]]]
"""Search takes indices of sentences and the phrases of each, and returns translations that contain them if possible."""


Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Run calls a function, in a thread if it may be slow."""


async def constrained(
    free: Sequence[Translation],
    terms: Sequence[Sequence[Term]],
    search: Search,
    run: Run,
    most: float | None = None,
) -> tuple[list[Translation], dict[int, list[str]]]:
    """Return the translations with their terms, and the dropped target terms by sentence index.

    Args:
        free: the translations without constraints.
        terms: soft terms of each sentence.
        search: runs another search.
        run: runs everything that is not a search.
        most: nats for each token of the terms; None: MOST_LOSS.

    A sentence is searched at most four times: freely, with all terms that it lacks, with each of these alone, and with
    those that cost little alone.
    """
    trial = _Trial(free, terms, MOST_LOSS if most is None else most)
    for step in (trial.all_lacking, trial.alone, trial.harmless):
        places, phrases = await run(step)
        found = await search(places, phrases) if places else []
        await run(partial(trial.take, found))
    await run(trial.end)
    return trial.found, trial.dropped


class _Trial:
    """The state of the searches for the terms of several sentences."""

    def __init__(self, free: Sequence[Translation], terms: Sequence[Sequence[Term]], most: float) -> None:
        self._free, self._terms, self._most = free, terms, most
        self.found = list(free)
        self.dropped: dict[int, list[str]] = {}
        self._bad: dict[int, list[str]] = {}  # sentences that are harmed by all their terms together
        self._asked: list[tuple[int, list[str]]] = []
        self._kept: dict[int, list[tuple[float, list[str], Translation]]] = {}  # cheap ones for bad sentences

    def all_lacking(self) -> tuple[list[int], list[list[str]]]:
        """Return the terms that each free translation lacks."""
        for place, own in enumerate(self._terms):
            lacking = list(dict.fromkeys(term.target for term in own if not times(term, self._free[place].text)))
            if len(lacking) > MOST_TERMS:
                self.dropped[place] = lacking[MOST_TERMS:]
            if lacking:
                self._asked.append((place, lacking[:MOST_TERMS]))
        return self._wanted()

    def alone(self) -> tuple[list[int], list[list[str]]]:
        """Return each term, by itself, of the sentences harmed by all together, to see which terms do the harm."""
        self._bad = {place: phrases for place, phrases in self._asked if place not in self._kept}
        for place, kept in self._kept.items():
            self.found[place] = kept[0][2]
        self._kept = {}
        several = [(place, phrases) for place, phrases in self._bad.items() if len(phrases) > 1]
        self._asked = [(place, [phrase]) for place, phrases in several for phrase in phrases]
        return self._wanted()

    def harmless(self) -> tuple[list[int], list[list[str]]]:
        """Return together the terms that cost little alone; if those are all terms, the better half."""
        self._asked = []
        for place, kept in self._kept.items():
            kept.sort(key=lambda each: each[0])
            phrases = [phrase for _, own, _ in kept for phrase in own]
            few = phrases if len(phrases) < len(self._bad[place]) else phrases[: max(1, len(phrases) // 2)]
            if len(few) > 1:
                self._asked.append((place, few))
        return self._wanted()

    def take(self, found: Sequence[Translation]) -> None:
        """Keep those of the last requested translations that did not cost too much."""
        for (place, phrases), translation in zip(self._asked, found, strict=True):
            lost = loss(self._free[place], translation, phrases)
            if lost <= self._most:
                self._kept.setdefault(place, []).append((lost, phrases, translation))

    def end(self) -> None:
        """For each bad sentence, choose the translation with the most terms, and among these the cheapest one."""
        for place, phrases in self._bad.items():
            kept = max(self._kept.get(place, []), key=lambda each: (len(each[1]), -each[0]), default=None)
            applied: list[str] = []
            if kept is not None:
                self.found[place], applied = kept[2], kept[1]
            without = [phrase for phrase in phrases if phrase not in applied]
            self.dropped[place] = [*without, *self.dropped.get(place, [])]

    def _wanted(self) -> tuple[list[int], list[list[str]]]:
        return [place for place, _ in self._asked], [phrases for _, phrases in self._asked]


def loss(free: Translation, translation: Translation, phrases: Sequence[str]) -> float:
    """Return the nats that a translation lost per token of its phrases; infinity if it lacks one."""
    best = translation.hypotheses[0]
    if free.hypotheses[0].finished and not best.finished:
        return float("inf")
    if not all(times(Term("", phrase), best.text) for phrase in phrases):
        return float("inf")
    tokens = _tokens_of(phrases, best.text, best.tokens)
    return max(0.0, free.hypotheses[0].log_probability - best.log_probability) / max(1, tokens)


def _tokens_of(phrases: Sequence[str], text: str, pieces: Sequence[str]) -> int:
    """Return how many of the pieces of `text` are part of a phrase."""
    spans = piece_spans(text, pieces)
    lowered = text.lower()
    if spans is None:
        return len(phrases)
    places = [(at, at + len(phrase)) for phrase in phrases if (at := lowered.find(phrase.lower())) >= 0]
    return sum(any(start < until and at < end for at, until in places) for start, end in spans if start < end)
