"""The verbs that translate: translate, for lines and documents, and serve, over HTTP."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ziggurat.cli.arguments import DecodingOverrides
from ziggurat.cli.documents import DocumentForm, translate_documents
from ziggurat.cli.engine import (
    HINT_LINES,
    ModelOptions,
    notices_text,
    open_engine,
    say_hint,
    warnings_shown,
    worker_count,
)
from ziggurat.cli.jobs import job_options, model_choice, translation_job
from ziggurat.cli.output import (
    HOW,
    OUT,
    WHAT,
    Device,
    Ensemble,
    Tag,
    Threads,
    Which,
    WithoutLayers,
    check_input,
    check_one_stream,
    check_output,
    counted,
    decoding_settings,
    input_stream,
    is_setting,
    line_count,
    line_progress,
    output_stream,
    refuse_overwriting,
    say,
    write_parts,
)
from ziggurat.config.load import change_section, parse_as, read_config
from ziggurat.config.section import joined
from ziggurat.system.errors import ConfigError
from ziggurat.system.terminal import duration, importing

if TYPE_CHECKING:
    from ziggurat.translate.interface import StreamTranslator
    from ziggurat.translate.options import TranslateOptions
    from ziggurat.translate.results import Translation


def _refuse(given: Mapping[str, bool], reason: str) -> None:
    """Raise ConfigError with `reason` for the first option that is true in `given`."""
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(f"`{option}` {reason}")


_FORM = "Form of the output"


def translate(
    model: Annotated[str, typer.Argument(help="Run or model directory, or an export for CTranslate2.")],
    overrides: DecodingOverrides = None,
    input: Annotated[
        str, typer.Option("--input", "-i", metavar="FILE", help="Text file, or - for standard input.")
    ] = "-",
    output: Annotated[str, typer.Option(*OUT, metavar="FILE", help="File, or - for standard output.")] = "-",
    document: Annotated[
        list[str] | None,
        typer.Option(
            "--document",
            metavar="FILE",
            help="Word, OpenDocument, PowerPoint, EPUB, HTML, subtitles, XLIFF, ...: translated whole, by the "
            "ending of its name; repeatable, with a folder as --output.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    protect: Annotated[
        list[str] | None,
        typer.Option(
            "--protect",
            metavar="REGEX",
            help="With --document: keep what this pattern matches unchanged; repeatable.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    leave: Annotated[
        list[str] | None,
        typer.Option(
            "--leave",
            metavar="KEY",
            help="With --document: leave this key's text (JSON, Android, gettext, XLIFF); `*`: any characters.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="JSON lines: text, tokens, scores, n-best; for documents, their notices.",
            rich_help_panel=_FORM,
        ),
    ] = False,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="N",
            min=1,
            help="Lines to read before translating; 1 answers each line at once.",
            rich_help_panel=HOW,
        ),
    ] = None,
    tag: Tag = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            "--prefix",
            metavar="FILE",
            help="File with the beginning of each translation, line by line; lines may be blank.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    constraints: Annotated[
        str | None,
        typer.Option(
            "--constraints",
            metavar="FILE",
            help="File with the phrases that each translation must contain, separated by tabs.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    terminology: Annotated[
        str | None,
        typer.Option(
            "--terminology",
            metavar="FILE",
            help="File of lines `source term TAB target term`, applied wherever the source term occurs.",
            rich_help_panel=WHAT,
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
    without_layers: WithoutLayers = None,
    device: Device = "auto",
    threads: Threads = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            metavar="N",
            help="Parallel processes, each with the model and its share of the threads; auto: the fastest number here. "
            "Default: 1.",
            rich_help_panel=HOW,
        ),
    ] = None,
    source_model: Annotated[
        Path | None,
        typer.Option(
            "--source-model",
            metavar="FILE",
            help="SentencePiece model of the source, for a CTranslate2 folder from another toolkit's converter.",
            rich_help_panel=HOW,
        ),
    ] = None,
    target_model: Annotated[
        Path | None,
        typer.Option(
            "--target-model",
            metavar="FILE",
            help="The same for the target; default: that of the source.",
            rich_help_panel=HOW,
        ),
    ] = None,
) -> None:
    """Translate line by line: one output line for each input line, in order; or whole documents with `--document`.

    With `n_best=N` the text output is `line ||| translation ||| score`, up to N lines for each input line.

    Example: `ziggurat translate runs/a < test.de > output.en`
    """
    from ziggurat.data.lines import refuse_records
    from ziggurat.translate.text_lines import read_lines

    # (1) Check options and files before the model is loaded, which takes seconds.
    opening = ModelOptions(
        which,
        device,
        threads,
        decoding_settings(overrides, "--document" if document else "--input"),
        without_layers,
        segmenters=(source_model, target_model),
    )
    models, options = [model, *(ensemble or [])], job_options(threads=threads, device=device)
    in_bulk = options.folder is not None
    if document:
        by_line = {"--input": input != "-", "--window": window is not None, "--quality": quality}
        by_line |= {"--prefix": prefix is not None, "--constraints": constraints is not None}
        lines_only = {**by_line, "--workers": workers is not None, "ziggurat bulk": in_bulk}
        _refuse(lines_only, "is for lines of text; with `--document` leave it out")
        documents = DocumentForm(tuple(protect or ()), tuple(leave or ()), as_json)
        translate_documents(models, opening, document, output, _asked(tag, terminology), terminology, documents)
        return
    _refuse({"--protect": bool(protect), "--leave": bool(leave)}, "goes with `--document`")
    beside = [path for path in (prefix, constraints, terminology) if path is not None]
    check_one_stream(input, *beside)
    refuse_records(Path(input), "--input")
    refuse_overwriting(output, input, *beside)
    for path in (input, *beside):
        check_input(path)
    check_output(output)
    total = line_count(input)
    if in_bulk:
        if any(opening.segmenters):
            raise ConfigError("`--source-model` and `--target-model` are not for bulk work; translate without `bulk`")
        _refuse(
            {"--workers": workers is not None}, "goes before the command: `ziggurat bulk --workers N translate ...`"
        )
        _refuse({"--window": window is not None}, "is the shard size in bulk work: `ziggurat bulk --shard-lines N ...`")
        inputs = {"lines": input, "prefixes": prefix, "constraints": constraints, "terminology": terminology}
        wanted, take = _asked(tag, terminology, scores=as_json), partial(write_parts, output)
        with warnings_shown():
            chosen = model_choice(models, opening).identified()
            shown: Literal["json", "quality", "text"] = "json" if as_json else "quality" if quality else "text"
            merged = translation_job(options, "translate", chosen, inputs, take, form=shown, asked=wanted)
        if merged is not None:
            say(f"{counted(merged.lines, 'line')}{notices_text(merged.counts)}")
        return
    interactive = input == "-" and sys.stdin.isatty()
    processes, lines_ahead = _pace(workers, 1 if interactive and window is None else window, models, opening, total)
    # (2) Open the other files; load a model.
    wanted, columns = _asked(tag, terminology, scores=as_json), _columns(prefix, constraints)
    beside_lines = bool(columns) or wanted.terms is not None
    with (
        warnings_shown(),
        open_engine(models, opening, workers=processes, beside_lines=beside_lines, lines=total) as translator,
    ):
        n_best = translator.decoding.n_best
        if translator.decoding.alignments and not as_json:
            say("warning: `alignments=true` shows only with `--json`, not in this text")
        if interactive:
            say("One sentence per line; Ctrl-D ends.")
        # (3) Write translations while later lines are still being read.
        began = time.perf_counter()
        lines = read_lines(*input_stream(input))
        translations = translator.translate_stream(lines, wanted, window=lines_ahead, **columns)

        def form(translation: Translation, number: int) -> str:
            return translation.to_json() if as_json else translation.to_text(number, n_best, quality=quality)

        # With a window of 1, a person or program waits for each line before writing the next.
        flush = interactive or window == 1
        count = _write(translator, translations, form, output, total=total, flush=flush, hint=not interactive)
        seconds = time.perf_counter() - began
        if not interactive:
            rate = f"{count / seconds:,.1f} lines/s" if seconds > 0 else ""
            say(f"{counted(count, 'line')} in {duration(seconds)} ({rate}){notices_text(translator.notices)}")


def _pace(
    workers: str | None, window: int | None, models: Sequence[str], opening: ModelOptions, total: int | None
) -> tuple[int, int]:
    """Return the number of processes, and how many lines are read ahead, of `total` if that is known."""
    from ziggurat.translate.text_lines import WINDOW_LINES

    lines_ahead = window or WINDOW_LINES
    processes = worker_count(workers or "1", models, opening, None if lines_ahead == 1 else total)
    if workers == "auto" and processes > 1 and window is None and total is not None:
        # Several windows per worker; otherwise the worker with the last window would keep the others waiting.
        lines_ahead = min(WINDOW_LINES, -(-total // (4 * processes)))
    if processes > 1 and lines_ahead == 1:
        raise ConfigError("several `--workers` read ahead; to answer each line before the next is read, use one")
    return processes, lines_ahead


def _asked(tag: str | None, terminology: str | None, *, scores: bool = False) -> TranslateOptions:
    """Return the options for all translations; the path of a terminology may be `-`."""
    from ziggurat.translate.options import TranslateOptions
    from ziggurat.translate.terms import Terms, read_terminology
    from ziggurat.translate.text_lines import read_lines

    terms = None
    if terminology is not None:
        stream, name = input_stream(terminology)
        terms = Terms.of(read_terminology(read_lines(stream, name), name))
    return TranslateOptions(tag=tag, terms=terms, scores=scores)


def _columns(prefix: str | None, constraints: str | None) -> dict[str, Any]:
    """Return the line-by-line files as arguments of `translate_stream`; a path may be `-`."""
    from ziggurat.translate.terms import read_constraints
    from ziggurat.translate.text_lines import read_lines

    columns: dict[str, Any] = {}
    if prefix is not None:
        columns["prefixes"] = read_lines(*input_stream(prefix))
    if constraints is not None:
        columns["constraints"] = read_constraints(read_lines(*input_stream(constraints)))
    return columns


def _write(
    translator: StreamTranslator,
    translations: Iterable[Translation],
    form: Callable[[Translation, int], str],
    output: str,
    *,
    total: int | None,
    flush: bool,
    hint: bool,
) -> int:
    """Write translations as they come, in `form`, with a progress bar over `total` lines; return their number.

    `hint`: print a hint on speed if the text turns out to be long; if `total` is known, it was printed before.
    """
    on_screen = output == "-" and sys.stdout.isatty()  # a bar would break up the translations
    number = 0
    with output_stream(output) as out, line_progress("translating", total, shown=not on_screen) as advance:
        translator.on_finished = advance
        for number, translation in enumerate(translations, start=1):
            out.write(form(translation, number).encode() + b"\n")
            if flush:
                out.flush()
            if hint and total is None and number == HINT_LINES:
                say_hint(translator)
    return number


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Runs, model directories or exported CTranslate2 folders; decoding settings for all."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file for settings beyond the options.")] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen at; default: this machine alone.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port; default 5000; 0: a free one.")
    ] = None,
    keys: Annotated[Path | None, typer.Option("--keys", help="File of API keys; requests must then send one.")] = None,
    new_key: Annotated[
        str | None,
        typer.Option("--new-key", metavar="NAME", help="Add a key to the file of --keys, print it, and exit."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics", metavar="TOKEN", help="Token required for /metrics; without one, /metrics is open to all."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, max=1024, help="CPU threads of each model.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...; default: the file's, else auto.")
    ] = None,
) -> None:
    """Serve translations over HTTP: a web page, and the interfaces of LibreTranslate, DeepL and OpenAI.

    Example: `ziggurat serve runs/de-en runs/en-de --port 5000`
    """
    try:
        with importing():
            from ziggurat.serve.access import new_key as make_key
            from ziggurat.serve.config import ServeConfig
            from ziggurat.serve.server import run_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"`{error.name}` is not installed: pip install 'ziggurat-mt[serve]'") from None

    if new_key is not None:
        if keys is None:
            raise ConfigError("`--new-key NAME` goes with `--keys FILE`")
        print(make_key(keys, new_key))
        return
    settings = decoding_settings([text for text in models or [] if is_setting(text)], "--input")
    shared = {key: value for key, value in (("threads", threads), ("device", device)) if value is not None}
    named = [{"path": path, **shared, "decoding": settings} for path in models or [] if not is_setting(path)]
    found = ServeConfig()
    if config is not None:
        found = parse_as(ServeConfig, read_config(config), str(config))
    changes = {
        "host": host,
        "port": port,
        "keys": None if keys is None else str(keys),
        "metrics_token": metrics,
    }
    given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    # The command line takes precedence over the file.
    of_file = [joined(entry.model_dump(), {**shared, "decoding": settings}) for entry in found.models]
    given["models"] = [*named, *of_file]
    found = change_section(found, given, "")
    if not found.models:
        raise ConfigError("name at least one model: `ziggurat serve RUN`")
    run_server(found, say)
