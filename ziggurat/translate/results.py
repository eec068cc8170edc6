"""Results of a translator: translations with their hypotheses, scores of given targets, and their JSON lines.

This module does not need PyTorch: an exported model gives the same results (ziggurat.translate.served).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ziggurat.translate.lines import join_parts


@dataclass(frozen=True)
class Alignment:
    """Attention of each token of a translation to the source.

    It is that of the head that guided alignment taught, or else of the last decoder layer, mean over its heads.
    """

    source_tokens: list[str]
    """Pieces of the source as the model read it, tag and end-of-sentence included."""
    soft: list[list[float]]
    """Per target token, one weight for each source token; they add up to 1."""
    hard: list[int]
    """Per target token, the source token with the greatest weight, tag and end-of-sentence left out."""

    @classmethod
    def of(cls, source_tokens: list[str], soft: list[list[float]], tags: int) -> Alignment:
        """Return the alignment with these weights; the first `tags` source tokens are tags."""
        own = range(tags, len(source_tokens) - 1)
        return cls(source_tokens, soft, [max(own, key=row.__getitem__) for row in soft])


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a line."""

    text: str
    """Without line ends."""
    score: float
    """Log-probability after the length penalty, or mean chrF with `mbr`; the n-best list is ranked by it."""
    log_probability: float
    """Natural logarithm of the probability given the source, end-of-sentence included."""
    tokens: list[str]
    """Pieces, without end-of-sentence."""
    token_log_probabilities: list[float]
    """One per token, and one for end-of-sentence where the hypothesis (or a part of it) ended."""
    finished: bool
    """False: cut at the length limit, or made to end there (`endings: fairseq`)."""
    alignment: Alignment | None = None
    """None where it was not asked for."""
    unmet_constraints: list[str] | None = None
    """Phrases that should be in the text but are not; None for a line without such phrases."""
    ends: int = 0
    """Times that end-of-sentence was generated: once for each part that ended."""

    @property
    def quality(self) -> float:
        """Mean log-probability per token, end-of-sentence counted where there is one; 0 for a blank line."""
        # Not by the scores of tokens, which CTranslate2 gives only where they are asked for.
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
    """Number of parts that a very long line was translated in; 0 for a blank line, which the model never saw."""

    @property
    def text(self) -> str:
        """The best translation."""
        return self.hypotheses[0].text

    @property
    def score(self) -> float:
        """The best translation's score."""
        return self.hypotheses[0].score

    def to_text(self, number: int, n_best: int, *, quality: bool = False) -> str:
        """Return its text: one line, or with `n_best` above 1 several, with the line's `number` and scores.

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
    """Natural logarithm of the probability given the source, end-of-sentence included."""
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
    # Characters that JSON leaves as they are, though some readers take them for line ends.
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return text.replace("\x85", r"\u0085").replace("\u2028", r"\u2028").replace("\u2029", r"\u2029")


def side_by_side(
    source: str, parts: Sequence[Sequence[Hypothesis]], n_best: int, *, mean_score: bool = False
) -> Translation:
    """Return the translation of a line of one or more parts: its k-th best joins the k-th best of each part.

    A part with fewer results gives its best one again. Log-probabilities add up, and so do scores, unless
    `mean_score` asks for their mean (for scores that are not logarithms, such as chrF). Of several parts, finished
    translations rank first.
    """
    hypotheses = []
    for rank in range(min(n_best, max(map(len, parts)))):
        hypotheses.append(_joined([part[rank] if rank < len(part) else part[0] for part in parts], mean_score))
    # The hypotheses of a single part keep the search's order, where with `endings: fairseq` a forced end may be first.
    if len(parts) > 1 or mean_score:
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
