"""Measures of a run after training, kept in its folder for reports: scores on test sets and decoding speed."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field, RootModel

from ziggurat.system.errors import DataError
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import Form, read_json

SCORES = "scores"
"""Folder of a run with a file for each test set, NAME.json, as `ziggurat evaluate RUN ... --json` prints it."""
SPEED_FILE = "speed.json"


class KeptScore(Form):
    """A score of a test set. Scores of unlike signatures must not be compared."""

    name: str
    """Name of the metric, such as `BLEU`."""
    value: float
    """From 0 to 100."""
    signature: str
    """The settings behind it."""


class DecodingSpeed(Form):
    """The speed of a run's model in translating a text. Speeds of unlike `how` must not be compared."""

    tokens_per_second: float = Field(gt=0)
    """Output tokens per second, median of the rounds."""
    rounds: int = Field(ge=1)
    """Number of times that the text was translated."""
    how: str
    """Text, search, machine and threads."""


class _Scores(RootModel[list[KeptScore]]):
    """Content of a file of scores."""


def read_scores(run: Path) -> dict[str, list[KeptScore]]:
    """Return the scores of each test set that the run keeps, by name of the test set.

    Raises DataError naming a file that is damaged or is not what `evaluate --json` prints.
    """
    remedy = "write it again by `ziggurat evaluate RUN --source FILE --reference FILE --json`, or remove it"
    files = sorted((run / SCORES).glob("*.json"))
    return {file.stem: read_json(file, _Scores, error=DataError, remedy=remedy).root for file in files}


def keep_speed(run: Path, speed: DecodingSpeed) -> None:
    """Write the decoding speed of a run, in place of an earlier one. Raises OSError."""
    write_atomically(run / SPEED_FILE, (json.dumps(speed.model_dump(), indent=1) + "\n").encode())


def read_speed(run: Path) -> DecodingSpeed | None:
    """Return the decoding speed that the run keeps, None if none was measured. Raises DataError for a damaged file."""
    try:
        return read_json(run / SPEED_FILE, DecodingSpeed, error=DataError, remedy="remove it and measure again")
    except FileNotFoundError:
        return None
