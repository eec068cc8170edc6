"""The warning where many lines gave no pair: because of the model, or of limits that do not suit these languages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from ziggurat.corpora.synthesis.filters import PairFilter
from ziggurat.corpora.synthesis.lines import readable_lines
from ziggurat.corpora.synthesis.merge import Report, dropped_text
from ziggurat.data.subword import load_tokenizers

_USUALLY_KEPT = 0.9  # of the lines; with less a notice says what may be wrong
_COMPARED = 20_000
"""Pairs of the bitext that limits are tried on: enough for a tenth of a percent, and half a second."""
_OF_LIMITS = ("ratio", "too_long")


def dropped_notice(
    report: Report, filters: PairFilter, section: str, bitext: Sequence[tuple[Path, Path]], vocabularies: Path
) -> str | None:
    """Return what to say of a corpus where many lines gave no pair; None where that is not so.

    Args:
        report: of the corpus.
        filters: what its pairs were dropped by.
        section: the section of the pipeline's file that has them.
        bitext: files of both sides of human pairs, those of the language that was translated first.
        vocabularies: folder with the vocabularies of the model that translated.
    """
    if report.kept >= _USUALLY_KEPT * report.read:
        return None
    lost = report.read - report.kept
    said = f"{_percent(lost / report.read)} of {report.read:,} lines gave no pair ({dropped_text(report.dropped)})"
    by_limits = sum(report.dropped.get(reason, 0) for reason in _OF_LIMITS) / report.read
    human = share_beyond(filters, bitext, vocabularies) if by_limits else None
    if human is None or 2 * by_limits < lost / report.read:
        return f"{said}: the model may be weak"
    limits = f"`{section}.max_ratio: {filters.max_ratio:g}`, `ratio_slack: {filters.ratio_slack}`"
    limits += f" and `max_pieces: {filters.max_pieces}`"
    beside = f"{said}; by {limits} {_percent(human)} of the bitext's own pairs would be dropped, too"
    # Where human translations fare half as badly, it is the limits; more than a few of them should never go.
    return f"{beside}: {'raise them' if 2 * human >= by_limits else 'the model may be weak'}"


def share_beyond(filters: PairFilter, bitext: Sequence[tuple[Path, Path]], vocabularies: Path) -> float | None:
    """Return the share of human pairs, the first ones of each corpus, beyond the limits; None where there are none."""
    tokenizers = load_tokenizers(vocabularies)
    beyond = tried = 0
    for sides in bitext:
        lines = islice(readable_lines([sides[0]], [sides[1]]), max(1, _COMPARED // len(bitext)))
        pairs = [(line.text, line.reference) for line in lines if line.text and line.reference]
        ids = [tokenizers[side].encode([pair[side] for pair in pairs]) for side in (0, 1)]
        beyond += sum(filters.reason("a", "b", len(a), len(b)) in _OF_LIMITS for a, b in zip(*ids, strict=True))
        tried += len(pairs)
    return beyond / tried if tried else None


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
