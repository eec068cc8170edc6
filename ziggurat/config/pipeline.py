"""The file of `ziggurat pipeline`: from corpora to a small student, one section for each part of the road.

A section that is left out leaves its steps out. `PipelineConfig.experiment` puts together what a model is trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from ziggurat.config.base import Beams, Count, Length, PathText, Real, Section, Seed, Size, Threads
from ziggurat.config.data import CorpusConfig, DataConfig, FilterConfig, SubwordConfig
from ziggurat.config.decode import DecodingConfig
from ziggurat.config.experiment import Experiment
from ziggurat.config.load import change_section
from ziggurat.config.model import ModelConfig
from ziggurat.config.modifiers import ModifiersConfig, StageConfig
from ziggurat.config.recipes import recipe_text
from ziggurat.config.train import TrainingConfig
from ziggurat.config.yaml_text import parse_yaml
from ziggurat.errors import ConfigError

__all__ = [
    "BACK_TRANSLATION",
    "BITEXT",
    "DISTILLATION",
    "MODELS",
    "BitextCorpus",
    "EvaluationConfig",
    "ExportTarget",
    "ModelName",
    "MonolingualText",
    "PipelineConfig",
    "TestSetConfig",
    "TrainedConfig",
    "TranslationConfig",
]

PIPELINE_FORMAT = 1
ModelName = Literal["backward", "teacher", "student"]
MODELS: tuple[ModelName, ...] = ("backward", "teacher", "student")
CorpusName = Literal["bitext", "back-translation", "distillation"]
BITEXT: CorpusName = "bitext"
BACK_TRANSLATION: CorpusName = "back-translation"
DISTILLATION: CorpusName = "distillation"
Name = Annotated[str, Field(pattern=r"^[\w][\w.+-]*$", max_length=100)]


class FetchConfig(Section):
    """How public corpora are fetched (docs/fetch.md)."""

    registry: list[PathText] = Field(default_factory=list, max_length=100)
    """Registries of your own, laid over the built-in one."""
    cache: PathText | None = None
    """Folder of downloads; null: `$ZIGGURAT_DOWNLOADS`, or ~/.cache/ziggurat/downloads."""
    mirror: list[str] = Field(default_factory=list, max_length=100)
    """Folders or addresses with files at HOST/PATH, asked before the files' own servers."""
    offline: bool = False
    """Use downloads and mirrors only."""
    proxy: str | None = None
    """Proxy for all addresses; null: `$https_proxy`."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 5
    """Failures in a row to bear."""
    mtdata: PathText | None = None
    """Python of an environment with mtdata; null: one is made when `mtdata/ID` is asked for."""


class BitextCorpus(CorpusConfig):
    """A parallel corpus: files as in `data.train`, or the name of a public one."""

    fetch: str | None = Field(default=None, min_length=1, max_length=500)
    """Name of a public corpus, such as `opus/Tatoeba/v2023-04-12/de-en`, in place of files (docs/fetch.md)."""

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        if self.alignment is not None:
            raise ValueError("`alignment` is of no use here: pairs are dropped and split up; add section `alignment`")
        if (self.fetch is None) == (self.path is None and self.source is None and self.target is None):
            raise ValueError("give `fetch`, or `source` and `target` (aligned text files), or `path` (one file)")
        if self.fetch is None and self.path is not None and (self.source or self.target):
            raise ValueError("give either `source` and `target` (aligned text files) or `path` (one file)")
        if self.fetch is None and self.path is None and (self.source is None or self.target is None):
            raise ValueError("give both `source` and `target`, aligned line by line")
        if self.columns and len(self.columns) != 2:
            raise ValueError("`columns` needs two entries: the source column and the target column")
        return self


class HoldOutConfig(Section):
    """Pairs that are taken out of the training corpora where there is no other development or test set."""

    dev: Size = Field(default=0, ge=0)
    """Pairs for development; 0: none."""
    test: Size = Field(default=0, ge=0)
    """Pairs for a test set, called `held-out`; 0: none."""


class BitextConfig(Section):
    """Parallel text."""

    train: list[BitextCorpus] = Field(min_length=1, max_length=1000)
    """Training corpora."""
    dev: list[BitextCorpus] = Field(default_factory=list, max_length=100)
    """Development corpora; they are not cleaned."""
    hold_out: HoldOutConfig | None = None
    """Take pairs for development and test out of the cleaned training corpora: no pair that shares a side with them
    stays there."""


class TestSetConfig(Section):
    """A test set."""

    name: Name
    """Name in the report."""
    source: PathText | None = None
    """Source text, one sentence per line."""
    target: PathText | None = None
    """Its translation."""
    fetch: str | None = Field(default=None, min_length=1, max_length=500)
    """Name of a public test set, such as `sacrebleu/wmt20/de-en`, in place of files."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        files = self.source is not None and self.target is not None
        if (self.source is None) != (self.target is None) or (self.fetch is None) == (not files):
            raise ValueError("give either `source` and `target`, or `fetch`")
        return self


class MonolingualText(Section):
    """Text of one language."""

    path: PathText | None = None
    """One sentence per line: path or glob; .gz, .xz and .zst are read as streams."""
    fetch: str | None = Field(default=None, min_length=1, max_length=500)
    """Name of a public corpus, such as `news-crawl/2019/de`, in place of files."""
    lines: Size | None = Field(default=None, ge=1)
    """Take the first lines only, after cleaning; null: all."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.fetch is None):
            raise ValueError("give either `path` or `fetch`")
        return self


class MonolingualConfig(Section):
    """Text of one language each; without duplicates and without the sentences of development and test sets."""

    source: list[MonolingualText] = Field(default_factory=list, max_length=1000)
    """Text of the source language, for `distillation`."""
    target: list[MonolingualText] = Field(default_factory=list, max_length=1000)
    """Text of the target language, for `backtranslation`."""


class TrainedConfig(Section):
    """A model, as the sections of an experiment say (docs/config.md); where its data come from is the pipeline's."""

    recipe: str | None = None
    """Built-in recipe (`ziggurat recipes`) whose model, training, decoding and subwords are taken where this section
    says nothing else."""
    existing: PathText | None = None
    """Run or model directory to be used as it is; nothing is trained."""
    corpora: dict[CorpusName, Annotated[float, Field(gt=0, le=1e9)]] | None = None
    """Corpora to train on with their weights; null: `bitext` and, where they are made, `back-translation`; for the
    student `distillation` alone where that is made."""
    unicode: Literal["none", "nfc", "nfkc"] = "none"
    """As `data.unicode`."""
    sampling_temperature: Real = Field(default=1.0, ge=0.1)
    """As `data.sampling_temperature`."""
    subword: SubwordConfig = SubwordConfig()
    """As `data.subword`."""
    modifiers: ModifiersConfig = ModifiersConfig()
    """As `data.modifiers`."""
    stages: list[StageConfig] = Field(default_factory=list, max_length=1000)
    """As `data.stages`; corpora are called as in `corpora`, and the bitext's by their own names."""
    model: ModelConfig = ModelConfig()
    """Architecture."""
    training: TrainingConfig = TrainingConfig()
    """Optimisation; `growth` makes a deep teacher of a shallow one."""
    decoding: DecodingConfig = DecodingConfig()
    """Search, for validation and evaluation."""

    @model_validator(mode="before")
    @classmethod
    def _over_recipe(cls, content: Any) -> Any:
        if not isinstance(content, dict) or not isinstance(name := content.get("recipe"), str):
            return content
        try:
            below, _ = parse_yaml(recipe_text(name), f"recipe {name}")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        data = below.get("data", {})
        taken = {key: below[key] for key in ("model", "training", "decoding") if key in below}
        taken |= {key: data[key] for key in ("subword", "unicode") if key in data}
        return _overlaid(taken, content)

    @model_validator(mode="after")
    def _trained_or_existing(self) -> Self:
        if self.existing is not None and (given := self.model_fields_set - {"existing"}):
            raise ValueError(f"`existing` takes a model as it is: leave out `{min(given)}`")
        if self.training.start_from is not None:
            raise ValueError("`training.start_from` is not for a pipeline, whose models begin from nothing")
        return self


def _overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above`, also in the sections inside."""
    both = dict(below)
    for key, value in above.items():
        inner = both.get(key)
        both[key] = _overlaid(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return both


class TranslationConfig(Section):
    """A synthetic corpus (docs/back-translation.md)."""

    method: Literal["sample", "top-k", "beam", "noised-beam"]
    """Search for the synthetic side."""
    decoding: dict[str, Any] = Field(default_factory=dict)
    """Keys of `decoding` in place of the model's own, such as `{beam_size: 8}`."""
    max_pieces: Length = Field(default=250, ge=1)
    """Most subword pieces of either side."""
    max_ratio: Annotated[float, Field(ge=1, le=1e6)] = 1.5
    """Largest ratio of the two sides' pieces."""
    seed: Seed = Field(default=1, ge=0)
    """Seed of samples and noise."""
    shard_lines: Size = Field(default=2000, ge=1)
    """Lines of a shard: what an interruption loses per worker."""
    threads: Threads = Field(default=1, ge=1)
    """CPU threads of each worker; the result depends on them."""
    workers: Threads | None = Field(default=None, ge=1)
    """Processes; null: one for each core, one on a GPU. The result does not depend on them."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, ..."""

    @model_validator(mode="after")
    def _decoding_is_one(self) -> Self:
        try:
            change_section(DecodingConfig(search="sample" if self.method in ("sample", "top-k") else "beam"),
                           self.decoding, "decoding")  # fmt: skip
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if clash := {"search", "seed", "n_best"} & self.decoding.keys():
            raise ValueError(f"`decoding.{min(clash)}`: this section has keys of its own for that")
        return self


class BackTranslationConfig(TranslationConfig):
    """Back-translation of `monolingual.target` by the backward model: a corpus for the teacher and the student."""

    method: Literal["sample", "top-k", "beam", "noised-beam"] = "sample"
    """Search for the synthetic side."""
    tag: str | None = Field(default="<bt>", pattern=r"^<[^\s<>]+>$")
    """Tag of its source sentences; null: none."""


class DistillationConfig(TranslationConfig):
    """Sequence-level distillation (Kim and Rush 2016): the teacher translates what the student learns from."""

    method: Literal["sample", "top-k", "beam", "noised-beam"] = "beam"
    """Search for the synthetic side."""
    bitext: bool = True
    """Translate the source side of the bitext."""
    monolingual: bool = True
    """Translate `monolingual.source`, too, where it is given."""


class AlignmentStepConfig(Section):
    """Word alignments of the student's corpora, for guided alignment, inline tags and terms (docs/alignment.md)."""

    symmetrise: Literal["grow-diag-final-and", "grow-diag-final", "grow-diag", "intersection", "union"] = (
        "grow-diag-final-and"
    )
    """How the two directions are merged."""
    model1_iterations: Annotated[int, Field(ge=1, le=1000)] = 5
    """Iterations of IBM Model 1."""
    hmm_iterations: Annotated[int, Field(ge=0, le=1000)] = 5
    """Iterations of the hidden Markov model."""
    pairs: Size = Field(default=1_000_000, ge=1)
    """Pairs to train the aligner on at most."""


class ExportTarget(Section):
    """A model written for another toolkit, and compared with ours before (docs/export.md)."""

    quantization: str | None = None
    """`int8`, `float32`, ...; null: the target's usual one, fp32 for most."""
    lines: Size = Field(default=1000, ge=1)
    """Lines of the development set to compare by."""
    tolerance: Real | None = Field(default=None, ge=0)
    """By how much BLEU may fall on the first test set; null: it is not asked."""
    metadata: dict[str, str] = Field(default_factory=dict)
    """argos: `package_version`, `from_code`, `from_name`, `to_code`, `to_name`, `license`."""


class ExportConfig(Section):
    """Exports of the student, or of the teacher where there is no student."""

    ctranslate2: ExportTarget | None = None
    """For CTranslate2, and `ziggurat translate` without PyTorch."""
    argos: ExportTarget | None = None
    """For Argos Translate and LibreTranslate."""
    huggingface: ExportTarget | None = None
    """For transformers."""
    onnx: ExportTarget | None = None
    """For onnxruntime."""


class EvaluationConfig(Section):
    """Evaluation of teacher, student and the export for CTranslate2 on all test sets."""

    metrics: list[Literal["bleu", "chrf", "ter"]] = Field(default=["bleu", "chrf"], min_length=1)
    """Metrics of sacreBLEU."""
    perturb: list[str] = Field(default_factory=list, max_length=100)
    """Disturbances of the first test set (docs/robustness.md): `caps`, `title`, `typos`, ..., or `all`."""
    perturb_lines: Size = Field(default=500, ge=1)
    """Lines of the test set that are disturbed, the first ones."""
    speed_lines: Size = Field(default=500, ge=0)
    """Lines of the first test set that are translated to measure speed, after a warm-up; 0: speed is not measured."""
    threads: Threads | None = Field(default=None, ge=1)
    """CPU threads; null: one for each core."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, ..."""


class PipelineConfig(Section):
    """The whole of a pipeline."""

    format: Count = PIPELINE_FORMAT
    """Version of this format."""
    folder: PathText = Field(min_length=1)
    """Folder of all results, one folder in it for each step."""
    source_language: str = Field(min_length=1)
    """ISO 639 code of the source language, such as `de`."""
    target_language: str = Field(min_length=1)
    """ISO 639 code of the target language, such as `en`."""
    fetch: FetchConfig = FetchConfig()
    """How corpora are fetched, where any is named by `fetch`."""
    bitext: BitextConfig
    """Parallel text."""
    test: list[TestSetConfig] = Field(default_factory=list, max_length=100)
    """Test sets, none of which is trained on."""
    monolingual: MonolingualConfig = MonolingualConfig()
    """Text of one language."""
    cleaning: FilterConfig = FilterConfig(max_length_ratio=3, identical=True, duplicates=True, control_characters=True)
    """Cleaning of the training corpora, as `data.filters`; `max_pieces` holds when a model's data are prepared."""
    backward: TrainedConfig | None = None
    """Model from target to source, for `backtranslation`."""
    backtranslation: BackTranslationConfig | None = None
    """Back-translation of `monolingual.target`."""
    teacher: TrainedConfig | None = None
    """Teacher: the best model that can be trained, deep."""
    distillation: DistillationConfig | None = None
    """Distillation by the teacher."""
    alignment: AlignmentStepConfig | None = None
    """Word alignments of the student's corpora."""
    student: TrainedConfig | None = None
    """Student: the small model that is to be used."""
    export: ExportConfig | None = None
    """Exports."""
    evaluation: EvaluationConfig | None = None
    """Evaluation on `test`."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.format != PIPELINE_FORMAT:
            raise ValueError(f"pipeline format {self.format} is not known here (this version reads {PIPELINE_FORMAT})")
        names = [test.name for test in self.test]
        held = self.bitext.hold_out or HoldOutConfig()
        if len({*names, *(["held-out"] if held.test else [])}) < len(names) + bool(held.test):
            raise ValueError("`test`: names of test sets must differ (`held-out` is that of `bitext.hold_out`)")
        for missing, why in self._missing(held):
            raise ValueError(f"`{missing}` is missing: {why}")
        if self.student is not None and self.student.existing is not None:
            raise ValueError("`student.existing`: a student is trained here; leave the section out")
        for name in MODELS:
            chosen: TrainedConfig | None = getattr(self, name)
            if chosen is not None and chosen.existing is None:
                self._check_model(name, chosen)
        return self

    def _missing(self, held: HoldOutConfig) -> list[tuple[str, str]]:
        """Return each key that is missing, and what needs it."""
        wants = [
            (self.teacher or self.student, "teacher", "a pipeline trains a `teacher`, a `student`, or both"),
            (self.bitext.dev or held.dev, "bitext.dev", "models are chosen by it; or take pairs out of the training "
             "corpora by `bitext.hold_out: {dev: 1000}`"),
        ]  # fmt: skip
        if self.backtranslation is not None:
            wants += [
                (self.backward, "backward", "`backtranslation` translates with it"),
                (self.monolingual.target, "monolingual.target", "`backtranslation` translates it"),
            ]
        if self.distillation is not None:
            made = self.distillation.bitext or (self.distillation.monolingual and self.monolingual.source)
            wants += [
                (self.teacher, "teacher", "`distillation` translates with it"),
                (self.student, "student", "`distillation` is for it"),
                (made, "monolingual.source", "`distillation` has no text without it: `bitext` is false"),
            ]
        if self.alignment is not None:
            wants += [(self.student, "student", "`alignment` is of its corpora")]
        if self.evaluation is not None:
            wants += [(self.test or held.test, "test", "`evaluation` needs a test set; or take one out of the training "
                       "corpora by `bitext.hold_out: {test: 1000}`")]  # fmt: skip
        tolerances = self.export is not None and any(
            target is not None and target.tolerance is not None for _, target in self.export
        )
        if tolerances:
            wants += [(self.test or held.test, "test", "`export` asks for BLEU on it (`tolerance`)")]
        return [(key, why) for there, key, why in wants if not there]

    def _check_model(self, name: ModelName, chosen: TrainedConfig) -> None:
        """Raise ValueError where the sections of a model contradict each other, or the corpora it is to learn from."""
        made = {BITEXT: True, BACK_TRANSLATION: self.backtranslation is not None and name != "backward"}
        made[DISTILLATION] = self.distillation is not None and name == "student"
        for corpus in chosen.corpora or {}:
            if not made[corpus]:
                raise ValueError(f"`{name}.corpora.{corpus}`: no such corpus is made for this model")
        if chosen.training.loss.alignment is not None and (name != "student" or self.alignment is None):
            raise ValueError(f"`{name}.training.loss.alignment` needs word alignments: add section `alignment`, for the "
                             "student")  # fmt: skip
        try:
            self.experiment(name, [CorpusConfig(source="-", target="-")], [], "store")
        except ValidationError as error:
            found = error.errors()[0]
            place = ".".join(str(step) for step in (name, *found["loc"]))
            raise ValueError(f"`{place}`: {found['msg'].removeprefix('Value error, ')}") from None

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
        """Return the experiment of a model on these corpora. Raises ValidationError where its parts do not fit."""
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
                filters=FilterConfig(max_pieces=self.cleaning.max_pieces),
                subword=chosen.subword,
                stages=chosen.stages,
                modifiers=chosen.modifiers,
            ),
            model=chosen.model,
            training=chosen.training,
            decoding=chosen.decoding,
        )
