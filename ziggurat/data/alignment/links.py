"""Links between words of a pair: the Pharaoh format that all aligners write, and the alignment error rate."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ziggurat.system.errors import DataError, printable

Link = tuple[int, int]
"""Number of a source word and of a target word, both from 0."""

_LINKS = re.compile(r"(?:\d{1,9}-\d{1,9}(?:[ \t]+|$))*", flags=re.ASCII)


def format_links(links: Iterable[Link]) -> str:
    """Return links as a line of the Pharaoh format, `0-0 1-2`, by source word and then by target word."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def parse_links(line: str, source_words: int | None, target_words: int | None, place: str) -> list[Link]:
    """Return the links of a line in the order in which they stand there; a repeated one counts once.

    Args:
        line: `0-0 1-2`; an empty line has no links.
        source_words: number of source words, above every number on the left; None: not known.
        target_words: the same for the right.
        place: file and line, for messages.

    Raises DataError: something other than numbers joined by `-`, or a word that the sentence does not have.
    """
    text = line.strip(" \t")
    if not _LINKS.fullmatch(text):
        raise DataError(f"{place}: no word alignment: {printable(line, 80)}; wanted: links such as `0-0 1-2`, from 0")
    links = list(dict.fromkeys((int(i), int(j)) for i, _, j in (link.partition("-") for link in text.split())))
    for side, words, number in (("source", source_words, 0), ("target", target_words, 1)):
        worst = max(links, key=lambda link: link[number], default=None)
        if words is not None and worst is not None and worst[number] >= words:
            raise DataError(
                f"{place}: the link {worst[0]}-{worst[1]} names {side} word {worst[number]}, but the {side} has "
                f"{words} (from 0): is it the alignment of other text, or of words split by another rule?"
            )
    return links


class AlignmentScore(NamedTuple):
    """Agreement of alignments with gold alignments, each figure a share between 0 and 1."""

    error_rate: float
    """AER = 1 - (|A and S| + |A and P|) / (|A| + |S|) (Och and Ney 2003); 0 is best."""
    precision: float
    """|A and P| / |A|."""
    recall: float
    """|A and S| / |S|."""


def error_rate(
    found: Sequence[Collection[Link]], sure: Sequence[Collection[Link]], possible: Sequence[Collection[Link]]
) -> AlignmentScore:
    """Return the agreement of the alignments `found` with gold ones, over all pairs together.

    Args:
        found: a, links of each pair.
        sure: S, links that must be there.
        possible: P, links that may be there; those of S count as possible, whether they are listed or not.
    """
    links = gold = right = allowed = 0
    for a, s, p in zip(map(set, found), map(set, sure), map(set, possible), strict=True):
        links, gold = links + len(a), gold + len(s)
        right, allowed = right + len(a & s), allowed + len(a & (p | s))
    return AlignmentScore(
        error_rate=1.0 - (right + allowed) / (links + gold) if links + gold else 0.0,
        precision=allowed / links if links else 1.0,
        recall=right / gold if gold else 1.0,
    )
