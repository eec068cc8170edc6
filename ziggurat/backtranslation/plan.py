"""A back-translation, and its plan: everything that its result depends on, models and text by their content."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ziggurat.backtranslation.filters import PairFilter
from ziggurat.backtranslation.lines import count_lines
from ziggurat.data.files import find_files, fingerprint
from ziggurat.data.sides import named_language
from ziggurat.errors import ConfigError, DataError
from ziggurat.jobs.models import ModelChoice
from ziggurat.jobs.plan import Plan, fix_plan

__all__ = ["METHODS", "SHARD_LINES", "Job", "Method", "make_plan"]


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
    def files(self) -> list[Path]:
        """The input files, in order. Raises DataError where there is none."""
        return [path for pattern in self.inputs for path in find_files(pattern, "--input")]

    @property
    def choice(self) -> ModelChoice:
        """The models, as workers open them. Raises ConfigError as `settings`."""
        return ModelChoice(
            self.models,
            which=self.which,
            device=self.device,
            threads=self.threads,
            engine=self.engine,
            decoding=self.settings(),
        )

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


def make_plan(job: Job) -> tuple[Plan, ModelChoice]:
    """Return the plan of `job`, which is written into its folder unless it is there already, and the models.

    The models are opened, so that errors appear before any work is done. Text that seems to be in the language that the
    models write gives a UserWarning.

    Raises:
        DataError: inputs that cannot be read or have no lines; a folder with another plan, or with other things.
        ConfigError, CheckpointError: settings or models that cannot be used.
    """
    files = job.files
    found = job.choice.identified()
    settings = {
        "method": job.method,
        "forward": job.forward,
        "shard_lines": job.shard_lines,
        "filters": asdict(job.filters),
        **found.settings,
        "inputs": [{"files": fingerprint(path)} for path in files],
    }

    def count() -> int:
        if not (lines := count_lines(files)):
            raise DataError(f"--input: no line in {', '.join(map(str, files))}")
        return lines

    plan = fix_plan(job.out, "backtranslate", settings, job.shard_lines, count)
    source, target = found.experiment.data.source_language, found.experiment.data.target_language
    if source != target and {named_language(str(file)) for file in files} == {target.lower()}:
        wanted = f"text in `{source}`" if job.forward else f"a model from `{target}` to `{source}`"
        warnings.warn(
            f"{job.models[0]} translates `{source}` into `{target}`, but by its name {', '.join(job.inputs)} is in "
            f"`{target}` already: this takes {wanted}",
            stacklevel=2,
        )
    return plan, found.choice
