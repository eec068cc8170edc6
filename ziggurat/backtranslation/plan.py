"""Plan of a back-translation: everything that its result depends on.

A `Job` is one call of the verb. Its `Plan` names models and text by their content. It is written once, and a later call
in the same folder must have the same one.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from ziggurat.backtranslation.filters import PairFilter
from ziggurat.backtranslation.shards import count_lines
from ziggurat.config import Experiment, load_experiment
from ziggurat.config.experiment import shown
from ziggurat.config.load import change_section
from ziggurat.data.files import find_files, fingerprint, write_atomically
from ziggurat.data.sides import named_language
from ziggurat.data.store_checks import differences
from ziggurat.data.temporary import TEMPORARY
from ziggurat.decoding.engines import SERVED_FILE, served_folder
from ziggurat.decoding.served import ServedTranslator
from ziggurat.errors import ConfigError, DataError
from ziggurat.models.directory import CONFIG_FILE, open_model
from ziggurat.small_files import parse_json, read_bounded

__all__ = [
    "METHODS",
    "PLAN_FILE",
    "SHARD_LINES",
    "Job",
    "Method",
    "Plan",
    "make_plan",
]


Method = Literal["sample", "top-k", "beam", "noised-beam"]
"""Search for the synthetic side."""

METHODS: Mapping[Method, Mapping[str, Any]] = {
    "sample": {"search": "sample", "top_k": 0, "mbr": 0, "n_best": 1},
    "top-k": {"search": "sample", "top_k": 10, "mbr": 0, "n_best": 1},
    "beam": {"search": "beam", "n_best": 1},
    "noised-beam": {"search": "beam", "n_best": 1},
}
"""Decoding settings of each method, which replace the model's own."""

SHARD_LINES = 2000
"""Lines of a shard: the most work that an interruption loses per worker, and one window of the translator."""


@dataclass(frozen=True)
class Job:
    """One call of the verb.

    Attributes:
        models: Runs or model directories: the reverse model (`forward`: the teacher), or the members of an ensemble.
        inputs: Paths or globs of monolingual text.
        out: Folder of the result.
        method: Search for the synthetic side.
        forward: The text is the source and its translation the target (sequence-level distillation, Kim and Rush
            2016); else the text is the target and its translation the source (back-translation).
        which: Checkpoint of a run; see ziggurat.models.directory.open_model.
        device: `auto`, `cpu`, `cuda`, ...
        threads: CPU threads of each worker. The result depends on them: another number of threads sums matrix products
            in another order, which rounds differently.
        seed: Seed of sampling and noise.
        shard_lines: Lines of a shard.
        filters: Filters for pairs.
        decoding: Keys of the `decoding` section that replace the model's own.
        engine: `torch`, `ctranslate2`, or `auto`: the latter for an exported model. Never by speed: parts of the work
            may be done on several machines.
    """

    models: tuple[str, ...]
    inputs: tuple[str, ...]
    out: Path
    method: Method = "sample"
    forward: bool = False
    which: str | None = None
    device: str = "auto"
    threads: int = 1
    seed: int = 1
    shard_lines: int = SHARD_LINES
    filters: PairFilter = field(default_factory=PairFilter)
    decoding: Mapping[str, Any] = field(default_factory=dict, hash=False)
    engine: str = "auto"

    @property
    def served(self) -> Path | None:
        """Folder of the exported model that CTranslate2 translates with; None: PyTorch does. Raises ConfigError."""
        return served_folder(self.engine, self.models, which=self.which)

    def settings(self) -> dict[str, Any]:
        """Return the decoding settings of the method and of the user.

        Raises:
            ConfigError: the user's settings contradict the method or the verb.
        """
        if self.decoding.get("n_best", 1) != 1:
            raise ConfigError("`n_best`: backtranslate writes one translation for each line; leave it out")
        if clash := {"search", "seed"} & self.decoding.keys():
            raise ConfigError(f"`{min(clash)}`: give `--method` and `--seed` instead")
        return {**METHODS[self.method], "seed": self.seed, **self.decoding}


PLAN_FILE = "plan.json"
_FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """Work to be done, and the settings that its result depends on.

    Attributes:
        settings: Everything that the result depends on; models and inputs by their content.
        files: The input files, in order.
        lines: Lines of all inputs.
        languages: Codes of the text's language and of its translation's.
        shard_lines: Lines of a shard.
        fingerprint: Hash of settings and lines; each shard's manifest contains it.
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
        """Return the number of lines of a shard."""
        return min(self.shard_lines, self.lines - shard * self.shard_lines)


def make_plan(job: Job) -> Plan:
    """Return the plan of `job`, and write it into its folder unless it is there already.

    The models are opened, so that errors appear before any work is done. Text that seems to be in the language that the
    models write gives a UserWarning.

    Raises:
        DataError: inputs that cannot be read or have no lines; a folder with another plan, or with other things.
        ConfigError, CheckpointError: settings or models that cannot be used.
    """
    files = tuple(path for pattern in job.inputs for path in find_files(pattern, "--input"))
    path = job.out / PLAN_FILE
    known = _known(path)
    models = _opened(job)
    settings = _settings(job, models, files)
    if known is not None and (changed := differences(known["settings"], settings, "backtranslate")):
        names = shown([name.removeprefix("backtranslate.") for name in changed])
        raise DataError(
            f"{job.out}: was begun with other settings or files (there -> now): {names}. Continue with the same ones, "
            "or give `--out` another folder"
        )
    # Counting takes a pass over the text, which the plan saves: the fingerprints say that the text is the same.
    lines = count_lines(files) if known is None else known["lines"]
    if not lines:
        raise DataError(f"--input: no line in {', '.join(map(str, files))}")
    data = models[0].experiment.data
    languages = (data.source_language, data.target_language)
    if languages[0] != languages[1] and {named_language(str(file)) for file in files} == {languages[1].lower()}:
        warnings.warn(_wrong_way(job, languages), stacklevel=2)
    if known is None:
        # Written only now: a folder with a plan has passed all checks.
        job.out.mkdir(parents=True, exist_ok=True)
        document = {"format": _FORMAT, "settings": settings, "lines": lines}
        write_atomically(path, json.dumps(document, indent=1).encode() + b"\n")
    return Plan(settings, files, lines, languages, job.shard_lines)


def _wrong_way(job: Job, languages: tuple[str, str]) -> str:
    """Return the warning that the text seems to be in the language that the model writes, with the way out."""
    source, target = languages
    wanted = f"text in `{source}`" if job.forward else f"a model from `{target}` to `{source}`"
    return (
        f"{job.models[0]} translates `{source}` into `{target}`, but by its name {', '.join(job.inputs)} is in "
        f"`{target}` already: this takes {wanted}"
    )


class _Identified(NamedTuple):
    """What a plan needs of a model: its configuration, the type of its device, and fingerprints of its content."""

    experiment: Experiment
    device: str
    identity: dict[str, str]


def _opened(job: Job) -> list[_Identified]:
    """Open the models, so that what is wrong with them or with the settings of the search is said now."""
    if (folder := job.served) is None:
        opened = [open_model(model, which=job.which, device=job.device) for model in job.models]
        return [
            _Identified(m.experiment, m.model.device.type, _identity(m.experiment, m.weights, m.directory))
            for m in opened
        ]
    translator = ServedTranslator(folder, device=job.device, threads=job.threads, **job.settings())
    experiment = load_experiment(folder / CONFIG_FILE)
    return [_Identified(experiment, translator.device, _identity(experiment, folder / SERVED_FILE, folder))]


def _settings(job: Job, models: list[_Identified], files: tuple[Path, ...]) -> dict[str, Any]:
    """Return all settings that the result depends on, as JSON can represent them without loss."""
    decoding = change_section(models[0].experiment.decoding, job.settings(), "decoding")
    if decoding.precision == "auto":
        raise ConfigError(
            "`decoding.precision: auto` may mean something else on each machine that takes part: name the precision, "
            "`precision=float32` or `bfloat16`"
        )
    return {
        "method": job.method,
        "forward": job.forward,
        "threads": job.threads,
        "device": models[0].device,
        "shard_lines": job.shard_lines,
        "filters": asdict(job.filters),
        "decoding": decoding.model_dump(mode="json"),
        "models": [model.identity for model in models],
        "inputs": [{"files": fingerprint(path)} for path in files],
    }


def _identity(experiment: Experiment, weights: Path, directory: Path) -> dict[str, str]:
    """Return the fingerprints of a model's weights, architecture and vocabularies."""
    # By content, since a run may have been trained further and folders may be renamed.
    vocabularies = sorted(
        path for path in directory.iterdir() if path.name == "vocabulary.json" or path.suffix in (".spm", ".vocab")
    )
    architecture = json.dumps(experiment.model.model_dump(mode="json"), sort_keys=True)
    return {
        "weights": fingerprint(weights),
        "architecture": xxhash.xxh3_128_hexdigest(architecture.encode()),
        "vocabulary": xxhash.xxh3_128_hexdigest("".join(fingerprint(path) for path in vocabularies).encode()),
    }


def _known(path: Path) -> dict[str, Any] | None:
    """Return the plan in the folder, or None for a new or empty folder. Raises DataError for anything else."""
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
