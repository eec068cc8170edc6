"""Results of CTranslate2 as hypotheses, with the scores and alignments that ours have.

This module needs neither PyTorch nor CTranslate2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ziggurat.decoding.results import Alignment, Hypothesis

__all__ = ["Found", "alignment_of", "hypothesis_of", "rescored"]


class Found(NamedTuple):
    """One result of the search.

    Attributes:
        pieces: without end-of-sentence.
        score: after the length penalty.
        ended: whether it ended.
    """

    pieces: list[str]
    score: float
    ended: bool


def hypothesis_of(
    found: Found, text: str, alpha: float, token_scores: Sequence[float], alignment: Alignment | None
) -> Hypothesis:
    """Return a result as a hypothesis; `alpha` is the exponent of the length penalty."""
    length = max(1, len(found.pieces) + found.ended)
    return Hypothesis(
        text=text,
        score=found.score,
        log_probability=found.score * length**alpha,  # CTranslate2 gives the score after the penalty alone
        tokens=found.pieces,
        token_log_probabilities=list(token_scores[: length if found.ended else len(found.pieces)]),
        finished=found.ended,
        alignment=alignment,
    )


def rescored(hypothesis: Hypothesis, alpha: float) -> Hypothesis:
    """Return a hypothesis with the score that follows from those of its tokens."""
    total = sum(hypothesis.token_log_probabilities)
    length = max(1, len(hypothesis.token_log_probabilities))
    return replace(hypothesis, log_probability=total, score=total / length**alpha)


def alignment_of(attention: Sequence[Sequence[float]], source: Sequence[str], tag: int, eos: str) -> Alignment:
    """Return an alignment.

    Args:
        attention: for each piece of a translation the weights of those of the source, and maybe more columns.
        source: pieces of the source, tag included, end-of-sentence left out.
        tag: pieces at its beginning that stand for no text.
        eos: the piece of end-of-sentence, whose weight is what is left of 1.
    """
    # Beyond the source's own pieces, rows of a batch with longer sources have its end-of-sentence and padding.
    rows = [[float(weight) for weight in row[: len(source)]] for row in attention]
    return Alignment.of([*source, eos], [[*row, max(0.0, 1.0 - sum(row))] for row in rows], tag)
