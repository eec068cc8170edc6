"""Models on disk: weights as safetensors, beside their configuration and vocabularies. No pickle is read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import Tensor, nn

from ziggurat.config import Experiment, dump, load_experiment
from ziggurat.data.files import fingerprint, holds_only, write_atomically
from ziggurat.data.folder_kinds import folder_kind
from ziggurat.data.subword import copy_tokenizers, load_tokenizers
from ziggurat.errors import CheckpointError, ConfigError, DataError
from ziggurat.models.build import build_model
from ziggurat.models.device import usable_device
from ziggurat.models.grow import at_depth
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.models.tensors import placed_as, read_tensors, write_tensors

__all__ = [
    "CONFIG_FILE",
    "MODEL_FILE",
    "OpenedModel",
    "load_weights",
    "locate_weights",
    "may_become_model_directory",
    "meta_checksum",
    "open_model",
    "read_meta",
    "read_tensors",
    "read_weights",
    "refuse_replacing",
    "verify",
    "weights",
    "weights_origin",
    "write_meta",
    "write_model_directory",
    "write_tensors",
]

MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.yaml"
META_FILE = "meta.json"
CHECKPOINTS = "checkpoints"
ENVIRONMENT_FILE = "environment.json"


@dataclass(frozen=True)
class OpenedModel:
    """A model ready to decode.

    Attributes:
        model: in evaluation mode.
        experiment: its configuration.
        directory: folder that holds the vocabulary files.
        weights: file the weights came from.
        origin: which weights these are, in words for people: `runs/a: best, update 1200`.
    """

    model: Seq2Seq
    experiment: Experiment
    directory: Path
    weights: Path
    origin: str


_MODEL_DIRECTORY_FILES = re.compile(r"model\.safetensors|config\.yaml|vocabulary\.json|\w+\.(spm|vocab)")


def may_become_model_directory(path: Path) -> bool:
    """Whether nothing would be lost: there is nothing at `path`, an empty folder, or a model directory alone."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return True
    return (path / MODEL_FILE).is_file() and holds_only(path, _MODEL_DIRECTORY_FILES)


def refuse_replacing(path: Path, *, force: bool) -> None:
    """Raise ConfigError where a model directory written to `path` would replace another, or anything else.

    `force` replaces a model, never other things.
    """
    if not may_become_model_directory(path):
        raise ConfigError(f"{path}: exists and holds other things than a model directory; choose another folder")
    if not force and (path / MODEL_FILE).exists():
        raise ConfigError(f"{path}: already holds a model; `--force` replaces it, or choose another folder")


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter by name; a shared one once, under its first name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read `model.safetensors` of a model directory or a checkpoint; a checkpoint's is checked against its checksum.

    Raises CheckpointError: missing, damaged, too new.
    """
    if (path.parent / META_FILE).is_file():
        verify(path, read_meta(path.parent)["checksums"][path.name])
    return read_tensors(path)


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's `meta.json`, whatever its format version.

    Raises CheckpointError when the file is missing or damaged: from format 3 on it has a checksum of its own.
    """
    path = folder / META_FILE
    try:
        document = json.loads(path.read_text("utf-8"))
        whole = "progress" in document and MODEL_FILE in document["checksums"]
        if document["format"] in (3, 4):
            whole = whole and document["checksum"] == meta_checksum(document)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: damaged")
    return cast(dict[str, Any], document)


def write_meta(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a checkpoint's `meta.json` with a checksum of its own, atomically. Raises OSError."""
    content = {**document, "checksum": meta_checksum(document)}
    write_atomically(folder / META_FILE, json.dumps(content, indent=1).encode())


def meta_checksum(document: Mapping[str, Any]) -> str:
    """Return the checksum of the content of a `meta.json`, its own `checksum` left out."""
    content = {key: value for key, value in document.items() if key != "checksum"}
    return str(xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest())


def verify(path: Path, expected: str) -> None:
    """Raise CheckpointError when the file is missing or its fingerprint is another one."""
    try:
        actual = fingerprint(path)
    except DataError as error:
        raise CheckpointError(str(error)) from None
    if actual != expected:
        raise CheckpointError(f"{path}: damaged (checksum {actual}, expected {expected})")


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Copy `tensors` into the model's parameters; `name` says in errors where they came from.

    Raises CheckpointError listing the first parameter that is missing, unknown or of another shape.
    """
    parameters = dict(model.named_parameters())
    if missing := sorted(parameters.keys() - tensors.keys()):
        raise CheckpointError(f"{name}: parameter {missing[0]} is missing ({len(missing)} in all); other architecture?")
    if unknown := sorted(tensors.keys() - parameters.keys()):
        raise CheckpointError(f"{name}: parameter {unknown[0]} is unknown ({len(unknown)} in all); other architecture?")
    for key, parameter in parameters.items():
        if parameter.shape != tensors[key].shape:
            raise CheckpointError(
                f"{name}: {key} has shape {list(tensors[key].shape)}, the configuration needs {list(parameter.shape)}"
            )
        parameter.copy_(placed_as(tensors[key], parameter))


def write_model_directory(
    directory: Path, tensors: Mapping[str, Tensor], experiment: Experiment, vocabularies: Path
) -> None:
    """Write a model directory: vocabularies, configuration and, last, the weights, each atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    copy_tokenizers(vocabularies, directory)
    write_atomically(directory / CONFIG_FILE, dump(experiment).encode())
    write_tensors(directory / MODEL_FILE, tensors)


def open_model(path: str | Path, *, which: str | None = None, device: str = "cpu") -> OpenedModel:
    """Open a run, one of its checkpoints, or a model directory.

    Args:
        path: the folder.
        which: of a run: `averaged`, `best`, `last`, or the number of an update; default: the first of these
            that is there.
        device: where to put the model; see ziggurat.models.device.usable_device.

    Raises CheckpointError: nothing there, damaged files, weights that do not fit the configuration. ConfigError:
    a device that cannot be used.
    """
    place, path = usable_device(device, "device"), Path(path).expanduser()
    weights_file, root = locate_weights(path, which)
    experiment = _experiment(weights_file.parent, root)
    source, target = load_tokenizers(root)
    model = build_model(experiment.model, source.size, target.size)
    load_weights(model, read_weights(weights_file), str(weights_file))
    return OpenedModel(model.to(place).eval(), experiment, root, weights_file, weights_origin(path, weights_file))


def locate_weights(path: Path, which: str | None = None) -> tuple[Path, Path]:
    """Return the file that open_model reads weights from, and the folder with configuration and vocabularies.

    Raises CheckpointError when there is none.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such run or model directory")
    if (path / CHECKPOINTS).is_dir():
        if which is None:
            candidates = [path / "averaged", path / "best", path / "last"]
        elif which.isdecimal():
            candidates = [path / CHECKPOINTS / f"step-{int(which):08d}"]
        elif re.fullmatch(r"step-\d{8}", which):
            candidates = [path / CHECKPOINTS / which]
        else:
            candidates = [path / which]
        for candidate in candidates:
            if (candidate / MODEL_FILE).is_file():
                return candidate / MODEL_FILE, path
        steps = sorted(p.name for p in (path / CHECKPOINTS).glob("step-*") if (p / MODEL_FILE).is_file())
        kept = [name for name in ("averaged", "best", "last") if (path / name / MODEL_FILE).is_file()]
        kept += [str(int(name.removeprefix("step-"))) for name in steps]
        wanted = f"no checkpoint `{which}`" if which else "no checkpoint yet"
        raise CheckpointError(f"{path}: {wanted}; kept: {', '.join(kept) or 'none'}")
    if not ((path / MODEL_FILE).is_file() and _has_config(path)):
        if kind := folder_kind(path):
            raise CheckpointError(f"{path}: no run or model directory, but {kind}")
        if not (path / MODEL_FILE).is_file():
            raise CheckpointError(f"{path}: neither a run (no {CHECKPOINTS}/) nor a model directory (no {MODEL_FILE})")
    if which is not None:
        raise CheckpointError(f"{path}: is a model directory, it has no checkpoint `{which}`")
    if (path / CONFIG_FILE).is_file():
        return path / MODEL_FILE, path
    if _has_config(path):
        return path / MODEL_FILE, _run_of(path)
    raise CheckpointError(f"{path}: {CONFIG_FILE} is missing")


def _run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint would be in."""
    return (Path(os.path.realpath(checkpoint)) / ".." / "..").resolve()


def _has_config(path: Path) -> bool:
    """Whether a model directory, or the run of a checkpoint, has its configuration."""
    return (path / CONFIG_FILE).is_file() or (_run_of(path) / CONFIG_FILE).is_file()


def _experiment(folder: Path, root: Path) -> Experiment:
    """Return the configuration of the weights in `folder` of the run `root`: a growing run has several depths."""
    if (folder / CONFIG_FILE).is_file():
        return load_experiment(folder / CONFIG_FILE)
    experiment = load_experiment(root / CONFIG_FILE)
    layers = read_meta(folder).get("encoder_layers")
    if layers in (None, experiment.model.encoder.layers):
        return experiment
    return experiment.model_copy(update={"model": at_depth(experiment.model, layers)})


def weights_origin(path: Path, weights_file: Path) -> str:
    """Say for people which weights `weights_file` holds, behind the folder they were asked of."""
    folder = weights_file.parent
    step = re.fullmatch(r"step-(\d+)", Path(os.path.realpath(folder)).name)  # `best` and `last` are links
    said = [f"update {int(step[1])}"] if step else []
    if folder != path and folder.name == "averaged":
        said = ["averaged checkpoints"]
    elif folder != path and folder.name in ("best", "last"):
        said = [folder.name, *said]
    return f"{path}: {', '.join(said) or 'model directory'}"
