"""The verbs that make synthetic corpora: backtranslate, filter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from ziggurat.cli.engine import warnings_shown
from ziggurat.cli.jobs import finished, job_options
from ziggurat.cli.output import (
    HOW,
    OUT,
    WHO,
    Device,
    Ensemble,
    Json,
    Which,
    counted,
    decoding_settings,
    is_setting,
    print_json,
    say,
)
from ziggurat.config.data import CorpusConfig
from ziggurat.config.load import change_section
from ziggurat.config.pipeline_models import MAX_RATIO, RATIO_SLACK
from ziggurat.system.errors import ConfigError, printable

if TYPE_CHECKING:
    from ziggurat.corpora.synthesis.backtranslation import Report

_UNLIKELY = -4.0
"""_UNLIKELY is the median score (nats per token) below which the text probably does not suit the model."""

_CORPUS, _CHOICE, _FILTERS = "The new corpus", "How lines are translated", "Which pairs are kept"
_ModelTag = Annotated[
    str | None,
    typer.Option(
        "--model-tag",
        metavar="TAG",
        help="Tag that the model needs before every line, such as <2de>; not part of the corpus.",
        rich_help_panel=WHO,
    ),
]
_MaxLength = Annotated[
    int,
    typer.Option(
        "--max-length", metavar="N", min=1, help="Most subword pieces on either side.", rich_help_panel=_FILTERS
    ),
]
_Weight = Annotated[
    float, typer.Option("--weight", metavar="X", help="Weight of the corpus in training.", rich_help_panel=_CORPUS)
]
_Threads = Annotated[
    int,
    typer.Option("--threads", metavar="N", min=1, max=1024, help="CPU threads of each worker.", rich_help_panel=HOW),
]
_SHARD_LINES = 2000


def backtranslate(
    model: Annotated[str, typer.Argument(help="Reverse model (a run or model directory); with --forward the teacher.")],
    given: Annotated[
        list[str] | None, typer.Argument(help="Decoding settings such as beam_size=8, and further input files.")
    ] = None,
    input: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", metavar="FILE", help="Monolingual text, also .gz, .xz, .zst; file or glob."),
    ] = None,
    out: Annotated[Path | None, typer.Option(*OUT, metavar="FOLDER", help="Folder for the corpus.")] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help="sample (default), top-k, beam (default of --forward), noised-beam.",
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    forward: Annotated[
        bool,
        typer.Option(
            "--forward",
            help="Distillation: the text is the source, its translation the target.",
            rich_help_panel=_CHOICE,
        ),
    ] = False,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            "--reference",
            metavar="FILE",
            help="With --forward: the text's translations, line by line; keeps the nearest of --n-best candidates.",
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    n_best: Annotated[
        int | None,
        typer.Option(
            "--n-best",
            metavar="N",
            min=2,
            max=1000,
            help="Candidates per line. Default: 8.",
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    nearest: Annotated[
        Literal["chrf", "bleu"] | None,
        typer.Option(
            "--nearest",
            help="Score of a candidate against its reference. Default: chrf.",
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(
            "--tag",
            metavar="TAG",
            help="Tag of the corpus; default: `<bt>`, with --forward none; '' for none.",
            rich_help_panel=_CORPUS,
        ),
    ] = None,
    model_tag: _ModelTag = None,
    weight: _Weight = 1.0,
    max_length: _MaxLength = 250,
    max_ratio: Annotated[
        float,
        typer.Option(
            "--max-ratio",
            metavar="X",
            min=1,
            help="Largest ratio of pieces between the sides.",
            rich_help_panel=_FILTERS,
        ),
    ] = MAX_RATIO,
    ratio_slack: Annotated[
        int,
        typer.Option(
            "--ratio-slack",
            metavar="N",
            min=0,
            help="Pieces allowed on the longer side beyond --max-ratio.",
            rich_help_panel=_FILTERS,
        ),
    ] = RATIO_SLACK,
    seed: Annotated[
        int,
        typer.Option("--seed", metavar="N", min=0, help="Seed of sampling and noise.", rich_help_panel=_CHOICE),
    ] = 1,
    threads: _Threads = 1,
    ensemble: Ensemble = None,
    which: Which = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Translate monolingual text into a synthetic corpus for `prepare`; repeat a stopped command to resume it.

    Example: `ziggurat backtranslate runs/en-de --input mono.en.gz --out bt` makes German for English text.
    """
    # (1) Check options before the seconds that importing PyTorch takes.
    if not input:
        raise ConfigError("`--input FILE` is missing: which text should be translated?")
    # `--input *` arrives as `--input a b c`, so arguments that are not settings are input files, too.
    inputs = (*input, *(text for text in given or [] if not is_setting(text)))
    settings = decoding_settings([text for text in given or [] if is_setting(text)], "--input")
    if out is None:
        raise ConfigError("`--out FOLDER` is missing: where should the corpus go?")
    options = job_options(str(out), threads=threads, device=device)
    choosing = [name for name, value in {"--n-best": n_best, "--nearest": nearest}.items() if value is not None]
    if choosing and not reference:
        raise ConfigError(f"`{choosing[0]}` is for candidates, among which references choose: add `--reference FILE`")
    tag = (None if forward else "<bt>") if tag is None else tag or None
    # Built only for its checks: `prepare` must accept the snippet's tag and weight.
    change_section(CorpusConfig(source="-", target="-"), {"tag": tag, "weight": weight}, "data.train.0")

    from ziggurat.config.pipeline_models import Method
    from ziggurat.corpora.synthesis.backtranslation import (
        METHODS,
        N_BEST,
        BackTranslationJob,
        back_translate,
        write_snippet,
    )
    from ziggurat.corpora.synthesis.lines import PairFilter

    chosen = method or ("beam" if forward else "sample")
    if chosen not in METHODS:
        raise ConfigError(f"`--method {printable(chosen)}`: choose one of {', '.join(METHODS)}")
    # (2) Translate and merge
    job = BackTranslationJob(
        models=(model, *(ensemble or [])),
        inputs=inputs,
        out=out,
        method=cast(Method, chosen),
        forward=forward,
        which=which,
        device=device,
        threads=threads,
        seed=seed,
        shard_lines=options.shard_lines or _SHARD_LINES,
        filters=PairFilter(max_pieces=max_length, max_ratio=max_ratio, ratio_slack=ratio_slack),
        decoding=settings,
        references=tuple(reference or ()),
        n_best=n_best or N_BEST,
        nearest=nearest or "chrf",
        model_tag=model_tag,
    )
    with warnings_shown():
        report = finished(back_translate(job, options.work()), options)
    # (3) Print results, and the corpus as a snippet for the configuration
    if report is not None:
        name = "distillation" if forward else "back-translation"
        _print(report, out, write_snippet(out, name=name, weight=weight, tag=tag), json)


def filter_corpus(
    model: Annotated[str, typer.Argument(help="Run or model directory that scores the pairs.")],
    given: Annotated[list[str] | None, typer.Argument(help="Decoding settings: precision=float32.")] = None,
    source: Annotated[
        list[str] | None,
        typer.Option("--source", metavar="FILE", help="Source text, also .gz, .xz, .zst; file or glob."),
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", metavar="FILE", help="Its translations, line by line.")
    ] = None,
    out: Annotated[Path | None, typer.Option(*OUT, metavar="FOLDER", help="Folder for the filtered corpus.")] = None,
    keep: Annotated[
        float,
        typer.Option("--keep", metavar="X", help="Share of pairs to keep: the likeliest.", rich_help_panel=_FILTERS),
    ] = 0.95,
    reverse: Annotated[
        bool,
        typer.Option(
            "--reverse", help="The model translates targets into sources: a backward model.", rich_help_panel=WHO
        ),
    ] = False,
    model_tag: _ModelTag = None,
    max_length: _MaxLength = 250,
    weight: _Weight = 1.0,
    threads: _Threads = 1,
    ensemble: Ensemble = None,
    which: Which = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Drop the pairs of a corpus that a model finds least likely; repeat a stopped command to resume it.

    Example: `ziggurat filter runs/en-de --reverse --source kd/source.txt --target kd/target.txt --out kd-filtered`
    """
    if not source or not target:
        raise ConfigError(f"`--{'target' if source else 'source'} FILE` is missing: which pairs should be scored?")
    if out is None:
        raise ConfigError("`--out FOLDER` is missing: where should the corpus go?")
    options = job_options(str(out), threads=threads, device=device, noun="pair")
    change_section(CorpusConfig(source="-", target="-"), {"weight": weight}, "data.train.0")

    from ziggurat.corpora.synthesis.backtranslation import write_snippet
    from ziggurat.corpora.synthesis.cross_entropy import FilterJob, filter_pairs

    job = FilterJob(
        models=(model, *(ensemble or [])),
        sources=tuple(source),
        targets=tuple(target),
        out=out,
        keep=keep,
        reverse=reverse,
        which=which,
        device=device,
        threads=threads,
        max_pieces=max_length,
        shard_lines=options.shard_lines or _SHARD_LINES,
        decoding=decoding_settings(given or [], "--source"),
        model_tag=model_tag,
    )
    with warnings_shown():
        report = finished(filter_pairs(job, options.work()), options)
    if report is not None:
        median, threshold = report.scores["median"], report.scores["threshold"]
        say(f"mean log-probability per token: threshold {threshold:.3f}, median {median:.3f}")
        if median < _UNLIKELY:
            other = "without" if reverse else "with"
            say(f"warning: the model finds most pairs very unlikely; did you mean to use it {other} `--reverse`?")
        _print(report, out, write_snippet(out, name="filtered", weight=weight, tag=None), json)


def _print(report: Report, out: Path, snippet: str, json: bool) -> None:
    if json:
        figures = {"read": report.read, "kept": report.kept, "dropped": report.dropped, **report.scores}
        print_json({"out": str(out), **figures})
        return
    from ziggurat.corpora.synthesis.backtranslation import CORPUS_FILE, dropped_text

    print(f"{out}: {report.kept:,} pairs of {counted(report.read, 'line')}; dropped: {dropped_text(report.dropped)}")
    print(f"{out / CORPUS_FILE}, for the configuration:\n{snippet}", end="")
