"""Models on disk: weights as safetensors, with their configuration and vocabularies. No pickle is read."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from ziggurat.config import Experiment, dump, load_experiment
from ziggurat.config.depth import LeftOut
from ziggurat.config.experiment import without_lora
from ziggurat.config.model import ModelConfig
from ziggurat.data.subword import Tokenizer, copy_tokenizers, load_tokenizers, same_vocabulary
from ziggurat.model.accelerator import usable_device
from ziggurat.model.build import assemble
from ziggurat.model.depth import at_depth, prune, pruned_experiment
from ziggurat.model.low_rank import base_file, with_base
from ziggurat.model.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    META_FILE,
    MODEL_FILE,
    best_link,
    checkpoint_name,
    config_file,
    mend_links,
    read_meta,
    refuse_missing,
)
from ziggurat.model.seq2seq import AlignmentHead, Seq2Seq
from ziggurat.model.tensors import check_fit, load_weights, read_tensors, write_tensors
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, refuse_passing
from ziggurat.system.files import (
    CHECKSUMS_FILE,
    check_file,
    check_folder,
    content_checksum,
    fingerprint,
    folder_kind,
    has_checksum,
    holds_only,
    write_atomically,
    write_checksums,
)
from ziggurat.system.small_files import parse_json, read_bounded
from ziggurat.system.staging import TEMPORARY, building, recover, tidy
from ziggurat.system.yaml_text import changed, shown

AVERAGED = "averaged"
"""AVERAGED is the folder in a run that holds its averaged model."""
SCORE_FILE = "validation.json"
"""SCORE_FILE is a file in that folder, an AverageScore; an average made by hand has none and is always preferred."""


@dataclass(frozen=True)
class AverageScore:
    """The dev scores, by `training.validation.metric`, of an averaged model and of its rival.

    The rival is the checkpoint used by default if the average is worse: `best` or, if none is kept, `last`. A `value`
    of None was not measured, or is not finite.
    """

    metric: str
    value: float | None
    rival: str
    rival_value: float

    @property
    def worse(self) -> bool:
        """True if the rival is better and should be used."""
        if self.value is None or not math.isfinite(self.value):
            return True
        return self.value > self.rival_value if self.metric == "loss" else self.value < self.rival_value

    def said(self) -> str:
        """Return both values in words: `dev loss 4.1012, best 3.2034`."""
        digits = 4 if self.metric == "loss" else 2
        value = "not known" if self.value is None else f"{self.value:.{digits}f}"
        return f"dev {self.metric} {value}, {self.rival} {self.rival_value:.{digits}f}"


def write_score(folder: Path, score: AverageScore) -> None:
    """Write the score of the averaged model in `folder`, atomically. Raises OSError."""
    finite = score.value is not None and math.isfinite(score.value)
    document = {**asdict(score), "value": score.value if finite else None}
    document["checksum"] = content_checksum(document)
    write_atomically(folder / SCORE_FILE, json.dumps(document, indent=1).encode() + b"\n")


def _passed_over(run: Path) -> str:
    """Return why a run's averaged model is not used by default; "": it is, or there is none.

    Raises CheckpointError: its score is damaged.
    """
    path = run / AVERAGED / SCORE_FILE
    try:
        document = parse_json(read_bounded(path, error=CheckpointError), str(path), error=CheckpointError)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        refuse_passing(path, error)
        raise CheckpointError(f"{path}: {error.strerror}") from None
    try:
        if not has_checksum(document):
            raise ValueError
        score = AverageScore(*(document[key] for key in ("metric", "value", "rival", "rival_value")))
        return f"{AVERAGED}/ is worse: {score.said()}; `--which {AVERAGED}` uses it" if score.worse else ""
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{path}: damaged; name the weights to use (`--which {AVERAGED}`, `--which best`), or remove the file, "
            f"and {AVERAGED}/ is used whatever its score"
        ) from None


@dataclass(frozen=True)
class OpenedModel:
    """A model ready to decode, in evaluation mode.

    Attributes:
        tokenizers: source and target tokenizer; the same object twice if they are joint.
        directory: folder that holds the vocabulary files.
        weights: file from which the weights came.
        origin: a description of these weights, such as `runs/a: best, update 1200`.
    """

    model: Seq2Seq
    experiment: Experiment
    tokenizers: tuple[Tokenizer, Tokenizer]
    directory: Path
    weights: Path
    origin: str


_LISTED = r"model\.safetensors|config\.yaml|vocabulary\.json|\w+\.(spm|vocab)"
_BESIDE = "|".join(map(re.escape, (CHECKSUMS_FILE, SCORE_FILE)))
_MODEL_DIRECTORY_FILES = re.compile(rf"{_LISTED}|{_BESIDE}|{TEMPORARY.pattern}")


def may_become_model_directory(path: Path) -> bool:
    """Return whether writing to `path` loses nothing: it is free, an empty folder, or holds only a model directory.

    Raises DataError: another process is building it.
    """
    tidy(path)
    if not path.exists():
        return True
    whole = (path / MODEL_FILE).is_file()
    return holds_only(path, _MODEL_DIRECTORY_FILES) and (whole or _holds_nothing(path))


def _holds_nothing(path: Path) -> bool:
    # Ignores temporary files, such as the lock of a process that builds it.
    return all(TEMPORARY.fullmatch(entry.name) for entry in path.iterdir())


def refuse_replacing(path: Path, *, force: bool) -> None:
    """Raise ConfigError if a model directory written to `path` would replace another one, or anything else.

    `force` replaces a model, never other things.
    """
    if not may_become_model_directory(path):
        raise ConfigError(f"{path}: exists and holds something other than a model directory; choose another folder")
    if not force and (path / MODEL_FILE).exists():
        raise ConfigError(f"{path}: already holds a model; `--force` replaces it, or choose another folder")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read `model.safetensors` of a model directory or a checkpoint, compared with its checksum before it is parsed.

    Low-rank updates are merged with their base weights. Raises CheckpointError: missing, damaged, too new.
    """
    if (path.parent / META_FILE).is_file():
        verify(path, read_meta(path.parent)["checksums"][path.name])
    check_file(path)
    return with_base(path, read_tensors(path), read_weights)


def verify(path: Path, expected: str) -> None:
    """Raise CheckpointError if the file is missing or its fingerprint differs."""
    try:
        actual = fingerprint(path)
    except DataError as error:
        raise CheckpointError(*error.problems, between=error.between) from None
    if actual != expected:
        raise CheckpointError(f"{path}: damaged (checksum {actual}, expected {expected})")


def write_model_directory(
    directory: Path,
    tensors: Mapping[str, Tensor],
    experiment: Experiment,
    vocabularies: Path,
    *,
    again: str = "write the folder again",
) -> None:
    """Write a model directory; it appears whole or not at all, and replaces an existing one.

    `again` says how to write the folder again (ziggurat.system.files.write_checksums). Raises DataError: the folder
    cannot be made, or another process is building it.
    """
    with building(directory) as folder:
        fill_model_directory(folder, tensors, experiment, vocabularies, again=again)


def fill_model_directory(
    folder: Path, tensors: Mapping[str, Tensor], experiment: Experiment, vocabularies: Path, *, again: str
) -> None:
    """Write the files of a model directory into `folder`, which ziggurat.system.staging.building has made.

    The list of their checksums comes last; for `again` see ziggurat.system.files.write_checksums.
    """
    copy_tokenizers(vocabularies, folder)
    write_atomically(folder / CONFIG_FILE, dump(experiment).encode())
    checksum = write_tensors(folder / MODEL_FILE, tensors)
    write_checksums(folder, again, only=re.compile(_LISTED), known={MODEL_FILE: checksum})


def open_model(
    path: str | Path, *, which: str | None = None, device: str = "cpu", without_layers: str | None = None
) -> OpenedModel:
    """Open a run, one of its checkpoints, or a model directory.

    Args:
        path: the folder.
        which: weights of a run: `averaged`, `best`, `last`, or the number of an update; default: the first that exists,
            but an average that is worse than `best` on the dev set comes last.
        device: where to put the model; see ziggurat.model.accelerator.usable_device.
        without_layers: layers to leave out, such as `encoder.5-8,decoder.3` (ziggurat.config.depth).

    Raises CheckpointError: nothing there, damaged files, weights that do not fit the configuration. ConfigError:
    a device that cannot be used, layers that cannot be left out.
    """
    left_out = LeftOut() if without_layers is None else LeftOut.parse(without_layers)
    place, path = usable_device(device, "device"), Path(path).expanduser()
    weights_file, root = locate_weights(path, which)
    for folder in dict.fromkeys((root, weights_file.parent)):
        check_folder(folder)
    experiment = weights_experiment(weights_file.parent, root)
    source, target = tokenizers = load_tokenizers(root)
    check_fit(experiment.model, (source.size, target.size), base_file(weights_file) or weights_file)
    # Without initial values: the file has every parameter (load_weights checks this), and modules fill their buffers.
    tensors, origin = read_weights(weights_file), weights_origin(path, weights_file, which)
    if any(left_out):
        smaller, tensors = prune(experiment.model, tensors, left_out)
        experiment = pruned_experiment(experiment, smaller, left_out)
        origin += f", without layers {without_layers}"
    model = assemble(experiment.model, source.size, target.size)
    load_weights(model, tensors, str(weights_file))
    model.decoder.aligned = AlignmentHead.of(experiment.training.loss.alignment)
    return OpenedModel(model.to(place).eval(), experiment, tokenizers, root, weights_file, origin)


def locate_weights(path: Path, which: str | None = None) -> tuple[Path, Path]:
    """Return the file from which open_model reads weights, and the folder with configuration and vocabularies.

    Raises CheckpointError when there is none.
    """
    refuse_missing(path)
    if (path / CHECKPOINTS).is_dir():
        mend_links(path)
        if which is None:
            candidates = [path / AVERAGED, path / "best", path / "last"]
            if _passed_over(path):
                candidates.append(candidates.pop(0))
        elif which.isdecimal():
            candidates = [path / CHECKPOINTS / checkpoint_name(int(which))]
        elif re.fullmatch(r"step-\d{8}", which):
            candidates = [path / CHECKPOINTS / which]
        else:
            candidates = [path / which]
        for candidate in candidates:
            recover(candidate)
            if (candidate / MODEL_FILE).is_file():
                return candidate / MODEL_FILE, path
        steps = sorted(p.name for p in (path / CHECKPOINTS).glob("step-*") if (p / MODEL_FILE).is_file())
        links = [AVERAGED, "best", *sorted(p.name for p in path.glob(best_link("*"))), "last"]
        kept = [name for name in links if (path / name / MODEL_FILE).is_file()]
        kept += [str(int(name.removeprefix("step-"))) for name in steps]
        wanted = f"no checkpoint `{which}`" if which else "no checkpoint yet"
        raise CheckpointError(f"{path}: {wanted}; kept: {', '.join(kept) or 'none'}")
    config = config_file(path)
    if not ((path / MODEL_FILE).is_file() and config.is_file()):
        if kind := folder_kind(path):
            raise CheckpointError(f"{path}: no run or model directory, but {kind}")
        if not (path / MODEL_FILE).is_file():
            raise CheckpointError(f"{path}: neither a run (no {CHECKPOINTS}/) nor a model directory (no {MODEL_FILE})")
    if which is not None:
        raise CheckpointError(f"{path}: is a model directory, it has no checkpoint `{which}`")
    if config.is_file():
        return path / MODEL_FILE, config.parent
    raise CheckpointError(f"{path}: {CONFIG_FILE} is missing")


def common_weights(runs: Sequence[Path]) -> str | None:
    """Return the checkpoint by which to compare runs, `best` or `last`, if some of them would open averaged weights.

    None if all would open the same kind: if only some were averaged, that would decide the comparison.
    """
    kinds = set()
    for run in runs:
        with contextlib.suppress(CheckpointError):
            kinds.add(locate_weights(run)[0].parent.name)
    if len(kinds) < 2:
        return None
    return "best" if all((run / "best").is_dir() for run in runs) else "last"


def weights_experiment(folder: Path, root: Path) -> Experiment:
    """Return the configuration of the weights in `folder` of the run `root`: a growing run has several depths."""
    if (folder / CONFIG_FILE).is_file():
        return load_experiment(folder / CONFIG_FILE)
    experiment, meta = without_lora(load_experiment(root / CONFIG_FILE)), read_meta(folder)
    if kept := meta["configuration"]:
        _refuse_other_model(root / CONFIG_FILE, experiment, kept)
    depth = meta["encoder_layers"], meta["decoder_layers"]
    if depth == (experiment.model.encoder.layers, experiment.model.decoder.layers):
        return experiment
    return experiment.model_copy(update={"model": at_depth(experiment.model, *depth)})


def _refuse_other_model(path: Path, experiment: Experiment, kept: Mapping[str, Any]) -> None:
    """Raise CheckpointError naming the keys in which `model` differs from the section the weights were trained with."""
    try:
        before = type(experiment.model).model_validate(kept["model"])  # with defaults for keys introduced later
    except (ValidationError, KeyError) as error:
        raise CheckpointError(
            f"{path.parent}: this version cannot read the model configuration in its checkpoints: {error}"
        ) from None
    if changes := changed(
        {"model": before.model_dump(mode="json")}, {"model": experiment.model.model_dump(mode="json")}
    ):
        raise CheckpointError(
            f"{path}: edited since the checkpoint was written ({shown(changes)}); the weights compute something else "
            "with it: put the old values back"
        )


def weights_origin(path: Path, weights_file: Path, which: str | None = None) -> str:
    """Describe the weights in `weights_file`: the requested folder, then which of its weights.

    If `which` does not name them, also explain why an averaged model is passed over.
    """
    folder = weights_file.parent
    step = re.fullmatch(r"step-(\d+)", Path(os.path.realpath(folder)).name)  # `best` and `last` are links
    said = [f"update {int(step[1])}"] if step else []
    if folder != path and folder.name == AVERAGED:
        said = ["averaged checkpoints"]
    elif folder != path and (folder.name in ("best", "last") or folder.name.startswith(best_link(""))):
        said = [folder.name, *said]
    why = _passed_over(path) if which is None and folder.name != AVERAGED else ""
    return f"{path}: {', '.join(said) or 'model directory'}" + (f" ({why})" if why else "")


Sides = tuple[Tokenizer, Tokenizer]
"""Tokenizers of source and target."""


def refuse_other_vocabulary(its: Sides, others: Sides, name: str, other: str, way_out: str) -> None:
    """Raise ConfigError when `others` and `its` give a text different ids, or normalise it differently.

    The message calls their owners `name` and `other`. Equal pieces do not imply equal normalisation, which is not part
    of a SentencePiece file.
    """
    for side, mine, theirs in zip(("source", "target"), its, others, strict=True):
        if not same_vocabulary(mine, theirs):
            raise ConfigError(f"{name}: its {side} vocabulary is not that of {other}; {way_out}")
        if mine.unicode != theirs.unicode:
            raise ConfigError(
                f"{name}: its text is normalised by `data.unicode: {mine.unicode}`, but that of {other} by "
                f"`{theirs.unicode}`; {way_out}"
            )


def refuse_two_vocabularies(config: ModelConfig, source: Tokenizer, target: Tokenizer) -> None:
    """Raise ConfigError when a row of a shared embedding would stand for different pieces on the two sides.

    Equal sizes prove nothing: two separately trained vocabularies have the same size by default.
    """
    if config.embedding.sharing == "all" and source is not target and not same_vocabulary(source, target):
        raise ConfigError(
            "`model.embedding.sharing: all` needs one vocabulary for both sides, but the data have two; use `decoder`, "
            "or prepare the data with a joint vocabulary",
            key="model.embedding.sharing",
        )
