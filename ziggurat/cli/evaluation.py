"""The verbs that score translations: evaluate, and score, which uses a model's probabilities."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from ziggurat.cli.arguments import DecodingOverrides
from ziggurat.cli.engine import ModelOptions, open_model
from ziggurat.cli.jobs import job_options, line_job, lines_beside, model_choice
from ziggurat.cli.output import (
    OUT,
    Checkpoints,
    Device,
    Ensemble,
    Json,
    Model,
    Tag,
    Threads,
    Which,
    WithoutLayers,
    check_one_stream,
    check_output,
    decoding_settings,
    is_setting,
    output_stream,
    pair_up,
    read_text,
    refuse_overwriting,
    say,
    write_parts,
)
from ziggurat.cli.score_options import (
    PERPLEXITY,
    SCORES,
    TEXTS,
    BleuTokenizer,
    CometModel,
    Language,
    Lowercase,
    Metrics,
    Reference,
    Source,
    SourceTag,
    TableFormat,
    score_options,
)
from ziggurat.cli.scoring import read_texts, score_checkpoints, score_file, score_system, score_test_sets
from ziggurat.system.errors import ConfigError


def evaluate(
    model: Annotated[str | None, typer.Argument(help="Run or model directory; leave out with --hypothesis.")] = None,
    overrides: DecodingOverrides = None,
    source: Source = None,
    reference: Reference = None,
    hypothesis: Annotated[
        str | None,
        typer.Option("--hypothesis", metavar="FILE", help="Score these translations; no model.", rich_help_panel=TEXTS),
    ] = None,
    test_set: Annotated[
        list[str] | None,
        typer.Option(
            "--test-set",
            metavar="[NAME=]SOURCE,REF[,REF]",
            help="One of several test sets, in place of --source and --reference; repeatable. Adds their mean.",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    tag: SourceTag = None,
    metrics: Metrics = "bleu,chrf,ter",
    language: Language = None,
    bleu_tokenizer: BleuTokenizer = None,
    lowercase: Lowercase = False,
    comet_model: CometModel = None,
    confidence: Annotated[
        bool, typer.Option("--confidence", help="Add 95 % confidence intervals.", rich_help_panel=SCORES)
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(*OUT, metavar="FILE", help="Keep the translations; a folder with --test-set and --checkpoints."),
    ] = None,
    format: TableFormat = "text",
    json: Json = False,
    which: Which = None,
    checkpoints: Checkpoints = None,
    ensemble: Ensemble = None,
    without_layers: WithoutLayers = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Score a model on a test set, or translations in a file, with sacreBLEU.

    `ziggurat compare` tests whether systems differ; `ziggurat perturb` measures how robust they are.

    Example: `ziggurat evaluate runs/a --source test.de --reference test.en --confidence`
    """
    if model is not None and is_setting(model):  # no model was named, so this is the first setting
        overrides, model = [model, *(overrides or [])], None
    opening = ModelOptions(which, device, threads, decoding_settings(overrides, "--source"), without_layers)
    options = job_options(threads=threads, device=device)
    reference = reference or []
    several = bool(test_set) or checkpoints is not None
    if several and (model is None or hypothesis or options.folder is not None):
        raise ConfigError(
            "`--test-set` and `--checkpoints` are for a model: name it, and leave out `--hypothesis` and `bulk`"
        )
    if test_set and checkpoints is not None:
        raise ConfigError("`--test-set` and `--checkpoints`: give several test sets or several checkpoints, not both")
    if test_set and (source or reference):
        raise ConfigError("`--test-set` gives source and references: leave out `--source` and `--reference`")
    if checkpoints is not None and (ensemble or which):
        raise ConfigError("`--checkpoints` names the weights of one run: leave out `--ensemble` and `--which`")
    if not reference and not test_set:
        raise ConfigError("`--reference FILE` is missing")
    check_one_stream(source, hypothesis, *reference)
    if options.folder is not None and model is None:
        raise ConfigError("`bulk` translates with one model or an ensemble; name it")
    scoring = score_options(
        metrics,
        language,
        comet_model,
        bleu_tokenizer,
        lowercase,
        device,
        tag=tag,
        format=format,
        confidence=confidence,
    )
    if scoring.table is not None and json:
        raise ConfigError("`--format` is for tables of scores: leave out `--json`")
    if scoring.names.perplexity:
        if model is None or options.folder is not None:
            raise ConfigError(
                f"`--metrics {PERPLEXITY}` needs a model: name it, and leave out `--hypothesis` and `bulk`"
            )
        opening = replace(opening, engine="torch")
    scoring.refuse_references(len(reference))
    if output is not None and not scoring.of_outputs:
        raise ConfigError(f"`--output` is for translations, but `--metrics {PERPLEXITY}` alone makes none")
    if (model is None) == (hypothesis is None):
        raise ConfigError("give a model with `--source`, or translations with `--hypothesis`")
    of_model = bool(overrides or output or ensemble or which or without_layers or threads or tag)
    if hypothesis is not None and (of_model or (device != "auto" and scoring.comet is None)):
        raise ConfigError(
            "`--hypothesis` is scored as it is, without a model: leave out decoding settings, `--output`, "
            "`--ensemble`, `--which`, `--without-layers`, `--threads`, `--tag` and (except for COMET) `--device`"
        )
    if not several:
        refuse_overwriting(output, source, *reference)
        check_output(output or "-")
    if model is None:
        assert hypothesis is not None
        score_file(hypothesis, source, reference, scoring, json=json)
        return
    models = [model, *(ensemble or [])]
    if test_set:
        score_test_sets(models, test_set, output, scoring, opening, json=json)
        return
    if source is None:
        raise ConfigError("`--source FILE` is missing: what should the model translate?")
    # Texts are read and paired before a model is opened, which takes seconds.
    texts = read_texts(source, reference)
    if checkpoints is not None:
        score_checkpoints(model, checkpoints, texts, output, scoring, opening, json=json)
    else:
        score_system(models, texts, output, scoring, opening, options, json=json)


def score(
    model: Model,
    source: Annotated[str, typer.Option("--source", help="Source text, one sentence per line.")],
    target: Annotated[str, typer.Option("--target", help="Its translations, line by line.")],
    overrides: DecodingOverrides = None,
    json: Annotated[bool, typer.Option("--json", help="JSON lines: score, log-probability, tokens.")] = False,
    tag: Tag = None,
    ensemble: Ensemble = None,
    which: Which = None,
    device: Device = "auto",
    threads: Threads = None,
    output: Annotated[str, typer.Option(*OUT, help="File, or - for standard output.")] = "-",
) -> None:
    """Print the log-probability of each given translation (natural logarithm, end-of-sentence included).

    Their sum and the perplexity per token go to standard error; `evaluate --metrics perplexity --json` reports them as
    JSON.

    Example: `ziggurat score runs/a --source test.de --target test.en`
    """
    check_output(output)
    refuse_overwriting(output, source, target)
    options = job_options(threads=threads, device=device)
    opening = ModelOptions(which, device, threads, decoding_settings(overrides, "--source"), engine="torch")
    models = [model, *(ensemble or [])]
    if options.folder is not None:
        from ziggurat.corpora.jobs.tasks import Scoring

        found = model_choice(models, opening).identified(searched=False)
        task, settings = Scoring(found.choice, tag, json), {**found.settings, "tag": tag, "json": json}
        texts = (source, target)
        line_job(options, "score", task, settings, texts, partial(lines_beside, *texts), partial(write_parts, output))
        return
    check_one_stream(source, target)
    sources, targets = read_text(source), read_text(target)
    pair_up((source, sources), (target, targets))
    translator = open_model(models, opening, lines=len(sources))
    scores = translator.score(sources, targets, tag=tag)
    with output_stream(output) as out:
        for result in scores:
            out.write((result.to_json() if json else result.to_text()).encode() + b"\n")
    if not scores:
        say("0 lines, so no perplexity")
        return
    from ziggurat.evaluate.metrics import Likelihood

    say(Likelihood.of(result.token_log_probabilities for result in scores).line())
