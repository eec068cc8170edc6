"""What a store was made from: enough to tell whether it has to be made again, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ziggurat.config.data import DataConfig
from ziggurat.data.files import find_files, fingerprint
from ziggurat.data.passes import Corpus, Progress
from ziggurat.errors import printable

__all__ = ["differences", "other_files", "provenance", "unlike_store"]


_PLACES = {"source", "target", "path", "name", "format"}
"""Keys of a corpus that say where it lies or what it is called."""
_MODEL_FILES = ("source_model", "target_model", "source_vocabulary", "target_vocabulary")


def provenance(
    config: DataConfig, corpora: Sequence[Corpus], progress: Progress, fingerprint: Callable[[Path], str] = fingerprint
) -> dict[str, Any]:
    """Return what the pairs and vocabularies of a store depend on: settings, and files by their content.

    Left out: where files lie, what they are called, and what only training reads (weights, sampling
    temperature, the strength of regularisation).
    """
    settings = _settings(config.model_dump(mode="json"))
    for name in _MODEL_FILES:
        path = getattr(config.subword, name)
        found = None if path is None else [fingerprint(p) for p in _files_of(path, f"data.subword.{name}")]
        settings["subword"][name] = found
    entries = {split: iter(settings[split]) for split in ("train", "dev")}
    for number, corpus in enumerate(corpora):
        entry = next(entries[corpus.split])
        del entry["weight"]
        entry["format"] = corpus.reader.kind
        entry["files"] = [[fingerprint(path) for path in part] for part in corpus.reader.files]
        progress("fingerprint", number + 1, len(corpora))
    return settings


def _files_of(path: str, key: str) -> list[Path]:
    """Return the model or vocabulary files that `path` names; of a folder, the vocabularies in it."""
    if not (folder := Path(path).expanduser()).is_dir():
        return find_files(path, key)
    return [file for pattern in ("vocabulary.json", "*.spm", "*.vocab") for file in sorted(folder.glob(pattern))]


def unlike_store(config: DataConfig, manifest: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of the settings in which `config` differs from those that a store was made with.

    Reads no input file, so what is left out in `provenance` is left out here, and files too; weights, which the
    store keeps for training, are compared. Corpora are compared only when `config` names some.
    """
    old, new = (_settings(data) for data in (manifest["config"], config.model_dump(mode="json")))
    if not config.train:
        old["train"] = old["dev"] = new["train"] = new["dev"] = []
    return differences(old, new)


def other_files(config: DataConfig, manifest: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of the corpora's paths in which `config` differs from those a store was made from.

    One path written in two ways is the same. Corpora are compared where both name equally many.
    """
    found = []
    for split in ("train", "dev"):
        old, new = manifest["config"][split], config.model_dump(mode="json")[split]
        for number, pair in enumerate(zip(old, new, strict=True) if len(old) == len(new) else ()):
            for key in ("source", "target", "path"):
                before, after = (corpus[key] for corpus in pair)
                if before and after and os.path.abspath(before) != os.path.abspath(after):
                    found.append(f"data.{split}.{number}.{key} ({printable(before, 80)} -> {printable(after, 80)})")
    return found


def _settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dumped `data` section without places, names and what only training reads; weights stay."""
    kept = {key: value for key, value in data.items() if key not in ("store", "sampling_temperature")}
    kept["subword"] = {key: value for key, value in data["subword"].items() if key not in _MODEL_FILES}
    kept["subword"]["regularisation"] = data["subword"]["regularisation"] is not None
    for split in ("train", "dev"):
        kept[split] = [{k: v for k, v in corpus.items() if k not in _PLACES} for corpus in data[split]]
    return kept


def differences(old: Any, new: Any, path: str = "data") -> list[str]:
    """Return the dotted names of what differs, with both values where they are short."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [*old, *(name for name in new if name not in old)]
        return [found for name in names for found in differences(old.get(name), new.get(name), f"{path}.{name}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and not path.endswith(".files"):
        return [
            found
            for number, pair in enumerate(zip(old, new, strict=True))
            for found in differences(*pair, f"{path}.{number}")
        ]
    if old == new:
        return []
    if path in ("data.train", "data.dev"):
        return [f"{path} ({len(old)} -> {len(new)} corpora)"]
    if path.endswith((".files", "_model", "_vocabulary")):
        return [f"{path}: other content"]
    return [f"{path} ({printable(json.dumps(old), 40)} -> {printable(json.dumps(new), 40)})"]
