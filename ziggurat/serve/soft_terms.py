"""Soft terms of a glossary: searched for under constraints, and dropped where that harms the translation too much.

A sentence is first translated freely; often it has its terms then. Otherwise the search must give them. What they cost
is how much less likely the translation becomes, per token of the terms: a term that the model merely would not have
chosen costs a few nats where it stands; one that does not belong there costs far more, since the search writes it where
nothing fits it, or at the end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from ziggurat.serve.text.alignment import piece_spans
from ziggurat.serve.text.glossary import Term, times
from ziggurat.translate.results import Translation

MOST_LOSS = 10.0
"""Nats (natural logarithm of the probability) that a translation may lose for each token of its terms.

With a model for Multi30k (en-de), 100 sentences with a noun of their reference that the free translation lacked, and
100 with a noun of another sentence: of the 175 translations that were whole 148 are kept, of the 25 that were broken
(the term stands behind the full stop, words are doubled, no end) 8. At 8 nats it is 121 and 2, at 15 it is 164 and 17.
"""

MOST_TERMS = 8
"""Terms that a sentence is searched with; further ones are dropped. The search's memory grows with their number."""

Search = Callable[[Sequence[int], Sequence[Sequence[str]]], Awaitable[list[Translation]]]
"""Places of sentences and the phrases of each -> translations that contain them, as far as there are such."""


Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function, in a thread where it may take long."""


async def constrained(
    free: Sequence[Translation],
    terms: Sequence[Sequence[Term]],
    search: Search,
    run: Run,
    most: float | None = None,
) -> tuple[list[Translation], dict[int, list[str]]]:
    """Return the translations with their terms, and the target terms that were dropped, by place.

    Args:
        free: the translations without constraints.
        terms: soft terms of each sentence.
        search: searches again.
        run: for what is not a search.
        most: nats for each token of the terms; None: MOST_LOSS.

    A sentence is searched at most four times: freely, with all terms that it lacks, with each of these alone, and with
    those that alone cost little.
    """
    trial = _Trial(free, terms, MOST_LOSS if most is None else most)
    for step in (trial.all_lacking, trial.alone, trial.harmless):
        places, phrases = await run(step)
        found = await search(places, phrases) if places else []
        await run(partial(trial.take, found))
    await run(trial.end)
    return trial.found, trial.dropped


class _Trial:
    """The state of the searches for the terms of some sentences."""

    def __init__(self, free: Sequence[Translation], terms: Sequence[Sequence[Term]], most: float) -> None:
        self._free, self._terms, self._most = free, terms, most
        self.found = list(free)
        self.dropped: dict[int, list[str]] = {}
        self._bad: dict[int, list[str]] = {}  # sentences that all their terms together harm
        self._asked: list[tuple[int, list[str]]] = []
        self._kept: dict[int, list[tuple[float, list[str], Translation]]] = {}  # what cost little, of the bad ones

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
        """Return each term of the sentences that all together harmed, to see which of them do the harm."""
        self._bad = {place: phrases for place, phrases in self._asked if place not in self._kept}
        for place, kept in self._kept.items():
            self.found[place] = kept[0][2]
        self._kept = {}
        several = [(place, phrases) for place, phrases in self._bad.items() if len(phrases) > 1]
        self._asked = [(place, [phrase]) for place, phrases in several for phrase in phrases]
        return self._wanted()

    def harmless(self) -> tuple[list[int], list[list[str]]]:
        """Return those terms together that alone cost little; where these are all, the better half."""
        self._asked = []
        for place, kept in self._kept.items():
            kept.sort(key=lambda each: each[0])
            phrases = [phrase for _, own, _ in kept for phrase in own]
            few = phrases if len(phrases) < len(self._bad[place]) else phrases[: max(1, len(phrases) // 2)]
            if len(few) > 1:
                self._asked.append((place, few))
        return self._wanted()

    def take(self, found: Sequence[Translation]) -> None:
        """Keep those of the translations that were asked for last that did not cost too much."""
        for (place, phrases), translation in zip(self._asked, found, strict=True):
            lost = loss(self._free[place], translation, phrases)
            if lost <= self._most:
                self._kept.setdefault(place, []).append((lost, phrases, translation))

    def end(self) -> None:
        """Take for each bad sentence the translation with the most terms, of these the one that cost least."""
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
    """Return the nats that a translation lost for each token of its phrases; infinity where it lacks one."""
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
