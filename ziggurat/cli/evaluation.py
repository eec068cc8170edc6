"""The verb that scores translations, of one system or of several side by side: evaluate."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ziggurat.cli.comparing import CompareOptions, check_test_set, compare_systems, translated, warn_of_sides
from ziggurat.cli.engine import open_model
from ziggurat.cli.output import OUT, check_output, console, print_json, refuse_overwriting
from ziggurat.cli.preparation import Json
from ziggurat.cli.translated import notices
from ziggurat.cli.translation import (
    Device,
    Ensemble,
    Overrides,
    Threads,
    Which,
    decoding_settings,
    pair_up,
    read_text,
)
from ziggurat.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.evaluation.comet import CometEnvironment
    from ziggurat.evaluation.metrics import TestSet
    from ziggurat.evaluation.scores import Metric, Score

__all__ = ["evaluate"]

_COMET_PYTHON = "ZIGGURAT_COMET_PYTHON"


def evaluate(
    model: Annotated[
        str | None, typer.Argument(help="Run or model directory; leave out with --hypothesis and --compare.")
    ] = None,
    overrides: Overrides = None,
    source: Annotated[str | None, typer.Option("--source", help="Source text to translate.")] = None,
    hypothesis: Annotated[str | None, typer.Option("--hypothesis", help="Translations that are there already.")] = None,
    reference: Annotated[
        list[str] | None, typer.Option("--reference", help="Reference translation; repeat for several.")
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            metavar="[NAME=]PATH[,PATH...]",
            help="A system to compare: runs, model directories or files of translations, one per seed; repeat.",
        ),
    ] = None,
    train_target: Annotated[
        list[str] | None,
        typer.Option("--train-target", help="Target side of the training text, for word accuracy; with --compare."),
    ] = None,
    metrics: Annotated[
        str, typer.Option("--metrics", help="Of bleu, chrf, ter, meteor, comet; separated by commas.")
    ] = "bleu,chrf,ter",
    language: Annotated[
        str | None,
        typer.Option("--language", help="Target language, such as en, for METEOR and BLEU; default: the model's."),
    ] = None,
    comet_python: Annotated[
        str | None, typer.Option("--comet-python", help=f"Python that has unbabel-comet; default: ${_COMET_PYTHON}.")
    ] = None,
    comet_model: Annotated[
        str | None, typer.Option("--comet-model", help="COMET's model; default: Unbabel/wmt22-comet-da.")
    ] = None,
    tokenised: Annotated[
        str | None, typer.Option("--tokenised", help="Also BLEU on Moses-tokenised text of this language.")
    ] = None,
    compound_split: Annotated[
        bool, typer.Option("--compound-split", help="Also compound-split BLEU (English-German papers).")
    ] = False,
    bleu_tokenizer: Annotated[
        str | None, typer.Option("--bleu-tokenizer", help="sacreBLEU's name; default: by the target language.")
    ] = None,
    confidence: Annotated[bool, typer.Option("--confidence", help="Add 95 % confidence intervals.")] = False,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    output: Annotated[
        str | None, typer.Option(*OUT, help="Also write the translations here (--compare: a folder).")
    ] = None,
    ensemble: Ensemble = None,
    which: Which = None,
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Score a model on a test set, or translations in a file, with sacreBLEU; or compare systems.

    Examples: `ziggurat evaluate runs/a --source test.de --reference test.en --confidence`,
    `ziggurat evaluate --compare a=runs/a-1,runs/a-2 --compare b=b.txt --source test.de --reference test.en`
    """
    from ziggurat.evaluation.languages import check_language_code
    from ziggurat.evaluation.metrics import TestSet
    from ziggurat.evaluation.tokenised import check_language

    if language is not None:
        check_language_code(language, "--language")
    if model is not None and "=" in model:
        overrides, model = [model, *(overrides or [])], None
    settings = decoding_settings(overrides, "--source")
    if not reference:
        raise ConfigError("`--reference FILE` is missing")
    wanted = _metrics(metrics)
    if (comet_python or comet_model) and "comet" not in wanted:
        raise ConfigError("`--comet-python` and `--comet-model` go with `--metrics comet`")
    comet = _comet(comet_python, comet_model, device) if "comet" in wanted else None
    if compare:
        if model is not None or hypothesis or ensemble or tokenised or compound_split or confidence:
            raise ConfigError(
                "`--compare` takes no model beside it, no `--hypothesis`, `--ensemble`, `--tokenised`, "
                "`--compound-split` or `--confidence`"
            )
        test = TestSet([read_text(path) for path in reference], None, language, bleu_tokenizer, lowercase)
        asked = CompareOptions(compare, source, reference, test, wanted, comet, train_target or [], output)
        compare_systems(asked, which=which, device=device, threads=threads, settings=settings, json=json)
        return
    if train_target:
        raise ConfigError("`--train-target` goes with `--compare`")
    if (model is None) == (hypothesis is None):
        raise ConfigError("give a model with `--source`, or translations with `--hypothesis`, or `--compare`")
    refuse_overwriting(output, source, *reference)
    check_output(output or "-")
    if tokenised is not None or compound_split:
        check_language(tokenised or "de")
    references = [read_text(path) for path in reference]
    sources = None if source is None else read_text(source)
    if sources is not None and source is not None:
        pair_up((source, sources), *zip(reference, references, strict=True))
    if hypothesis is not None:
        if overrides or output or ensemble:
            raise ConfigError("`--hypothesis` takes no decoding settings, `--output` or `--ensemble`")
        hypotheses = read_text(hypothesis)
        pair_up((hypothesis, hypotheses), *zip(reference, references, strict=True))
    else:
        if sources is None:
            raise ConfigError("`--source FILE` is missing: what should the model translate?")
        assert model is not None
        with notices():
            translator = open_model([model, *(ensemble or [])], which, device, threads, settings)
            language = language or translator.target_language
            test_set = TestSet(references, sources, language, bleu_tokenizer, lowercase)
            check_test_set(test_set, wanted, comet)
            hypotheses = translated(translator, sources, output)
    test_set = TestSet(references, sources, language, bleu_tokenizer, lowercase)
    if hypothesis is not None:
        check_test_set(test_set, wanted, comet)
    warn_of_sides(hypotheses, test_set)
    scores = _scores(test_set, hypotheses, wanted, comet, confidence)
    scores += _tokenised_scores(test_set, hypotheses, tokenised, compound_split, confidence)
    if json:
        print_json([s.as_record() for s in scores])
        return
    for s in scores:
        print(s)


def _scores(
    test_set: TestSet, hypotheses: list[str], names: list[str], comet: CometEnvironment | None, confidence: bool
) -> list[Score]:
    """Return the score of each metric, in the order of `names`."""
    from ziggurat.evaluation.scores import METRICS
    from ziggurat.evaluation.scores import evaluate as sacrebleu_scores
    from ziggurat.evaluation.segments import scored

    scores = sacrebleu_scores(
        hypotheses,
        test_set.references,
        metrics=cast("list[Metric]", [name for name in names if name in METRICS]),
        confidence=confidence,
        target_language=test_set.target_language,
        tokenize=test_set.tokenize,
        lowercase=test_set.lowercase,
    )
    others = [test_set.metric(name, comet) for name in names if name not in METRICS]
    return scores + [scored(metric, hypotheses, confidence=confidence) for metric in others]


def _tokenised_scores(
    test_set: TestSet, hypotheses: list[str], language: str | None, compound_split: bool, confidence: bool
) -> list[Score]:
    """Return BLEU on tokenised text and compound-split BLEU, where they are asked for."""
    from ziggurat.evaluation.tokenised import compound_split_bleu, tokenised_bleu

    references, lowercase = test_set.references, test_set.lowercase
    scores = []
    if language is not None:
        scores.append(
            tokenised_bleu(hypotheses, references, language=language, confidence=confidence, lowercase=lowercase)
        )
    if compound_split:
        scores.append(
            compound_split_bleu(
                hypotheses, references, language=language or "de", confidence=confidence, lowercase=lowercase
            )
        )
    return scores


def _metrics(listed: str) -> list[str]:
    """Return the metrics named in a list with commas, in the order of ALL_METRICS."""
    from ziggurat.evaluation.metrics import ALL_METRICS, check_metrics

    names = [name.strip().lower() for name in listed.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"`--metrics` names none; valid: {', '.join(ALL_METRICS)}")
    check_metrics(names)
    return [metric for metric in ALL_METRICS if metric in names]


def _comet(python: str | None, model: str | None, device: str) -> CometEnvironment:
    """Return how COMET runs. Raises ConfigError when nobody said with which Python."""
    from ziggurat.evaluation.comet import DEFAULT_MODEL, CometEnvironment

    python = python or os.environ.get(_COMET_PYTHON)
    if not python:
        raise ConfigError(
            "COMET runs in an environment of its own (`python3 -m venv comet-env && comet-env/bin/pip install "
            f"unbabel-comet`): give its Python with `--comet-python comet-env/bin/python` or in ${_COMET_PYTHON}"
        )
    say = console()
    return CometEnvironment(
        python,
        model or DEFAULT_MODEL,
        device=device,
        say=lambda text: say.print(text, markup=False, highlight=False, soft_wrap=True),
    )
