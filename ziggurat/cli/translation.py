"""The verb that translates lines and documents: translate."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ziggurat.cli.documents import refuse_for_documents, translate_documents
from ziggurat.cli.engine import (
    HINT_LINES,
    ModelOptions,
    notices_text,
    open_engine,
    say_hint,
    warnings_shown,
    worker_count,
)
from ziggurat.cli.jobs import (
    JobFolder,
    JobOptions,
    MergeOnly,
    RayAddress,
    ShardPart,
    model_choice,
    translation_job,
)
from ziggurat.cli.options import (
    HOW,
    WHAT,
    DecodingOverrides,
    Device,
    Engine,
    Ensemble,
    Model,
    Tag,
    Threads,
    Which,
    WithoutLayers,
    decoding_settings,
)
from ziggurat.cli.output import (
    OUT,
    check_input,
    check_one_stream,
    check_output,
    counted,
    input_stream,
    line_count,
    line_progress,
    output_stream,
    refuse_overwriting,
    say,
    write_parts,
)
from ziggurat.system.duration import duration
from ziggurat.system.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.translate.results import Translation
    from ziggurat.translate.served import ServedTranslator
    from ziggurat.translate.translator import Translator
    from ziggurat.translate.workers import WorkerTranslator

# Group of options in the help, beside those of ziggurat.cli.options
_FORM = "Form of the output"


def translate(
    model: Model,
    overrides: DecodingOverrides = None,
    input: Annotated[str, typer.Option("--input", "-i", help="Text file, or - for standard input.")] = "-",
    output: Annotated[str, typer.Option(*OUT, help="File, or - for standard output.")] = "-",
    document: Annotated[
        list[str] | None,
        typer.Option(
            "--document",
            metavar="FILE",
            help="Word, OpenDocument, PowerPoint, EPUB, HTML, subtitles, XLIFF, ...: translated whole, by its name's "
            "ending; repeat for more, with a folder as --output.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="JSON lines: text, tokens, scores, n-best.", rich_help_panel=_FORM)
    ] = False,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
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
            help="File with the beginning of each translation, line by line; may be blank.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    constraints: Annotated[
        str | None,
        typer.Option(
            "--constraints",
            help="File with the phrases that each translation must contain, separated by tabs.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    terminology: Annotated[
        str | None,
        typer.Option(
            "--terminology",
            help="File of lines `source term TAB target term`, applied where the source term occurs.",
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
            help="Parallel processes, each with the model and its share of the threads; auto: as is fastest here. "
            "Default: 1; with --job one per CPU core.",
            rich_help_panel=HOW,
        ),
    ] = None,
    engine: Engine = "auto",
    job: JobFolder = None,
    shard: ShardPart = None,
    merge: MergeOnly = False,
    ray: RayAddress = None,
) -> None:
    """Translate line by line: one output line for each input line, in order; or whole documents with `--document`.

    With `n_best=N` the text output is `line ||| translation ||| score`, up to N lines for each input line.

    Example: `ziggurat translate runs/a < test.de > output.en`
    """
    from ziggurat.translate.lines import WINDOW_LINES, read_lines
    from ziggurat.translate.served import ServedTranslator

    # (1) Options and files are checked before the model is loaded, which takes seconds.
    opening = ModelOptions(which, device, threads, decoding_settings(overrides, "--input"), without_layers, engine)
    if document:
        by_line = {"--input": input != "-", "--json": json, "--window": window is not None, "--quality": quality}
        by_line |= {"--prefix": prefix is not None, "--constraints": constraints is not None}
        bulk = {"--job": job is not None, "--shard": shard is not None, "--merge": merge, "--ray": ray is not None}
        refuse_for_documents({**by_line, "--workers": workers is not None, **bulk})
        terms = _inputs_beside_lines(None, None, terminology)
        translate_documents([model, *(ensemble or [])], opening, document, output, tag=tag, **terms)
        return
    beside = [path for path in (prefix, constraints, terminology) if path is not None]
    check_one_stream(input, *beside)
    refuse_overwriting(output, input, *beside)
    for path in (input, *beside):
        check_input(path)
    check_output(output)
    models, total = [model, *(ensemble or [])], line_count(input)
    asked = None if workers is None or job is None else worker_count(workers, models, opening, total)
    options = JobOptions(job, shard, merge, ray, asked, threads, device)
    if job is not None:
        inputs = {"lines": input, "prefixes": prefix, "constraints": constraints, "terminology": terminology}
        shown = "json" if json else "quality" if quality else "text"
        size = window or WINDOW_LINES
        _translate_job(options, models, opening, inputs, output, form=shown, tag=tag, shard_lines=size)
        return
    interactive = input == "-" and sys.stdin.isatty()
    lines_ahead = window or (1 if interactive else WINDOW_LINES)
    processes = worker_count(workers or "1", models, opening, None if lines_ahead == 1 else total)
    if workers == "auto" and processes > 1 and window is None and total is not None:
        # Several windows for each worker: one that is given the last window would keep the others waiting.
        lines_ahead = min(WINDOW_LINES, -(-total // (4 * processes)))
    if processes > 1 and lines_ahead == 1:
        raise ConfigError("several `--workers` read ahead; answering each line before the next is read takes one")
    # (2) Files beside the lines are opened; a model is loaded.
    extras = _inputs_beside_lines(prefix, constraints, terminology)
    with (
        warnings_shown(),
        open_engine(
            models,
            opening,
            workers=processes,
            beside_lines=bool(extras),
            lines=total,
        ) as translator,
    ):
        n_best = translator.decoding.n_best
        if translator.decoding.alignments and not json:
            say("warning: `alignments=true` shows only in the results of `--json`; this text has none")
        if interactive:
            say("One sentence a line; Ctrl-D ends.")
        # (3) Translations are written while later lines are still being read.
        began = time.perf_counter()
        extras |= {"token_scores": json} if isinstance(translator, ServedTranslator) else {}
        lines = read_lines(*input_stream(input))
        translations = translator.translate_stream(lines, window=lines_ahead, tag=tag, **extras)

        def form(translation: Translation, number: int) -> str:
            return translation.to_json() if json else translation.to_text(number, n_best, quality=quality)

        # With a window of 1 somebody waits for each line before writing the next.
        flush = interactive or window == 1
        count = _write(translator, translations, form, output, total=total, flush=flush, hint=not interactive)
        seconds = time.perf_counter() - began
        if not interactive:
            rate = f"{count / seconds:,.1f} lines/s" if seconds > 0 else ""
            say(f"{counted(count, 'line')} in {duration(seconds)} ({rate}){notices_text(translator.notices)}")


def _translate_job(
    options: JobOptions,
    models: list[str],
    opening: ModelOptions,
    inputs: dict[str, str | None],
    output: str,
    **how: Any,
) -> None:
    """Translate in bulk; `how` are further arguments of translation_job."""
    terms = _inputs_beside_lines(None, None, inputs["terminology"])
    with warnings_shown():
        chosen = model_choice(models, opening).identified()
        merged = translation_job(options, "translate", chosen, inputs, partial(write_parts, output), **how, **terms)
    if merged is not None:
        say(f"{counted(merged.lines, 'line')}{notices_text(merged.counts)}")


def _inputs_beside_lines(prefix: str | None, constraints: str | None, terminology: str | None) -> dict[str, Any]:
    """Return the content of the files beside the lines, as arguments of `translate_stream`; a path may be `-`."""
    from ziggurat.translate.lines import read_lines
    from ziggurat.translate.terminology import read_constraints, read_terminology

    inputs: dict[str, Any] = {}
    if prefix is not None:
        inputs["prefixes"] = read_lines(*input_stream(prefix))
    if constraints is not None:
        inputs["constraints"] = read_constraints(read_lines(*input_stream(constraints)))
    if terminology is not None:
        stream, name = input_stream(terminology)
        inputs["terminology"] = read_terminology(read_lines(stream, name), name)
    return inputs


def _write(
    translator: Translator | ServedTranslator | WorkerTranslator,
    translations: Iterable[Translation],
    form: Callable[[Translation, int], str],
    output: str,
    *,
    total: int | None,
    flush: bool,
    hint: bool,
) -> int:
    """Write translations as they come, in `form`, under a progress bar over `total` lines; return their number.

    `hint`: print a hint on speed where the text turns out to be long; where `total` is known it was printed before.
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
