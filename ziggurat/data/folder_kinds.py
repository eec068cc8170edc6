"""Recognition of folders that were given in place of others, for error messages: their kind, and what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ziggurat.system.errors import DataError, printable
from ziggurat.system.small_files import parse_json, read_bounded

MANIFEST = "manifest.json"
"""Name of the file that makes a folder a store."""

_READ_BY = {
    "ctranslate2": "an export for CTranslate2, which `ziggurat translate {0}` reads, in Python "
    'ziggurat.translate.served.ServedTranslator("{0}"); `ziggurat evaluate --hypothesis` scores its translations',
    "huggingface": "an export for transformers, which AutoModelForSeq2SeqLM reads; `ziggurat import {0} --out FOLDER` "
    "makes a model directory of it",
    "argos": "an export for Argos Translate and LibreTranslate, which install the .argosmodel file in it",
    "onnx": 'an export for onnxruntime; in Python, ziggurat.exchange.onnx_runtime.load_onnx("{0}") opens it',
}


def folder_kind(path: Path) -> str | None:
    """Return the kind of the folder and what reads it, as a part of a sentence; None for an unknown kind.

    Only file names and a few fields of small JSON files are looked at.
    """
    found = _exported(path) or _foreign(path)
    if found:
        return found
    if is_store(path):
        return (
            f"a store of `ziggurat prepare`; training reads it by `data.store: {path}`, `ziggurat report` describes it"
        )
    if (path / "checkpoints").is_dir() and (path / "config.yaml").is_file():
        return f"a run; `ziggurat translate {path}` translates with it"
    if path.name == "checkpoints" and (path.parent / "config.yaml").is_file():
        return f"the checkpoints of the run {path.parent}: name the run, and a checkpoint by `--which`"
    if (path / "model.safetensors").is_file() and (path / "config.yaml").is_file():
        return f"a model directory; `ziggurat translate {path}` translates with it"
    return _parent(path)


def is_store(path: Path) -> bool:
    """Return whether a folder has the manifest of a store, damaged or not; other programs' manifests do not count."""
    return _fields(path / MANIFEST, "tables", "prepared_from") is not None


def _exported(path: Path) -> str | None:
    """Recognise a folder that `ziggurat export` wrote."""
    fields = _fields(path / "export.json", "target", "model")
    if fields is None or fields[0] not in _READ_BY:
        return None
    return f"{_READ_BY[fields[0]].format(path)} (it was made from {printable(fields[1], 200)})"


def _foreign(path: Path) -> str | None:
    """Recognise a folder that another toolkit wrote."""
    if _fields(path / "config.json", "model_type"):
        return f"a directory of transformers; `ziggurat import {path} --out FOLDER` makes a model directory of it"
    if (path / "model.bin").is_file() and not (path / "config.yaml").is_file():
        return "a directory of CTranslate2 (or pickled weights) of another toolkit, which nothing here reads"
    return None


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
    return f"{kind}; name one that is in it: {named}"


def _models_in(path: Path) -> list[Path]:
    """Return the runs in a folder, and the exports that translate here."""

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
