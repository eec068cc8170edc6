"""Minimum Bayes risk: of several samples, the one that is most like all of them (Eikema and Aziz 2020)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

__all__ = ["mean_chrf"]


def mean_chrf(texts: Sequence[str]) -> list[float]:
    """Return the mean sentence chrF (sacreBLEU's defaults, 0 to 100) of each text against all, itself included.

    Samples of a translation are often the same: each pair of different texts is compared once, so the time grows
    with the square of their number.
    """
    import sacrebleu  # takes a while, and few need it

    metric = sacrebleu.CHRF()
    counts = Counter(texts)
    utility = {
        text: sum(count * metric.sentence_score(text, [other]).score for other, count in counts.items())
        for text in counts
    }
    return [utility[text] / len(texts) for text in texts]
