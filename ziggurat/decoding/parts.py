"""Translations of the parts of a long line -> the translation of the line."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.decoding.lines import join_parts
from ziggurat.decoding.results import Alignment, Hypothesis, Translation

__all__ = ["side_by_side"]


def side_by_side(
    source: str, parts: Sequence[Sequence[Hypothesis]], n_best: int, *, mean_score: bool = False
) -> Translation:
    """Return the k-th best results of the parts, at least one part, side by side; of several parts, a finished
    translation goes first.

    A part with fewer results gives its best one again. Log-probabilities add up, and so do scores, unless
    `mean_score` asks for their mean (scores that are no logarithms, such as chrF).
    """
    hypotheses = []
    for rank in range(min(n_best, max(map(len, parts)))):
        hypotheses.append(_joined([part[rank] if rank < len(part) else part[0] for part in parts], mean_score))
    if len(parts) > 1 or mean_score:  # a search ranks its own; with `endings: fairseq` a forced end may rank first
        hypotheses.sort(key=lambda h: (not h.finished, -h.score))
    return Translation(source, hypotheses, len(parts))


def _joined(parts: Sequence[Hypothesis], mean_score: bool) -> Hypothesis:
    """Return the translations of the parts of a line as one."""
    if len(parts) == 1:
        return parts[0]
    total = sum(h.score for h in parts)
    wanted = [h.unmet_constraints for h in parts if h.unmet_constraints is not None]
    return Hypothesis(
        text=join_parts(h.text for h in parts),
        score=total / len(parts) if mean_score else total,
        log_probability=sum(h.log_probability for h in parts),
        tokens=[p for h in parts for p in h.tokens],
        token_log_probabilities=[p for h in parts for p in h.token_log_probabilities],
        finished=all(h.finished for h in parts),
        alignment=_joined_alignment([h.alignment for h in parts if h.alignment is not None]),
        unmet_constraints=[phrase for row in wanted for phrase in row] if wanted else None,
    )


def _joined_alignment(parts: Sequence[Alignment]) -> Alignment | None:
    """Return the alignments of the parts of a line as one, 0 between tokens of different parts."""
    if not parts:
        return None
    whole = Alignment([], [], [])
    width = sum(len(part.source_tokens) for part in parts)
    for part in parts:
        first = len(whole.source_tokens)
        after = width - first - len(part.source_tokens)
        whole.soft.extend([[0.0] * first + row + [0.0] * after for row in part.soft])
        whole.hard.extend(first + place for place in part.hard)
        whole.source_tokens.extend(part.source_tokens)
    return whole
