"""Model sections of a `ziggurat pipeline` file: training, translation, export and evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.data import SubwordConfig, Symmetrisation
from ziggurat.config.decode import DecodingConfig
from ziggurat.config.depth import LeftOut, pruned_config
from ziggurat.config.load import change_section
from ziggurat.config.model import ModelConfig, without_sizes
from ziggurat.config.modifiers import ModifiersConfig, StageConfig
from ziggurat.config.notices import unread_files
from ziggurat.config.recipes import recipe_text
from ziggurat.config.section import Beams, Count, Length, PathText, Real, Section, Seed, Size, Threads, joined
from ziggurat.config.train import TrainingConfig
from ziggurat.system.errors import ConfigError
from ziggurat.system.yaml_text import parse_yaml

Method = Literal["sample", "top-k", "beam", "noised-beam"]
"""Method is the search for the synthetic side of a corpus."""
CorpusName = Literal["bitext", "back-translation", "distillation"]
"""CorpusName is a corpus that a model can learn from."""
MAX_RATIO, RATIO_SLACK = 1.5, 5
"""MAX_RATIO and RATIO_SLACK are the defaults of `max_ratio` and `ratio_slack`. They drop 0.2 to 0.7 % of short human
pairs (fr-en and de-en) and about a seventh of random pairs (docs/students.md)."""

_OF_TEACHER = frozenset({"model", "subword", "unicode"})
"""_OF_TEACHER are the keys that a student inherits from the teacher it starts from."""


class TrainedConfig(Section):
    """A model to train, with the sections of an experiment; the pipeline provides the data."""

    recipe: str | None = None
    """Built-in recipe (`ziggurat recipes`) whose model, training, decoding and subwords provide this section's
    defaults."""
    existing: PathText | None = None
    """Run or model directory to use unchanged; nothing is trained."""
    without_layers: str | None = None
    """Student only: start from the teacher without these layers, such as `decoder.2-5`, and with its vocabulary.
    `model`, `subword` and `unicode` are then the teacher's (docs/students.md). null: train from scratch."""
    corpora: dict[CorpusName, Annotated[float, Field(gt=0, le=1e9)]] | None = None
    """Corpora to train on, with their weights. null: `bitext`, and `back-translation` if it is made; for the student,
    only `distillation` if that is made."""
    unicode: Literal["none", "nfc", "nfkc"] = "none"
    """As `data.unicode`."""
    sampling_temperature: Real = Field(default=1.0, ge=0.1)
    """As `data.sampling_temperature`."""
    subword: SubwordConfig = SubwordConfig()
    """As `data.subword`."""
    modifiers: ModifiersConfig = ModifiersConfig()
    """As `data.modifiers`."""
    stages: list[StageConfig] = Field(default_factory=list, max_length=1000)
    """Stages as in `data.stages`. Corpora are named as in `corpora`, and those of the bitext by their own name.
    Without `filter`, the part distilled from monolingual text is `distillation-monolingual`."""
    model: ModelConfig = ModelConfig()
    """Architecture."""
    training: TrainingConfig = TrainingConfig()
    """Optimisation; `growth` grows a shallow teacher into a deep one."""
    decoding: DecodingConfig = DecodingConfig()
    """Search, for validation and evaluation."""

    @model_validator(mode="before")
    @classmethod
    def _over_recipe(cls, content: Any) -> Any:
        if not isinstance(content, dict) or not isinstance(name := content.get("recipe"), str):
            return content
        below, _ = parse_yaml(recipe_text(name), f"recipe {name}")
        taken: dict[str, Any] = {key: below[key] for key in ("model", "training", "decoding") if key in below}
        taken |= {key: below["data"][key] for key in ("subword", "unicode") if key in below.get("data", {})}
        if content.get("without_layers") is not None:
            taken = {key: value for key, value in taken.items() if key not in _OF_TEACHER}
        if isinstance(model := content.get("model"), dict) and "model" in taken:
            taken["model"] = without_sizes(taken["model"], model.get("preset"))
        return joined(taken, content)

    @model_validator(mode="after")
    def _trained_or_existing(self) -> Self:
        if self.existing is not None and (given := self.model_fields_set - {"existing"}):
            raise ConfigError.of("existing", f"uses a model unchanged: leave out `{min(given)}`")
        if self.training.lora is not None:
            raise ConfigError.of("training.lora", "adapts an already trained model: use `ziggurat train`")
        if self.training.start_from is not None:
            raise ConfigError.of(
                "training.start_from", "is not for a pipeline; `without_layers` starts a student from the teacher"
            )
        if unread := unread_files(self.subword):
            names = {"data.subword": "subword"}
            raise ConfigError(unread[0].shown(names), key=unread[0].key.removeprefix("data."))
        if self.without_layers is not None:
            if given := self.model_fields_set & _OF_TEACHER:
                raise ConfigError.of("without_layers", f"takes the teacher's `{min(given)}`: leave it out")
            if self.training.growth is not None:
                raise ConfigError.of("training.growth", "trains from scratch: leave out either it or `without_layers`")
        return self

    def begun_as(self, teacher: ModelConfig, unicode: str, vocabulary: str) -> Self:
        """Return the section of a student that starts as `teacher` minus `without_layers`.

        `vocabulary` is the folder of the teacher's vocabulary. Raises ConfigError if layers cannot be left out.
        """
        try:
            model = pruned_config(teacher, LeftOut.parse(self.without_layers or "", ""))
        except ConfigError as error:
            raise ConfigError.of("student.without_layers", f": {error}") from None
        subword = SubwordConfig(kind="existing", source_model=vocabulary)
        return self.model_copy(update={"model": model, "subword": subword, "unicode": unicode})


class TranslationConfig(Section):
    """A synthetic corpus (docs/students.md)."""

    method: Method
    """Search for the synthetic side."""
    decoding: dict[str, Any] = Field(default_factory=dict)
    """Keys that override the model's `decoding`, such as `{beam_size: 8}`."""
    max_pieces: Length = Field(default=250, ge=1)
    """Maximum number of subword pieces on either side."""
    max_ratio: Annotated[float, Field(ge=1, le=1e6)] = MAX_RATIO
    """Maximum length ratio in pieces: the longer side may have this many times the pieces of the shorter side, plus
    `ratio_slack`."""
    ratio_slack: Length = Field(default=RATIO_SLACK, ge=0)
    """Pieces allowed beyond `max_ratio`, which on its own would drop many good pairs of short sentences."""
    seed: Seed = Field(default=1, ge=0)
    """Seed for samples and noise."""
    shard_lines: Size | None = Field(default=None, ge=1)
    """Lines per shard, the most that a worker loses in an interruption; null: a hundredth of all, from 200 to 2,000."""
    threads: Threads = Field(default=1, ge=1)
    """CPU threads of each worker; the result depends on this number."""
    workers: Threads | None = Field(default=None, ge=1)
    """Number of processes; null: one per core, or one on a GPU. The result does not depend on it."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, ..."""

    @model_validator(mode="after")
    def _decoding_is_one(self) -> Self:
        search: Literal["sample", "beam"] = "sample" if self.method in ("sample", "top-k") else "beam"
        change_section(DecodingConfig(search=search), self.decoding, "decoding")
        if clash := {"search", "seed", "n_best"} & self.decoding.keys():
            raise ConfigError.of(f"decoding.{min(clash)}", ": use this section's key for that")
        return self


class BackTranslationConfig(TranslationConfig):
    """Back-translation of `monolingual.target` by the backward model: a corpus for the teacher and the student."""

    method: Method = "sample"
    """Search for the synthetic side."""
    tag: str | None = Field(default="<bt>", pattern=r"^<[^\s<>]+>$")
    """Tag of its source sentences; null: none."""


class DistillationConfig(TranslationConfig):
    """Sequence-level distillation (Kim and Rush 2016): the teacher translates the text that the student learns from."""

    method: Method = "beam"
    """Search for the synthetic side."""
    n_best: Beams = Field(default=8, ge=1)
    """Candidates for each sentence of the bitext; the one nearest to the reference is kept. The beam has this size, or
    `decoding.beam_size`, which cannot be smaller. 1: the model's best."""
    nearest: Literal["chrf", "bleu"] = "chrf"
    """Score of a candidate against its reference."""
    bitext: bool = True
    """Translate the source side of the bitext."""
    monolingual: bool = True
    """Also translate `monolingual.source`, if given."""

    @model_validator(mode="after")
    def _beam_has_room(self) -> Self:
        beam = self.decoding.get("beam_size", self.n_best)
        if self.bitext and self.method in ("beam", "noised-beam") and beam < self.n_best:
            raise ValueError(
                f"a beam of {beam} (`decoding.beam_size`) cannot give {self.n_best} candidates (`n_best`): use a "
                "smaller `n_best`, or leave out `beam_size`"
            )
        return self


class FilterStepConfig(Section):
    """Cross-entropy filter (docs/students.md): drops pairs whose source the backward model finds least likely."""

    keep: float = Field(default=0.95, gt=0, le=1)
    """Share of the pairs to keep."""
    threads: Threads = Field(default=1, ge=1)
    """CPU threads of each worker; the last digits of a score depend on this number."""
    workers: Threads | None = Field(default=None, ge=1)
    """Number of processes; null: one per core, or one on a GPU."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, ..."""


class QuantisationConfig(Section):
    """Fine-tuning of the student with products rounded to bytes, as int8 translation computes them.

    It uses the mix and modifiers of the last of the student's `stages`.
    """

    updates: Count = Field(default=500, ge=1)
    """Updates."""
    peak: Real = Field(default=1e-4, gt=0)
    """Highest learning rate, reached after a tenth of the updates; the rate then falls along a cosine."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Keys that override the student's `training`, such as `{batch: {max_tokens: 2048}}`."""


class AlignmentStepConfig(Section):
    """Word alignments of the student's corpora, for guided alignment, inline tags and terms (docs/students.md)."""

    symmetrise: Symmetrisation = "grow-diag-final-and"
    """Method for merging the two directions."""
    model1_iterations: Annotated[int, Field(ge=1, le=1000)] = 5
    """Iterations of IBM Model 1."""
    hmm_iterations: Annotated[int, Field(ge=0, le=1000)] = 5
    """Iterations of the hidden Markov model."""
    pairs: Size = Field(default=1_000_000, ge=1)
    """Maximum number of pairs to train the aligner on."""


class ShortlistConfig(Section):
    """Lexical shortlist of the student's data, for its export to CTranslate2 (docs/students.md)."""

    best: Annotated[int, Field(ge=0, le=100_000)] = 100
    """Number of likely target pieces to keep per source piece."""
    frequent: Annotated[int, Field(ge=0, le=100_000)] = 100
    """Number of frequent target pieces to allow in every sentence."""
    floor: Annotated[float, Field(ge=0, le=1)] = 1e-4
    """Lowest probability of a target piece given a source piece."""
    pairs: Size = Field(default=200_000, ge=1)
    """Maximum number of training pairs to read."""


class TargetConfig(Section):
    """A model exported for another toolkit and compared with the original (docs/export.md)."""

    quantization: str | None = None
    """`int8`, `float32`, ...; null: the target's default, fp32 for most."""
    lines: Size = Field(default=1000, ge=1)
    """Lines of the development set used for the comparison."""
    tolerance: Real | None = Field(default=None, ge=0)
    """Largest drop in BLEU allowed on the first test set; null: BLEU is not checked."""
    metadata: dict[str, str] = Field(default_factory=dict)
    """Metadata of an Argos package: `package_version`, `from_code`, `from_name`, `to_code`, `to_name`, `license`."""


class ExportConfig(Section):
    """Exports of the student, or of the teacher if there is no student."""

    ctranslate2: TargetConfig | None = None
    """Export for CTranslate2, and for `ziggurat translate` without PyTorch."""
    argos: TargetConfig | None = None
    """Export for Argos Translate and LibreTranslate."""
    huggingface: TargetConfig | None = None
    """Export for transformers."""
    onnx: TargetConfig | None = None
    """Export for onnxruntime."""


class EvaluationConfig(Section):
    """Evaluation of the teacher, the student and its CTranslate2 export on all test sets."""

    metrics: list[Literal["bleu", "chrf", "ter"]] = Field(default=["bleu", "chrf"], min_length=1)
    """sacreBLEU's metrics."""
    perturb: list[str] = Field(default_factory=list, max_length=100)
    """Perturbations of the first test set (docs/evaluate.md#robustness): `caps`, `title`, `typos`, ..., or `all`."""
    perturb_lines: Size = Field(default=500, ge=1)
    """Number of lines of the test set to perturb, from the first."""
    int8: bool = True
    """Also evaluate the final model in int8 with the PyTorch engine (on CPUs)."""
    speed_lines: Size = Field(default=500, ge=0)
    """Lines of the first test set to translate, after a warm-up, to measure speed; 0: speed is not measured."""
    threads: Threads | None = Field(default=None, ge=1)
    """CPU threads; null: one per core."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, ..."""
