"""Filters of a synthetic corpus: lines and pairs that are dropped, each for one reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ziggurat.config.filters import FilterConfig
from ziggurat.config.pipeline_models import MAX_RATIO, RATIO_SLACK
from ziggurat.data.lines import normalise

Reason = Literal["encoding", "nul", "empty", "too_long", "unfinished", "ratio", "copy", "cross_entropy"]
"""Reason why a line gives no pair:

- `encoding`: not valid UTF-8;
- `nul`: contains U+0000, so it is not text;
- `empty`: the line, or its translation, is blank;
- `too_long`: the line or its translation has too many pieces, or the line more than MAX_CHARACTERS;
- `unfinished`: the translation was cut at the length limit;
- `ratio`: the sides differ too much in length;
- `copy`: the translation is the text itself;
- `cross_entropy`: the pair is among the least likely (ziggurat.corpora.synthesis.cross_entropy).
"""

MAX_CHARACTERS = FilterConfig().max_characters or 4000
"""Longest line that is used, as in `prepare`."""
_BYTE_ORDER_MARK = "\ufeff"


def readable(raw: bytes | None, *, first_of_file: bool = False) -> tuple[str, Reason | None]:
    """Return the text of a line, trimmed and without its line end, and None; or "" and the reason to drop it.

    Args:
        raw: the line's bytes; None where there were too many to keep.
        first_of_file: a byte order mark is removed.
    """
    if raw is None:
        return "", "too_long"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "", "encoding"
    (text,) = normalise([text.removeprefix(_BYTE_ORDER_MARK) if first_of_file else text], "none")
    if "\0" in text:
        return "", "nul"
    if not text or text.isspace():
        return "", "empty"
    return ("", "too_long") if len(text) > MAX_CHARACTERS else (text, None)


@dataclass(frozen=True)
class PairFilter:
    """The filters of fairseq's back-translation recipe (Edunov et al. 2018), milder with short sentences; and copies.

    The longer side may have `max_ratio` times the pieces of the shorter one and `ratio_slack` more. The ratio alone is
    a rule for long sentences: a true translation of four pieces by seven breaks it.

    Attributes:
        max_pieces: most subword pieces of either side, by the tokenizers of the model that translated.
        max_ratio: largest ratio of the sides' pieces.
        ratio_slack: pieces that the longer side may have beyond that.
    """

    max_pieces: int = FilterConfig().max_pieces or 250
    max_ratio: float = MAX_RATIO
    ratio_slack: int = RATIO_SLACK

    def reason(self, text: str, translation: str, text_pieces: int, translation_pieces: int) -> Reason | None:
        """Return the first reason, in this order, to drop the pair, or None."""
        if not translation or translation.isspace():
            return "empty"
        if max(text_pieces, translation_pieces) > self.max_pieces:
            return "too_long"
        if self.uneven(text_pieces, translation_pieces):
            return "ratio"
        return "copy" if text == translation else None

    def uneven(self, pieces: int, others: int) -> bool:
        """Return whether the sides of a pair differ too much in length."""
        shorter, longer = sorted((pieces, others))
        return longer > self.max_ratio * shorter + self.ratio_slack
