"""Answers of the server's own interface: sentences, alternatives, scores, links, terms."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from ziggurat.serve.text.alignment import piece_spans
from ziggurat.serve.text.glossary import Term, Terms
from ziggurat.serve.text.words import units
from ziggurat.serve.text.work import Link, Sentence
from ziggurat.serve.wanted import TextTranslation, Wanted
from ziggurat.translate.results import Hypothesis


def details(found: TextTranslation, source: str, wanted: Wanted) -> dict[str, Any]:
    """Return a translation as the answer has it."""
    record: dict[str, Any] = {"text": found.best.text, "source": source}
    if wanted.more:
        record["alternatives"] = [other.text for other in found.others]
    if wanted.markup is None and (wanted.more or wanted.alignments or wanted.scores):
        record["sentences"] = _sentences(found, wanted)
    if wanted.terms is not None:
        records = found.tally.records(wanted.terms)
        record["glossary"] = [
            {**each, "dropped": _dropped(found, term)} for each, term in zip(records, wanted.terms.terms, strict=True)
        ]
    return record


def _dropped(found: TextTranslation, term: Term) -> int:
    """Return in how many sentences a soft term was given up, since it harmed the translation."""
    if found.recorded is None or term.hard:
        return 0
    return sum(
        term.target in phrases and any(each.term == term for each in Terms([term]).found(sentence.text))
        for sentence, phrases in found.recorded.dropped.items()
    )


def _sentences(found: TextTranslation, wanted: Wanted) -> list[dict[str, Any]]:
    """Return the sentences of a text, each with what was asked for."""
    records: list[dict[str, Any]] = []
    direct = found.recorded is not None and len(found.recorded.route) == 1
    for number, pair in enumerate(found.best.sentences):
        record: dict[str, Any] = {"source": list(pair.source), "target": list(pair.target)}
        said = found.best.text[slice(*pair.target)]
        if wanted.more:
            record["alternatives"] = _alternatives(found, number, said)
        best = _hypothesis(found, pair.source, said, 0)
        record["score"] = None if best is None else best.score
        if wanted.scores and direct:
            spans = None if best is None else piece_spans(best.text, best.tokens)
            shift = 0 if best is None else pair.target[0] - (len(best.text) - len(best.text.lstrip()))
            record["tokens"] = [
                {"target": [start + shift, end + shift] if start < end else [shift, shift], "score": score}
                for (start, end), score in zip(spans or [], best.token_log_probabilities if best else [], strict=False)
            ]
        records.append(record)
    if wanted.alignments and direct:
        for record, links in zip(records, _word_links(found), strict=True):
            record["links"] = links
    return records


def _hypothesis(found: TextTranslation, source: tuple[int, int], said: str, rank: int) -> Hypothesis | None:
    """Return the hypothesis that a sentence's translation is, as a whole; None where it was put together of several."""
    if found.recorded is None:
        return None
    translation = found.recorded.found.get(Sentence(found.source[slice(*source)]))
    if translation is None:
        return None
    hypothesis = translation.hypotheses[min(rank, len(translation.hypotheses) - 1)]
    return hypothesis if hypothesis.text.strip() == said else None


def _alternatives(found: TextTranslation, number: int, best: str) -> list[dict[str, Any]]:
    """Return the other translations of a sentence; those put together of several parts have no score."""
    seen, listed = {best}, []
    for other, rank in zip(found.others, found.ranks, strict=True):
        pair = other.sentences[number]
        said = other.text[slice(*pair.target)]
        if said not in seen:
            seen.add(said)
            hypothesis = _hypothesis(found, pair.source, said, rank)
            listed.append({"text": said, "score": None if hypothesis is None else hypothesis.score})
    return listed


def _word_links(found: TextTranslation) -> list[list[list[int]]]:
    """Return for each sentence the links between its words and those of its translation."""
    pairs = found.best.sentences
    begins = [pair.source[0] for pair in pairs]
    listed: list[dict[tuple[int, int, int, int], None]] = [{} for _ in pairs]
    sources, targets = units(found.source), units(found.best.text)
    for link in found.best.links:
        here = _overlapped(sources, link.source_start, link.source_end)
        there = _overlapped(targets, link.target_start, link.target_end)
        # A link of many words with many says that a stretch became another, not which word became which.
        if len(here) > 1 and len(there) > 1:
            if not _is_same(found, link):
                continue
            here, there = [link[:2]], [link[2:]]
        number = bisect_right(begins, link.source_start) - 1
        if number >= 0:
            listed[number] |= {(*source, *target): None for source in here for target in there}
    return [[list(link) for link in links] for links in listed]


def _is_same(found: TextTranslation, link: Link) -> bool:
    """Return whether a stretch came through unchanged, such as an address."""
    source, target = (
        found.source[link.source_start : link.source_end],
        found.best.text[link.target_start : link.target_end],
    )
    return source == target


def _overlapped(spans: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    first = max(0, bisect_right(spans, start, key=lambda span: span[0]) - 1)
    found = []
    for span in spans[first:]:
        if span[0] >= end:
            break
        if span[1] > start:
            found.append(span)
    return found
