"""A back-translation, and its plan: everything that its result depends on, models and text by their content."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ziggurat.config.decode import WITHOUT_BEAM, WITHOUT_SAMPLING
from ziggurat.config.pipeline_models import Method
from ziggurat.corpora.jobs.models import ModelChoice
from ziggurat.corpora.jobs.plan import Plan, fix_plan
from ziggurat.corpora.synthesis.filters import PairFilter
from ziggurat.corpora.synthesis.lines import count_lines
from ziggurat.data.sides import named_language
from ziggurat.data.store_checks import InputWatch
from ziggurat.evaluate.scores import sacrebleu_metric
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import find_files

_SAMPLE = {"search": "sample", "mbr": 0, "n_best": 1, **WITHOUT_BEAM}
_BEAM = {"search": "beam", "n_best": 1, **WITHOUT_SAMPLING}

METHODS: Mapping[Method, Mapping[str, Any]] = {
    "sample": {**_SAMPLE, "top_k": 0},
    "top-k": {**_SAMPLE, "top_k": 10},
    "beam": _BEAM,
    "noised-beam": _BEAM,
}
"""Decoding settings of each method, which replace the model's own: those of the other search among them, so that a
method goes with every model."""

Nearest = Literal["chrf", "bleu"]
"""Score of a sentence by which the candidate nearest its reference is found."""

N_BEST = 8
"""Candidates of each line where there are references."""

SHARD_LINES = 2000
"""Lines of a shard: the most work that an interruption loses per worker, and one window of the translator."""


@dataclass(frozen=True)
class BackTranslationJob:
    """One call of the verb.

    Attributes:
        models: runs or model directories: the reverse model (`forward`: the teacher), or the members of an ensemble.
        inputs: paths or globs of monolingual text.
        out: folder of the result.
        method: search for the synthetic side.
        forward: the text is the source and its translation the target (sequence-level distillation, Kim and Rush
            2016); else the text is the target and its translation the source (back-translation).
        which: checkpoint of a run; see ziggurat.model.directory.open_model.
        device: `auto`, `cpu`, `cuda`, ...
        threads: CPU threads of each worker. The result depends on them: another number of threads sums matrix products
            in another order, which rounds differently.
        seed: seed of sampling and noise.
        shard_lines: lines of a shard.
        filters: filters for pairs.
        decoding: keys of the `decoding` section that replace the model's own.
        engine: `torch`, `ctranslate2`, or `auto`: the latter for an exported model. Never by speed: parts of the work
            may be done on several machines.
        references: paths or globs of the text's translations, line by line, with `forward`: of the `n_best` candidates
            of a line, the one nearest its reference is kept (Kim and Rush 2016, section 3.3).
        n_best: candidates of each line; the beam has this size, or one that `decoding` gives, which cannot be smaller.
        nearest: score of a candidate against its reference.
        model_tag: tag that the models are given before every line, of those that they were trained with.
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
    references: tuple[str, ...] = ()
    n_best: int = N_BEST
    nearest: Nearest = "chrf"
    model_tag: str | None = None

    @property
    def files(self) -> list[Path]:
        """The input files, in order. Raises DataError where there is none."""
        return [path for pattern in self.inputs for path in find_files(pattern, "--input")]

    @property
    def reference_files(self) -> list[Path]:
        """The files of references, in order. Raises DataError where one is missing."""
        return [path for pattern in self.references for path in find_files(pattern, "--reference")]

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
            raise ConfigError(
                "`n_best`: backtranslate writes one translation for each line; leave it out, or let references choose "
                "among candidates, by `--reference FILE --n-best N`"
            )
        if clash := {"search", "seed"} & self.decoding.keys():
            raise ConfigError(f"`{min(clash)}`: give `--method` and `--seed` instead")
        settings = {**METHODS[self.method], "seed": self.seed, **self.decoding}
        if not self.references:
            return settings
        if not self.forward:
            raise ConfigError("`--reference` goes with `--forward`: there the text has true translations")
        # A beam as wide as the list is long, unless another is asked for: `decoding` refuses one that is narrower.
        beam = {"beam_size": self.n_best} if settings["search"] == "beam" else {}
        return {**beam, **settings, "n_best": self.n_best}


def sentence_metric(name: Nearest, language: str) -> Any:
    """Return sacreBLEU's object for the score of single sentences in a language, whose BLEU has an effective order.

    Raises ConfigError when the language's tokenizer is missing.
    """
    metric = sacrebleu_metric(name, target_language=language)
    if name == "bleu":  # without it a sentence of three words scores 0
        metric.effective_order = True
    return metric


def make_plan(job: BackTranslationJob) -> tuple[Plan, ModelChoice]:
    """Return the plan of `job`, which is written into its folder unless it is there already, and the models.

    The models are opened, so that errors appear before any work is done. Text that seems to be in the language that the
    models write gives a UserWarning.

    Raises:
        DataError: inputs that cannot be read or have no lines; a folder with another plan, or with other things.
        ConfigError, CheckpointError: settings or models that cannot be used.
    """
    files, watch = job.files, InputWatch()
    found = job.choice.identified()
    settings = {
        "inputs": [{"files": watch.fingerprint(path)} for path in files],
        "method": job.method,
        "forward": job.forward,
        "shard_lines": job.shard_lines,
        "filters": asdict(job.filters),
        **found.settings,
        **found.tag_settings(job.model_tag),
    }
    references = job.reference_files
    if references:
        sentence_metric(job.nearest, found.experiment.data.target_language)  # its tokenizer may be missing
        settings["references"] = [{"files": watch.fingerprint(path)} for path in references]
        settings["nearest"] = job.nearest

    def count() -> int:
        if not (lines := count_lines(files)):
            raise DataError(f"--input: no line in {', '.join(map(str, files))}")
        if references and (beside := count_lines(references)) != lines:
            raise DataError(
                f"--reference: {beside:,} lines in {', '.join(map(str, references))}, but {lines:,} in "
                f"{', '.join(map(str, files))}; they must pair up"
            )
        return lines

    plan = fix_plan(job.out, "backtranslate", settings, watch, job.shard_lines, count)
    source, target = found.experiment.data.source_language, found.experiment.data.target_language
    if source != target and {named_language(str(file)) for file in files} == {target.lower()}:
        wanted = f"text in `{source}`" if job.forward else f"a model from `{target}` to `{source}`"
        warnings.warn(
            f"{job.models[0]} translates `{source}` into `{target}`, but by its name {', '.join(job.inputs)} is in "
            f"`{target}` already: this takes {wanted}",
            stacklevel=2,
        )
    return plan, found.choice
