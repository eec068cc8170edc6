"""Verbs that use a model: translate, score."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ziggurat.cli.engine import Engine, open_engine, open_model
from ziggurat.cli.output import (
    OUT,
    check_input,
    check_output,
    console,
    counted,
    input_stream,
    line_count,
    line_progress,
    output_stream,
    refuse_overwriting,
)
from ziggurat.cli.translated import counts, line_extras, notices, text
from ziggurat.config.load import apply_override
from ziggurat.duration import duration
from ziggurat.errors import ConfigError, DataError, printable

__all__ = [
    "Device",
    "Ensemble",
    "Overrides",
    "Threads",
    "Which",
    "decoding_settings",
    "pair_up",
    "read_text",
    "score",
    "translate",
]

_WHAT, _FORM, _WHO, _HOW = "What to translate", "Form of the output", "Which model", "Speed"
"""Groups of options in the help of verbs."""

Model = Annotated[str, typer.Argument(help="Run or model directory.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Decoding settings: beam_size=8 length_penalty.alpha=1")]
Ensemble = Annotated[
    list[str] | None,
    typer.Option(
        "--ensemble",
        metavar="RUN",
        help="A further model, of any depth and architecture, with the same vocabularies; repeat for more. The "
        "probabilities of all are averaged.",
        rich_help_panel=_WHO,
    ),
]
Which = Annotated[
    str | None,
    typer.Option(
        "--which", help="Checkpoint of a run: averaged, best, last or an update's number.", rich_help_panel=_WHO
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=_HOW)]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=1024, help="CPU threads; default: as PyTorch decides.", rich_help_panel=_HOW),
]
Tag = Annotated[
    str | None,
    typer.Option("--tag", help="Tag of a training corpus, such as `<bt>`, for every line.", rich_help_panel=_WHAT),
]


def translate(
    model: Model,
    overrides: Overrides = None,
    input: Annotated[str, typer.Option("--input", "-i", help="Text file, or - for standard input.")] = "-",
    output: Annotated[str, typer.Option(*OUT, help="File, or - for standard output.")] = "-",
    json: Annotated[
        bool, typer.Option("--json", help="JSON lines: text, tokens, scores, n-best.", rich_help_panel=_FORM)
    ] = False,
    window: Annotated[
        int | None,
        typer.Option(
            "--window", min=1, help="Lines read before any is translated; 1 answers at once.", rich_help_panel=_HOW
        ),
    ] = None,
    tag: Tag = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            "--prefix", help="File of how each translation begins, line by line; may be blank.", rich_help_panel=_WHAT
        ),
    ] = None,
    constraints: Annotated[
        str | None,
        typer.Option(
            "--constraints",
            help="File of phrases, tabs between them, that each translation must hold.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    terminology: Annotated[
        str | None,
        typer.Option(
            "--terminology",
            help="File of lines `source term TAB target term`, for lines that hold one.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    quality: Annotated[
        bool,
        typer.Option(
            "--quality", help="Write `translation ||| mean log-probability per token`.", rich_help_panel=_FORM
        ),
    ] = False,
    ensemble: Ensemble = None,
    which: Which = None,
    device: Device = "auto",
    threads: Threads = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            max=1024,
            help="Processes, each with the model and its share of the threads.",
            rich_help_panel=_HOW,
        ),
    ] = 1,
    engine: Annotated[
        str, typer.Option("--engine", help="auto, torch, or ctranslate2 (an exported model).", rich_help_panel=_HOW)
    ] = "auto",
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
        if translator.decoding.alignments and not json:
            console().print(
                "warning: `alignments=true` shows only in the results of `--json`; this text has none",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        if interactive:
            console().print("One sentence a line; Ctrl-D ends.", highlight=False)
        on_screen = output == "-" and sys.stdout.isatty()  # a bar would break up the translations
        lines = read_lines(*input_stream(input))
        began, count = time.perf_counter(), 0
        with output_stream(output) as out:
            translations = translator.translate_stream(lines, window=size, tag=tag, **extras)
            with line_progress("translating", line_count(input), shown=not on_screen) as advance:
                translator.told = advance
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
    sources, targets = read_text(source), read_text(target)
    pair_up((source, sources), (target, targets))
    translator = open_model([model, *(ensemble or [])], which, device, threads, {})
    for result in translator.score(sources, targets, tag=tag):
        print(result.to_json() if json else f"{result.log_probability:.6f}")


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


def read_text(path: str) -> list[str]:
    """Return the lines of a text file, `-` for standard input. Raises DataError when it cannot be read."""
    from ziggurat.decoding.lines import read_lines

    stream, name = input_stream(path)
    return list(read_lines(stream, name))


def pair_up(first: tuple[str, list[str]], *others: tuple[str, Sequence[str]]) -> None:
    """Raise DataError unless all texts, each with the path it came from, have equally many lines."""
    name, lines = first
    for other_name, other_lines in others:
        if len(other_lines) != len(lines):
            raise DataError(
                f"{name} has {counted(len(lines), 'line')}, but {other_name} has {counted(len(other_lines), 'line')}: "
                "they must pair up line by line"
            )
