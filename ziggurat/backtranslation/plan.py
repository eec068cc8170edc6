"""The plan of a back-translation: what its result depends on, written down once and demanded when it goes on."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from ziggurat.backtranslation.job import Job
from ziggurat.backtranslation.shards import count_lines
from ziggurat.config.load import change_section
from ziggurat.data.files import find_files, fingerprint, write_atomically
from ziggurat.data.provenance import differences
from ziggurat.data.sides import named_language
from ziggurat.data.temporary import TEMPORARY
from ziggurat.documents import parse_json, read_bounded
from ziggurat.errors import DataError
from ziggurat.models.directory import OpenedModel, open_model

__all__ = ["PLAN_FILE", "Plan", "make_plan"]

PLAN_FILE = "plan.json"
_FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        settings: Everything that the result depends on, with models and inputs by their content.
        files: The input files, in order.
        lines: Lines of all inputs.
        languages: Codes of the text's language and of its translation's.
        shard_lines: Lines of a shard.
        fingerprint: Of settings and lines; each shard's manifest holds it.
    """

    settings: dict[str, Any]
    files: tuple[Path, ...]
    lines: int
    languages: tuple[str, str]
    shard_lines: int

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.lines // self.shard_lines)

    @property
    def fingerprint(self) -> str:
        """128-bit xxHash in hexadecimal."""
        return str(xxhash.xxh3_128_hexdigest(json.dumps([self.settings, self.lines], sort_keys=True).encode()))

    def lines_of(self, shard: int) -> int:
        """Return how many lines a shard has."""
        return min(self.shard_lines, self.lines - shard * self.shard_lines)


def make_plan(job: Job) -> Plan:
    """Return the plan of `job`, and write it into its folder unless the same is there.

    The models are opened, so that what cannot be done is told before anything is. Text that seems to be in the
    language that the models write is a UserWarning.

    Raises:
        DataError: inputs that cannot be read or hold no line; a folder with another plan, or with other things.
        ConfigError, CheckpointError: settings or models that cannot be used.
    """
    files = tuple(path for pattern in job.inputs for path in find_files(pattern, "--input"))
    path = job.out / PLAN_FILE
    known = _known(path)
    opened = [open_model(model, which=job.which, device=job.device) for model in job.models]
    settings = _settings(job, opened, files)
    if known is not None and (changed := differences(known["settings"], settings, "backtranslate")):
        shown = "; ".join(name.removeprefix("backtranslate.") for name in changed[:6])
        raise DataError(
            f"{job.out}: was begun with other settings or files (there -> now): {shown}. Go on with the same ones, or "
            "give `--out` another folder"
        )
    lines = count_lines(files) if known is None else known["lines"]
    if not lines:
        raise DataError(f"--input: no line in {', '.join(map(str, files))}")
    languages = (opened[0].experiment.data.source_language, opened[0].experiment.data.target_language)
    if languages[0] != languages[1] and {named_language(str(file)) for file in files} == {languages[1].lower()}:
        warnings.warn(_wrong_way(job, languages), stacklevel=2)
    if known is None:
        job.out.mkdir(parents=True, exist_ok=True)
        document = {"format": _FORMAT, "settings": settings, "lines": lines}
        write_atomically(path, json.dumps(document, indent=1).encode() + b"\n")
    return Plan(settings, files, lines, languages, job.shard_lines)


def _wrong_way(job: Job, languages: tuple[str, str]) -> str:
    """Say that the text seems to be in the language that the model writes, and which model is wanted."""
    source, target = languages
    wanted = f"text in `{source}`" if job.forward else f"a model from `{target}` to `{source}`"
    return (
        f"{job.models[0]} translates `{source}` into `{target}`, but by its name {', '.join(job.inputs)} is in "
        f"`{target}` already: this takes {wanted}"
    )


def _settings(job: Job, opened: list[OpenedModel], files: tuple[Path, ...]) -> dict[str, Any]:
    """Return what the result depends on; JSON holds it without loss."""
    decoding = change_section(opened[0].experiment.decoding, job.settings(), "decoding")
    return {
        "method": job.method,
        "forward": job.forward,
        "threads": job.threads,
        "device": opened[0].model.device.type,
        "shard_lines": job.shard_lines,
        "filters": asdict(job.filters),
        "decoding": decoding.model_dump(mode="json"),
        "models": [_identity(model) for model in opened],
        "inputs": [{"files": fingerprint(path)} for path in files],
    }


def _identity(opened: OpenedModel) -> dict[str, str]:
    """Return the fingerprints of a model's weights, architecture and vocabularies."""
    vocabularies = sorted(
        path
        for path in opened.directory.iterdir()
        if path.name == "vocabulary.json" or path.suffix in (".spm", ".vocab")
    )
    architecture = json.dumps(opened.experiment.model.model_dump(mode="json"), sort_keys=True)
    return {
        "weights": fingerprint(opened.weights),
        "architecture": xxhash.xxh3_128_hexdigest(architecture.encode()),
        "vocabulary": xxhash.xxh3_128_hexdigest("".join(fingerprint(path) for path in vocabularies).encode()),
    }


def _known(path: Path) -> dict[str, Any] | None:
    """Return the plan that is in the folder, None in a new or empty one. Raises DataError for anything else."""
    if not path.exists():
        folder = path.parent
        if folder.exists() and (not folder.is_dir() or any(not TEMPORARY.fullmatch(p.name) for p in folder.iterdir())):
            raise DataError(f"{path.parent}: exists and is no back-translation; give `--out` another folder")
        return None
    try:
        plan: dict[str, Any] = parse_json(read_bounded(path), str(path))
        if plan["format"] == _FORMAT:
            return {"settings": dict(plan["settings"]), "lines": int(plan["lines"])}
    except (OSError, DataError, ValueError, KeyError, TypeError, OverflowError):
        pass
    raise DataError(f"{path}: damaged, or of another version of ziggurat; give `--out` another folder")
