"""The dev score of a run's averaged model: where it is worse than `best`, `best` is the one taken by default.

averaged/validation.json   metric, value (null: not measured), rival (`best` or `last`), rival_value, checksum
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from ziggurat.system.checksums import content_checksum, has_checksum
from ziggurat.system.errors import CheckpointError, refuse_passing
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import parse_json, read_bounded

AVERAGED = "averaged"
"""Folder of a run with its averaged model."""
SCORE_FILE = "validation.json"
"""File in it; an average that was made by hand has none, and is taken."""


@dataclass(frozen=True)
class AverageScore:
    """An averaged model beside the checkpoint that is taken where there is no average.

    Attributes:
        metric: `training.validation.metric`.
        value: the averaged model's; None: not measured, or not a finite number.
        rival: name of the checkpoint: `best` or, where none is kept, `last`.
        rival_value: its value.
    """

    metric: str
    value: float | None
    rival: str
    rival_value: float

    @property
    def worse(self) -> bool:
        """True where the rival is to be taken."""
        if self.value is None or not math.isfinite(self.value):
            return True
        return self.value > self.rival_value if self.metric == "loss" else self.value < self.rival_value

    def said(self) -> str:
        """Return both values in words: `dev loss 4.1012, best 3.2034`."""
        digits = 4 if self.metric == "loss" else 2
        value = "not known" if self.value is None else f"{self.value:.{digits}f}"
        return f"dev {self.metric} {value}, {self.rival} {self.rival_value:.{digits}f}"


def write_score(folder: Path, score: AverageScore) -> None:
    """Write the score of the averaged model in `folder`, atomically. Raises OSError."""
    finite = score.value is not None and math.isfinite(score.value)
    document = {**asdict(score), "value": score.value if finite else None}
    document["checksum"] = content_checksum(document)
    write_atomically(folder / SCORE_FILE, json.dumps(document, indent=1).encode() + b"\n")


def passed_over(run: Path) -> str:
    """Return why a run's averaged model is not taken by default, in words; "": it is, or there is none.

    Raises CheckpointError: its score is damaged.
    """
    path = run / AVERAGED / SCORE_FILE
    try:
        document = parse_json(read_bounded(path, error=CheckpointError), str(path), error=CheckpointError)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        refuse_passing(path, error)
        raise CheckpointError(f"{path}: {error.strerror}") from None
    try:
        if not has_checksum(document):
            raise ValueError
        score = AverageScore(*(document[key] for key in ("metric", "value", "rival", "rival_value")))
        return f"{AVERAGED}/ is worse: {score.said()}; `--which {AVERAGED}` takes it" if score.worse else ""
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{path}: damaged; name the weights to take (`--which {AVERAGED}`, `--which best`), or remove the file, "
            f"and {AVERAGED}/ is taken whatever its score"
        ) from None
