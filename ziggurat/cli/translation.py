"""Verbs that use a model: translate, score, evaluate."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ziggurat.cli.engine import Engine, open_engine, open_model
from ziggurat.cli.output import (
    check_input,
    check_output,
    console,
    counted,
    input_stream,
    output_stream,
    print_json,
    refuse_overwriting,
)
from ziggurat.cli.preparation import Json
from ziggurat.cli.translated import counts, line_extras, notices, text
from ziggurat.config.load import apply_override
from ziggurat.duration import duration
from ziggurat.errors import ConfigError, DataError, printable

if TYPE_CHECKING:
    from ziggurat.decoding.translator import Translator
    from ziggurat.evaluation.scores import Metric

__all__ = ["decoding_settings", "evaluate", "score", "translate"]

Model = Annotated[str, typer.Argument(help="Run or model directory.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Decoding settings: beam_size=8 length_penalty.alpha=1")]
Ensemble = Annotated[
    list[str] | None,
    typer.Option(
        "--ensemble",
        metavar="RUN",
        help="A further model, of any depth and architecture, with the same vocabularies; repeat for more. The "
        "probabilities of all are averaged.",
    ),
]
Which = Annotated[
    str | None, typer.Option("--which", help="Checkpoint of a run: averaged, best, last or an update's number.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; default: as PyTorch decides.")]
Tag = Annotated[str | None, typer.Option("--tag", help="Tag of a training corpus, such as `<bt>`, for every line.")]


def translate(
    model: Model,
    overrides: Overrides = None,
    input: Annotated[str, typer.Option("--input", "-i", help="Text file, or - for standard input.")] = "-",
    output: Annotated[str, typer.Option("--output", "-o", help="File, or - for standard output.")] = "-",
    json: Annotated[bool, typer.Option("--json", help="JSON lines: text, tokens, scores, n-best.")] = False,
    window: Annotated[
        int | None, typer.Option("--window", min=1, help="Lines read before any is translated; 1 answers at once.")
    ] = None,
    tag: Tag = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", help="File of how each translation begins, line by line; may be blank.")
    ] = None,
    constraints: Annotated[
        str | None,
        typer.Option("--constraints", help="File of phrases, tabs between them, that each translation must hold."),
    ] = None,
    terminology: Annotated[
        str | None,
        typer.Option("--terminology", help="File of lines `source term TAB target term`, for lines that hold one."),
    ] = None,
    quality: Annotated[
        bool, typer.Option("--quality", help="Write `translation ||| mean log-probability per token`.")
    ] = False,
    ensemble: Ensemble = None,
    which: Which = None,
    device: Device = "auto",
    threads: Threads = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Processes, each with the model and its share of the threads.")
    ] = 1,
    engine: Annotated[str, typer.Option("--engine", help="auto, torch, or ctranslate2 (an exported model).")] = "auto",
) -> None:
    """Translate line by line: one output line for each input line, in order.

    With `n_best=N` the text output is `line ||| translation ||| score`, up to N lines for each input line.

    Example: `ziggurat translate runs/a < test.de > test.en`
    """
    from ziggurat.decoding.lines import WINDOW_LINES, read_lines

    settings = decoding_settings(overrides, "--input")
    beside = [path for path in (prefix, constraints, terminology) if path is not None]
    if [input, *beside].count("-") > 1:
        raise ConfigError("only one of the inputs can be standard input (`-`)")
    refuse_overwriting(output, input, *beside)
    for path in (input, *beside):
        check_input(path)  # before the model is loaded, which takes seconds
    check_output(output)
    extras = line_extras(prefix, constraints, terminology)
    chosen = Engine(engine, [model, *(ensemble or [])], which, device, threads, workers)
    interactive = input == "-" and sys.stdin.isatty()
    size = window or (1 if interactive else WINDOW_LINES)
    if workers > 1 and size == 1:
        raise ConfigError("several `--workers` read ahead; to answer each line before the next is read takes one")
    with notices(), open_engine(chosen, settings, token_scores=json, extras=bool(extras)) as translator:
        n_best = translator.decoding.n_best
        lines = read_lines(*input_stream(input))
        began, count = time.perf_counter(), 0
        with output_stream(output) as out:
            translations = translator.translate_stream(lines, window=size, tag=tag, **extras)
            for count, translation in enumerate(translations, start=1):
                shown = translation.to_json() if json else text(translation, count, n_best, quality=quality)
                out.write(shown.encode() + b"\n")
                if interactive or window == 1:
                    out.flush()
        seconds = time.perf_counter() - began
        if not interactive:
            rate = f"{count / seconds:,.1f} lines/s" if seconds > 0 else ""
            console().print(
                f"{counted(count, 'line')} in {duration(seconds)} ({rate}){counts(translator)}",
                highlight=False,
                soft_wrap=True,
            )


def score(
    model: Model,
    source: Annotated[str, typer.Option("--source", help="Source text, one sentence per line.")],
    target: Annotated[str, typer.Option("--target", help="Its translations, line by line.")],
    json: Annotated[bool, typer.Option("--json", help="JSON lines: score, log-probability, tokens.")] = False,
    tag: Tag = None,
    ensemble: Ensemble = None,
    which: Which = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Print the log-probability of each given translation, natural logarithm, end-of-sentence included.

    Example: `ziggurat score runs/a --source test.de --target test.en`
    """
    sources, targets = _read(source), _read(target)
    _pair_up((source, sources), (target, targets))
    translator = open_model([model, *(ensemble or [])], which, device, threads, {})
    for result in translator.score(sources, targets, tag=tag):
        print(result.to_json() if json else f"{result.log_probability:.6f}")


def evaluate(
    model: Annotated[str | None, typer.Argument(help="Run or model directory; leave out with --hypothesis.")] = None,
    overrides: Overrides = None,
    source: Annotated[str | None, typer.Option("--source", help="Source text to translate.")] = None,
    hypothesis: Annotated[str | None, typer.Option("--hypothesis", help="Translations that are there already.")] = None,
    reference: Annotated[
        list[str] | None, typer.Option("--reference", help="Reference translation; repeat for several.")
    ] = None,
    metrics: Annotated[
        str, typer.Option("--metrics", help="Of bleu, chrf, ter; separated by commas.")
    ] = "bleu,chrf,ter",
    tokenised: Annotated[
        str | None, typer.Option("--tokenised", help="Also BLEU on Moses-tokenised text of this language.")
    ] = None,
    compound_split: Annotated[
        bool, typer.Option("--compound-split", help="Also compound-split BLEU (English-German papers).")
    ] = False,
    bleu_tokenizer: Annotated[
        str | None, typer.Option("--bleu-tokenizer", help="sacreBLEU's name; default: by the model's target language.")
    ] = None,
    confidence: Annotated[bool, typer.Option("--confidence", help="Add 95 % confidence intervals.")] = False,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Also write the translations here.")] = None,
    ensemble: Ensemble = None,
    which: Which = None,
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Score a model on a test set, or translations in a file, with sacreBLEU.

    Example: `ziggurat evaluate runs/a --source test.de --reference test.en --confidence`
    """
    from ziggurat.evaluation.scores import evaluate as sacrebleu_scores
    from ziggurat.evaluation.tokenised import check_language, compound_split_bleu, tokenised_bleu

    if model is not None and "=" in model:
        overrides, model = [model, *(overrides or [])], None
    settings = decoding_settings(overrides, "--source")
    if not reference:
        raise ConfigError("`--reference FILE` is missing")
    if (model is None) == (hypothesis is None):
        raise ConfigError("give a model with `--source`, or translations with `--hypothesis`")
    wanted = _metrics(metrics)
    refuse_overwriting(output, source, *reference)
    check_output(output or "-")
    if tokenised is not None or compound_split:
        check_language(tokenised or "de")
    references = [_read(path) for path in reference]
    language = None
    if hypothesis is not None:
        if overrides or source or output or ensemble:
            raise ConfigError("`--hypothesis` takes no decoding settings, `--source`, `--output` or `--ensemble`")
        hypotheses = _read(hypothesis)
        _pair_up((hypothesis, hypotheses), *zip(reference, references, strict=True))
    else:
        if source is None:
            raise ConfigError("`--source FILE` is missing: what should the model translate?")
        assert model is not None
        sources = _read(source)
        _pair_up((source, sources), *zip(reference, references, strict=True))
        with notices():
            translator = open_model([model, *(ensemble or [])], which, device, threads, settings)
            hypotheses = _translations(translator, sources, output)
        language = translator.target_language
    options = {"confidence": confidence, "lowercase": lowercase}
    scores = sacrebleu_scores(
        hypotheses, references, metrics=wanted, tokenize=bleu_tokenizer, target_language=language, **options
    )
    if tokenised is not None:
        scores.append(tokenised_bleu(hypotheses, references, language=tokenised, **options))
    if compound_split:
        scores.append(compound_split_bleu(hypotheses, references, language=tokenised or "de", **options))
    if json:
        print_json([s.as_record() for s in scores])
        return
    for s in scores:
        print(s)


def decoding_settings(overrides: list[str] | None, text_option: str) -> dict[str, Any]:
    """Return the decoding settings `key=value`; `text_option` is how the verb takes the text to translate."""
    settings: dict[str, Any] = {}
    for override in overrides or []:
        if "=" not in override:
            shown = printable(override, 4096)  # whole: it is to be copied
            raise ConfigError(
                f"`{shown}` is not a decoding setting such as beam_size=8; a file to translate is given by "
                f"`{text_option} {shown}`"
            )
        apply_override(settings, override.removeprefix("decoding."))
    return settings


def _read(path: str) -> list[str]:
    from ziggurat.decoding.lines import read_lines

    stream, name = input_stream(path)
    return list(read_lines(stream, name))


def _pair_up(first: tuple[str, list[str]], *others: tuple[str, list[str]]) -> None:
    """Raise DataError unless all texts, each with the path it came from, have equally many lines."""
    name, lines = first
    for other_name, other_lines in others:
        if len(other_lines) != len(lines):
            raise DataError(
                f"{name} has {counted(len(lines), 'line')}, but {other_name} has {counted(len(other_lines), 'line')}: "
                "they must pair up line by line"
            )


def _translations(translator: Translator, sources: list[str], output: str | None) -> list[str]:
    hypotheses = [translation.text for translation in translator.translate(sources)]
    if output is not None:
        with output_stream(output) as out:
            out.write("".join(line + "\n" for line in hypotheses).encode())
    return hypotheses


def _metrics(listed: str) -> list[Metric]:
    """Return the metrics named in a list with commas, in the order of METRICS."""
    from ziggurat.evaluation.scores import METRICS

    names = [name.strip().lower() for name in listed.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"`--metrics` names none; valid: {', '.join(METRICS)}")
    if unknown := [name for name in names if name not in METRICS]:
        raise ConfigError(f"unknown metric `{unknown[0]}`; valid: {', '.join(METRICS)}")
    return [metric for metric in METRICS if metric in names]
