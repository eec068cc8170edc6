"""Results of a translator: translations, scores of given targets, and notices.

A translation is one line, put together from the parts in which a long line was translated. PyTorch is not needed here,
because an exported model gives results of the same form (ziggurat.translate.ctranslate2).
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import regex

UNSPACED_SCRIPTS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""UNSPACED_SCRIPTS lists scripts without spaces between words, for a class of the `regex` module."""

# NUL, and every character that ends a line in str.splitlines(), wc, editors or JavaScript.
_LINE_ENDS = regex.compile(r"[\x00\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+")

_NO_BLANKS = rf"[{UNSPACED_SCRIPTS}。、！？｡」』）]"
_ENDS_UNSPACED = regex.compile(_NO_BLANKS + r"\Z")
_STARTS_UNSPACED = regex.compile(_NO_BLANKS)


def one_line(text: str) -> str:
    """Return `text` with every run of line ends or NULs replaced by one space, and stripped of them at both ends.

    A model can generate any byte. Line ends are LF and CR, but also vertical tab, form feed, U+001C to U+001E, U+0085,
    U+2028 and U+2029: some programs treat each of them as a line end, and lines would shift.
    """
    return _LINE_ENDS.sub(" ", text).strip(" ") if _LINE_ENDS.search(text) else text


def join_parts(texts: Iterable[str]) -> str:
    """Join the translations of a line's parts with spaces, but without them between letters of unspaced scripts."""
    joined = ""
    for text in filter(None, texts):
        unspaced = _ENDS_UNSPACED.search(joined[-1:]) and _STARTS_UNSPACED.match(text)
        joined += text if unspaced or not joined else f" {text}"
    return joined


class TranslationWarning(UserWarning):
    """Part of the input needed special handling; counted in `Translator.notices`."""


class Notices(Counter[str]):
    """Counts, by kind, of lines that needed special handling.

    `told` has the first message of each kind that warns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, str] = {}

    def add(self, kind: str, message: str) -> None:
        """Count one; the first of its kind warns."""
        self[kind] += 1
        self._tell(kind, message)

    def merge(self, counts: Mapping[str, int], told: Mapping[str, str]) -> None:
        """Add the counts and messages of another process; only the first of a kind here warns."""
        self.update(counts)
        for kind, message in told.items():
            self._tell(kind, message)

    def _tell(self, kind: str, message: str) -> None:
        if kind not in self.told:
            self.told[kind] = message
            warnings.warn(f"{message}; further ones are only counted", TranslationWarning, stacklevel=5)


@dataclass(frozen=True)
class Alignment:
    """Attention of each token of a translation to the source.

    It comes from the head that guided alignment trained, or from the last decoder layer, mean over its heads.
    """

    source_tokens: list[str]
    """Pieces of the source as read by the model, including tag and end-of-sentence."""
    soft: list[list[float]]
    """Per target token, one weight for each source token; they add up to 1."""
    hard: list[int]
    """Per target token, the source token with the largest weight, excluding tag and end-of-sentence."""

    @classmethod
    def of(cls, source_tokens: list[str], soft: list[list[float]], tags: int) -> Alignment:
        """Return the alignment with these weights; the first `tags` source tokens are tags."""
        own = range(tags, len(source_tokens) - 1)
        return cls(source_tokens, soft, [max(own, key=row.__getitem__) for row in soft])


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a line."""

    text: str
    """The text, without line ends."""
    score: float
    """Log-probability after the length penalty, or mean chrF with `mbr`; the n-best list is ranked by it."""
    log_probability: float
    """Natural logarithm of the probability given the source, including end-of-sentence."""
    tokens: list[str] = field(repr=False)
    """Pieces, without end-of-sentence."""
    token_log_probabilities: list[float] = field(repr=False)
    """One per token, and one for end-of-sentence if the hypothesis (or a part of it) ended."""
    finished: bool
    """False if cut at the length limit, or forced to end there (`endings: fairseq`)."""
    alignment: Alignment | None = field(default=None, repr=False)
    """The alignment, or None if it was not requested."""
    unmet_constraints: list[str] | None = None
    """Phrases that should be in the text but are not; None for a line without such phrases."""
    ends: int = 0
    """Number of times that end-of-sentence was generated: once for each part that ended."""

    @property
    def quality(self) -> float:
        """Mean log-probability per token, including any end-of-sentence; 0 for a blank line."""
        # Not computed from token scores, which CTranslate2 returns only on request.
        return self.log_probability / max(1, len(self.tokens) + self.ends)

    def as_record(self) -> dict[str, Any]:
        """Return the fields as a dictionary, without those that do not apply."""
        record = {**asdict(self), "quality": self.quality}
        return {key: value for key, value in record.items() if value is not None and key != "ends"}


@dataclass(frozen=True)
class Translation:
    """The n best translations of one line, best first; there is always at least one."""

    source: str
    hypotheses: list[Hypothesis]
    parts: int = 1
    """Number of parts in which a very long line was translated; 0 for a blank line, which the model never saw."""

    @property
    def text(self) -> str:
        """The best translation."""
        return self.hypotheses[0].text

    @property
    def score(self) -> float:
        """The best translation's score."""
        return self.hypotheses[0].score

    def to_text(self, number: int, n_best: int, *, quality: bool = False) -> str:
        """Return the text: one line, or several with `n_best` above 1, with the line's `number` and scores.

        `quality` adds the mean log-probability per token.
        """
        lines = []
        for hypothesis in self.hypotheses:
            columns = [hypothesis.text] if n_best == 1 else [str(number), hypothesis.text, f"{hypothesis.score:.4f}"]
            lines.append(" ||| ".join([*columns, f"{hypothesis.quality:.4f}"] if quality else columns))
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return one line of JSON: the fields of the best hypothesis, `parts`, and the `n_best` list."""
        best = self.hypotheses[0].as_record()
        return json_line({**best, "parts": self.parts, "n_best": [h.as_record() for h in self.hypotheses]})


@dataclass(frozen=True)
class TargetScore:
    """The score of a given target sentence."""

    score: float
    """Log-probability after the length penalty."""
    log_probability: float
    """Natural logarithm of the probability given the source, including end-of-sentence."""
    tokens: list[str]
    """Pieces of the target, without end-of-sentence."""
    token_log_probabilities: list[float]
    """One per token, and one for end-of-sentence."""

    def to_text(self) -> str:
        """Return the log-probability as text."""
        return f"{self.log_probability:.6f}"

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json_line(asdict(self))


def json_line(record: dict[str, Any]) -> str:
    """Return `record` as JSON on one line; raises ValueError for NaN."""
    # Characters that JSON does not escape, although some readers treat them as line ends.
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return text.replace("\x85", r"\u0085").replace("\u2028", r"\u2028").replace("\u2029", r"\u2029")


def side_by_side(
    source: str, parts: Sequence[Sequence[Hypothesis]], n_best: int, *, mean_score: bool = False
) -> Translation:
    """Return the translation of a line of one or more parts: its k-th best joins the k-th best of each part.

    A part with fewer results repeats its best one. Log-probabilities add up, as do scores, unless `mean_score` asks for
    their mean (for scores that are not logarithms, such as chrF). With several parts, finished translations rank first.
    """
    hypotheses = []
    for rank in range(min(n_best, max(map(len, parts)))):
        hypotheses.append(_joined([part[rank] if rank < len(part) else part[0] for part in parts], mean_score))
    # The hypotheses of a single part keep the search's order; with `endings: fairseq`, a forced end may be first.
    if len(parts) > 1 or mean_score:
        hypotheses.sort(key=lambda h: (not h.finished, -h.score))
    return Translation(source, hypotheses, len(parts))


def _joined(parts: Sequence[Hypothesis], mean_score: bool) -> Hypothesis:
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
        ends=sum(h.ends for h in parts),
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
