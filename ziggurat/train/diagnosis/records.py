"""Records of measures: the file `diagnostics/depth.jsonl` of a run, one JSON object per line.

{"format": 1, "update": 200, "time": 1790000000.0, "layers": {"encoder": 18, "decoder": 18}, "values": {...}}

`values` are the results of ziggurat.train.diagnosis.probe.measure (docs/diagnosis.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from ziggurat.system.errors import DataError, other_format
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import built, json_safe, parse_json, read_json_lines

RECORD_FORMAT = 1
"""Version of the records."""

DEPTH_FILE = Path("diagnostics") / "depth.jsonl"
"""File of the records in a run's folder."""


_Number = float | None
_FORMS: dict[str, TypeAdapter[Any]] = {
    "gradient_batches": TypeAdapter(Annotated[int, Field(ge=1)]),
    **dict.fromkeys(("nll", "source_dependence"), TypeAdapter(_Number)),
    **dict.fromkeys(
        ("gradient_norm", "scaled_gradient_norm", "update_ratio"), TypeAdapter(dict[str, _Number | list[_Number]])
    ),
    **dict.fromkeys(("r", "effective_depth"), TypeAdapter(dict[str, _Number])),
    **dict.fromkeys(
        (
            "beta_ln",
            "beta_rc",
            "beta",
            "variance",
            "output_change",
            "attention_entropy",
            "pruning_curve",
            "pruning_bleu",
            "logit_lens",
        ),
        TypeAdapter(dict[str, list[_Number]]),
    ),
    **dict.fromkeys(
        (
            "residual_dependency",
            "history_weights",
            "angular_distance",
            "causal_score",
            "permutation_score",
            "loss_without",
        ),
        TypeAdapter(dict[str, list[list[_Number]]]),
    ),
    **dict.fromkeys(("transparent_weights", "similarity"), TypeAdapter(list[list[_Number]])),
    **dict.fromkeys(("embedding_similarity", "adjacent_similarity", "inter_similarity"), TypeAdapter(list[_Number])),
}
"""Form of every measure; a record may contain other values, too."""


@dataclass(frozen=True)
class Record:
    """Measures at one moment of training.

    Attributes:
        update: updates done before it.
        time: seconds since 1970.
        layers: layers of `encoder` and `decoder` at that moment; a growing run has several depths.
        values: measures by name; None for a number that was not finite, or has no meaning there.
    """

    update: Annotated[int, Field(ge=0, le=10**12)]
    time: float
    layers: dict[str, Annotated[int, Field(ge=0, le=1 << 20)]]
    values: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the record as it is written, with None for numbers that are not finite."""
        return {"format": RECORD_FORMAT, **asdict(self), "values": json_safe(self.values)}

    def line(self) -> str:
        """Return the record as one line of the file, with its line feed."""
        return json.dumps(self.as_dict(), allow_nan=False) + "\n"


def read_records(run: Path) -> list[Record]:
    """Return the records of a run in the order of updates; of two records of one update, the later one.

    Returns none if there is no file. A last line that a kill cut off is left out. Raises DataError, with file and line,
    for a damaged record, or one of another format.
    """
    found = {record.update: record for record in read_json_lines(run / DEPTH_FILE, _record, "a record of measures")}
    return [found[update] for update in sorted(found)]


def _record(document: Any, place: str) -> Record:
    version = document.pop("format")
    if version != RECORD_FORMAT:
        raise DataError(other_format(place, version, RECORD_FORMAT, "remove the file"))
    return _checked(document)


def _checked(document: dict[str, Any]) -> Record:
    """Return a record. Raises TypeError or ValueError if it has another form."""
    record = built(Record, document)
    for name, form in _FORMS.items():
        if name in record.values:
            form.validate_python(record.values[name])
    return record


def write_records(run: Path, records: Iterable[Record]) -> Path:
    """Replace the records of a run, atomically; return the file. Raises OSError."""
    path = run / DEPTH_FILE
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, "".join(record.line() for record in records).encode())
    return path


def cut_records(run: Path, update: int) -> None:
    """Remove the records after `update`, from which a run starts again, and damaged lines; at 0 remove all.

    Raises OSError.
    """
    path = run / DEPTH_FILE
    if path.is_file():
        lines = path.read_bytes().splitlines(keepends=True)
        write_atomically(path, b"".join(line for line in lines if update and _is_until(line, update)))


def _is_until(line: bytes, update: int) -> bool:
    try:
        return line.endswith(b"\n") and bool(parse_json(line, "")["update"] <= update)
    except (DataError, KeyError, TypeError):
        return False
