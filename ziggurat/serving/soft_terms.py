"""Soft terms of a glossary: searched for under constraints, and dropped where that harms the translation too much.

A sentence is first translated freely; often it has its terms then. Otherwise the search must give them. What they cost
is how much less likely the translation becomes, per token of the terms: a term that the model merely would not have
chosen costs a few nats where it stands; one that does not belong there costs far more, since the search writes it where
nothing fits it, or at the end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from ziggurat.decoding.results import Translation
from ziggurat.text.alignment import piece_spans
from ziggurat.text.glossary import Term, times

__all__ = ["MOST_LOSS", "MOST_TERMS", "constrained", "loss"]

MOST_LOSS = 10.0
"""Nats (natural logarithm of the probability) that a translation may lose for each token of its terms.

With a model for Multi30k (en-de), each of 100 sentences with a noun of its reference that its free translation lacked,
and 100 with a noun of another sentence: of the 175 translations that were whole 148 are kept, of the 25 that were broken
(the term stands behind the full stop, words are doubled, no end) 8. At 8 nats it is 121 and 2, at 15 it is 164 and 17.
"""

MOST_TERMS = 8
"""Terms that a sentence is searched with; further ones are dropped. The search's memory grows with their number."""

Search = Callable[[Sequence[int], Sequence[Sequence[str]]], Awaitable[list[Translation]]]
"""Places of sentences and the phrases of each -> translations that contain them, as far as there are such."""


async def constrained(
    free: Sequence[Translation], terms: Sequence[Sequence[Term]], search: Search, most: float | None = None
) -> tuple[list[Translation], dict[int, list[str]]]:
    """Return the translations with their terms, and the target terms that were dropped, by place.

    Args:
        free: the translations without constraints.
        terms: soft terms of each sentence.
        search: searches again.
        most: nats for each token of the terms; None: MOST_LOSS.

    A sentence is searched at most four times: freely, with all terms that it lacks, with each of these alone, and with
    those that alone cost little.
    """
    most = MOST_LOSS if most is None else most
    found, dropped = list(free), dict[int, list[str]]()
    wanted: dict[int, list[str]] = {}
    for place, own in enumerate(terms):
        lacking = list(dict.fromkeys(term.target for term in own if not times(term, free[place].text)))
        if len(lacking) > MOST_TERMS:
            dropped[place] = lacking[MOST_TERMS:]
        if lacking:
            wanted[place] = lacking[:MOST_TERMS]
    # (1) All that are lacking.
    tried = await _searched(wanted, search)
    bad = {}
    for place, translation in tried.items():
        if loss(free[place], translation, wanted[place]) <= most:
            found[place] = translation
        else:
            bad[place] = wanted[place]
    # (2) Each alone, to see which of them do the harm.
    alone = [(place, phrase) for place, phrases in bad.items() if len(phrases) > 1 for phrase in phrases]
    singles = await search([place for place, _ in alone], [[phrase] for _, phrase in alone]) if alone else []
    harmless: dict[int, dict[str, float]] = {}
    best: dict[int, tuple[float, str, Translation]] = {}
    for (place, phrase), translation in zip(alone, singles, strict=True):
        lost = loss(free[place], translation, [phrase])
        if lost <= most:
            harmless.setdefault(place, {})[phrase] = lost
            if place not in best or lost < best[place][0]:
                best[place] = (lost, phrase, translation)
    # (3) The harmless ones together; where these are all, the better half.
    kept = {}
    for place, losses in harmless.items():
        phrases = sorted(losses, key=losses.__getitem__)
        few = phrases if len(phrases) < len(bad[place]) else phrases[: max(1, len(phrases) // 2)]
        if len(few) > 1:
            kept[place] = few
    together = await _searched(kept, search)
    for place, phrases in bad.items():
        applied: list[str] = []
        if place in together and loss(free[place], together[place], kept[place]) <= most:
            found[place], applied = together[place], kept[place]
        elif place in best:
            found[place], applied = best[place][2], [best[place][1]]
        dropped[place] = [*(phrase for phrase in phrases if phrase not in applied), *dropped.get(place, [])]
    return found, {place: phrases for place, phrases in dropped.items() if phrases}


async def _searched(wanted: Mapping[int, Sequence[str]], search: Search) -> dict[int, Translation]:
    places = list(wanted)
    found = await search(places, [wanted[place] for place in places]) if places else []
    return dict(zip(places, found, strict=True))


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
