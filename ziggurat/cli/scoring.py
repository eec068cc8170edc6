"""Scoring for `evaluate`: one or several test sets or checkpoints; `compare` also uses it to translate."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ziggurat.cli.engine import ModelOptions, open_engine, warnings_shown
from ziggurat.cli.jobs import JobOptions, model_choice, translation_job
from ziggurat.cli.output import (
    check_one_stream,
    counted,
    line_progress,
    output_folder,
    pair_up,
    print_json,
    read_text,
    refuse_empty,
    refuse_overwriting,
    say,
    write_parts,
)
from ziggurat.cli.score_options import PERPLEXITY, ScoreOptions, moses_language
from ziggurat.cli.score_tables import scores_table
from ziggurat.cli.scored_text import check_scored, warn_of_forms
from ziggurat.system.errors import ConfigError, printable

if TYPE_CHECKING:
    from ziggurat.evaluate.metrics import TestSet
    from ziggurat.evaluate.scores import Metric, Score
    from ziggurat.translate.interface import StreamTranslator


_LANGUAGE_LINES = 2000  # lines compared to tell the languages of two texts apart


@dataclass(frozen=True)
class Texts:
    """A source text and its reference translations, read and paired; `paths` lists all files, the source first."""

    paths: Sequence[str]
    sources: list[str]
    references: Sequence[list[str]]


def read_texts(source: str, references: Sequence[str]) -> Texts:
    """Return the texts at these paths. Raises DataError if one is empty or does not match the others."""
    sources, of_references = read_text(source), [read_text(path) for path in references]
    named = list(zip(references, of_references, strict=True))
    refuse_empty(source, sources)  # pieces are allowed here: some models read them
    for path, lines in named:
        check_scored(path, lines)
    pair_up((source, sources), *named)
    return Texts([source, *references], sources, of_references)


def translated(
    translator: StreamTranslator, sources: list[str], output: str | None, tag: str | None = None
) -> list[str]:
    """Return the translations of `sources`, each prefixed with `tag`; also writes them to `output`, if given."""
    with line_progress("translating", len(sources)) as advance:
        translator.on_finished = advance
        translations = translator.translate_stream(sources, window=max(1, len(sources)), tag=tag)
        hypotheses = [translation.text for translation in translations]
    if output is not None:
        write_parts(output, [f"{line}\n".encode() for line in hypotheses])
    return hypotheses


def warn_of_sides(outputs: Sequence[str], test_set: TestSet, name: str = "the output") -> None:
    """Print a warning if `outputs` resemble the source text more than the reference, or differ in normal form."""
    warn_of_forms(outputs, test_set.references, name)
    if test_set.sources is None:
        return
    from ziggurat.data.inputs import Trigrams, resembles_more  # loads numpy and pyarrow

    source, reference = (Trigrams(lines[:_LANGUAGE_LINES]) for lines in (test_set.sources, test_set.references[0]))
    if resembles_more(Trigrams(outputs[:_LANGUAGE_LINES]), source, reference):
        say(
            f"warning: {name} looks like the source text, not like the reference: are `--source` and `--reference` "
            "swapped, or does the system copy its input?"
        )


def _score_outputs(test_set: TestSet, hypotheses: list[str], options: ScoreOptions) -> list[Score]:
    """Return the scores of one system: sacreBLEU's metrics, METEOR and COMET, then BLEU on tokenised text."""
    from ziggurat.evaluate.scores import METRICS, compound_split_bleu, evaluate, scored, tokenised_bleu

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
    how: dict[str, Any] = {
        "language": moses_language(test_set.target_language),
        "confidence": confidence,
        "lowercase": lowercase,
    }
    if options.names.tokenised:
        scores.append(tokenised_bleu(hypotheses, references, **how))
    if options.names.compound_split:
        scores.append(compound_split_bleu(hypotheses, references, **how))
    return scores


def _model_scores(translator: StreamTranslator, texts: Texts, output: str | None, scoring: ScoreOptions) -> list[Score]:
    scores: list[Score] = []
    if scoring.of_outputs:
        test_set = scoring.test_set(texts.references, texts.sources, translator.target_language)
        hypotheses = translated(translator, texts.sources, output, scoring.tag)
        scores = _checked_scores(test_set, hypotheses, scoring)
    if scoring.names.perplexity:
        scores.append(_perplexity(translator, texts, scoring.tag))
    return scores


def _perplexity(translator: StreamTranslator, texts: Texts, tag: str | None) -> Score:
    from ziggurat.evaluate.metrics import Likelihood
    from ziggurat.translate.translator import Translator

    if not isinstance(translator, Translator):
        raise ConfigError(f"`--metrics {PERPLEXITY}` needs the model itself; an export has no probabilities")
    found = translator.score(texts.sources, texts.references[0], tag=tag)
    vocabulary = translator.target_tokenizer
    likelihood = Likelihood.of(score.token_log_probabilities for score in found)
    return likelihood.score(vocabulary.pieces(range(vocabulary.size)))


def _checked_scores(test_set: TestSet, hypotheses: list[str], scoring: ScoreOptions) -> list[Score]:
    from ziggurat.evaluate.findings import FEWEST_CASES

    warn_of_sides(hypotheses, test_set)
    scores = _score_outputs(test_set, hypotheses, scoring)
    if scoring.confidence and len(hypotheses) < FEWEST_CASES:
        say(
            f"warning: {counted(len(hypotheses), 'sentence')}: too few for `--confidence`. With fewer than "
            f"{FEWEST_CASES}, intervals come out too narrow."
        )
    return scores


def score_file(
    hypothesis: str, source: str | None, reference: Sequence[str], scoring: ScoreOptions, *, json: bool
) -> None:
    """Print the scores of the translations in the file `hypothesis`; some need the source."""
    texts = read_texts(hypothesis, reference)
    check_scored(hypothesis, texts.sources)
    sources = None if source is None else read_text(source)
    if source is not None and sources is not None:
        refuse_empty(source, sources)
        pair_up((source, sources), *zip(reference, texts.references, strict=True))
    test_set = scoring.test_set(texts.references, sources)
    scoring.check(test_set)
    _print_scores(hypothesis, _checked_scores(test_set, texts.sources, scoring), scoring, json=json)


def score_system(
    models: Sequence[str],
    texts: Texts,
    output: str | None,
    scoring: ScoreOptions,
    opening: ModelOptions,
    options: JobOptions,
    *,
    json: bool,
) -> None:
    """Translate with one model or an ensemble, in bulk if `options` name a folder, and print the scores."""
    if options.folder is not None:
        scores = _scores_of_job(models, texts, output, scoring, opening, options)
        if scores is None:
            return
    else:
        with warnings_shown(), open_engine(models, opening, lines=len(texts.sources)) as translator:
            # Metrics are checked before anything is translated, which may take hours.
            test_set = scoring.test_set(texts.references, texts.sources, translator.target_language)
            scoring.check(test_set)
            scores = _model_scores(translator, texts, output, scoring)
    _print_scores(" + ".join(models), scores, scoring, json=json)


def _print_scores(name: str, scores: Sequence[Score], scoring: ScoreOptions, *, json: bool) -> None:
    if json:
        print_json([score.as_record() for score in scores])
    elif scoring.table is not None:
        print(scores_table({name: scores}, scoring.table))
    else:
        print("\n".join(map(str, scores)))


def _scores_of_job(
    models: Sequence[str],
    texts: Texts,
    output: str | None,
    scoring: ScoreOptions,
    opening: ModelOptions,
    options: JobOptions,
) -> list[Score] | None:
    from ziggurat.translate.options import TranslateOptions

    with warnings_shown():
        found = model_choice(models, opening).identified()  # finds the language
        test_set = scoring.test_set(texts.references, texts.sources, found.experiment.data.target_language)
        scoring.check(test_set)
        # Only the best per line: with `n_best` above 1, perhaps by the model's default, `text` has several per line.
        inputs: dict[str, str | None] = {"lines": texts.paths[0]}
        merged = translation_job(
            options, "evaluate", found, inputs, b"".join, form="best", asked=TranslateOptions(tag=scoring.tag)
        )
    if merged is None:
        return None
    if output is not None:
        write_parts(output, [merged.taken])
    return _checked_scores(test_set, merged.taken.decode().split("\n")[:-1], scoring)


@dataclass(frozen=True)
class _Spread:
    name: str
    signature: str
    mean: float
    deviation: float
    min: float
    max: float

    def line(self, decimals: int, of: str) -> str:
        """Return the figures as text; `of` says what they cover."""
        mean, deviation, low, high = (
            f"{value:.{decimals}f}" for value in (self.mean, self.deviation, self.min, self.max)
        )
        return f"{self.name}|{self.signature} = mean {mean}, standard deviation {deviation}, {low} to {high} ({of})"


def parse_test_sets(given: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
    """Return source and references of each `[NAME=]SOURCE,REFERENCE[,REFERENCE...]` by name. Raises ConfigError."""
    found: dict[str, tuple[str, list[str]]] = {}
    for text in given:
        name, equals, paths = text.partition("=")
        if not equals or not re.fullmatch(r"[\w.+-]+", name):
            name, paths = "", text
        source, *references = paths.split(",")
        if not source or not references or not all(references):
            raise ConfigError(
                f"`--test-set {printable(text)}`: write [NAME=]SOURCE,REFERENCE[,REFERENCE...], such as "
                "wmt14=newstest2014.en,newstest2014.de"
            )
        name = name or Path(source).name.partition(".")[0]
        if name in found:
            raise ConfigError(
                f"two test sets are called `{printable(name)}`: give them names, `NAME={printable(paths)}`"
            )
        found[name] = source, references
    return found


def score_test_sets(
    models: Sequence[str],
    test_sets: Sequence[str],
    output: str | None,
    scoring: ScoreOptions,
    opening: ModelOptions,
    *,
    json: bool,
) -> None:
    """Translate and score each of `test_sets`; print the scores of each and their mean."""
    named = parse_test_sets(test_sets)
    check_one_stream(*(path for source, references in named.values() for path in (source, *references)))
    for _, references in named.values():
        scoring.refuse_references(len(references))
    sets = {name: read_texts(source, references) for name, (source, references) in named.items()}
    folder = output_folder(output)
    for name, texts in sets.items():
        refuse_overwriting(kept_file(folder, name), *texts.paths)
    lines = sum(len(texts.sources) for texts in sets.values())
    found: dict[str, list[Score]] = {}
    with warnings_shown(), open_engine(models, opening, lines=lines) as translator:
        for texts in sets.values():
            test_set = scoring.test_set(texts.references, texts.sources, translator.target_language)
            scoring.check(test_set)
        for name, texts in sets.items():
            say(f"test set {name}: {counted(len(texts.sources), 'line')}")
            found[name] = _model_scores(translator, texts, kept_file(folder, name), scoring)
    spreads = _spreads(list(found.values()))
    if json:
        print_json({"test_sets": _documents("name", found), "summary": [asdict(spread) for spread in spreads]})
        return
    if scoring.table is not None:
        print(scores_table(found, scoring.table))
        return
    for name, scores in found.items():
        print("\n".join(f"{name}: {score}" for score in scores))
    of_any = next(iter(found.values()))
    for spread, score in zip(spreads, of_any, strict=True):
        print(spread.line(score.decimals, counted(len(found), "test set")))


def score_checkpoints(
    run: str,
    checkpoints: str,
    texts: Texts,
    output: str | None,
    scoring: ScoreOptions,
    opening: ModelOptions,
    *,
    json: bool,
) -> None:
    """Translate and score with each of a run's `checkpoints`; print all scores, their mean and their spread."""
    from ziggurat.config import load_experiment
    from ziggurat.model.run_folder import CHECKPOINTS, CONFIG_FILE, checkpoint_update, refuse_missing
    from ziggurat.train.average import CheckpointSelection, selected_checkpoints

    selection = CheckpointSelection.parse(checkpoints)
    refuse_missing(Path(run), "run")
    if not (Path(run) / CHECKPOINTS).is_dir():
        raise ConfigError(f"{run}: not a run (no {CHECKPOINTS}/): `--checkpoints` needs one")
    training = load_experiment(Path(run) / CONFIG_FILE).training
    updates = [checkpoint_update(folder) for folder in selected_checkpoints(Path(run), training, selection)]
    folder = output_folder(output)
    for update in updates:
        refuse_overwriting(kept_file(folder, str(update)), *texts.paths)
    found: dict[int, list[Score]] = {}
    for update in updates:
        this = replace(opening, which=str(update))
        with warnings_shown(), open_engine([run], this, lines=len(texts.sources)) as translator:
            if not found:
                test_set = scoring.test_set(texts.references, texts.sources, translator.target_language)
                scoring.check(test_set)
            found[update] = _model_scores(translator, texts, kept_file(folder, str(update)), scoring)
    spreads = _spreads(list(found.values()))
    if json:
        print_json({"checkpoints": _documents("update", found), "summary": [asdict(spread) for spread in spreads]})
        return
    if scoring.table is not None:
        print(scores_table({f"update {update}": scores for update, scores in found.items()}, scoring.table))
        return
    for update, scores in found.items():
        shown = "  ".join(f"{score.name} {score.value:.{max(2, score.decimals)}f}" for score in scores)
        print(f"update {update}: {shown}")
    for spread in spreads:
        print(spread.line(2, f"{counted(len(found), 'checkpoint')}, {selection}"))


def _documents(key: str, found: Mapping[Any, Sequence[Score]]) -> list[dict[str, Any]]:
    return [{key: name, "scores": [score.as_record() for score in scores]} for name, scores in found.items()]


def kept_file(folder: Path | None, name: str) -> str | None:
    """Return the path of the translations called `name`; None if none should be kept."""
    return None if folder is None else str(folder / f"{name}.txt")


def _spreads(scores: Sequence[Sequence[Score]]) -> list[_Spread]:
    """Return each metric's spread over [checkpoints or test sets][metrics]; warn if signatures differ."""
    found = []
    for of_metric in zip(*scores, strict=True):
        values, signatures = [score.value for score in of_metric], list(dict.fromkeys(s.signature for s in of_metric))
        if len(signatures) > 1:
            say(f"warning: the scores by {of_metric[0].name} have different signatures: their mean says little")
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        signature = " or ".join(signatures)
        found.append(
            _Spread(of_metric[0].name, signature, statistics.fmean(values), deviation, min(values), max(values))
        )
    return found
