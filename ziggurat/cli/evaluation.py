"""The verbs that score translations: evaluate, and score, which asks a model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from ziggurat.cli.compare import compare_systems, perturb_systems, perturbation_names
from ziggurat.cli.engine import ModelOptions, open_model
from ziggurat.cli.jobs import (
    JobFolder,
    JobOptions,
    JobWorkers,
    MergeOnly,
    RayAddress,
    ShardPart,
    line_job,
    lines_beside,
    model_choice,
)
from ziggurat.cli.output import (
    OUT,
    Checkpoints,
    DecodingOverrides,
    Device,
    Engine,
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
from ziggurat.cli.score_tables import table_format
from ziggurat.cli.scoring import (
    COMET_PYTHON,
    PERPLEXITY,
    ScoreOptions,
    SystemOptions,
    comet_environment,
    metric_names,
    read_texts,
    score_checkpoints,
    score_system,
    score_test_sets,
)
from ziggurat.system.errors import ConfigError


def evaluate(
    model: Annotated[
        str | None, typer.Argument(help="Run or model directory; leave out with --hypothesis and --compare.")
    ] = None,
    overrides: DecodingOverrides = None,
    source: Annotated[str | None, typer.Option("--source", help="Source text to translate.")] = None,
    hypothesis: Annotated[str | None, typer.Option("--hypothesis", help="Existing translations to score.")] = None,
    reference: Annotated[
        list[str] | None, typer.Option("--reference", help="Reference translation; repeat for several.")
    ] = None,
    test_set: Annotated[
        list[str] | None,
        typer.Option(
            "--test-set",
            metavar="[NAME=]SOURCE,REFERENCE[,...]",
            help="In place of --source and --reference: one of several test sets; repeat. Their mean is added.",
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            metavar="[NAME=]PATH[,PATH...]",
            help="A system to compare: runs, model directories or files of translations, one per seed; repeat.",
        ),
    ] = None,
    perturb: Annotated[
        str | None,
        typer.Option(
            "--perturb",
            metavar="NAME[,NAME...]",
            help="Disturb the source and tell what that costs: caps, title, typos, tags, noise, short, long, emoji, "
            "untranslatable, or all. With a model, or --compare and models.",
        ),
    ] = None,
    perturb_seed: Annotated[
        int, typer.Option("--perturb-seed", min=0, help="Seed of the random choices of --perturb.")
    ] = 0,
    page: Annotated[
        str | None, typer.Option("--page", help="With --perturb: also write the result to this HTML file.")
    ] = None,
    train_target: Annotated[
        list[str] | None,
        typer.Option("--train-target", help="Target side of the training text, for word accuracy; with --compare."),
    ] = None,
    metrics: Annotated[
        str,
        typer.Option("--metrics", help="Of bleu, chrf, chrf++, ter, meteor, comet, perplexity; separated by commas."),
    ] = "bleu,chrf,ter",
    language: Annotated[
        str | None,
        typer.Option("--language", help="Target language, such as en, for METEOR and BLEU; default: the model's."),
    ] = None,
    comet_python: Annotated[
        str | None, typer.Option("--comet-python", help=f"Python that has unbabel-comet; default: ${COMET_PYTHON}.")
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
    tag: Annotated[
        str | None,
        typer.Option("--tag", help="Tag for every source line, such as `<2de>`, as in the training corpora."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(*OUT, help="Also write the translations here (--compare, --test-set, --checkpoints: a folder)."),
    ] = None,
    ensemble: Ensemble = None,
    which: Which = None,
    checkpoints: Checkpoints = None,
    without_layers: WithoutLayers = None,
    device: Device = "auto",
    threads: Threads = None,
    engine: Engine = "auto",
    workers: JobWorkers = None,
    job: JobFolder = None,
    shard: ShardPart = None,
    merge: MergeOnly = False,
    ray: RayAddress = None,
    format: Annotated[
        str,
        typer.Option("--format", help="Of the scores: text, or one table as csv, markdown or latex, to be copied."),
    ] = "text",
    json: Json = False,
) -> None:
    """Score a model on a test set or several, or translations in a file, with sacreBLEU; or compare systems.

    Examples: `ziggurat evaluate runs/a --source test.de --reference test.en --confidence`,
    `ziggurat evaluate --compare a=runs/a-1,runs/a-2 --compare b=b.txt --source test.de --reference test.en`,
    `ziggurat evaluate runs/a --source test.de --reference test.en --perturb caps,typos --page robustness.html`
    """
    from ziggurat.config.languages import check_language_code
    from ziggurat.evaluate.scores import check_language

    table = table_format(format)
    if table is not None and (json or perturb is not None):
        raise ConfigError("`--format` is of tables of scores: leave out `--json` and `--perturb`")
    if language is not None:
        check_language_code(language, "--language")
    if model is not None and is_setting(model):  # no model is named: this is the first setting
        overrides, model = [model, *(overrides or [])], None
    opening = ModelOptions(which, device, threads, decoding_settings(overrides, "--source"), without_layers, engine)
    options = JobOptions(job, shard, merge, ray, workers, threads, device)
    several = bool(test_set) or checkpoints is not None
    if several and (model is None or compare or perturb is not None or hypothesis or job is not None):
        raise ConfigError(
            "`--test-set` and `--checkpoints` are for a model: name it, and leave out `--hypothesis`, `--compare`, "
            "`--perturb` and `--job`"
        )
    if test_set and checkpoints is not None:
        raise ConfigError("`--test-set` and `--checkpoints`: give several test sets or several checkpoints, not both")
    if test_set and (source or reference):
        raise ConfigError("`--test-set` has source and references: leave out `--source` and `--reference`")
    if checkpoints is not None and (ensemble or which):
        raise ConfigError("`--checkpoints` names the weights of one run: leave out `--ensemble` and `--which`")
    reference = reference or []
    if not reference and not test_set:
        raise ConfigError("`--reference FILE` is missing")
    check_one_stream(source, hypothesis, *reference)
    if job is not None and model is None:
        raise ConfigError("`--job` is for translating with one model, or an ensemble; name it")
    names, perplexity = metric_names(metrics)
    if perplexity:
        if model is None or compare or perturb is not None or job is not None or engine == "ctranslate2":
            raise ConfigError(
                f"`--metrics {PERPLEXITY}` asks a model: name it, and leave out `--hypothesis`, `--compare`, "
                "`--perturb`, `--job` and `--engine ctranslate2`"
            )
        opening = replace(opening, engine="torch")
    if (comet_python or comet_model) and "comet" not in names:
        raise ConfigError("`--comet-python` and `--comet-model` go with `--metrics comet`")
    comet = comet_environment(comet_python, comet_model, device) if "comet" in names else None
    scoring = ScoreOptions(
        names, comet, language, bleu_tokenizer, lowercase, tokenised, compound_split, confidence, tag, perplexity, table
    )
    scoring.refuse_references(len(reference))
    if output is not None and not scoring.of_outputs:
        raise ConfigError(f"`--output` is for translations, and `--metrics {PERPLEXITY}` alone makes none")
    if perturb is not None:
        if hypothesis or output or train_target or tokenised or compound_split or confidence or (compare and ensemble):
            raise ConfigError(
                "`--perturb` takes no `--hypothesis`, `--output`, `--train-target`, `--tokenised`, `--compound-split` "
                "or `--confidence`, and beside `--compare` no `--ensemble`"
            )
        if job is not None:
            raise ConfigError("`--perturb` cannot be a job; leave out `--job`")
        if (model is None) == (not compare):
            raise ConfigError("`--perturb` needs a model, or `--compare` with models")
        systems = SystemOptions(compare or [str(model)], source, reference, scoring, opening)
        names = perturbation_names(perturb)
        perturb_systems(systems, names, ensemble=ensemble or [], seed=perturb_seed, page=page, json=json)
        return
    if page is not None or perturb_seed:
        raise ConfigError("`--page` and `--perturb-seed` go with `--perturb`")
    if compare:
        if model is not None or hypothesis or ensemble or without_layers or tokenised or compound_split or confidence:
            raise ConfigError(
                "`--compare` takes no model beside it, no `--hypothesis`, `--ensemble`, `--without-layers`, "
                "`--tokenised`, `--compound-split` or `--confidence`"
            )
        systems = SystemOptions(compare, source, reference, scoring, opening)
        compare_systems(systems, train_target=train_target or [], output=output, json=json)
        return
    if train_target:
        raise ConfigError("`--train-target` goes with `--compare`")
    if (model is None) == (hypothesis is None):
        raise ConfigError("give a model with `--source`, or translations with `--hypothesis`, or `--compare`")
    of_model = bool(overrides or output or ensemble or which or without_layers or threads or tag) or engine != "auto"
    if hypothesis is not None and (of_model or (device != "auto" and comet is None)):
        raise ConfigError(
            "`--hypothesis` is scored as it is, without a model: leave out decoding settings, `--output`, "
            "`--ensemble`, `--which`, `--without-layers`, `--threads`, `--engine`, `--tag` and (but for COMET) "
            "`--device`"
        )
    if not several:
        refuse_overwriting(output, source, *reference)
        check_output(output or "-")
    if tokenised is not None or compound_split:
        check_language(tokenised or "de")
    models = [] if model is None else [model, *(ensemble or [])]
    if test_set:
        score_test_sets(models, test_set, output, scoring, opening, json=json)
        return
    if checkpoints is not None:
        if source is None:
            raise ConfigError("`--source FILE` is missing: what should the model translate?")
        score_checkpoints(models[0], checkpoints, read_texts(source, reference), output, scoring, opening, json=json)
        return
    score_system(models, hypothesis, source, reference, output, scoring, opening, options, json=json)


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
    workers: JobWorkers = None,
    job: JobFolder = None,
    shard: ShardPart = None,
    merge: MergeOnly = False,
    ray: RayAddress = None,
) -> None:
    """Print the log-probability of each given translation (natural logarithm, end-of-sentence included).

    Their sum and the perplexity of a token are told on standard error; `evaluate --metrics perplexity --json` has them
    for programs. Example: `ziggurat score runs/a --source test.de --target test.en`
    """
    check_output(output)
    refuse_overwriting(output, source, target)
    options = JobOptions(job, shard, merge, ray, workers, threads, device)
    opening = ModelOptions(which, device, threads, decoding_settings(overrides, "--source"), engine="torch")
    models = [model, *(ensemble or [])]
    if job is not None:
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
        say("0 lines, which have no perplexity")
        return
    from ziggurat.evaluate.metrics import Likelihood

    say(Likelihood.of(result.token_log_probabilities for result in scores).line())
