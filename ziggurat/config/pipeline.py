"""The file of `ziggurat pipeline`: from corpora to a small student, with one section per part of the pipeline.

If a section is left out, so are its steps. `PipelineConfig.experiment` assembles the configuration for training a
model. The sections about corpora (their sources, held-out pairs) are here; those about models are in
`ziggurat.config.pipeline_models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from ziggurat.config.data import CorpusConfig, DataConfig, FilterConfig, Language
from ziggurat.config.experiment import Experiment
from ziggurat.config.lifecycle import StopConfig
from ziggurat.config.load import change_section
from ziggurat.config.model import ModelConfig
from ziggurat.config.modifiers import UntilConfig
from ziggurat.config.pipeline_models import (
    AlignmentStepConfig,
    BackTranslationConfig,
    CorpusName,
    DistillationConfig,
    EvaluationConfig,
    ExportConfig,
    FilterStepConfig,
    QuantisationConfig,
    ShortlistConfig,
    TrainedConfig,
)
from ziggurat.config.section import Count, PathText, Real, Section, Size
from ziggurat.config.train import ScheduleConfig
from ziggurat.system.errors import ConfigError, Problem, Remedy

Name = Annotated[str, Field(pattern=r"^[\w][\w.+-]*$", max_length=100)]


class FetchConfig(Section):
    """Settings for fetching public corpora (docs/data.md)."""

    registry: list[PathText] = Field(default_factory=list, max_length=100)
    """Your own registries, whose entries override the built-in ones."""
    cache: PathText | None = None
    """Folder for downloads; null: `$ZIGGURAT_DOWNLOADS`, or ~/.cache/ziggurat/downloads."""
    mirror: list[str] = Field(default_factory=list, max_length=100)
    """Folders or URLs with files at HOST/PATH, tried before the files' own servers."""
    offline: bool = False
    """Use downloads and mirrors only."""
    proxy: str | None = None
    """Proxy for all URLs; null: `$https_proxy`."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 5
    """Consecutive failures to tolerate."""


class BitextCorpus(CorpusConfig):
    """A parallel corpus: files as in `data.train`, or the name of a public one."""

    fetch: str | None = Field(default=None, min_length=1, max_length=500)
    """Name of a public corpus, such as `opus/Tatoeba/v2023-04-12/de-en`, instead of files (docs/data.md)."""

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        if self.alignment is not None:
            raise ConfigError.of(
                "alignment", "is useless here because pairs are dropped and split: add section `alignment`"
            )
        if self.source_language or self.target_language:
            raise ValueError("a pipeline has one direction: leave out the languages of single corpora")
        if (self.fetch is None) == (self.path is None and self.source is None and self.target is None):
            raise ValueError("give `fetch`, or `source` and `target` (aligned text files), or `path` (one file)")
        if self.fetch is None and self.path is not None and (self.source or self.target):
            raise ValueError("give either `source` and `target` (aligned text files) or `path` (one file)")
        if self.fetch is None and self.path is None and (self.source is None or self.target is None):
            raise ValueError("give both `source` and `target`, aligned line by line")
        if self.columns and len(self.columns) != 2:
            raise ConfigError.of("columns", "needs two entries: the source column and the target column")
        return self


class CleaningConfig(FilterConfig):
    """Cleaning of the training corpora, as `data.filters` (docs/data.md) but with more filters on by default."""

    max_length_ratio: Real | None = Field(default=3.0, gt=1)
    """As in `data.filters`."""
    identical: bool = True
    """As in `data.filters`."""
    duplicates: bool = True
    """As in `data.filters`."""
    control_characters: bool = True
    """As in `data.filters`."""
    markup: bool = True
    """As in `data.filters`."""
    held_out: Literal["keep", "pairs", "sides"] = "pairs"
    """Training pairs that also occur in development or test sets; as in `data.filters`."""


class HoldOutConfig(Section):
    """Pairs taken out of the training corpora if there is no other development or test set."""

    dev: Size = Field(default=0, ge=0)
    """Pairs for development; 0: none."""
    test: Size = Field(default=0, ge=0)
    """Pairs for a test set, called `held-out`; 0: none."""


class BitextConfig(Section):
    """Parallel text."""

    train: list[BitextCorpus] = Field(min_length=1, max_length=1000)
    """Training corpora. Give a `tag` only to some of them: held-out, distilled and test text has none."""
    dev: list[BitextCorpus] = Field(default_factory=list, max_length=100)
    """Development corpora, which are not cleaned. Their `tag` is put before the sentences only for models that learn
    from a corpus with the same tag."""
    hold_out: HoldOutConfig | None = None
    """Take pairs for development and test out of the cleaned training corpora, and drop pairs there that share a side
    with them."""

    @model_validator(mode="after")
    def _dev_has_no_keys_of_training(self) -> Self:
        tags = {corpus.tag for corpus in self.train}
        for number, corpus in enumerate(self.dev):
            for key, why in (("filters", "filtered"), ("scores", "filtered"), ("weight", "drawn from")):
                if getattr(corpus, key) != BitextCorpus.model_fields[key].get_default(call_default_factory=True):
                    raise ConfigError.of(f"dev.{number}.{key}", f": development corpora are not {why}; remove it")
            if corpus.tag is not None and corpus.tag not in tags:
                raise ConfigError.of(
                    f"dev.{number}.tag", f": no corpus of `train` has {corpus.tag}, so no model would learn it"
                )
        return self


class TestSetConfig(Section):
    """A test set."""

    name: Name
    """Name in the report."""
    source: PathText | None = None
    """Source text, one sentence per line."""
    target: PathText | None = None
    """Its translation."""
    fetch: str | None = Field(default=None, min_length=1, max_length=500)
    """Name of a public test set, such as `sacrebleu/wmt20/de-en`, instead of files."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        files = self.source is not None and self.target is not None
        if (self.source is None) != (self.target is None) or (self.fetch is None) == (not files):
            raise ValueError("give either `source` and `target`, or `fetch`")
        return self


class MonolingualText(Section):
    """A monolingual text."""

    path: PathText | None = None
    """One sentence per line: path or glob; .gz, .xz and .zst are read as streams."""
    fetch: str | None = Field(default=None, min_length=1, max_length=500)
    """Name of a public corpus, such as `news-crawl/2019/de`, instead of files."""
    lines: Size | None = Field(default=None, ge=1)
    """Use only the first N lines, after cleaning; null: all."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.fetch is None):
            raise ValueError("give either `path` or `fetch`")
        return self


class MonolingualConfig(Section):
    """Monolingual texts; duplicates and sentences from development and test sets are removed."""

    source: list[MonolingualText] = Field(default_factory=list, max_length=1000)
    """Texts in the source language, for `distillation`."""
    target: list[MonolingualText] = Field(default_factory=list, max_length=1000)
    """Texts in the target language, for `backtranslation`."""


_PIPELINE_FORMAT = 1
ModelName = Literal["backward", "teacher", "student"]
MODELS: tuple[ModelName, ...] = ("backward", "teacher", "student")
BITEXT: CorpusName = "bitext"
BACK_TRANSLATION: CorpusName = "back-translation"
DISTILLATION: CorpusName = "distillation"
HELD_OUT = "held-out"
"""HELD_OUT is the name of the test set taken out of the training corpora."""
PREPARED_BY = ("max_characters", "max_pieces")
"""PREPARED_BY are the filters that apply when a model's data is prepared."""
_ANY = CorpusConfig(source="-", target="-")  # for checks that do not depend on corpora


_OF_PIPELINE = {
    "data.filters": "cleaning",
    "data.train": "bitext.train",
    "data.dev": "bitext.dev",
    "data.held_out": "test",
    "data.alignment": "alignment",
    "data.source_language": "source_language",
    "data.target_language": "target_language",
}
_OF_MODEL = ("subword", "unicode", "stages", "modifiers", "sampling_temperature")
"""_OF_MODEL are the keys of an experiment's `data` that belong to a model in a pipeline's file."""


def pipeline_names(model: ModelName | None = None, corpora: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the pipeline's names for an experiment's keys and for the remedies that messages propose.

    Args:
        model: the model that the experiment belongs to; None: the experiment is for cleaning data.
        corpora: key of a corpus in the experiment, such as `data.train.0`, -> key in the pipeline's file.
    """
    found = {**_OF_PIPELINE, **(corpora or {})}
    if model is None:
        return found
    if model == "backward":  # its source is the pipeline's target
        found |= {"data.source_language": "target_language", "data.target_language": "source_language"}
    found |= {section: f"{model}.{section}" for section in ("model", "training", "decoding")}
    found |= {f"data.{key}": f"{model}.{key}" for key in _OF_MODEL}
    # Changing the file rebuilds the store, and the pipeline's own command resumes.
    found |= dict.fromkeys((Remedy.PREPARE, Remedy.PREPARE_ANEW, Remedy.REBUILD), f"give `--force {model}-data`")
    return found | {Remedy.THEN_PREPARE: "", Remedy.PREPARE_AFTER: "", Remedy.RESUME: "the same command"}


def _said(error: ConfigError | ValidationError, names: Mapping[str, str] = MappingProxyType({})) -> str:
    if isinstance(error, ValidationError):
        found = error.errors()[0]
        error = found.get("ctx", {}).get("error", error)
        if not isinstance(error, ConfigError):
            return str(found["msg"]).removeprefix("Value error, ")
    return str(error.with_names(names))


class PipelineConfig(Section):
    """A whole pipeline."""

    format: Count = _PIPELINE_FORMAT
    """Version of this format."""
    folder: PathText = Field(min_length=1)
    """Folder for all results, with one folder per step."""
    source_language: Language
    """ISO 639 code of the source language, such as `de`."""
    target_language: Language
    """ISO 639 code of the target language, such as `en`."""
    fetch: FetchConfig = FetchConfig()
    """Settings for corpora with `fetch`."""
    bitext: BitextConfig
    """Parallel text."""
    test: list[TestSetConfig] = Field(default_factory=list, max_length=100)
    """Test sets, which are never trained on."""
    monolingual: MonolingualConfig = MonolingualConfig()
    """Monolingual texts."""
    cleaning: CleaningConfig = CleaningConfig()
    """Cleaning of the training corpora. `max_pieces` applies when a model's data is prepared, `max_characters` in both
    steps."""
    backward: TrainedConfig | None = None
    """Model from target to source, for `backtranslation`."""
    backtranslation: BackTranslationConfig | None = None
    """Back-translation of `monolingual.target`."""
    teacher: TrainedConfig | None = None
    """Teacher: the best deep model that can be trained."""
    distillation: DistillationConfig | None = None
    """Distillation from the teacher."""
    filter: FilterStepConfig | None = None
    """Cross-entropy filter of the distilled corpus."""
    alignment: AlignmentStepConfig | None = None
    """Word alignments of the student's corpora."""
    student: TrainedConfig | None = None
    """Student: the small model to deploy."""
    quantisation: QuantisationConfig | None = None
    """Fine-tuning of the student for int8."""
    shortlist: ShortlistConfig | None = None
    """Shortlist for the student's export to CTranslate2."""
    export: ExportConfig | None = None
    """Exports."""
    evaluation: EvaluationConfig | None = None
    """Evaluation on `test`."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.format != _PIPELINE_FORMAT:
            raise ValueError(f"pipeline format {self.format} is unknown (this version reads {_PIPELINE_FORMAT})")
        if self.source_language == self.target_language:
            both = f"`source_language` and `target_language` are both `{self.source_language}`"
            why = "files are named by these codes; give one a longer code, such as `sr-Latn`"
            raise ConfigError(f"{both}: {why}", key="source_language", named=["target_language"])
        held = self.bitext.hold_out or HoldOutConfig()
        names = [test.name for test in self.test] + ([HELD_OUT] if held.test else [])
        if len(set(names)) < len(names):
            raise ConfigError.of(
                "test",
                f": names of test sets must differ (`{HELD_OUT}` is the one from `bitext.hold_out`)",
                named=["bitext.hold_out"],
            )
        if missing := self._missing(held):
            raise ConfigError(*missing)
        if self.student is not None and self.student.existing is not None:
            raise ConfigError.of("student.existing", ": the student is trained here; leave out the section")
        for name in MODELS:
            chosen: TrainedConfig | None = getattr(self, name)
            if chosen is None or chosen.existing is not None:
                continue
            if chosen.without_layers is None:
                self._check_model(name, chosen)
            elif name != "student":
                raise ConfigError.of(f"{name}.without_layers", ": only a `student` starts from the teacher")
            elif self.teacher is not None and self.teacher.existing is None:  # otherwise the steps check it
                self.with_student_of(self.teacher.model, self.teacher.unicode, "-")
        self._check_precision()
        return self

    def with_student_of(self, teacher: ModelConfig, unicode: str, vocabulary: str) -> Self:
        """Return the configuration with all settings that the student inherits from the teacher it starts from.

        `vocabulary` is the folder of the teacher's vocabulary. Raises ConfigError if layers cannot be left out or
        sections do not fit.
        """
        assert self.student is not None
        student = self.student.begun_as(teacher, unicode, vocabulary)
        whole = self.model_copy(update={"student": student})
        whole._check_model("student", student)
        return whole

    def _missing(self, held: HoldOutConfig) -> list[Problem]:
        """Return each key that is missing, with the key that needs it."""
        instead = "or take pairs out of the training corpora, `bitext.hold_out: {%s: 1000}`"
        tested, developed = self.test or held.test, self.bitext.dev or held.dev
        wants: list[tuple[object, str, str, str]] = [  # value, its key, the key that needs it (@), why
            (self.teacher or self.student, "teacher", "", "a pipeline trains a `teacher`, a `student`, or both"),
            (developed, "bitext.dev", "", f"it selects the models; {instead % 'dev'}"),
        ]
        if self.backtranslation is not None:
            wants += [
                (self.backward, "backward", "backtranslation", "@ translates with it"),
                (self.monolingual.target, "monolingual.target", "backtranslation", "@ translates it"),
            ]
        if self.distillation is not None:
            made = self.distillation.bitext or (self.distillation.monolingual and self.monolingual.source)
            wants += [
                (self.teacher, "teacher", "distillation", "@ translates with it"),
                (self.student, "student", "distillation", "@ is for it"),
                (made, "monolingual.source", "distillation", "@ has no text without it: `bitext` is false"),
            ]
        if self.student is not None and self.student.without_layers is not None:
            wants.append((self.teacher, "teacher", "student.without_layers", "the student starts from it (@)"))
        if self.filter is not None:
            wants += [
                (self.distillation, "distillation", "filter", "@ filters its corpus"),
                (self.backward, "backward", "filter", "@ uses its probability of a source given the translation"),
            ]
        for key, why in (("alignment", "@ aligns its corpora"), ("quantisation", "@ adapts it")):
            if getattr(self, key) is not None:
                wants.append((self.student, "student", key, why))
        if self.shortlist is not None:
            served = self.export is not None and self.export.ctranslate2 is not None
            wants += [
                (self.student, "student", "shortlist", "@ is made from its data"),
                (served, "export.ctranslate2", "shortlist", "@ is for it"),
            ]
        if self.evaluation is not None:
            wants.append((tested, "test", "evaluation", f"@ needs a test set; {instead % 'test'}"))
        if self.export is not None and any(target and target.tolerance is not None for _, target in self.export):
            wants.append((tested, "test", "export", f"@ measures BLEU on it (`tolerance`); {instead % 'test'}"))
        return [
            Problem(key, f"`{key}` is missing: {why.replace('@', f'`{user}`')}", named=(user,))
            for there, key, user, why in wants
            if not there
        ]

    def _check_model(self, name: ModelName, chosen: TrainedConfig) -> None:
        """Raise ConfigError if the sections of a model contradict each other or its corpora."""
        made = {BITEXT: True, BACK_TRANSLATION: self.backtranslation is not None and name != "backward"}
        made[DISTILLATION] = self.distillation is not None and name == "student"
        for corpus in chosen.corpora or {}:
            if not made[corpus]:
                raise ConfigError.of(f"{name}.corpora.{corpus}", ": no such corpus is made for this model")
        stages = [(f"stages.{number}.modifiers", stage.modifiers) for number, stage in enumerate(chosen.stages)]
        wanting = ["training.loss.alignment"] if chosen.training.loss.alignment is not None else []
        wanting += [key for key, own in (("modifiers", chosen.modifiers), *stages) if own and own.need_links]
        if wanting and (name != "student" or self.alignment is None):
            out = "add section `alignment`, which makes them" if name == "student" else "a pipeline makes them only"
            raise ConfigError.of(f"{name}.{wanting[0]}", f"needs word alignments: {out} for the student")
        # With their final weights, which do not exist with stages.
        train = [
            _ANY.model_copy(update={"weight": corpus.weight * weight})
            for kind, weight in self.weights(name).items()
            for corpus in (self.bitext.train if kind == BITEXT else [_ANY])
        ]
        try:
            experiment = self.experiment(name, train, [], "store")
        except ValidationError as error:
            place = ".".join(str(step) for step in (name, *error.errors()[0]["loc"]))
            raise ConfigError(f"`{place}`: {_said(error, pipeline_names(name))}", key=place) from None
        if name == "student" and self.quantisation is not None:
            try:
                self.quantised(experiment, "student")
            except (ConfigError, ValidationError) as error:
                raise ConfigError.of("quantisation", f": {_said(error)}") from None

    def _check_precision(self) -> None:
        """Raise ConfigError for a step whose precision each machine would choose for itself."""
        for step, name in (("backtranslation", "backward"), ("distillation", "teacher"), ("filter", "backward")):
            section = getattr(self, step)
            if section is None:
                continue
            own: dict[str, object] = getattr(section, "decoding", {})
            place, found = (step, own) if "precision" in own else (name, dict(getattr(self, name).decoding))
            if found["precision"] == "auto":
                raise ConfigError.of(
                    f"{place}.decoding.precision: auto",
                    f"would make the result of `{step}` depend on the machine: choose `float32` or `bfloat16`",
                )

    def weights(self, name: ModelName) -> dict[CorpusName, float]:
        """Return the corpora that a model learns from, with their weights."""
        chosen: TrainedConfig = getattr(self, name)
        if chosen.corpora is not None:
            return dict(chosen.corpora)
        if name == "student" and self.distillation is not None:
            return {DISTILLATION: 1.0}
        with_synthetic = self.backtranslation is not None and name != "backward"
        return {BITEXT: 1.0, BACK_TRANSLATION: 1.0} if with_synthetic else {BITEXT: 1.0}

    def experiment(
        self, name: ModelName, train: Sequence[CorpusConfig], dev: Sequence[CorpusConfig], store: str
    ) -> Experiment:
        """Return the experiment of a model on these corpora. Raises ValidationError if its parts do not fit."""
        chosen: TrainedConfig = getattr(self, name)
        languages = (self.source_language, self.target_language)
        source, target = languages[::-1] if name == "backward" else languages
        return Experiment(
            data=DataConfig(
                source_language=source,
                target_language=target,
                store=store,
                train=list(train),
                dev=list(dev),
                sampling_temperature=chosen.sampling_temperature,
                unicode=chosen.unicode,
                filters=FilterConfig(**{key: getattr(self.cleaning, key) for key in PREPARED_BY}),
                subword=chosen.subword,
                stages=chosen.stages,
                modifiers=chosen.modifiers,
            ),
            model=chosen.model,
            training=chosen.training,
            decoding=chosen.decoding,
        )

    def quantised(self, student: Experiment, weights: str) -> Experiment:
        """Return the experiment that fine-tunes the student for int8, from its `weights`, on its last mix.

        Raises ConfigError or ValidationError if its parts do not fit.
        """
        assert self.quantisation is not None
        updates, before = self.quantisation.updates, student.training
        changes = {
            "start_from": weights,
            "quantise": "int8",
            "growth": None,
            "schedule": ScheduleConfig(kind="cosine", peak=self.quantisation.peak, warmup_updates=updates // 10),
            "stop": StopConfig(updates=updates),
            "validation": {"every_updates": min(updates, before.validation.every_updates or updates)},
            "checkpoint": {"every_updates": min(updates, before.checkpoint.every_updates or updates)},
        }
        training = change_section(change_section(before, changes, "training"), self.quantisation.training, "training")
        data = student.data
        if data.stages:  # a run starts with the first stage, but the student's training ended with the last
            last = data.stages[-1]
            for_good = last.model_copy(update={"until": UntilConfig(corpus=last.until.corpus)})
            data = data.model_copy(update={"stages": [for_good]})
        return Experiment(data=data, model=student.model, training=training, decoding=student.decoding)
