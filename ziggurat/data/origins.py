"""Where corpus files come from: a record beside them, written by `fetch` and kept by `prepare` in the store's manifest.

NAME.fetched.json   format, name, languages, pairs, parts (corpora with licence, addresses, checksums), files: name ->
                    {bytes, xxh3_128}, checksum (of all this)

A file that changed since it was fetched has no known origin of its own; where the other side is as it was, the licence
stays, and what changed is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from ziggurat.system.compressed import compression_of
from ziggurat.system.errors import DataError, ZigguratError
from ziggurat.system.files import content_checksum, has_checksum, write_atomically
from ziggurat.system.small_files import Form, parse_json, read_bounded, shaped

ORIGIN_FORMAT = 1
_ENDING = ".fetched.json"


class FileOrigin(Form):
    """A file that was fetched."""

    url: str
    came_from: str | None = None
    """The address or path that it came from, where that is another."""
    bytes: int = Field(ge=0)
    sha256: str


class PartOrigin(Form):
    """A corpus in a file, with its licence."""

    name: str
    title: str
    licence: str
    terms: str | None = None
    pairs: int = Field(ge=0)
    skipped: int = Field(ge=0)
    files: list[FileOrigin]


class _File(Form):
    bytes: int = Field(ge=0)
    xxh3_128: str


class Origin(Form):
    """Form of a record."""

    format: int
    name: str
    languages: list[str]
    pairs: int = Field(ge=0)
    parts: list[PartOrigin]
    files: dict[str, _File]


def set_name(path: Path) -> str:
    """Return what the files of both sides are called without language and compression: `train` of `train.de.zst`."""
    plain = path.with_suffix("") if compression_of(path) else path
    return plain.with_suffix("").name


def record_of(path: Path) -> Path:
    """Return the place of the record of a corpus file."""
    return path.with_name(f"{set_name(path)}{_ENDING}")


def write_origin(record: Path, content: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a record; `files` has length and fingerprint of each file by its name, `content` is the rest of it."""
    document: dict[str, Any] = {"format": ORIGIN_FORMAT, **content, "files": files}
    document["checksum"] = content_checksum(document)
    write_atomically(record, json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n")


def read_origin(record: Path) -> Origin | None:
    """Return the content of a record; None where there is none, or another version's. Raises DataError for damage."""
    try:
        document = parse_json(
            read_bounded(record, 1 << 24), str(record), remedy="fetch the corpus again with `--force`"
        )
    except FileNotFoundError:
        return None
    if not isinstance(document, dict) or not has_checksum(document):
        raise DataError(f"{record}: damaged; fetch the corpus again with `--force`")
    return shaped(document, Origin, str(record)) if document.get("format") == ORIGIN_FORMAT else None


def origins_of(files: Sequence[Path], taken: Callable[[Path], str]) -> list[dict[str, Any]]:
    """Return the parts of the corpora in `files` as the manifest of a store keeps them, each once.

    `taken` gives the fingerprint of a file. Where one side is no longer that of its record and the other is, the parts
    name it under `changed`. A record none of whose files is as it was adds nothing, and a damaged one neither: that
    nobody knows the origin is no fault of the text.
    """
    records: dict[Path, tuple[Origin, dict[Path, bool]]] = {}
    for path in files:
        try:
            origin = read_origin(record_of(path))
        except (ZigguratError, OSError):
            continue
        if origin is not None and path.name in origin.files:
            same = taken(path) == origin.files[path.name].xxh3_128
            records.setdefault(record_of(path), (origin, {}))[1][path] = same
    found: dict[str, dict[str, Any]] = {}
    for origin, same_of in records.values():
        changed = [path.name for path, same in same_of.items() if not same]
        for part in origin.parts if len(changed) < len(same_of) else []:
            kept = part.model_dump(mode="json", exclude_none=True, exclude={"skipped", "pairs"})
            entry = found.setdefault(part.name, kept)
            if changed:
                entry["changed"] = [*entry.get("changed", []), *changed]
    return list(found.values())
