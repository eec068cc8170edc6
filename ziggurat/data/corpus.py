"""The store: prepared pairs on disk, with their vocabularies and a manifest.

store/
manifest.json               written last: a folder without it is no store
joint.spm | source.spm target.spm | *.vocab, vocabulary.json
train-*, dev-*              see `ziggurat.data.table`; development pairs always have text
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ziggurat.data.files import fingerprint
from ziggurat.data.folder_kinds import folder_kind
from ziggurat.data.subword import load_tokenizers
from ziggurat.data.table import PairTable, TableWriter
from ziggurat.errors import DataError

__all__ = ["MANIFEST", "STORE_FORMAT", "PairTable", "Store", "TableWriter", "read_manifest"]

STORE_FORMAT = 1
"""Version of everything in the folder; another one is refused."""

MANIFEST = "manifest.json"
"""Name of the file that makes a folder a store."""


class Store:
    """A prepared data set. `Store.open(path)` checks that it is whole: format version, files and their sizes."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.fingerprint = str(manifest["fingerprint"])
        """Identity of the content (pairs, vocabularies, weights, tags): equal for equal data wherever it lies."""
        self.source, self.target = load_tokenizers(path)
        self.train = PairTable(path, "train", manifest["tables"]["train"], manifest["corpora"]["train"])
        dev = manifest["tables"].get("dev")
        self.dev = PairTable(path, "dev", dev, manifest["corpora"]["dev"]) if dev else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Reopen in another process instead of sending the mapped arrays there."""
        return Store.open, (str(self.path),)

    @classmethod
    def open(cls, path: Path | str) -> Store:
        """Open the store in folder `path`.

        Raises:
            DataError: no store, one of another format version, or one with missing or short files.
        """
        path = Path(path).expanduser()
        manifest = read_manifest(path)
        for name, entry in manifest["files"].items():
            try:
                size = (path / name).stat().st_size
            except OSError:
                raise DataError(f"{path / name}: missing; run `ziggurat prepare --force` again") from None
            if size != entry["bytes"]:
                raise DataError(
                    f"{path / name}: {size:,} bytes instead of {entry['bytes']:,}; run `ziggurat prepare --force` again"
                )
        return cls(path, manifest)

    def verify(self) -> None:
        """Read every file and compare its check sum.

        Raises:
            DataError: names the first damaged file.
        """
        for name, entry in self.manifest["files"].items():
            if fingerprint(self.path / name) != entry["xxh3_128"]:
                raise DataError(f"{self.path / name}: damaged (wrong check sum); run `ziggurat prepare --force` again")


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the store in folder `path`; refuse what is not a whole store of this format."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text("utf-8"))
        version = manifest["format"]
    except OSError:
        if kind := folder_kind(path):
            raise DataError(f"{path}: no store of `ziggurat prepare`, but {kind}") from None
        what = "an unfinished store" if path.is_dir() and any(path.glob("*.arrow")) else "no store"
        raise DataError(f"{path}: {what} (no {MANIFEST}); run `ziggurat prepare` first") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{file}: damaged; run `ziggurat prepare --force` again") from None
    if version != STORE_FORMAT:
        raise DataError(
            f"{path}: store format {version}, but this version of ziggurat reads {STORE_FORMAT}; "
            "run `ziggurat prepare --force` again"
        )
    return cast(dict[str, Any], manifest)
