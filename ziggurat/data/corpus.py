"""The store: prepared pairs on disk, with their vocabularies and a manifest.

store/
manifest.json               written last: a folder without it is not a store
joint.spm | source.spm target.spm | *.vocab, vocabulary.json
train-*, dev-*              see `ziggurat.data.table`; development pairs always have text
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ziggurat.data.subword import load_tokenizers
from ziggurat.data.table import PairTable, refuse_damaged, refuse_store
from ziggurat.system.errors import DataError, Remedy, other_format
from ziggurat.system.files import MANIFEST, folder_kind, has_checksum, is_intact
from ziggurat.system.small_files import JsonForm, check_regular, parse_json, read_bounded, shaped
from ziggurat.system.staging import recover

STORE_FORMAT = 1
"""STORE_FORMAT is the version of all files in the folder; others are refused."""

_SAMPLE = 20_000  # maximum number of pairs read for word frequencies


class Store:
    """A prepared data set. `Store.open(path)` compares its files with their checksums before they are used."""

    def __init__(self, path: Path, manifest: Mapping[str, Any], *, verified: bool = False) -> None:
        """`verified`: every file has been compared with its checksum; otherwise training pairs' files have not."""
        self.path = path
        self.manifest = manifest
        self.fingerprint = str(manifest["fingerprint"])
        """Identity of the content (pairs, vocabularies, weights, tags), independent of the folder's path."""
        self.source, self.target = load_tokenizers(path)
        tables, corpora = manifest["tables"], manifest["corpora"]
        checksums = {} if verified else {name: str(entry["xxh3_128"]) for name, entry in manifest["files"].items()}

        def table(split: str, known: Mapping[str, str]) -> PairTable:
            sizes = self.source.size, self.target.size
            return PairTable(path, split, tables[split], corpora[split], checksums=known, vocabulary=sizes)

        self.train = table("train", checksums)
        self.dev = table("dev", {}) if tables.get("dev") else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a path: another process maps the files itself. They are not verified a second time."""
        return _reopened, (str(self.path),)

    @classmethod
    def open(cls, path: Path | str) -> Store:
        """Open the store in folder `path`.

        All files except the training pairs are compared with their checksums now. Files of training pairs are compared
        before they are first parsed, or all in the background (ziggurat.data.store_checks.Verification). A process
        reads each file only once for this. Raises DataError if it is not a store, has another format version, or has
        missing or damaged files.
        """
        path = Path(path).expanduser()
        recover(path)
        manifest = read_manifest(path)
        try:
            later = {shard["file"] for shard in manifest["tables"]["train"]["shards"]}
            # All sizes before any content, to find a truncated or missing file without reading the others.
            for name, entry in manifest["files"].items():
                _check_size(path / name, entry["bytes"])
            for name in manifest["files"].keys() - later:
                _check_content(path / name, manifest["files"][name]["xxh3_128"])
            return cls(path, manifest)
        # Only possible in forged manifests: others contain their own checksum.
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
            raise refuse_damaged(path / MANIFEST, "not the description of a store") from None

    def verify(self) -> None:
        """Compare every file with its checksum.

        Raises DataError, which names the first damaged file.
        """
        for name, entry in self.manifest["files"].items():
            _check_content(self.path / name, entry["xxh3_128"])

    def dev_tags(self, rows: NDArray[np.int64]) -> list[str | None]:
        """Return the tags of pairs of the dev set, or None for no tag; `rows` are their indices, [pairs]."""
        assert self.dev is not None
        tags = [corpus["tag"] for corpus in self.manifest["corpora"]["dev"]]
        return [tags[number] for number in self.dev.corpora[rows]]


def unigram_entropy(store: Store, *, on_dev: bool = False) -> float:
    """Return the loss in nats of a model that knows the frequencies of target tokens, end-of-sentence included.

    The frequencies are those of the training pairs. The loss is on these, and so is their entropy, or `on_dev`. At most
    20,000 randomly chosen pairs are used.
    """
    known = _target_counts(store.train, store.target.size)
    if not on_dev:
        shares = known[known > 0] / known.sum()
        return float(-(shares * np.log(shares)).sum())
    assert store.dev is not None
    text = _target_counts(store.dev, store.target.size)
    shares = (known + 1) / (known.sum() + len(known))  # unseen tokens also get some probability
    return float(-(text / text.sum() * np.log(shares)).sum())


def _target_counts(table: PairTable, size: int) -> NDArray[np.int64]:
    """Return the number of occurrences of each target token, [vocabulary + 1]; the last is end-of-sentence."""
    pairs = np.arange(min(len(table), _SAMPLE))
    if len(table) > _SAMPLE:
        pairs = np.sort(np.random.Generator(np.random.PCG64(0)).choice(len(table), _SAMPLE, replace=False))
    _, targets = table.pairs(pairs)
    counts = np.bincount(np.concatenate([np.asarray(ids) for ids in targets]), minlength=size)
    return np.append(counts, len(pairs))


def _reopened(path: str) -> Store:
    """Open a store that was verified by the process that pickled it."""
    return Store(Path(path), read_manifest(Path(path)), verified=True)


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except OSError:
        raise refuse_store(path, "missing") from None
    if size != expected:
        check_regular(path)
        raise refuse_store(path, f"{size:,} bytes instead of {expected:,}")


def _check_content(path: Path, expected: str) -> None:
    if not is_intact(path, expected):
        raise refuse_damaged(path, "wrong checksum")


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the store in folder `path`, checked against its own checksum and its form.

    Raises DataError if it is not a store, is unfinished, has a damaged manifest, or has another format version.
    """
    file = path / MANIFEST
    try:
        manifest = parse_json(read_bounded(file), str(file), remedy=Remedy.PREPARE_ANEW)
        version = manifest["format"]
        whole = has_checksum(manifest)
    except FileNotFoundError:
        if kind := folder_kind(path):
            raise DataError(f"{path}: not a store of `ziggurat prepare`, but {kind}") from None
        what = "an unfinished store" if path.is_dir() and any(path.glob("*.arrow")) else "no store"
        # A resumed run, for example, keeps a relative path that was given in another folder.
        place = "" if path.is_absolute() else f" in {path.absolute()}; give its path, `data.store=FOLDER`, or"
        raise DataError(f"{path}: {what} (no {MANIFEST}){place or ';'} run `ziggurat prepare` first") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise refuse_store(file, "damaged") from None
    if version != STORE_FORMAT:
        raise DataError(other_format(path, version, STORE_FORMAT, Remedy.PREPARE_ANEW))
    if not whole:
        raise refuse_store(file, "damaged")
    shaped(manifest, _Manifest, f"{file}: damaged", remedy=Remedy.PREPARE_ANEW)
    return cast(dict[str, Any], manifest)


_Natural = Annotated[int, Field(ge=0, le=1 << 62)]
_Entry = TypeVar("_Entry")
_Name = Annotated[str, Field(pattern=r"^[^/\x00]+$")]


class _File(JsonForm):
    bytes: _Natural
    xxh3_128: str


class _Shard(JsonForm):
    file: _Name
    pairs: _Natural


class _Table(JsonForm):
    pairs: _Natural
    source_pieces: _Natural
    target_pieces: _Natural
    has_text: bool
    has_links: bool = False
    shards: list[_Shard]


class _Part(JsonForm):
    name: str
    licence: str
    changed: list[str] = Field(default_factory=list)


class _Corpus(JsonForm):
    name: str
    weight: Annotated[float, Field(gt=0)]
    read: _Natural
    kept: _Natural
    dropped: dict[str, _Natural]
    carriage_returns: _Natural
    byte_order_marks: _Natural
    short_rows: _Natural = 0
    origin: list[_Part] = Field(default_factory=list)


class _Tables(JsonForm):
    train: _Table
    dev: _Table | None = None


class _Corpora(JsonForm, Generic[_Entry]):
    train: list[_Entry]
    dev: list[_Entry]


class _Vocabulary(JsonForm):
    source: _Natural
    target: _Natural


class _Manifest(JsonForm):
    """Form of `manifest.json`: the keys that readers rely on."""

    fingerprint: str
    files: dict[_Name, _File]
    tables: _Tables
    corpora: _Corpora[_Corpus]
    vocabulary: _Vocabulary
    config: _Corpora[dict[str, Any]]
    prepared_from: _Corpora[dict[str, Any]]

    @model_validator(mode="after")
    def _equally_many(self) -> Self:
        for split in ("train", "dev"):
            counts = {len(getattr(part, split)) for part in (self.corpora, self.config, self.prepared_from)}
            if len(counts) > 1:
                raise ValueError(f"unlike numbers of corpora for {split}")
        return self
