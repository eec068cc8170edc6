"""Scoring for `evaluate`, alone and with `--compare`: metrics by name, checks before and after translating."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ziggurat.cli.engine import ModelOptions, open_engine, warnings_shown
from ziggurat.cli.jobs import JobOptions, model_choice, translation_job
from ziggurat.cli.output import (
    counted,
    line_progress,
    output_stream,
    pair_up,
    print_json,
    read_text,
    refuse_empty,
    say,
    write_parts,
)
from ziggurat.data.sides import Trigrams, resembles_more
from ziggurat.evaluate.findings import FEWEST_CASES
from ziggurat.system.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.evaluate.comet import CometEnvironment
    from ziggurat.evaluate.metrics import TestSet
    from ziggurat.evaluate.scores import Metric, Score
    from ziggurat.translate.served import ServedTranslator
    from ziggurat.translate.translator import Translator
    from ziggurat.translate.workers import WorkerTranslator

    AnyTranslator = Translator | ServedTranslator | WorkerTranslator

COMET_PYTHON = "ZIGGURAT_COMET_PYTHON"
"""Environment variable that stands in for `--comet-python`."""

PERPLEXITY = "perplexity"
"""Name of the metric that is of the reference under the model, and so none of those that score translations."""

_LANGUAGE_LINES = 2000  # lines compared to tell the languages of two texts apart


@dataclass(frozen=True)
class ScoreOptions:
    """The options of `evaluate` on how outputs are scored.

    Attributes:
        metrics: names of ALL_METRICS, in its order.
        comet: where COMET runs; None without that metric.
        language: target language; None: the model's, if there is a model.
        tokenizer: BLEU's tokenizer by sacreBLEU's name; None: by the language.
        lowercase: ignore case.
        tokenised: language of tokenised BLEU; None: not asked for.
        compound_split: also compound-split BLEU.
        confidence: add confidence intervals.
        tag: put before every source sentence that is translated; None: none.
        perplexity: also that of the reference under the model.
    """

    metrics: Sequence[str]
    comet: CometEnvironment | None
    language: str | None
    tokenizer: str | None
    lowercase: bool
    tokenised: str | None = None
    compound_split: bool = False
    confidence: bool = False
    tag: str | None = None
    perplexity: bool = False

    def refuse_references(self, count: int) -> None:
        """Raise ConfigError where so many references are too many: a perplexity is of one."""
        if self.perplexity and count > 1:
            raise ConfigError(f"`--metrics {PERPLEXITY}` is of one reference translation, but there are {count}")

    @property
    def of_outputs(self) -> bool:
        """True where some score is of translations, False where the model alone is asked for probabilities."""
        return bool(self.metrics or self.tokenised or self.compound_split)

    def test_set(
        self, references: Sequence[Sequence[str]], sources: Sequence[str] | None, model_language: str | None = None
    ) -> TestSet:
        """Return these texts as a test set; `model_language` is used where no language was given."""
        from ziggurat.evaluate.metrics import TestSet

        return TestSet(references, sources, self.language or model_language, self.tokenizer, self.lowercase)


@dataclass(frozen=True)
class Texts:
    """A source text and its reference translations, read and paired.

    Attributes:
        paths: of all files, the source first.
        sources: lines of the source text.
        references: lines of each reference.
    """

    paths: Sequence[str]
    sources: list[str]
    references: Sequence[list[str]]


def read_texts(source: str, references: Sequence[str]) -> Texts:
    """Return the texts at these paths. Raises DataError for one that is empty or does not pair up with the others."""
    sources, of_references = read_text(source), [read_text(path) for path in references]
    named = list(zip(references, of_references, strict=True))
    for path, lines in ((source, sources), *named):
        refuse_empty(path, lines)
    pair_up((source, sources), *named)
    return Texts([source, *references], sources, of_references)


def metric_names(listed: str) -> tuple[list[str], bool]:
    """Return the metrics of a comma-separated list, in the order of ALL_METRICS, and whether `perplexity` is in it."""
    from ziggurat.evaluate.metrics import ALL_METRICS, check_metrics

    names = [name.strip().lower() for name in listed.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"`--metrics` is empty; valid: {', '.join(ALL_METRICS)}, {PERPLEXITY}")
    of_outputs = [name for name in names if name != PERPLEXITY]
    if of_outputs:
        check_metrics(of_outputs)
    return [metric for metric in ALL_METRICS if metric in of_outputs], PERPLEXITY in names


def comet_environment(python: str | None, model: str | None, device: str) -> CometEnvironment:
    """Return the environment that COMET runs in. Raises ConfigError when no Python is named for it."""
    from ziggurat.evaluate.comet import DEFAULT_MODEL, CometEnvironment

    python = python or os.environ.get(COMET_PYTHON)
    if not python:
        raise ConfigError(
            "COMET runs in a separate environment (`python3 -m venv comet-env && comet-env/bin/pip install "
            f"unbabel-comet`): give its Python with `--comet-python comet-env/bin/python` or in ${COMET_PYTHON}"
        )
    return CometEnvironment(python, model or DEFAULT_MODEL, device=device, say=say)


def check_test_set(
    test_set: TestSet, metrics: Iterable[str], comet: CometEnvironment | None, *, compare: bool = False
) -> None:
    """Print notices on how lines are split into words; raise ConfigError when a metric cannot be computed.

    To be called before anything is translated, which may take hours. With `compare`, BLEU's tokenizer is needed
    whatever the metrics, so the message does not propose to leave BLEU out.
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


def translated(
    translator: AnyTranslator,
    sources: list[str],
    output: str | None,
    tag: str | None = None,
) -> list[str]:
    """Return the translations of `sources`, each after `tag`; they are also written to the file `output`, if given."""
    with line_progress("translating", len(sources)) as advance:
        translator.on_finished = advance
        hypotheses = [
            translation.text
            for translation in translator.translate_stream(sources, window=max(1, len(sources)), tag=tag)
        ]
    if output is not None:
        with output_stream(output) as out:
            out.write("".join(line + "\n" for line in hypotheses).encode())
    return hypotheses


def warn_of_sides(outputs: Sequence[str], test_set: TestSet, name: str = "the output") -> None:
    """Print a warning when `outputs` resemble the source text more than the reference."""
    if test_set.sources is None:
        return
    source, reference = (Trigrams(lines[:_LANGUAGE_LINES]) for lines in (test_set.sources, test_set.references[0]))
    if resembles_more(Trigrams(outputs[:_LANGUAGE_LINES]), source, reference):
        say(
            f"warning: {name} looks like the source text, not like the reference: are `--source` and `--reference` "
            "swapped, or does the system copy its input?"
        )


def score_outputs(test_set: TestSet, hypotheses: list[str], options: ScoreOptions) -> list[Score]:
    """Return the scores of one system: sacreBLEU's metrics, METEOR and COMET, then BLEU on tokenised text."""
    from ziggurat.evaluate.scores import METRICS, evaluate
    from ziggurat.evaluate.segments import scored
    from ziggurat.evaluate.tokenised import compound_split_bleu, tokenised_bleu

    references, lowercase, confidence = test_set.references, test_set.lowercase, options.confidence
    scores = evaluate(
        hypotheses,
        references,
        metrics=cast("list[Metric]", [name for name in options.metrics if name in METRICS]),
        confidence=confidence,
        target_language=test_set.target_language,
        tokenize=test_set.tokenize,
        lowercase=lowercase,
    )
    for name in options.metrics:
        if name not in METRICS:
            scores.append(scored(test_set.metric(name, options.comet), hypotheses, confidence=confidence))
    if (language := options.tokenised) is not None:
        scores.append(
            tokenised_bleu(hypotheses, references, language=language, confidence=confidence, lowercase=lowercase)
        )
    if options.compound_split:
        language = options.tokenised or "de"
        scores.append(
            compound_split_bleu(hypotheses, references, language=language, confidence=confidence, lowercase=lowercase)
        )
    return scores


def model_scores(translator: AnyTranslator, texts: Texts, output: str | None, scoring: ScoreOptions) -> list[Score]:
    """Return the scores of a model: of its translations, which go into the file `output` too, and of the reference."""
    scores: list[Score] = []
    if scoring.of_outputs:
        test_set = scoring.test_set(texts.references, texts.sources, translator.target_language)
        hypotheses = translated(translator, texts.sources, output, scoring.tag)
        scores = checked_scores(test_set, hypotheses, scoring)
    if scoring.perplexity:
        scores.append(_perplexity(translator, texts, scoring.tag))
    return scores


def _perplexity(translator: AnyTranslator, texts: Texts, tag: str | None) -> Score:
    """Return the perplexity of the reference under the model. Raises ConfigError where the engine has none."""
    from ziggurat.evaluate.perplexity import Likelihood
    from ziggurat.translate.translator import Translator

    if not isinstance(translator, Translator):
        raise ConfigError(f"`--metrics {PERPLEXITY}` asks PyTorch's model for probabilities, not an export of it")
    found = translator.score(texts.sources, texts.references[0], tag=tag)
    vocabulary = translator.target_tokenizer
    likelihood = Likelihood.of(score.token_log_probabilities for score in found)
    return likelihood.score(vocabulary.pieces(range(vocabulary.size)))


def checked_scores(test_set: TestSet, hypotheses: list[str], scoring: ScoreOptions) -> list[Score]:
    """Return the scores of translations; warn where the texts seem swapped, or too short for intervals."""
    warn_of_sides(hypotheses, test_set)
    scores = score_outputs(test_set, hypotheses, scoring)
    if scoring.confidence and len(hypotheses) < FEWEST_CASES:
        say(
            f"warning: {counted(len(hypotheses), 'sentence')}: too few for `--confidence`. With fewer than "
            f"{FEWEST_CASES}, its intervals come out too narrow."
        )
    return scores


def score_system(
    models: Sequence[str],
    hypothesis: str | None,
    source: str | None,
    reference: Sequence[str],
    output: str | None,
    scoring: ScoreOptions,
    opening: ModelOptions,
    options: JobOptions,
    *,
    json: bool,
) -> None:
    """Score the translations in the file `hypothesis`, or else those that `models` make; print the scores."""
    # (1) Texts are read and paired before a model is opened, which takes seconds.
    if hypothesis is not None:
        scores: list[Score] | None = _scores_of_file(hypothesis, source, reference, scoring)
    elif source is None:
        raise ConfigError("`--source FILE` is missing: what should the model translate?")
    else:
        texts = read_texts(source, reference)
        if options.folder is not None:
            scores = _scores_of_job(models, texts, output, scoring, opening, options)
        else:
            with warnings_shown(), open_engine(models, opening, lines=len(texts.sources)) as translator:
                # (2) Metrics are checked before anything is translated, which may take hours.
                test_set = scoring.test_set(texts.references, texts.sources, translator.target_language)
                check_test_set(test_set, scoring.metrics, scoring.comet)
                scores = model_scores(translator, texts, output, scoring)
    # (3) Scores
    if scores is None:
        return
    if json:
        print_json([score.as_record() for score in scores])
    else:
        print("\n".join(map(str, scores)))


def _scores_of_file(
    hypothesis: str, source: str | None, reference: Sequence[str], scoring: ScoreOptions
) -> list[Score]:
    """Return the scores of the translations in a file."""
    texts = read_texts(hypothesis, reference)
    sources = None if source is None else read_text(source)
    if source is not None and sources is not None:
        refuse_empty(source, sources)
        pair_up((source, sources), *zip(reference, texts.references, strict=True))
    test_set = scoring.test_set(texts.references, sources)
    check_test_set(test_set, scoring.metrics, scoring.comet)
    return checked_scores(test_set, texts.sources, scoring)


def _scores_of_job(
    models: Sequence[str],
    texts: Texts,
    output: str | None,
    scoring: ScoreOptions,
    opening: ModelOptions,
    options: JobOptions,
) -> list[Score] | None:
    """Return the scores of translations that a job makes; None where this process has done a part of it."""
    with warnings_shown():
        found = model_choice(models, opening).identified()  # which names the language
        test_set = scoring.test_set(texts.references, texts.sources, found.experiment.data.target_language)
        check_test_set(test_set, scoring.metrics, scoring.comet)
        # The best of each line: with `n_best` above 1, also the model's own, `text` has several lines and columns.
        inputs: dict[str, str | None] = {"lines": texts.paths[0]}
        merged = translation_job(options, "evaluate", found, inputs, b"".join, form="best", tag=scoring.tag)
    if merged is None:
        return None
    if output is not None:
        write_parts(output, [merged.taken])
    return checked_scores(test_set, merged.taken.decode().split("\n")[:-1], scoring)
