"""Options of `evaluate`, `compare` and `perturb`: which scores, how to compute them, and for which systems."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ziggurat.cli.engine import ModelOptions
from ziggurat.cli.output import say
from ziggurat.cli.score_tables import table_format
from ziggurat.system.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.evaluate.metrics import CometEnvironment, TestSet

COMET_PYTHON = "ZIGGURAT_COMET_PYTHON"
"""COMET_PYTHON is the environment variable that names a Python interpreter with COMET."""

PERPLEXITY = "perplexity"
"""PERPLEXITY is the metric that scores the reference under the model rather than translations."""

TOKENISED, COMPOUND_SPLIT = "tokenised", "compound-split"
"""TOKENISED and COMPOUND_SPLIT are BLEU as in some papers, not comparable with sacreBLEU's."""

_OF_EVALUATE = (PERPLEXITY, TOKENISED, COMPOUND_SPLIT)

TEXTS, SCORES = "What to score", "Scores"
"""TEXTS and SCORES are groups of options in the help."""

Source = Annotated[
    str | None, typer.Option("--source", metavar="FILE", help="Source text to translate.", rich_help_panel=TEXTS)
]
Reference = Annotated[
    list[str] | None,
    typer.Option(
        "--reference", metavar="FILE", help="Reference translation; repeat for several.", rich_help_panel=TEXTS
    ),
]
SourceTag = Annotated[
    str | None,
    typer.Option("--tag", metavar="TAG", help="Tag for every source line, such as `<2de>`.", rich_help_panel=TEXTS),
]
Metrics = Annotated[
    str,
    typer.Option(
        "--metrics",
        metavar="NAME,...",
        help="bleu, chrf, chrf++, ter, meteor, comet; for a single system also perplexity, tokenised, compound-split.",
        rich_help_panel=SCORES,
    ),
]
Language = Annotated[
    str | None,
    typer.Option(
        "--language",
        metavar="CODE",
        help="Target language, such as en. Default: the model's.",
        rich_help_panel=SCORES,
    ),
]
CometModel = Annotated[
    str | None,
    typer.Option("--comet-model", metavar="NAME", help="Default: Unbabel/wmt22-comet-da.", rich_help_panel=SCORES),
]
BleuTokenizer = Annotated[
    str | None,
    typer.Option(
        "--bleu-tokenizer",
        metavar="NAME",
        help="sacreBLEU's name. Default: by the target language.",
        rich_help_panel=SCORES,
    ),
]
Lowercase = Annotated[bool, typer.Option("--lowercase", help="Ignore case.", rich_help_panel=SCORES)]
TableFormat = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="text, or the scores as one table: csv, markdown, latex.",
    ),
]


class MetricNames(NamedTuple):
    """Metrics that `--metrics` requests: `of_outputs` are names of ALL_METRICS, in its order."""

    of_outputs: list[str]
    perplexity: bool
    tokenised: bool
    compound_split: bool


def metric_names(listed: str) -> MetricNames:
    """Return the metrics of a comma-separated list. Raises ConfigError for an unknown one."""
    from ziggurat.evaluate.metrics import ALL_METRICS, OTHER_NAMES, check_metrics

    given = [name.strip().lower() for name in listed.split(",") if name.strip()]
    if not given:
        raise ConfigError(f"`--metrics` is empty; valid: {', '.join((*ALL_METRICS, *_OF_EVALUATE))}")
    names = [OTHER_NAMES.get(name, name) for name in given if name not in _OF_EVALUATE]
    if names:
        check_metrics(names)
    return MetricNames([metric for metric in ALL_METRICS if metric in names], *(name in given for name in _OF_EVALUATE))


@dataclass(frozen=True)
class ScoreOptions:
    """Options that say how to score outputs.

    Attributes:
        names: the metrics.
        comet: where COMET runs; None without that metric.
        language: target language; None: the model's, if any.
        tokenizer: sacreBLEU's name for BLEU's tokenizer; None: by language.
        tag: prefix for every source sentence to translate.
        table: format of the table of scores (ziggurat.cli.score_tables); None: plain text.
    """

    names: MetricNames
    comet: CometEnvironment | None
    language: str | None
    tokenizer: str | None
    lowercase: bool
    confidence: bool = False
    tag: str | None = None
    table: str | None = None

    @property
    def metrics(self) -> list[str]:
        """The metrics of translations, in the order of ALL_METRICS."""
        return self.names.of_outputs

    def refuse_references(self, count: int) -> None:
        """Raise ConfigError for several references if a perplexity is requested, which takes one."""
        if self.names.perplexity and count > 1:
            raise ConfigError(f"`--metrics {PERPLEXITY}` takes one reference translation, but there are {count}")

    def refuse_others(self, verb: str) -> None:
        """Raise ConfigError for metrics that only `evaluate` has."""
        if given := [name for name, is_given in zip(_OF_EVALUATE, self.names[1:], strict=True) if is_given]:
            raise ConfigError(f"`--metrics {given[0]}` is for `ziggurat evaluate`, not for `{verb}`")

    @property
    def of_outputs(self) -> bool:
        """True if some score needs translations, False if only the model's probabilities are needed."""
        return bool(self.names.of_outputs or self.names.tokenised or self.names.compound_split)

    def test_set(
        self, references: Sequence[Sequence[str]], sources: Sequence[str] | None, model_language: str | None = None
    ) -> TestSet:
        """Return these texts as a test set; `model_language` is used if no language was given."""
        from ziggurat.evaluate.metrics import TestSet

        return TestSet(references, sources, self.language or model_language, self.tokenizer, self.lowercase)

    def check(self, test_set: TestSet) -> None:
        """Check, before anything is translated, that every score can be computed; see check_test_set."""
        check_test_set(test_set, self.metrics, self.comet)
        self.check_moses(test_set.target_language)

    def check_moses(self, language: str | None) -> None:
        """Raise ConfigError if a score needs Moses' tokeniser, which does not know this target language."""
        from ziggurat.evaluate.scores import check_language

        if self.names.tokenised or self.names.compound_split:
            check_language(moses_language(language))


def score_options(
    metrics: str,
    language: str | None,
    comet_model: str | None,
    tokenizer: str | None,
    lowercase: bool,
    device: str,
    *,
    tag: str | None,
    format: str = "text",
    confidence: bool = False,
) -> ScoreOptions:
    """Return the score options as typed. Raises ConfigError for invalid ones."""
    from ziggurat.config.languages import check_language_code

    table = table_format(format)
    if language is not None:
        check_language_code(language, "--language")
    names = metric_names(metrics)
    if comet_model and "comet" not in names.of_outputs:
        raise ConfigError("`--comet-model` goes with `--metrics comet`")
    comet = comet_environment(comet_model, device) if "comet" in names.of_outputs else None
    found = ScoreOptions(names, comet, language, tokenizer, lowercase, confidence, tag, table)
    if language is not None:
        found.check_moses(language)
    return found


def moses_language(target_language: str | None) -> str:
    """Return the language for Moses' tokeniser; German if none is given, as compound splitting is English-German."""
    from ziggurat.config.languages import main_language

    return main_language(target_language or "de")


@dataclass(frozen=True)
class SystemOptions:
    """The options of `compare` and `perturb`.

    Attributes:
        systems: each `[NAME=]PATH[,PATH...]`.
        source: path of the source text.
        references: paths of the reference translations.
        scoring: metrics, and how they are computed.
        opening: how models are opened.
    """

    systems: Sequence[str]
    source: str | None
    references: Sequence[str]
    scoring: ScoreOptions
    opening: ModelOptions


def comet_environment(model: str | None, device: str) -> CometEnvironment:
    """Return the environment that COMET runs in. Raises ConfigError if no Python is named for it."""
    from ziggurat.evaluate.metrics import DEFAULT_MODEL, CometEnvironment

    python = os.environ.get(COMET_PYTHON)
    if not python:
        raise ConfigError(
            "COMET runs in a separate environment (`python3 -m venv comet-env && comet-env/bin/pip install "
            f"unbabel-comet`): name its Python, `export {COMET_PYTHON}=comet-env/bin/python`"
        )
    return CometEnvironment(python, model or DEFAULT_MODEL, device=device, say=say)


def check_test_set(
    test_set: TestSet, metrics: Iterable[str], comet: CometEnvironment | None, *, compare: bool = False
) -> None:
    """Print notices about word segmentation; raise ConfigError if a metric cannot be computed.

    Call this before anything is translated, which may take hours. `compare` needs BLEU's tokenizer whatever the
    metrics, so its message does not suggest leaving BLEU out.
    """
    from ziggurat.evaluate.scores import MissingTokenizerError

    names = list(metrics)
    for metric in names:
        try:
            test_set.metric(metric, comet)
        except MissingTokenizerError as error:
            way_out = f"{error}. Or name another with `--bleu-tokenizer`, such as `char` (single characters)"
            raise ConfigError(way_out if compare else f"{way_out}, or leave BLEU out: `--metrics chrf,ter`") from None
    splitting = test_set.splitting
    if splitting.bleu_notice and {"bleu", "meteor"} & set(names):
        say(f"warning: {splitting.bleu_notice}")
    if splitting.ter_notice and "ter" in names:
        say(f"warning: {splitting.ter_notice}")
