"""Two or more systems compared on one test set: scores, tests of significance, and where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ziggurat.errors import DataError
from ziggurat.evaluation.findings import BucketTable, NgramTable, OutputCount, Scores, SentenceTable, SystemNotes

__all__ = ["FORMAT", "Comparison", "System", "comparison_from_json"]

FORMAT = 1
"""Version of the JSON form; another one is not read."""


@dataclass(frozen=True)
class System:
    """A system to compare, with its translations of the test set."""

    name: str
    outputs: Sequence[Sequence[str]]
    """One list of lines per seed, at least one."""
    origins: Sequence[str] = field(default=())
    """Where each output comes from; may be left out."""


@dataclass(frozen=True)
class Comparison:
    """What the comparison of systems found. Tables that need what was not given are left out; `notes` says which."""

    systems: tuple[SystemNotes, ...]
    sentences: int
    """Lines of the test set."""
    references: int
    """Reference translations of each line; words and n-grams are compared with the first."""
    words: str
    """sacreBLEU's name of the tokenizer that makes the words of all tables but `scores`."""
    scores: tuple[Scores, ...]
    counts: tuple[OutputCount, ...]
    buckets: tuple[BucketTable, ...]
    sentence_tables: tuple[SentenceTable, ...]
    """One per pair of systems."""
    ngrams: tuple[NgramTable, ...]
    """One per pair of systems."""
    notes: tuple[str, ...]
    """What was left out, and how to have it."""

    def as_record(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return {"format": FORMAT, **asdict(self)}


def comparison_from_json(text: str | bytes, name: str) -> Comparison:
    """Return the comparison whose record `text` is; `name` (a file's, say) is for the message.

    Raises DataError when it is not one of this version.
    """
    try:
        record = _RECORD.validate_json(text)
        found = record.pop("format", None)
        if found != FORMAT:
            raise DataError(f"{name}: a comparison of format {found}, expected {FORMAT}; compare again")
        return _COMPARISON.validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise DataError(
            f"{name}: no comparison as `ziggurat evaluate --compare --json` prints it: {where}: {first['msg']}"
        ) from None


_RECORD: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
_COMPARISON = TypeAdapter(Comparison)
