"""The report on a store as one HTML file without scripts that fetches nothing."""

from __future__ import annotations

from collections import Counter

from ziggurat.inspect.report.data_content import DataContent
from ziggurat.inspect.report.data_facts import CorpusFacts
from ziggurat.inspect.report.figure import numbers
from ziggurat.inspect.report.template import page_templates, table_link

_WIDEST = 14.0
"""Length in rem of the bar of the reason that dropped most pairs."""
_LISTED = 5  # scripts and languages of a side

REASONS = {
    "empty": "a side with no text",
    "nul": "a side with U+0000",
    "score": "a score of another tool beyond its limits",
    "too_long": "a side with too many characters",
    "too_many_words": "a side with too many words",
    "length_ratio": "sides of too unlike lengths",
    "identical": "the same text on both sides",
    "control_characters": "control characters",
    "wrong_script": "letters of another script",
    "urls": "other web addresses on the two sides",
    "emails": "other e-mail addresses on the two sides",
    "numbers": "other numbers on the two sides",
    "punctuation": "other punctuation on the two sides",
    "source_language": "the source is in another language",
    "target_language": "the target is in another language",
    "pair_score": "sides that hardly translate each other, by the score learnt from the corpora",
    "duplicate": "seen before",
    "near_duplicate": "nearly the same as an earlier pair",
    "held_out": "in a development or test set",
    "too_many_pieces": "a side with too many subword pieces",
}
"""Reason for which pairs are dropped -> its meaning."""


def data_page(content: DataContent) -> str:
    """Return the page."""
    environment = page_templates()
    environment.filters |= {"percent": _percent, "shares": _shares}
    totals = sum((Counter(corpus.dropped) for corpus in content.training), Counter[str]())
    read = sum(corpus.read for corpus in content.training)
    return environment.get_template("data.html").render(
        content=content,
        read=read,
        kept=sum(corpus.kept for corpus in content.training),
        reasons=[(reason, REASONS.get(reason, ""), count) for reason, count in totals.most_common()],
        width=lambda count: f"{_WIDEST * count / max(totals.values()):.2f}",
        examples=lambda reason: _examples(content.training, reason),
        downloads={figure.key: table_link(figure.key, numbers(figure)) for figure in content.figures},
    )


def _examples(corpora: list[CorpusFacts], reason: str) -> list[tuple[str, str, str]]:
    """Return corpus, source and target of the examples of a reason, one corpus after the other in turns; at most 20."""
    lists = [[(corpus.name, pair[0], pair[1]) for pair in corpus.examples.get(reason, [])] for corpus in corpora]
    turns = [found[turn] for turn in range(max(map(len, lists), default=0)) for found in lists if turn < len(found)]
    return turns[:20]


def _percent(share: float) -> str:
    """Return a share as per cent, with a digit more where it is small."""
    return f"{100 * share:.2f} %" if 0 < share < 0.01 else f"{100 * share:.1f} %"


def _shares(shares: dict[str, float]) -> str:
    """Return the largest shares, and the rest."""
    listed = list(shares.items())[:_LISTED]
    text = ", ".join(f"{name} {_percent(share)}" for name, share in listed)
    rest = 1.0 - sum(share for _, share in listed)
    return f"{text}, others {_percent(rest)}" if len(shares) > _LISTED else text or "–"
