"""Checks of a store: is it intact, does it stay unchanged, was it prepared with this configuration?

`Verification` compares checksums in the background. `StoreWatch` and `InputWatch` notice files that change while in
use. `changed_since` determines from the `provenance` of a store whether and why it must be prepared again.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from ziggurat.config.data import DataConfig
from ziggurat.data.corpus import Store
from ziggurat.data.inputs import Corpus, Progress
from ziggurat.system.errors import ConfigError, DataError, Problem, Remedy, printable
from ziggurat.system.files import find_files, fingerprint


class Verification:
    """Comparison of a store's training pairs with their checksums, in a thread that starts now.

    Training may run meanwhile, but must not save weights before `wait` has returned without an error. Reading and
    hashing run outside Python's lock, at 2 to 10 GB per second from memory. The constructor waits up to `patience`
    seconds for it to end, which is enough for most stores. It raises DataError with the file if it finds damage by
    then.
    """

    def __init__(self, store: Store, patience: float = 1.0) -> None:
        self._shards = store.train.shards
        self._found: futures.Future[None] = futures.Future()
        for shard in self._shards:
            shard.checked_elsewhere = True
        threading.Thread(target=self._go, name="ziggurat-checksums", daemon=True).start()
        if futures.wait([self._found], patience).done:
            self.wait()

    def _go(self) -> None:
        try:
            for shard in self._shards:
                shard.verify()
        except BaseException as error:  # raised by `wait`
            self._found.set_exception(error)
        else:
            self._found.set_result(None)

    @property
    def done(self) -> bool:
        """True once the comparison has ended, with or without damage."""
        return self._found.done()

    @property
    def damaged(self) -> bool:
        """True once damage has been found."""
        return self.done and self.found_damage()

    def found_damage(self) -> bool:
        """Wait until everything is compared; return True if damage was found."""
        return self._found.exception() is not None

    def wait(self) -> None:
        """Return when everything is compared. Raises DataError naming the damaged file, with a remedy."""
        error = self._found.exception()
        if isinstance(error, DataError):
            raise DataError(
                f"{error}. Training has stopped, and no weights were saved that have seen these data; once the "
                "store is restored, `--resume` continues the run",
                named=[Remedy.RESUME, *error.names],
            )
        if error is not None:
            raise error


class StoreWatch:
    """Watch over the files of an open store: `check` compares their identities, at the cost of one `stat` per file.

    Replacing or removing a store (`prepare --force`) does not harm a process that has mapped the old files, but new
    content in the same file does. Raises DataError if a file of `store`, which was just opened, is already gone.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        try:
            self._seen = {name: _state(os.stat(store.path / name)) for name in store.manifest["files"]}
        except OSError as error:
            raise DataError(f"{error.filename}: {error.strerror}, just after the store was opened") from None

    def check(self) -> str | None:
        """Return a message if the store was replaced or removed; None if it is unchanged.

        Raises DataError naming a file whose content was changed in place.
        """
        for name, seen in self._seen.items():
            path = self.store.path / name
            try:
                now = _state(os.stat(path))
            except OSError:
                return f"{path} is gone"
            if now == seen:
                continue
            if now[0][:2] != seen[0][:2]:  # another inode: this process's mapping keeps the old file alive
                return f"{path} is another file now"
            if fingerprint(path) != self.store.manifest["files"][name]["xxh3_128"]:
                raise DataError(
                    f"{path}: changed while it was being read, so updates since the last checkpoint may have seen "
                    "damaged data; restore the store, then `--resume`",
                    named=[Remedy.RESUME],
                )
            self._seen[name] = now
        return None


class InputWatch:
    """Watch over input files: `check` compares them with their state when fingerprints were taken.

    `prepare` reads them several times and records the fingerprints of the first time; a job reads them for hours.
    `take` computes fingerprints, and may be replaced by a function that caches those of unchanged files.
    """

    def __init__(self, take: Callable[[Path], str] = fingerprint) -> None:
        self._take = take
        self._seen: dict[Path, tuple[tuple[tuple[int, int, int, int], int], str]] = {}

    def fingerprint(self, path: Path) -> str:
        """Return the file's fingerprint, and watch the file from now on; raises as `fingerprint` does."""
        try:
            status = os.stat(path)  # before reading, so that a change while reading is noticed
        except OSError:
            return self._take(path)
        found = self._take(path)
        self._seen.setdefault(path, (_state(status), found))
        return found

    def check(self, way_out: str = Remedy.PREPARE) -> None:
        """Raise DataError, which ends with `way_out`, if a file may have had other content at any time since."""
        for path, (seen, content) in self._seen.items():
            try:
                now = _state(os.stat(path))
            except OSError:
                now = None
            if now is None or now[0] != seen[0] or (now[1] != seen[1] and self._take(path) != content):
                raise DataError(Problem("", f"{path}: changed while being read", way_out))


def _state(status: os.stat_result) -> tuple[tuple[int, int, int, int], int]:
    """Return ((device, inode, size, mtime), ctime) of a file.

    An edit can be hidden by resetting the mtime, but not the ctime. Changes of permissions or links alter the ctime as
    well, so where only that differs, the content decides.
    """
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns), status.st_ctime_ns


_PLACES = {"source", "target", "path", "name", "format", "alignment"}
"""Keys of a corpus with the paths of its files or its name."""
_OF_TRAINING = {"store", "sampling_temperature", "stages", "modifiers"}
_MODEL_FILES = ("source_model", "target_model", "source_vocabulary", "target_vocabulary")


def provenance(
    config: DataConfig, corpora: Sequence[Corpus], progress: Progress, fingerprint: Callable[[Path], str] = fingerprint
) -> dict[str, Any]:
    """Return everything that the pairs and vocabularies of a store depend on: settings, and files by their content.

    Left out are paths and names, and settings that only training reads (weights, sampling temperature, stages,
    modifiers, strength of regularisation).
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
        if corpus.alignments is not None:
            entry["alignment"] = {"files": [fingerprint(path) for path in corpus.alignments.paths]}
        for score, column in zip(entry.get("scores", ()), corpus.scores, strict=True):
            if score["external"]:
                score["files"] = [fingerprint(path) for path in column.paths]
        entry["files"] = [[fingerprint(path) for path in part] for part in corpus.reader.files]
        progress("fingerprint", number + 1, len(corpora))
    if config.held_out:
        paths = [path for key, name in enumerate(config.held_out) for path in find_files(name, f"data.held_out.{key}")]
        settings["held_out"] = {"files": [fingerprint(path) for path in paths]}
    return settings


def _files_of(path: str, key: str) -> list[Path]:
    """Return the model or vocabulary files at `path`; for a folder, the vocabularies in it."""
    if not (folder := Path(path).expanduser()).is_dir():
        return find_files(path, key)
    return [file for pattern in ("vocabulary.json", "*.spm", "*.vocab") for file in sorted(folder.glob(pattern))]


def unlike_store(config: DataConfig, manifest: Mapping[str, Any]) -> list[str]:
    """Return the settings, by dotted name, in which `config` differs from those of a store.

    It compares the settings in `provenance`, without the content of files, since it reads no input file, but with
    weights, which the store keeps for training. Corpora are compared only if `config` names some.
    """
    old, new = (_settings(data) for data in (_full(manifest), config.model_dump(mode="json")))
    if not config.train:
        for settings in (old, new):
            settings["train"], settings["dev"] = [], []
            settings.pop("alignment", None)  # this key says how the corpora are aligned
    return differences(old, new)


def changed_since(manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return the differences of a store's `provenance` from `settings`, that of now.

    A key that did not exist when the store was written had what is now its default.
    """
    return differences(_extended(manifest["prepared_from"], manifest["config"], _full(manifest)), settings)


def _full(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a store with the defaults of keys that it lacks."""
    try:
        return DataConfig.model_validate(manifest["config"]).model_dump(mode="json")
    except (ValidationError, ConfigError):  # of a version that allowed other values
        return cast("Mapping[str, Any]", manifest["config"])


def _extended(old: Any, raw: Any, full: Any) -> Any:
    """Return `old` with the entries that `full` has but `raw` lacks, at any depth."""
    if isinstance(old, Mapping) and isinstance(raw, Mapping):
        added = {key: value for key, value in full.items() if key not in raw}
        return added | {key: _extended(one, raw.get(key), full.get(key)) for key, one in old.items()}
    if isinstance(old, list) and isinstance(raw, list) and len(old) == len(raw):
        return [_extended(*each) for each in zip(old, raw, full, strict=True)]
    return old


def other_files(config: DataConfig, manifest: Mapping[str, Any]) -> list[str]:
    """Return the corpora's paths, by dotted name, in which `config` differs from those of a store.

    Two spellings of one path are equal. Corpora are compared only if both name the same number.
    """

    def absolute(path: str) -> str:  # as find_files takes it
        return os.path.abspath(os.path.expanduser(path))

    found = []
    for split in ("train", "dev"):
        old, new = manifest["config"][split], config.model_dump(mode="json")[split]
        for number, pair in enumerate(zip(old, new, strict=True) if len(old) == len(new) else ()):
            for key in ("source", "target", "path", "alignment"):
                before, after = (corpus[key] for corpus in pair)
                if before and after and absolute(before) != absolute(after):
                    found.append(f"data.{split}.{number}.{key} ({printable(before, 80)} -> {printable(after, 80)})")
    return found


def _settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dumped `data` section without paths, names and settings that only training reads, except weights."""
    settings = {key: value for key, value in data.items() if key not in _OF_TRAINING}
    # If nothing is aligned, the settings of alignment have no effect.
    aligned = data["alignment"]["compute"] != "none"
    if not aligned and not any(corpus["alignment"] for split in ("train", "dev") for corpus in data[split]):
        del settings["alignment"]
    settings["held_out"] = len(data["held_out"])
    settings["subword"] = {key: value for key, value in data["subword"].items() if key not in _MODEL_FILES}
    settings["subword"]["regularisation"] = data["subword"]["regularisation"] is not None
    for split in ("train", "dev"):
        settings[split] = [
            {key: value for key, value in corpus.items() if key not in _PLACES}
            | {"alignment": corpus["alignment"] is not None}
            | {"scores": [_score_settings(score) for score in corpus["scores"]]}
            for corpus in data[split]
        ]
    return settings


def _score_settings(score: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in score.items() if key != "path"} | {"external": score["path"] is not None}


def differences(old: Any, new: Any, path: str = "data") -> list[str]:
    """Return the dotted names of the differences, with both values, truncated if long."""
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
