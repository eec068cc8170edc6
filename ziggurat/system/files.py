"""Files: finding them by pattern, atomic writes, checksums, and recognising folders of the wrong kind.

Checksums of a folder's files are written last. Every reader compares them before it parses a file, because third-party
parsers may crash on damaged files or silently read wrong numbers from them:

    checksums.json   format, again (how to write the folder again), files: name -> {bytes, xxh3_128}, config (content
                     of config.yaml, so that an edit can be named), checksum (of all this)

A folder without checksums.json, written by another program, is opened unchecked.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from re import Pattern
from typing import Any, BinaryIO

import xxhash
from yaml import YAMLError

from ziggurat.system.compressed import compression_of
from ziggurat.system.errors import (
    CheckpointError,
    DataError,
    ZigguratError,
    other_format,
    printable,
    refuse_passing,
    written_whole,
)
from ziggurat.system.small_files import check_regular, parse_json, read_bounded
from ziggurat.system.staging import make_temporary, remove_dead, sync_folder
from ziggurat.system.yaml_text import MAX_YAML_BYTES, changed, parse_yaml, shown


def find_files(pattern: str, key: str) -> list[Path]:
    """Return the files that match `pattern` (a path or a glob, `**` included), sorted.

    `key` is the pattern's configuration key, for messages. Raises DataError if there is no file, if one is not a
    regular file, or if a file exists both compressed and uncompressed, since it would be read twice.
    """
    plain = Path(pattern).expanduser()
    if plain.exists() or not glob.has_magic(pattern):
        found = [plain]
    else:
        found = sorted(Path(name) for name in glob.glob(str(plain), recursive=True) if os.path.isfile(name))
        if not found:
            raise DataError(f"{key}: no file matches {pattern!r} (looked in {Path.cwd()})", key=key)
    together = set(found)
    for path in found:
        if not path.exists():
            raise DataError(f"{key}: no such file: {path} (relative paths start from {Path.cwd()})", key=key)
        if not path.is_file():
            raise DataError(f"{key}: {path} is not a regular file; corpora are read more than once", key=key)
        if compression_of(path) and (unpacked := path.with_suffix("")) in together:
            raise DataError(
                f"{key}: {pattern!r} names {path} and {unpacked}; remove one, or narrow the pattern", key=key
            )
    return found


def fingerprint(path: Path) -> str:
    """Return the 128-bit xxHash of the file's bytes in hexadecimal (an identity, not a signature).

    Raises DataError if there is no such file, it cannot be read, or it is a pipe or device, which might never end.
    """
    digest = xxhash.xxh3_128()
    try:
        check_regular(path)
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        refuse_passing(path, error)
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return str(digest.hexdigest())


def holds_only(folder: Path, names: Pattern[str]) -> bool:
    """Return True if `folder` is a folder whose entries are all files with such names (or that is empty)."""
    return folder.is_dir() and all(entry.is_file() and names.fullmatch(entry.name) for entry in folder.iterdir())


def write_atomically(path: Path, content: bytes, *, sweeps: bool = True) -> None:
    """Write `content` so that `path` has either its old content or all of the new, even after a power cut.

    `sweeps`: see atomic_file.
    """
    with atomic_file(path, sweeps=sweeps) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_file(path: Path, *, sweeps: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` at the end of the block; after an error it leaves no trace.

    A killed process leaves a temporary file, which the next writer of `path` removes. `sweeps` is False in folders with
    very many files, where searching for it would take too long; there ziggurat.system.staging.sweep does so once.
    """
    if sweeps:
        remove_dead(path)
    with written_whole(path):
        descriptor, temporary = make_temporary(path)
        try:
            # Closed only after the rename: until then the lock shows other processes that the writer is alive.
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fchmod(file.fileno(), 0o666 & ~_UMASK)
                # Sync before the rename: otherwise a power cut could leave an empty file under the name.
                os.fsync(file.fileno())
                os.replace(temporary, path)
            # Without this the name may reach the disk seconds later. Until then a power cut would bring back the old
            # content, while files written afterwards may already be on the disk.
            sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# Read once, at import, because setting the mask affects files that other threads create at the same time.
_UMASK = _umask()


CHECKSUMS_FILE = "checksums.json"
"""CHECKSUMS_FILE lists every other file of its folder, but no files in subfolders."""
CHECKSUMS_FORMAT = 1
_CONFIG = "config.yaml"  # people edit this file, so changes are reported by key
_MOST_BYTES = 1 << 24  # limit on checksums.json itself, enough for 100,000 files
_SETTLED_SECONDS = 2.0  # time after the last change of a file before its fingerprint may be cached


def write_checksums(
    folder: Path, again: str, *, only: Pattern[str] | None = None, known: Mapping[str, str] | None = None
) -> None:
    """Write checksums.json, the last file of `folder`, for all its files or for those whose full name matches `only`.

    `again` describes how to write the folder again, for messages about damage: `average the run again: ziggurat average
    runs/a`. `known` maps names to the fingerprints of files that need not be read. Raises OSError or DataError if a
    file cannot be read or the list cannot be written.
    """
    wanted = only or re.compile(r"[^.].*")  # names that begin with a dot are locks and temporary files
    present = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS_FILE)
    names = [name for name in present if wanted.fullmatch(name)]
    document: dict[str, Any] = {
        "format": CHECKSUMS_FORMAT,
        "again": again,
        "files": {
            name: {
                "bytes": (folder / name).stat().st_size,
                "xxh3_128": (known or {}).get(name) or fingerprint(folder / name),
            }
            for name in names
        },
    }
    if _CONFIG in names:
        document["config"] = parse_yaml((folder / _CONFIG).read_text("utf-8"), str(folder / _CONFIG))[0]
    document["checksum"] = content_checksum(document)
    content = json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"
    write_atomically(folder / CHECKSUMS_FILE, content)


def made_by(verb: str, *arguments: object, **options: object) -> str:
    """Return the `again` of a folder that a verb of ziggurat has written: the verb's command, quoted for the shell.

    An option is left out if it is None, has no value if it is True, and is repeated for each value in a list.
    """
    words = ["ziggurat", verb, *map(str, arguments)]
    for name, given in options.items():
        for value in given if isinstance(given, list) else [given]:
            if value is not None:
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return f"`{shlex.join(words)}` writes the folder again"


def check_folder(folder: Path) -> frozenset[str]:
    """Compare every file of `folder` with its checksum; return the listed names, or none if there is no list.

    Raises CheckpointError, which names the first missing or changed file and a remedy.
    """
    document = _listed(folder)
    for name in document["files"]:
        _check(folder / name, document)
    return frozenset(document["files"])


def check_file(path: Path) -> None:
    """Compare one file with its checksum, if its folder lists it. Raises CheckpointError as `check_folder` does."""
    document = _listed(path.parent)
    if path.name in document["files"]:
        _check(path, document)


def content_checksum(document: Mapping[str, Any]) -> str:
    """Return the checksum of a JSON document without its key `checksum`."""
    content = {key: value for key, value in document.items() if key != "checksum"}
    return str(xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest())


def has_checksum(document: Mapping[str, Any]) -> bool:
    """Return True if the `checksum` in a JSON document matches its content."""
    return bool(document.get("checksum") == content_checksum(document))


def is_intact(path: Path, expected: str) -> bool:
    """Return True if the file's fingerprint is `expected`; an unchanged file is read only once per process.

    Raises DataError if it cannot be read.
    """
    try:
        before = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    identity = (before.st_dev, before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns)
    if identity not in _intact:
        found = fingerprint(path)
        # The clock of a file system ticks a few hundred times a second. A recently written file may change again within
        # the same tick, and its time would not show it.
        if time.time() - max(before.st_mtime, before.st_ctime) < _SETTLED_SECONDS:
            return found == expected
        _intact[identity] = found
    return _intact[identity] == expected


_intact: dict[tuple[int, int, int, int, int], str] = {}
"""_intact maps a file's identity to its fingerprint, so that this process reads no file twice."""


def _listed(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's checksums.json, or an empty list of files if it is missing.

    Raises CheckpointError if the list itself is damaged.
    """
    path = folder / CHECKSUMS_FILE
    try:
        content = read_bounded(path, _MOST_BYTES, error=CheckpointError)
    except FileNotFoundError:
        return {"files": {}}
    try:
        document: dict[str, Any] = json.loads(content)
        if not {"again", "files", "checksum"} & document.keys():
            return {"files": {}}  # another program's file of this name
        whole = has_checksum(document)
        newer = whole and document["format"] != CHECKSUMS_FORMAT
        if whole and not newer:
            whole = all(_is_entry(name, entry) for name, entry in document["files"].items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = newer = False
    if newer:
        raise CheckpointError(other_format(path, document["format"], CHECKSUMS_FORMAT, "update ziggurat"))
    if not whole:
        raise CheckpointError(
            f"{path}: damaged, so the files next to it cannot be verified; write the folder again, or "
            "remove this file to open it unchecked"
        )
    return document


def _is_entry(name: str, entry: Mapping[str, Any]) -> bool:
    inside = name == Path(name).name and name not in ("", ".", "..") and "\0" not in name
    return inside and type(entry["bytes"]) is int and isinstance(entry["xxh3_128"], str)


def _check(path: Path, document: Mapping[str, Any]) -> None:
    entry, again = document["files"][path.name], f"; {printable(str(document['again']), 400)}"
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise CheckpointError(f"{path}: missing or unreadable ({error.strerror}){again}") from None
    if not path.is_file():  # reading a pipe might never end
        raise CheckpointError(f"{path}: not a file{again}")
    try:
        if size == entry["bytes"] and is_intact(path, entry["xxh3_128"]):
            return
    except DataError as error:
        raise CheckpointError(f"{error}{again}") from None
    if path.name == _CONFIG:
        _refuse_edit(path, document)
        return
    check_regular(path, error=CheckpointError)
    what = f"{size:,} bytes instead of {entry['bytes']:,}" if size != entry["bytes"] else "wrong checksum"
    raise CheckpointError(f"{path}: damaged or changed since it was written ({what}){again}")


def _refuse_edit(path: Path, document: Mapping[str, Any]) -> None:
    """Raise CheckpointError with the keys that an edit of the configuration changed; edited comments are allowed."""
    try:
        found = parse_yaml(read_bounded(path, MAX_YAML_BYTES).decode("utf-8"), str(path))[0]
    except (ZigguratError, YAMLError, OSError, ValueError, RecursionError) as error:
        said = str(error) if isinstance(error, ZigguratError) else f"{path}: not readable as text"
        raise CheckpointError(f"{said}; the file was changed since it was written; {document['again']}") from None
    if not (changes := changed(document.get("config"), found)):
        return
    # The way out depends on the edit: search settings can be given on the command line, the sections that belong to the
    # weights and vocabularies cannot be changed at all, and any other edit may stay.
    ways = "put the old values back"
    searched = [change for change in changes if change.startswith("decoding.")]
    if searched:
        key, _, values = searched[0].removeprefix("decoding.").partition(": ")
        setting = f"{key}={values.rpartition(' -> ')[2]}"
        ways += f", and give search settings on the command line (`ziggurat translate {path.parent} {setting}`)"
    if any(change.startswith("model.") for change in changes):
        ways += "; the weights are those of the old `model` section and compute something else with another"
    elif any(change.startswith("data.") and not change.startswith("data.store:") for change in changes):
        ways += "; the vocabularies are those of the old `data` section"
    else:
        ways += f"; if the edit is to stay, remove {path.with_name(CHECKSUMS_FILE)}: the folder then opens unchecked"
    raise CheckpointError(f"{path}: edited since it was written ({shown(changes)}); {ways}")


GENERATOR = "Ziggurat"
"""GENERATOR is the generator named in ziggurat's pages."""
_MARK = f'<meta name="generator" content="{GENERATOR}">'.encode()
_HEAD = 1000  # first bytes of a page, which contain the mark


def may_be_replaced(path: Path) -> bool:
    """Return True unless `path` is a file that is not one of ziggurat's pages."""
    if not path.is_file():  # nothing, or a device, which is written to and not replaced
        return True
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return not head or _MARK in head


MANIFEST = "manifest.json"
"""MANIFEST is the file that makes a folder a store."""

_READ_BY = {
    "ctranslate2": "an export for CTranslate2, which `ziggurat translate {0}` reads, in Python "
    'ziggurat.translate.ctranslate2.CTranslate2Translator("{0}"); `ziggurat evaluate --hypothesis` scores its '
    "translations",
    "huggingface": "an export for transformers, which AutoModelForSeq2SeqLM reads; `ziggurat import {0} --out FOLDER` "
    "turns it into a model directory",
    "argos": "an export for Argos Translate and LibreTranslate, which install the .argosmodel file in it",
    "onnx": 'an export for onnxruntime; in Python, ziggurat.exchange.onnx_runtime.load_onnx("{0}") opens it',
}

_DAMAGED = (
    "an export for transformers that lacks its config.json; copy the whole folder again, or write it with `ziggurat "
    "export MODEL --to huggingface --out {0} --force`"
)


def folder_kind(path: Path) -> str | None:
    """Return the kind of the folder and what reads it, as part of a sentence; None for an unknown kind.

    Only file names and a few fields of small JSON files are checked.
    """
    exported = _fields(path / "export.json", "target", "model")
    if exported is not None and exported[0] in _READ_BY:
        lacks = exported[0] == "huggingface" and not (path / "config.json").is_file()
        reader = _DAMAGED if lacks else _READ_BY[exported[0]]
        return f"{reader.format(path)} (made from {printable(exported[1], 200)})"
    if _fields(path / "config.json", "model_type"):
        return f"a directory of transformers; `ziggurat import {path} --out FOLDER` turns it into a model directory"
    if (path / "model.bin").is_file() and not (path / "config.yaml").is_file():
        return f"a CTranslate2 folder from another toolkit; `ziggurat translate {path}` translates with it"
    if is_store(path):
        return f"a store of `ziggurat prepare`; train with `data.store: {path}`; `ziggurat report` describes it"
    if (path / "checkpoints").is_dir() and (path / "config.yaml").is_file():
        return f"a run; `ziggurat translate {path}` translates with it"
    if path.name == "checkpoints" and (path.parent / "config.yaml").is_file():
        return f"the checkpoints of the run {path.parent}: name the run, and choose a checkpoint with `--which`"
    if (path / "model.safetensors").is_file() and (path / "config.yaml").is_file():
        return f"a model directory; `ziggurat translate {path}` translates with it"
    return _parent(path)


def is_store(path: Path) -> bool:
    """Return whether a folder has the manifest of a store, damaged or not; other programs' manifests do not count."""
    return _fields(path / MANIFEST, "tables", "prepared_from") is not None


def _parent(path: Path) -> str | None:
    """Recognise a folder of runs and exports, or of the pipeline that made them, and name the first ones."""
    try:
        found, kind = _models_in(path), "a folder of models"
        if not found:
            steps = sorted(file.parent for file in path.glob("*/begun.json"))
            found, kind = [model for step in steps for model in _models_in(step)], "the folder of a pipeline"
    except OSError:
        return None
    if not found:
        return None
    named = ", ".join(map(str, found[:5])) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    return f"{kind}; name one of its contents: {named}"


def _models_in(path: Path) -> list[Path]:
    """Return the runs in a folder, and the exports with which ziggurat can translate."""

    def translates(folder: Path) -> bool:
        return (folder / "checkpoints").is_dir() or _fields(folder / "export.json", "target") == ["ctranslate2"]

    return sorted(entry for entry in path.iterdir() if translates(entry))


def _fields(file: Path, *names: str) -> Sequence[str] | None:
    """Return the fields `names` of a small JSON object as text; None if one is missing."""
    try:
        document = parse_json(read_bounded(file, _LARGEST), str(file))
        return [str(document[name]) for name in names]
    except (OSError, DataError, KeyError, TypeError):
        return None


_LARGEST = 1 << 20  # bytes; even the manifest of a store with thousands of files is smaller
