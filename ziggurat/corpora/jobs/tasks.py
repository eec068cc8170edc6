"""Jobs on lines, each of which gives one or several lines of output, in order; and the models that workers open.

Alignment, translation and scoring are such tasks. Tasks that need a model import PyTorch when they start.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
import xxhash

from ziggurat.config import DecodingConfig, Experiment, load_experiment
from ziggurat.config.data import Symmetrisation
from ziggurat.config.load import change_section
from ziggurat.corpora.jobs.job import JobOutcome, Plan, Work, complete_shards, run_job
from ziggurat.corpora.jobs.launchers import Manifest, Shard, StageFiles
from ziggurat.data.aligner import Aligner, format_links, read_aligner
from ziggurat.data.vocabulary import several_languages
from ziggurat.model.accelerator import default_device, free_cache, usable_device
from ziggurat.model.directory import locate_weights, open_model
from ziggurat.model.low_rank import weights_fingerprint
from ziggurat.model.run_folder import CONFIG_FILE
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.system.files import fingerprint
from ziggurat.translate.ctranslate2 import CTranslate2Translator
from ziggurat.translate.engines import EXPORT_FILE, EXPORT_SHORTLIST, Engine, export_folder
from ziggurat.translate.interface import TextTranslator
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.results import Notices, Translation, TranslationWarning
from ziggurat.translate.terms import read_constraints
from ziggurat.translate.text_lines import check_tag
from ziggurat.translate.translator import load_translator


@dataclass(frozen=True)
class ModelChoice:
    """Models of a job, and the settings that they translate with."""

    models: tuple[str, ...]
    """Runs or model directories: one, or the members of an ensemble."""
    which: str | None = None
    """Checkpoint of a run; see ziggurat.model.directory.open_model."""
    without_layers: str | None = None
    """Layers to leave out; None: none."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, ..."""
    threads: int = 1
    """CPU threads of each worker. The result depends on them, because the order in which matrix products are summed,
    and so their rounding, depends on the number of threads."""
    engine: Engine = "auto"
    """`torch`, `ctranslate2`, or `auto`: `ctranslate2` for an exported model. It is never chosen by speed, because
    parts of the work may be done on several machines."""
    decoding: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys of the `decoding` section that replace the model's own."""
    weights: tuple[str, ...] = ()
    """Fingerprints of the weights of each model, once known; workers refuse other weights."""
    shortlist: str | None = None
    """Fingerprint of the lexical shortlist of the search, once known; None: unknown or none."""

    def identified(self, *, searched: bool = True) -> Identified:
        """Open the models, so that faults in them or the settings are reported now; return facts about them.

        Args:
            searched: translations are searched for; scores of given translations do not depend on a shortlist.

        Raises ConfigError or CheckpointError for settings or models that cannot be used, DataError for a missing
        shortlist.
        """
        served = export_folder(self.engine, self.models, which=self.which, without_layers=self.without_layers)
        if served is None:
            device = usable_device(self.device, "device").type
            # On the CPU, because the memory of a GPU is for the workers.
            found = [open_model(path, which=self.which, without_layers=self.without_layers) for path in self.models]
            experiments = [model.experiment for model in found]
            tags = list(found[0].tokenizers[0].tags)
            contents = [
                _identity(model.experiment, weights_fingerprint(model.weights), model.directory) for model in found
            ]
        else:
            translator = CTranslate2Translator(served, device=self.device, threads=self.threads, **self.decoding)
            experiments, device = [load_experiment(served / CONFIG_FILE)], translator.device
            tags = list(translator.source_tokenizer.tags)
            contents = [_identity(experiments[0], fingerprint(served / EXPORT_FILE), served)]
        decoding = job_decoding(experiments[0].decoding, self.decoding)
        # Also by content, because a rewritten file has the same name.
        listed = _shortlist(decoding, served) if searched else None
        shortlist = None if listed is None else fingerprint(listed)
        settings = {
            "threads": self.threads,
            "device": device,
            "decoding": decoding.model_dump(mode="json"),
            "models": contents,
            **({"without_layers": self.without_layers} if self.without_layers else {}),
            **({} if shortlist is None else {"shortlist": shortlist}),
        }
        # A worker on another machine must not make its own choice.
        fixed = replace(
            self,
            device=device if self.device == "auto" else self.device,
            weights=tuple(content["weights"] for content in contents),
            shortlist=shortlist,
        )
        return Identified(fixed, experiments[0], decoding, settings, tags)


@dataclass(frozen=True)
class Identified:
    """Facts about opened models."""

    choice: ModelChoice
    """The choice, with a device that is not `auto` and with the fingerprints of the weights."""
    experiment: Experiment
    decoding: DecodingConfig
    settings: dict[str, Any]
    """Everything that the result depends on, in a form that JSON represents without loss."""
    tags: list[str]
    """Tags that can precede a source sentence."""

    def tag_settings(self, tag: str | None) -> dict[str, str]:
        """Return the result's settings if the models are given `tag` before every sentence; empty without a tag.

        Raises ConfigError for a tag that the models do not have, and for a missing tag if theirs name several
        languages, because the output language would then be arbitrary.
        """
        check_tag(tag, self.tags)
        if tag is None and (languages := several_languages(self.tags)):
            raise ConfigError(
                f"`--model-tag TAG` is missing: the tags of {self.choice.models[0]} name several languages "
                f"({languages}), and without one the output language is arbitrary"
            )
        return {} if tag is None else {"model_tag": tag}


def job_decoding(own: DecodingConfig, changes: Mapping[str, Any]) -> DecodingConfig:
    """Return the decoding settings of a job: those of the model with `changes`.

    Raises ConfigError if they contradict each other, or may mean different things on different machines.
    """
    decoding = change_section(own, changes, "decoding")
    if decoding.precision == "auto":
        raise ConfigError(
            "`decoding.precision: auto` may mean different things on the machines that take part: name the "
            "precision, `precision=float32` or `bfloat16`"
        )
    return decoding


def _shortlist(decoding: DecodingConfig, served: Path | None) -> Path | None:
    """Return the file of the shortlist that a search uses; an export, `served`, has it in its folder."""
    if decoding.shortlist is None:
        return None
    return Path(decoding.shortlist).expanduser() if served is None else served / EXPORT_SHORTLIST


def _identity(experiment: Experiment, weights: str, directory: Path) -> dict[str, str]:
    """Return the fingerprints of a model's weights (`weights`), architecture and vocabularies."""
    # By content, since a run may have been trained further and folders may be renamed.
    vocabularies = sorted(
        path for path in directory.iterdir() if path.name == "vocabulary.json" or path.suffix in (".spm", ".vocab")
    )
    architecture = json.dumps(experiment.model.model_dump(mode="json"), sort_keys=True)
    return {
        "weights": weights,
        "architecture": xxhash.xxh3_128_hexdigest(architecture.encode()),
        "vocabulary": xxhash.xxh3_128_hexdigest("".join(fingerprint(path) for path in vocabularies).encode()),
    }


@lru_cache(maxsize=1)
def opened(choice: ModelChoice) -> TextTranslator:
    """Open the models, once in a worker's life, since a worker belongs to one job.

    Raises CheckpointError if the weights differ from those in `choice`, for example in a run that is being trained, and
    DataError for another shortlist.
    """
    torch.set_num_threads(choice.threads)
    served = export_folder(choice.engine, choice.models, which=choice.which, without_layers=choice.without_layers)
    translator: TextTranslator
    if served is not None:
        translator = CTranslate2Translator(served, device=choice.device, threads=choice.threads, **choice.decoding)
        found = [fingerprint(served / EXPORT_FILE)]
    else:
        translator = load_translator(
            choice.models,
            which=choice.which,
            without_layers=choice.without_layers,
            device=choice.device,
            **choice.decoding,
        )
        # Checked after reading, so that a file that is replaced meanwhile is noticed.
        found = [weights_fingerprint(locate_weights(Path(path), choice.which)[0]) for path in choice.models]
    for path, weights, known in zip(choice.models, found, choice.weights, strict=False):
        if weights != known:
            raise CheckpointError(
                f"{path}: its weights changed after the job had started; name a checkpoint that stays (`--which N`), "
                "and another folder"
            )
    listed = None if choice.shortlist is None else _shortlist(translator.decoding, served)
    if listed is not None and fingerprint(listed) != choice.shortlist:
        raise DataError(f"{listed}: this shortlist changed after the job had started; name another folder")
    return translator


Taken = TypeVar("Taken")


class LineWithInputs(NamedTuple):
    """A line with the corresponding lines of other files."""

    text: str
    beside: tuple[Any, ...] = ()


class Task(Protocol):
    """A pure function of the lines of a shard that can be sent to processes on other machines."""

    def __call__(self, lines: Sequence[LineWithInputs], first: int) -> tuple[Sequence[str], Mapping[str, int]]:
        """Return the results, without line ends, and counts; `first` is the number of the first line, from 0."""


class Merged(NamedTuple):
    """The end of a job of lines."""

    taken: Any
    """Return value of the merge."""
    lines: int
    counts: Mapping[str, int]


def run_text_job(
    plan: Plan,
    task: Task,
    lines: Callable[[], Iterable[LineWithInputs]],
    take: Callable[[Iterator[bytes]], Taken],
    work: Work,
) -> JobOutcome[Merged]:
    """Do the rest of a job of lines; see run_job. `take` gets the results of the shards, in order."""
    files = StageFiles(plan.folder, plan.verb, plan.fingerprint, "txt")

    def merge() -> Merged:
        manifests = list(complete_shards(plan, files))
        counts = sum((Counter(manifest.dropped) for manifest in manifests), Counter())
        taken = take(files.read(manifest) for manifest in manifests)
        return Merged(taken, sum(manifest.read for manifest in manifests), counts)

    return run_job(plan, files, partial(_do, task, files), lines, merge, work)


def _do(task: Task, files: StageFiles, shard: Shard[LineWithInputs]) -> Manifest:
    results, counts = task(shard.items, shard.first)
    content = "".join(result + "\n" for result in results).encode()
    return files.write(shard.index, content, read=len(shard.items), kept=len(results), dropped=counts)


@dataclass(frozen=True)
class Aligning:
    """Word alignments of lines with their translations."""

    model: str
    how: Symmetrisation

    def __call__(self, lines: Sequence[LineWithInputs], first: int) -> tuple[list[str], Mapping[str, int]]:
        """Return the links of each pair, and their number."""
        found = _aligner(self.model).align([line.text for line in lines], [line.beside[0] for line in lines], self.how)
        counts = {"links": sum(map(len, found)), "without_links": sum(not links for links in found)}
        return [format_links(links) for links in found], counts


@lru_cache(maxsize=1)
def _aligner(path: str) -> Aligner:
    return read_aligner(path)


@dataclass(frozen=True)
class Translating:
    """Translation of lines; all lines of a shard are one window, so the result does not depend on other shards."""

    choice: ModelChoice
    form: Literal["text", "best", "quality", "json"] = "text"
    """Form of the output (ziggurat.translate.results.Translation); `best`: only the text of the best translation,
    whatever `n_best` is."""
    options: TranslateOptions = field(default_factory=TranslateOptions, hash=False)
    beside: tuple[str, ...] = ()
    """Kinds of the lines' further inputs, in this order: `prefixes`, `constraints` (separated by tabs)."""

    def check(self) -> None:
        """Raise ConfigError for features that the engine or the model lacks; opens the models in this process."""
        self._translated([], 0)
        opened.cache_clear()  # this process does not translate itself
        free_cache(default_device())  # PyTorch does not return freed GPU memory by itself

    def _translated(self, lines: Sequence[LineWithInputs], first: int) -> list[Any]:
        translator = opened(self.choice)
        extras: dict[str, Any] = {name: [line.beside[n] for line in lines] for n, name in enumerate(self.beside)}
        if "constraints" in extras:
            extras["constraints"] = list(read_constraints(extras["constraints"]))
        translator.notices = Notices()
        with warnings.catch_warnings(action="ignore", category=TranslationWarning):  # they are counted
            texts = [line.text for line in lines]
            window = max(1, len(texts))
            return list(translator.translate_stream(texts, self.options, window=window, first=first, **extras))

    def __call__(self, lines: Sequence[LineWithInputs], first: int) -> tuple[list[str], Mapping[str, int]]:
        """Return the translations, and the number of lines that needed special handling."""
        found = self._translated(lines, first)
        translator = opened(self.choice)
        n_best = translator.decoding.n_best
        results = [self._written(each, number, n_best) for number, each in enumerate(found, start=first + 1)]
        return results, +translator.notices

    def _written(self, found: Translation, number: int, n_best: int) -> str:
        if self.form == "best":
            return found.text
        return found.to_json() if self.form == "json" else found.to_text(number, n_best, quality=self.form == "quality")


@dataclass(frozen=True)
class Scoring:
    """Log-probabilities of lines with their translations."""

    choice: ModelChoice
    tag: str | None = None
    """Tag for every line, or None."""
    json: bool = False

    def __call__(self, lines: Sequence[LineWithInputs], first: int) -> tuple[list[str], Mapping[str, int]]:
        """Return the scores."""
        translator = opened(self.choice)
        targets = [line.beside[0] for line in lines]
        found = translator.score([line.text for line in lines], targets, tag=self.tag, first=first)
        return [score.to_json() if self.json else score.to_text() for score in found], {}
