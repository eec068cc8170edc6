"""Model folders as Firefox publishes them: file names, packed (`.gz`) or not, and `metadata.json`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from ziggurat.exchange.imported import read_file
from ziggurat.system.compressed import byte_blocks
from ziggurat.system.errors import DataError
from ziggurat.system.small_files import JsonForm, parse_json, shaped

FIREFOX_SEARCH: Mapping[str, Any] = {
    "beam-size": 1,
    "normalize": 1.0,
    "word-penalty": 0,
    "max-length-break": 128,
    "mini-batch-words": 1024,
    "workspace": 128,
    "max-length-factor": 2.0,
    "skip-cost": True,
    "cpu-threads": 0,
    "quiet": True,
    "quiet-translation": True,
    "alignment": "soft",
}
"""FIREFOX_SEARCH are the options with which Firefox runs every model, whatever files come with it."""

METADATA_FILE = "metadata.json"
"""METADATA_FILE holds the languages, and the size and checksum of the unpacked weights."""

_WEIGHTS = re.compile(r"model\.[^.]+(\.intgemm8|\.intgemm\.alphas)?\.bin(\.gz)?")
_LANGUAGE = r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,8})*"


class _Metadata(JsonForm):
    """The fields of metadata.json that are used here."""

    source: str | None = Field(default=None, alias="sourceLanguage", pattern=f"^{_LANGUAGE}$")
    target: str | None = Field(default=None, alias="targetLanguage", pattern=f"^{_LANGUAGE}$")
    hash: str | None = None
    size: int | None = Field(default=None, alias="byteSize")


def is_published(weights: Path) -> bool:
    """Return True for weights named like Firefox's, such as `model.deen.intgemm.alphas.bin.gz`."""
    return _WEIGHTS.fullmatch(weights.name) is not None


def packed_or_not(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match a pattern, and `.gz` files without an unpacked counterpart."""
    plain = sorted(folder.glob(pattern))
    return plain + [path for path in sorted(folder.glob(f"{pattern}.gz")) if path.with_suffix("") not in plain]


def published_vocabularies(folder: Path) -> tuple[Path, ...]:
    """Return the vocabularies, found by names such as `vocab.deen.spm`; empty if there are none."""
    for names in (("vocab.*.spm",), ("srcvocab.*.spm", "trgvocab.*.spm")):
        found = [packed_or_not(folder, name) for name in names]
        if all(len(files) == 1 for files in found):
            return tuple(files[0] for files in found)
    return ()


def published_languages(weights: Path) -> tuple[str, str] | None:
    """Return the languages that metadata.json next to published weights names; None if there is no such file.

    Raises DataError if the file is damaged or describes other weights.
    """
    path = weights.with_name(METADATA_FILE)
    if not is_published(weights) or not path.exists():
        return None
    said = shaped(parse_json(read_file(path), str(path)), _Metadata, str(path))
    size, found = 0, hashlib.sha256()
    for block in byte_blocks(weights):
        size += len(block)
        found.update(block)
    for what, wanted, got in (("bytes", said.size, size), ("sha256", said.hash, found.hexdigest())):
        if wanted is not None and wanted != got:
            raise DataError(
                f"{weights}: damaged, or belongs to another version: {path.name} says {what} {wanted}, it has {got}"
            )
    return None if said.source is None or said.target is None else (said.source, said.target)
