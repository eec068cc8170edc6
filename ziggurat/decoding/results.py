"""What translation and scoring give back, and its form as JSON lines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Alignment", "Hypothesis", "TargetScore", "Translation", "json_line"]


@dataclass(frozen=True)
class Alignment:
    """What each token of a translation attended to: the last decoder layer, mean over its heads."""

    source_tokens: list[str]
    """Pieces of the source as the model read it, tag and end-of-sentence included."""
    soft: list[list[float]]
    """Per target token one weight per source token; they add up to 1."""
    hard: list[int]
    """Per target token the source token with the greatest weight, tag and end-of-sentence left out."""


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a line."""

    text: str
    """Never holds a line end."""
    score: float
    """The n-best list is ranked by it: log-probability after the length penalty, or mean chrF with `mbr`."""
    log_probability: float
    """Natural logarithm of the probability given the source, end-of-sentence included."""
    tokens: list[str]
    """Pieces, without end-of-sentence."""
    token_log_probabilities: list[float]
    """One per token, and one for end-of-sentence where the hypothesis (or a part of it) ended."""
    finished: bool
    """False: cut at the length limit, or made to end there (`endings: fairseq`)."""
    alignment: Alignment | None = None
    """Where it was asked for."""
    unmet_constraints: list[str] | None = None
    """Phrases that should be in the text but are not; None for a line without any."""

    @property
    def quality(self) -> float:
        """Mean log-probability per token, end-of-sentence counted where there is one; 0 for an empty translation."""
        return self.log_probability / max(1, len(self.token_log_probabilities))

    def as_record(self) -> dict[str, Any]:
        """Return the fields as a dictionary; what does not apply is left out."""
        record = {**asdict(self), "quality": self.quality}
        return {key: value for key, value in record.items() if value is not None}


@dataclass(frozen=True)
class Translation:
    """The n best translations of one line, best first; there is always at least one."""

    source: str
    hypotheses: list[Hypothesis]
    parts: int = 1
    """How many parts a very long line was translated in; 0 for a blank line, which the model never saw."""

    @property
    def text(self) -> str:
        """The best translation."""
        return self.hypotheses[0].text

    @property
    def score(self) -> float:
        """The best translation's score."""
        return self.hypotheses[0].score

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

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json_line(asdict(self))


def json_line(record: dict[str, Any]) -> str:
    """Return `record` as JSON on one line, whatever a reader takes for a line end; raises ValueError for NaN."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return text.replace("\x85", r"\u0085").replace("\u2028", r"\u2028").replace("\u2029", r"\u2029")
