"""Lexical shortlists: for each source piece the target pieces that get a score, estimated from a store by IBM Model 1.

The estimate is ziggurat.data.hmm's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ziggurat.data.hmm import Row, translation_table
from ziggurat.data.subword import Tokenizer
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import arrays_content, read_arrays

if TYPE_CHECKING:  # it imports Arrow, which would delay translation without a shortlist
    from ziggurat.data.corpus import Store


_FORMAT = "ziggurat-shortlist-1"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class ShortlistTable:
    """Table of the target ids that each source id allows, for S source ids and T target ids."""

    candidates: NDArray[np.int32]
    """[S, k] target ids of each source id; shorter rows are padded with T."""
    always: NDArray[np.int32]
    vocabularies: tuple[str, str]
    """Fingerprints of the two vocabularies."""


def estimate_shortlist(
    store: Store, *, pairs: int = 200_000, best: int = 100, frequent: int = 100, floor: float = 1e-4
) -> ShortlistTable:
    """Return a shortlist estimated from training pairs by IBM Model 1, from at most `pairs`, evenly spread over the
    store.

    A source piece allows its `best` likeliest target pieces that have a probability of at least `floor`, and the target
    piece with the same spelling. Every sentence allows the `frequent` most frequent target pieces, end-of-sentence, the
    unknown piece, and pieces that stand for bytes. Memory grows with `pairs`. Raises DataError if there are none.
    """
    source, target = store.source, store.target
    if not len(store.train):
        raise DataError(f"{store.path}: no training pairs to estimate a shortlist from")
    number = min(pairs, len(store.train))
    sources, targets = store.train.pairs(np.arange(number) * len(store.train) // number)
    rows = translation_table(sources, targets, source.size, target.size)[:-1]
    counts = np.bincount(np.concatenate([np.zeros(0, np.int64), *targets]), minlength=target.size)
    # A stable sort, so that ties go to the smaller id on every machine.
    most = np.argsort(-counts, kind="stable")[:frequent]
    special = [i for i, piece in enumerate(target.pieces(range(target.size))) if _BYTE.fullmatch(piece)]
    always = {target.eos, target.unk, *special, *most[counts[most] > 0].tolist()}
    return ShortlistTable(
        _candidates(rows, _copies(source, target), target.size, best, floor),
        np.array(sorted(always), np.int32),
        vocabulary_fingerprints(source, target),
    )


def vocabulary_fingerprints(source: Tokenizer, target: Tokenizer) -> tuple[str, str]:
    """Return hashes of two vocabularies, in the form of `ShortlistTable.vocabularies`."""
    return _fingerprint(source), _fingerprint(target)


def shortlist_bytes(table: ShortlistTable) -> bytes:
    """Return the content of a shortlist's file, a safetensors file."""
    source, target = table.vocabularies
    metadata = {"format": _FORMAT, "source_vocabulary": source, "target_vocabulary": target}
    return arrays_content({"candidates": table.candidates, "always": table.always}, metadata)


def write_shortlist(path: Path | str, table: ShortlistTable) -> None:
    """Write `table` to the file `path`, whole or not at all."""
    write_atomically(Path(path), shortlist_bytes(table))


def read_shortlist(path: Path | str, source: Tokenizer, target: Tokenizer) -> ShortlistTable:
    """Read the shortlist of a model with these vocabularies.

    Raises DataError if the file is missing, damaged or has another format, ConfigError for other vocabularies.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: no such file; this makes a shortlist: `ziggurat shortlist STORE -o {path}`")
    metadata, tensors = read_arrays(path, _FORMAT, "shortlist", "make it again")
    vocabularies = (metadata.get("source_vocabulary", ""), metadata.get("target_vocabulary", ""))
    table = ShortlistTable(tensors.get("candidates", _NOTHING), tensors.get("always", _NOTHING), vocabularies)
    for side, tokenizer, theirs in zip(("source", "target"), (source, target), vocabularies, strict=True):
        if _fingerprint(tokenizer) != theirs:
            raise ConfigError(
                f"{path}: this shortlist is for another {side} vocabulary than the model's; make one from the "
                "store that the model was trained on: `ziggurat shortlist STORE -o FILE`"
            )
    if not (_holds(table.candidates, 2, target.size) and _holds(table.always, 1, target.size - 1)):
        raise DataError(f"{path}: damaged (not tables of target ids); make it again")
    if len(table.candidates) != source.size:
        raise DataError(f"{path}: damaged ({len(table.candidates)} rows for {source.size} pieces); make it again")
    return table


def _copies(source: Tokenizer, target: Tokenizer) -> list[int]:
    """Return for each source id the target id with the same spelling, or the number of target ids."""
    ids = {piece: i for i, piece in enumerate(target.pieces(range(target.size)))}
    return [ids.get(piece, target.size) for piece in source.pieces(range(source.size))]


def _candidates(rows: list[Row], copies: list[int], filler: int, best: int, floor: float) -> NDArray[np.int32]:
    """Return [S, best + 1]: the copy of each source id, then the best ids of its row, likeliest first."""
    candidates = np.full((len(rows), best + 1), filler, np.int32)
    candidates[:, 0] = copies
    for piece, row in enumerate(rows):
        order = np.argsort(-row.probabilities, kind="stable")[:best]
        chosen = row.ids[order[row.probabilities[order] >= floor]]
        candidates[piece, 1 : 1 + len(chosen)] = chosen
    return candidates


_NOTHING = np.zeros((), np.int32)


def _holds(ids: NDArray[Any], dimensions: int, largest: int) -> bool:
    """Return True if `ids` is an int32 array with `dimensions` dimensions and ids from 0 to `largest`."""
    if ids.dtype != np.int32 or ids.ndim != dimensions:
        return False
    return not ids.size or (ids.min() >= 0 and ids.max() <= largest)


def _fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash that is equal if ids mean the same (ziggurat.data.subword.same_vocabulary)."""
    content = json.dumps([tokenizer.pieces(range(tokenizer.size)), sorted(tokenizer.tags.items())])
    return xxhash.xxh3_128_hexdigest(content.encode())
